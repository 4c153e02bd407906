"""V:N:M mask and format against enumeration in NumPy."""

import itertools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.operand import metadata_shape, SparseOperand
from pallas_kernels.two_of_four.prune import magnitude_mask
from pallas_kernels.vnm import api, reference
from pallas_kernels.vnm import format as fmt
from pallas_kernels.vnm.format import compress, decompress, verify
from tests.pallas_kernels import triton_interpreter

# One program each: operation by operation each of them is compiled by itself.
_mask = jax.jit(reference.vnm_mask, static_argnames=('v', 'm'))
_compress = jax.jit(compress, static_argnames=('v', 'm'))
_decompress, _dense = jax.jit(decompress), jax.jit(fmt.decompress_operand)
_pack = jax.jit(api.vnm_pack, static_argnames=('v', 'm', 'activation', 'masked', 'residuals', 'implementation'))
_SIZES = ((1, 8), (4, 8), (8, 16), (2, 4), (16, 5))


def _expected_mask(x, v, m):
  """Loops over blocks: Python's sort of (-sum, column), then of (-|x|, column)."""
  x = np.abs(np.asarray(x).astype(np.float64))
  mask = np.zeros(x.shape, bool)
  for top, left in itertools.product(range(0, x.shape[0], v), range(0, x.shape[1], m)):
    block = x[top : top + v, left : left + m]
    columns = sorted(sorted(range(m), key=lambda j: (-block[:, j].sum(), j))[:4])
    for i in range(v):
      for j in sorted(columns, key=lambda j: (-block[i, j], j))[:2]:
        mask[top + i, left + j] = True
  return mask


def _random(v, m, dtype='bfloat16', seed=0):
  # Small integers: sums are exact in any order, and ties are common.
  x = np.random.default_rng(seed).integers(-9, 10, (3 * v, 4 * m))
  return jnp.asarray(x.astype(jnp.dtype(dtype)))


def _matrix(rows, columns, seed=0):
  x = np.random.default_rng(seed).integers(-9, 10, (rows, columns))
  return jnp.asarray(x.astype(jnp.bfloat16))


@pytest.mark.few(4)
class MaskTest(parameterized.TestCase):

  # Sums of 128 rows are beyond the 256 up to which bfloat16 counts; both ways to rank columns.
  @parameterized.parameters(*_SIZES, (128, 10), (128, 32))
  @pytest.mark.few(2)
  def test_against_loops(self, v, m):
    for dtype in ('float32', 'bfloat16', 'float16'):
      x = _random(v, m, dtype)
      np.testing.assert_array_equal(_mask(x, v=v, m=m), _expected_mask(x, v, m))

  def test_leading_axes(self):
    x = jnp.stack([_random(4, 8, seed=i) for i in range(3)])
    found = _mask(x, v=4, m=8)
    np.testing.assert_array_equal(found, np.stack([_expected_mask(y, 4, 8) for y in x]))

  def test_m_of_four_is_two_of_four_of_each_row(self):
    x = _random(8, 4)
    np.testing.assert_array_equal(reference.vnm_mask(x, v=8, m=4), _mask(x, v=1, m=4))

  def test_not_far_from_the_best_columns(self):
    # All 70 quadruples, the search of the format's authors: the sums keep 98.9% of what it keeps on Gaussian data.
    v, m = 16, 8
    x = np.abs(np.random.default_rng(0).standard_normal((8 * v, 4 * m)))
    kept = (x * np.asarray(_mask(jnp.asarray(x, jnp.float32), v=v, m=m))).sum()
    best = 0.0
    for block in x.reshape(8, v, 4, m).transpose(0, 2, 1, 3).reshape(-1, v, m):
      best += max(np.sort(block[:, q])[:, 2:].sum() for q in map(list, itertools.combinations(range(m), 4)))
    self.assertBetween(kept / best, 0.985, 1.0)

  def test_nan_is_kept(self):
    x = jnp.ones((4, 16)).at[2, 13].set(jnp.nan)
    self.assertTrue(_mask(x, v=4, m=16)[2, 13])

  @parameterized.parameters(
    (dict(v=3, m=8), (4, 8), 'length 4 along axis -2'), (dict(v=4, m=6), (4, 8), 'length 8 along axis -1'),
    (dict(v=4, m=8, n=1), (4, 8), 'n=1 must be 2'), (dict(v=4, m=3), (4, 9), 'm=3 must be from 4'),
    (dict(v=0, m=8), (4, 8), 'v=0 must be 1'), (dict(v=4, m=8), (8,), 'two axes'),
  )
  def test_refusals(self, sizes, shape, message):
    with self.assertRaisesRegex(ValueError, message):
      reference.vnm_mask(jnp.ones(shape), **sizes)


