"""The packers' reference and argument checks, on the CPU."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from pallas_kernels.operand import from_operand
from pallas_kernels.pack import api, reference
from pallas_kernels.two_of_four import mvue, prune, transposable
from tests.draws import gaussian
from tests.quick import jit


def weights(shape=(64, 128), dtype=jnp.bfloat16, seed=0):
  return gaussian(seed, shape, dtype)


def dense(operand):
  return np.asarray(formats.decompress(from_operand(operand)).astype(jnp.float32))


class PackTest(parameterized.TestCase):

  @parameterized.parameters(((64, 128), jnp.bfloat16), ((3, 20, 36), jnp.float16), ((68, 4), jnp.float32))
  @pytest.mark.few
  def test_transposable_pack_holds_the_masked_weight_both_ways(self, shape, dtype):
    w = weights(shape, dtype)
    made = jax.jit(functools.partial(api.transposable_pack, implementation='reference'))(w)
    mask = jax.jit(transposable.transposable_mask)(w)
    kept = np.asarray(jnp.where(mask, w, jnp.zeros((), w.dtype)).astype(made.rows.dtype).astype(jnp.float32))
    np.testing.assert_array_equal(dense(made.rows), kept)
    np.testing.assert_array_equal(dense(made.columns), np.swapaxes(kept, -1, -2))
    np.testing.assert_array_equal(reference.code_mask(made.codes), mask)

  def test_every_block_keeps_two_of_each_row_and_column(self):
    # All negative, ties and signed zeros: patterns that pruning by signed value or by 7 of 16 would get wrong.
    search = jit(lambda w: reference.code_mask(api.transposable_pack(w).codes))
    negative = -np.abs(np.asarray(weights(dtype=jnp.float32)))
    for w in (negative, np.ones((64, 128), np.float32), np.full((64, 128), -0.0, np.float32)):
      mask = np.asarray(search(w)).reshape(16, 4, 32, 4)
      self.assertTrue((mask.sum(1) == 2).all() and (mask.sum(3) == 2).all())

  def test_masked_pack_takes_new_values_under_the_old_mask(self):
    codes = jit(lambda w: api.transposable_pack(w).codes)(weights())
    w = weights(seed=1)
    made, mask = jit(lambda w, codes: (api.masked_pack(w, codes), reference.code_mask(codes)))(w, codes)
    kept = np.where(mask, np.asarray(w, np.float32), 0)
    np.testing.assert_array_equal(dense(made.rows), kept)
    np.testing.assert_array_equal(dense(made.columns), np.swapaxes(kept, -1, -2))

  @parameterized.parameters(-1, -2)
  @pytest.mark.few
  def test_soft_threshold_pack(self, axis):
    w = weights((2, 64, 132))
    scale = np.float32([1.25, 1.5])
    found = dense(jit(functools.partial(api.soft_threshold_pack, axis=axis))(w, scale).operand)
    soft = np.asarray(jit(functools.partial(prune.soft_threshold, axis=axis))(w), np.float32) * scale[:, None, None]
    expected = soft.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(found, expected if axis == -1 else np.swapaxes(expected, -1, -2))

  def test_mvue_pack_holds_the_sample(self):
    x, key = weights((128, 36)), jax.random.key(5)
    made = jax.jit(api.mvue_pack)(x, key)
    self.assertIsNone(made.dense)
    sample = jax.jit(functools.partial(mvue.mvue24, axis=-2))(x, key)
    np.testing.assert_array_equal(dense(made.operand), np.asarray(sample.astype(jnp.float32)).T)

  def test_mvue_pack_of_a_part_draws_the_uniforms_of_the_whole(self):
    x, key = weights((128, 64)), jax.random.key(5)
    whole = dense(jax.jit(api.mvue_pack)(x, key).operand)
    part = dense(jax.jit(functools.partial(api.mvue_pack, origin=(0, 16, 32)))(x[64:, 32:], key).operand)
    np.testing.assert_array_equal(part, whole[32:, 64:])

  def test_mvue_pack_clips_to_the_narrower_dtype(self):
    pack = jax.jit(functools.partial(api.mvue_pack, dtype=jnp.float16))
    made = pack(jnp.full((4, 4), 1e30), jax.random.key(0))
    self.assertEqual(float(jnp.abs(made.operand.values).max()), 65504.0)

  @parameterized.named_parameters(
    ('odd_rows', lambda: api.transposable_pack(jnp.ones((6, 8))), 'length 6'),
    ('vector', lambda: api.transposable_pack(jnp.ones(8)), 'two axes'),
    ('codes_shape', lambda: api.masked_pack(jnp.ones((8, 8)), jnp.ones((2, 3), jnp.uint16)), r'\(2, 2\)'),
    ('codes_dtype', lambda: api.masked_pack(jnp.ones((8, 8)), jnp.ones((2, 2), jnp.int32)), 'uint16'),
    ('integers', lambda: api.transposable_pack(jnp.ones((8, 8), jnp.int32)), 'int32'),
    ('dtype', lambda: api.transposable_pack(jnp.ones((8, 8)), dtype=jnp.float32), 'bfloat16 or float16'),
    ('other_dtype', lambda: api.mvue_pack(jnp.ones((8, 8), jnp.bfloat16), None, dtype=jnp.float16), 'cast x first'),
    ('scale', lambda: api.soft_threshold_pack(jnp.ones((8, 8)), jnp.ones(2)), 'one a matrix'),
    ('axis', lambda: api.soft_threshold_pack(jnp.ones((2, 8, 8)), jnp.ones(2), axis=0), 'last two axes'),
    ('origin', lambda: api.mvue_pack(jnp.ones((8, 8)), None, origin=(0, 0, 2)), 'multiple of four'),
    ('implementation', lambda: api.transposable_pack(jnp.ones((8, 8)), implementation='cuda'), 'unknown'),
  )
  def test_bad_arguments(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()


if __name__ == '__main__':
  absltest.main()
