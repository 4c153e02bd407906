from absl.testing import absltest, parameterized
import hypothesis
from hypothesis import strategies as st
import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from tests import oracles

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
SHAPES = {-1: (3, 5, 12), -2: (2, 16, 3), -3: (8, 2, 3), 0: (4, 2), 1: (2, 20)}
# All that a group can keep: none, one or two.
SUBSETS = [[bool(bits >> i & 1) for i in range(4)] for bits in range(16) if bits.bit_count() <= 2]

compress = jax.jit(formats.compress, static_argnames='axis')
decompress = jax.jit(formats.decompress)


def compressed_by_hand(w: np.ndarray, mask: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
  """Values and metadata, group by group."""
  entries, kept = oracles.groups_last(w, axis), oracles.groups_last(mask, axis)
  values = np.zeros((*entries.shape[:-1], 2), w.dtype)
  metadata = np.zeros((*entries.shape[:-2], -(-entries.shape[-2] // 2)), np.uint8)
  for where in np.ndindex(entries.shape[:-1]):
    positions = np.flatnonzero(kept[where]).tolist()
    spare = [i for i in range(4) if i not in positions]
    low, high = sorted(positions + spare[: 2 - len(positions)])
    for slot, position in enumerate((low, high)):
      if kept[where][position]:
        values[*where, slot] = entries[where][position]
    metadata[*where[:-1], where[-1] // 2] += (low + 4 * high) * 16 ** (where[-1] % 2)
  return oracles.groups_back(values, axis), np.moveaxis(metadata, -1, axis)


class CompressTest(parameterized.TestCase):
  @parameterized.product(dtype=DTYPES, axis=list(SHAPES))
  @hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
  @hypothesis.given(seed=st.integers(0, 2**32 - 1))
  @pytest.mark.few(6)
  def test_round_trip_of_any_bits(self, dtype, axis, seed):
    shape = SHAPES[axis]
    w = oracles.bit_patterns(dtype, shape, seed)
    groups = oracles.groups_last(w, axis).shape[:-1]
    chosen = np.random.default_rng(seed + 1).integers(0, len(SUBSETS), groups)
    mask = oracles.groups_back(np.array(SUBSETS)[chosen], axis)
    found = compress(w, mask, axis=axis)
    values, metadata = compressed_by_hand(w, mask, axis)
    oracles.assert_same(found.values, values)
    np.testing.assert_array_equal(found.metadata, metadata)
    self.assertEqual((found.shape, found.dtype, found.metadata.dtype), (shape, dtype, jnp.uint8))
    self.assertLess(found.axis, 0)
    oracles.assert_same(decompress(found), np.where(mask, w, np.zeros((), dtype)))

  @parameterized.named_parameters(
    ('pairs_01_02', [1, 1, 0, 0, 1, 0, 1, 0], [0x84], [1, 2, 5, 7]),
    ('pairs_03_12', [1, 0, 0, 1, 0, 1, 1, 0], [0x9C], [1, 4, 6, 7]),
    ('pairs_13_23', [0, 1, 0, 1, 0, 0, 1, 1], [0xED], [2, 4, 7, 8]),
    ('none_and_first', [0, 0, 0, 0, 1, 0, 0, 0], [0x44], [0, 0, 5, 0]),
    ('second_and_third', [0, 1, 0, 0, 0, 0, 1, 0], [0x84], [0, 2, 0, 7]),
    ('last_and_odd_group', [0, 0, 0, 1], [0x0C], [0, 4]),
  )
  def test_bytes_by_hand(self, kept, metadata, values):
    c = compress(np.arange(1, len(kept) + 1, dtype=np.float32), np.array(kept, bool), axis=-1)
    self.assertEqual((c.metadata.tolist(), c.values.tolist()), (metadata, values))

  @parameterized.product(position=(0, 1, 2, 3), dtype=oracles.DTYPES)
  def test_negative_zero_is_a_zero_that_keeps_its_sign(self, position, dtype):
    w = np.full(4, 0.0, dtype)
    w[position], w[(position + 1) % 4], w[(position + 2) % 4] = -0.0, 3.0, 5.0
    formats.verify(jnp.asarray(w), axis=-1)
    mask = w != 0
    dense = decompress(compress(w, mask, axis=-1))
    oracles.assert_same(dense, np.where(mask, w, np.zeros((), dtype)))
    mask[(position + 1) % 4], mask[position] = False, True
    dense = decompress(compress(w, mask, axis=-1))
    self.assertEqual(bool(np.signbit(np.asarray(dense)[position])), True)

  @parameterized.parameters(jnp.float8_e4m3fn, jnp.float8_e5m2)
  def test_every_float8_keeps_its_bits_and_its_derivative(self, dtype):
    bits = np.arange(256, dtype=np.uint8).reshape(64, 4)
    w, mask = bits.view(dtype), np.tile(np.array([True, False, True, False]), (64, 1))
    c = compress(w, mask, axis=-1)
    found = np.asarray(decompress(c)).view(np.uint8)
    np.testing.assert_array_equal(found, np.where(mask, bits, 0))

    @jax.jit
    def back(values, ones):
      return jax.vjp(lambda v: formats.expand(formats.Compressed24(v, c.metadata, -1)), values)[1](ones)[0]

    np.testing.assert_array_equal(np.asarray(back(c.values, np.ones((64, 4), dtype)), np.float32), 1.0)

  def test_integers(self):
    w, mask = jnp.arange(1, 9, dtype=jnp.int8).reshape(2, 4), jnp.array([[True, False, False, True]] * 2)
    self.assertEqual(formats.decompress(formats.compress(w, mask, axis=1)).tolist(), [[1, 0, 0, 4], [5, 0, 0, 8]])

  def test_more_than_two_keeps_the_first_two_and_is_an_error_under_checkify(self):
    w, mask = jnp.arange(1.0, 5.0), jnp.array([False, True, True, True])
    self.assertEqual(formats.decompress(formats.compress(w, mask, axis=-1)).tolist(), [0, 2, 3, 0])
    error, _ = checkify.checkify(lambda w, mask: formats.compress(w, mask, axis=-1))(w, mask)
    self.assertRegex(str(error.get()), 'keeps more than two of four')
    error, _ = checkify.checkify(lambda w, mask: formats.compress(w, mask, axis=-1))(w, mask.at[1].set(False))
    self.assertIsNone(error.get())

  def test_axis_keeps_its_meaning_under_vmap(self):
    w = np.random.default_rng(0).standard_normal((3, 8, 5), np.float32)
    mask = np.asarray(oracles.magnitude_mask(w, axis=1))
    batched = jax.jit(jax.vmap(lambda w, mask: formats.compress(w, mask, axis=0)))(w, mask)
    self.assertEqual((batched.axis, batched.shape), (-2, (3, 8, 5)))
    np.testing.assert_array_equal(decompress(batched), np.where(mask, w, 0))
    np.testing.assert_array_equal(batched.metadata, compress(w, mask, axis=1).metadata)

  @parameterized.parameters((jnp.bfloat16, 9 / 16), (jnp.float32, 17 / 32))
  def test_size(self, dtype, share):
    w = jnp.ones((64, 32), dtype)
    c = formats.compress(w, jnp.asarray(oracles.magnitude_mask(w)))
    self.assertEqual(c.nbytes, share * w.nbytes)


class VerifyTest(parameterized.TestCase):
  def test_names_the_first_bad_group_its_axis_and_its_entries(self):
    w = np.zeros((2, 8, 3), np.float32)
    w[1, 4:8, 2] = [1.0, 0.0, -2.0, 3.0]
    with self.assertRaisesWithLiteralMatch(
      ValueError, 'not 2:4 along axis -2: group (1, 1, 2) holds [1.0, 0.0, -2.0, 3.0]'
    ):
      formats.verify(jnp.asarray(w), axis=1)
    formats.verify(jnp.asarray(w), axis=1, n=3)
    with self.assertRaisesRegex(ValueError, r'not 2:8 along axis -2: group \(1, 0, 2\)'):
      formats.verify(jnp.asarray(w), axis=-2, m=8)

  @parameterized.parameters(*oracles.DTYPES)
  def test_nan_and_subnormals_are_not_zero(self, dtype):
    tiny = jnp.finfo(dtype).smallest_subnormal
    for third in (tiny, jnp.nan):
      with self.assertRaisesRegex(ValueError, 'not 2:4'):
        formats.verify(jnp.asarray(np.array([tiny, -tiny, third, -0.0], dtype)), axis=-1)
    formats.verify(jnp.asarray(np.array([tiny, -0.0, tiny, 0.0], dtype)), axis=-1)


if __name__ == '__main__':
  absltest.main()