@pytest.mark.few(3)
class FormatTest(parameterized.TestCase):

  @parameterized.parameters(*_SIZES)
  @pytest.mark.few
  def test_round_trip(self, v, m):
    x = _random(v, m)
    mask = jnp.asarray(_expected_mask(x, v, m))
    c = _compress(x, mask, v=v, m=m)
    self.assertEqual((c.v, c.m, c.shape, c.dtype), (v, m, x.shape, x.dtype))
    self.assertEqual(c.columns.shape, (3, 16))
    np.testing.assert_array_equal(_decompress(c), jnp.where(mask, x, 0))
    np.testing.assert_array_equal(_dense(fmt.to_vnm_operand(c)), jnp.where(mask, x, 0))

  def test_fewer_than_the_format_holds(self):
    x = _random(4, 8)
    mask = jnp.asarray(_expected_mask(x, 4, 8)) & (x > 0)
    np.testing.assert_array_equal(_decompress(_compress(x, mask, v=4, m=8)), jnp.where(mask, x, 0))

  def test_bytes(self):
    x = _random(64, 8)
    c = _compress(x, jnp.asarray(_expected_mask(x, 64, 8)), v=64, m=8)
    # 2 of 8 values, two bits each, and 4 of 8 column numbers a block of 64 rows.
    self.assertEqual(c.nbytes, x.nbytes // 4 + x.size // 4 // 4 + x.size // 2 // 64)

  @pytest.mark.slow
  def test_stacked(self):
    x = jnp.stack([_random(4, 8, seed=i) for i in range(2)])
    mask = _mask(x, v=4, m=8)
    c = _compress(x, mask, v=4, m=8)
    np.testing.assert_array_equal(_decompress(c), jnp.where(mask, x, 0))
    np.testing.assert_array_equal(jax.vmap(_decompress)(c), jnp.where(mask, x, 0))


class VerifyTest(parameterized.TestCase):

  def test_accepts_what_the_mask_keeps(self):
    x = _random(4, 8)
    verify(jnp.where(_mask(x, v=4, m=8), x, -0.0), v=4, m=8)

  def test_names_the_wide_block(self):
    x = jnp.zeros((8, 16)).at[4:, 8:].set(jnp.eye(8)[:4]).at[7, 15].set(1.0)
    with self.assertRaisesRegex(ValueError, r'block \(1, 1\) uses more than 4 columns'):
      verify(x, v=4, m=8)

  def test_names_the_full_row(self):
    with self.assertRaisesRegex(ValueError, r'row 2 of block \(1, 0\) holds more than 2'):
      verify(jnp.zeros((8, 8)).at[6, :3].set(1.0), v=4, m=8)


def _zeros(rows, columns):
  """The 2:4 operand of a matrix of zeros."""
  return SparseOperand(
    jnp.zeros((rows, columns // 2), jnp.bfloat16), jnp.zeros(metadata_shape(rows, columns), jnp.uint32)
  )


@pytest.mark.few(3)
class ApiTest(parameterized.TestCase):

  def _operand(self, v=4, m=8):
    x = _random(v, m)
    mask = _mask(x, v=v, m=m)
    return _compress(x, mask, v=v, m=m), np.where(mask, np.asarray(x, np.float64), 0)

  @parameterized.product(implementation=(None, 'reference', 'dense'), out_layout=('mn', 'nm'), operand=(False, True))
  def test_matmul(self, implementation, out_layout, operand):
    a, dense = self._operand()
    b = jnp.asarray(np.random.default_rng(1).integers(-4, 5, (dense.shape[1], 24)), jnp.bfloat16)
    expected = dense @ np.asarray(b, np.float64)
    a = fmt.to_vnm_operand(a) if operand else a
    found = api.vnm_matmul(a, b, out_dtype=jnp.float32, out_layout=out_layout, implementation=implementation)
    np.testing.assert_array_equal(found, expected if out_layout == 'mn' else expected.T)

  def test_pack(self):
    x = _random(4, 8)
    y = jnp.square(jnp.maximum(x, 0))
    a = _pack(x, v=4, m=8, activation='squared_relu').operand
    np.testing.assert_array_equal(_dense(a), np.where(_expected_mask(y, 4, 8), y, 0))

  def test_residuals(self):
    x = _matrix(8, 32)
    made = _pack(x, v=4, m=8, activation='squared_relu', residuals=True)
    kept = np.maximum(np.asarray(made.inputs, np.float64), 0) ** 2
    np.testing.assert_allclose(kept, np.asarray(made.operand.compact.values, np.float64), rtol=4e-3)
    dense = np.asarray(_dense(made.operand), np.float64)
    np.testing.assert_array_equal(made.counts, (dense != 0).sum(0))
    self.assertGreater(made.counts.max(), made.counts.min())
    gradient = _matrix(8, 32, seed=1)
    options = dict(v=4, m=8, activation='squared_relu', gradient=gradient, pattern=made.operand, masked=True)
    found = _pack(made.inputs, **options)
    expected = np.where(dense != 0, 2.0 * gradient * np.maximum(x, 0), 0)
    np.testing.assert_array_equal(found.masked, expected.astype(jnp.bfloat16))
    np.testing.assert_array_equal(_dense(found.operand), found.masked)

  @parameterized.parameters(False, True)
  def test_transpose_pack(self, select):
    a = _pack(_matrix(16, 32), v=4, m=8, activation='squared_relu').operand
    dense = np.asarray(_dense(a), np.float64)
    used = jnp.arange(32) % 3 > 0 if select else None
    rest = np.where(used, dense, 0) if select else dense
    # Group g of tokens is g, g + 2, ..., g + 14.
    order = np.arange(16).reshape(8, 2).T.reshape(-1)
    mask = np.zeros((32, 16), bool)
    mask[:, order] = _expected_mask(jnp.asarray(rest.T[:, order]), 4, 8)
    transposed = api.transpose_pack(a, used=used)
    self.assertEqual(transposed.shape, (32, 16))
    np.testing.assert_array_equal(_dense(transposed), np.where(mask, rest.T, 0))
    again = api.transpose_pack(a, pattern=transposed)  # of all columns
    np.testing.assert_array_equal(_dense(again), np.where(mask, dense.T, 0))

  @parameterized.parameters(False, True)
  def test_transpose_pack_24(self, select):
    a = _pack(_matrix(16, 32), v=4, m=8, activation='squared_relu').operand
    dense = np.asarray(_dense(a), np.float64)
    used = jnp.arange(32) % 3 > 0 if select else None
    rest = np.where(used, dense, 0).T if select else dense.T
    mask = np.asarray(magnitude_mask(jnp.asarray(rest), axis=-1))
    found = api.transpose_pack_24(a, used=used)
    self.assertEqual(found.shape, (32, 16))
    np.testing.assert_array_equal(api.expand(found), np.where(mask, rest, 0))
    again = api.transpose_pack_24(a, pattern=found)  # of all columns
    np.testing.assert_array_equal(api.expand(again), np.where(mask, dense.T, 0))

  def test_columns(self):
    a = _pack(_matrix(16, 32), v=4, m=8, activation='squared_relu').operand
    columns = np.random.default_rng(4).permutation(32)[:9].astype(np.int32)
    found = api.take_columns(a, jnp.asarray(columns))
    np.testing.assert_array_equal(found, np.asarray(_dense(a))[:, columns])

  @parameterized.named_parameters(
    ('rows', (20, 32), {}, 'has length 20 along axis -2, no multiple of 4 and 8'),
    ('used', (16, 32), dict(used=jnp.ones(16, bool)), r'bool of shape \(32,\), found bool of shape \(16,\)'),
    ('used_type', (16, 32), dict(used=jnp.ones(32)), 'found float32'),
    ('pattern', (16, 32), dict(pattern=True), r'pattern must be 4:2:8 of \(32, 16\) .* found 4:2:8 of \(16, 32\)'),
  )
  def test_transpose_pack_refusals(self, shape, options, message):
    a = _pack(_matrix(*shape), v=4, m=8, activation='squared_relu').operand
    options = dict(pattern=a) if 'pattern' in options else options
    with self.assertRaisesRegex(ValueError, message):
      api.transpose_pack(a, **options)

  @parameterized.named_parameters(
    ('rows', (6, 32), {}, r'a of shape \(6, 32\) has 6 rows, no multiple of 4'),
    ('used', (8, 32), dict(used=jnp.ones(8, bool)), r'bool of shape \(32,\), found bool of shape \(8,\)'),
    ('pattern', (8, 32), dict(pattern=_zeros(8, 32)), r'pattern must be of shape \(32, 8\), found \(8, 32\)'),
    ('both', (8, 32), dict(pattern=_zeros(32, 8), used=jnp.ones(32, bool)), 'pattern and used do not go'),
  )
  def test_transpose_pack_24_refusals(self, shape, options, message):
    a = _pack(_matrix(*shape), v=2, m=8, activation='squared_relu').operand
    with self.assertRaisesRegex(ValueError, message):
      api.transpose_pack_24(a, **options)

  @parameterized.parameters('reference', 'triton')
  def test_groups_that_are_spread_are_refused(self, implementation):
    if implementation == 'triton' and not triton_interpreter.HAS_TRITON:
      self.skipTest('triton is not installed')
    spread = api.transpose_pack(_pack(_matrix(32, 16), v=4, m=8, activation='squared_relu').operand)
    self.assertTrue(spread.spread)
    calls = dict(implementation=implementation)
    for call in (
      lambda: api.transpose_pack(spread, **calls), lambda: api.transpose_pack_24(spread, **calls),
      lambda: api.take_columns(spread, jnp.zeros(3, jnp.int32), **calls),
    ):
      with self.assertRaisesRegex(ValueError, r'of shape \(16, 32\) has its groups spread; accepted .* side by side'):
        call()
    with self.assertRaisesRegex(ValueError, 'pattern of shape .* has its groups spread'):
      _pack(spread.compact.values, v=4, m=8, gradient=_matrix(16, 32), pattern=spread, **calls)

  def test_columns_refusal(self):
    a = _pack(_matrix(16, 32), v=4, m=8, activation='squared_relu').operand
    with self.assertRaisesRegex(ValueError, r'columns must be int32 \[n\], found float32 of shape \(3,\)'):
      api.take_columns(a, jnp.ones(3))

  def test_refusals(self):
    a, _ = self._operand()
    for b, kwargs, message in (
      (jnp.ones((31, 8), jnp.bfloat16), {}, '31 rows along K'),
      (jnp.ones((32, 8), jnp.float32), {}, 'they must be equal'),
      (jnp.ones((32, 8), jnp.bfloat16), dict(out_layout='kn'), "out_layout='kn'"),
      (jnp.ones((32, 8), jnp.bfloat16), dict(implementation='cutlass'), "implementation='cutlass'"),
    ):
      with self.assertRaisesRegex(ValueError, message):
        api.vnm_matmul(a, b, **kwargs)

  @parameterized.named_parameters(
    ('activation', dict(activation='gelu'), "activation='gelu' is unknown"),
    ('gradient_alone', dict(gradient=(8, 32)), 'gradient and pattern belong together'),
    ('pattern_alone', dict(pattern=(8, 4, 8)), 'gradient and pattern belong together'),
    ('gradient_shape', dict(gradient=(8, 64), pattern=(8, 4, 8)), r'4:2:8 of \(8, 64\) .* of \(8, 32\)'),
    ('pattern_blocks', dict(gradient=(8, 32), pattern=(8, 8, 8)), r'4:2:8 of \(8, 32\) .* found 8:2:8'),
    ('pattern_shape', dict(gradient=(8, 32), pattern=(16, 4, 8)), r'found 4:2:8 of \(16, 32\)'),
    ('inputs', dict(gradient=(8, 32), pattern=(8, 4, 8)), r'x must be the inputs .*, \(8, 8\), found shape \(8, 32\)'),
    ('residuals', dict(gradient=(8, 32), pattern=(8, 4, 8), residuals=True), 'residuals=True takes no gradient'),
    ('masked', dict(masked=True), 'masked=True takes a gradient'),
    ('implementation', dict(implementation='mosaic_gpu'), "implementation='mosaic_gpu'"),
  )
  def test_pack_refusals(self, given, message):
    """`given` has the sizes of arrays, of `pattern` also V and M."""
    make = dict(
      gradient=lambda *shape: jnp.ones(shape, jnp.bfloat16),
      pattern=lambda rows, v, m: fmt.VNMOperand(_zeros(rows, 128 // m), jnp.zeros((rows // v, 128 // m), jnp.int32), m),
    )
    given = {name: make[name](*value) if isinstance(value, tuple) else value for name, value in given.items()}
    with self.assertRaisesRegex(ValueError, message):
      _pack(jnp.ones((8, 32), jnp.bfloat16), v=4, m=8, **given)

  def test_expand_refuses_a_stack(self):
    stack = jax.tree.map(lambda a: a[None], _zeros(64, 64))
    with self.assertRaisesRegex(ValueError, r'operand must be a matrix, found shape \(1, 64, 64\)'):
      api.expand(stack)


class SquaredReluTest(parameterized.TestCase):

  @parameterized.parameters('bfloat16', 'float16')
  def test_every_number_is_squared_exactly_and_rounded_once(self, dtype):
    """Which is what the packers' one instruction on 16 bits does."""
    x = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(dtype))
    x = x[~np.isnan(x)]
    found = np.asarray(reference.squared_relu(jnp.asarray(x))).astype(np.float64)
    square = np.maximum(x.astype(np.float64), 0) ** 2
    info = jnp.finfo(dtype)
    # One unit in the last place; the exponent of the subnormal is that of the smallest normal number.
    exponent = np.maximum(np.frexp(square)[1] - 1, info.minexp)
    unit = np.ldexp(1.0, np.where(np.isfinite(square), exponent, 0) - info.nmant)
    once = np.rint(square / unit) * unit
    once = np.where(once > float(info.max), np.inf, once)
    # XLA's CPU takes a float32 below 2^-126 for zero.
    flushed = (square < 2.0**-126) & (found == 0)
    np.testing.assert_array_equal(found, np.where(flushed, 0, once))


if __name__ == '__main__':
  absltest.main()
