"""The packers' float8 results against oracles in NumPy and ml_dtypes, on the CPU."""

import functools
import itertools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import formats
from pallas_kernels.operand import from_operand
from pallas_kernels.pack import api
from pallas_kernels.pack.reference import mask_codes
from pallas_kernels.quantize.api import amax, current_scale
from pallas_kernels.two_of_four import mvue
from pallas_kernels.two_of_four.transposable import transposable_mask
from tests.draws import gaussian

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def normal(shape, dtype=jnp.bfloat16, seed=0):
  return gaussian(seed, shape, dtype)


# Compiled: one by one, the operations would take ten times as long.
masked_pack = jax.jit(api.masked_pack, static_argnames='dtype')
soft_threshold_pack = jax.jit(api.soft_threshold_pack, static_argnames=('axis', 'dtype'))
mvue_pack = jax.jit(api.mvue_pack, static_argnames=('origin', 'dtype'))
decompress = jax.jit(lambda operand: formats.decompress(from_operand(operand)))


def dense(operand):
  return np.asarray(decompress(operand)).astype(np.float32)


def rounded(x, dtype):
  return np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(NUMPY[dtype]).astype(np.float32)


def shrink(w):
  """Soft threshold of float32 groups of four along the last axis."""
  groups = w.reshape(*w.shape[:-1], -1, 4)
  t = np.sort(np.abs(groups), axis=-1)[..., 1:2]
  return (np.sign(groups) * np.maximum(np.abs(groups) - t, 0)).reshape(w.shape)


def expected_mean(group, scale, dtype):
  """Mean of the rounded sample of one group, in float64, from inclusion probabilities."""
  a = np.abs(group).astype(np.float64)
  p = np.minimum(1, 2 * a / a.sum())
  if (p == 1).any():
    rest = a.sum() - a.max()
    p = np.where(p == 1, 1, a / max(rest, 1e-300))
  values = np.divide(a, p, out=np.zeros_like(a), where=p > 0)
  return np.sign(group) * p * rounded((values * scale / 2).astype(np.float32), dtype) / (scale / 2)


_CODES = np.zeros((2, 2), np.uint16)


class SoftThresholdTest(parameterized.TestCase):

  @parameterized.product(axis=(-1, -2), dtype=(E4M3, E5M2))
  @pytest.mark.few
  def test_operand_and_dense_hold_the_rounded_projection(self, axis, dtype):
    w = normal((2, 68, 132), jnp.float32)
    soft = shrink(np.asarray(w)) if axis == -1 else np.swapaxes(shrink(np.swapaxes(w, 1, 2)), 1, 2)
    scale = current_scale(jnp.asarray(np.abs(soft).max((1, 2))), dtype)
    packed = soft_threshold_pack(w, scale, axis=axis, dtype=dtype)
    self.assertEqual(packed.operand.dtype, dtype)
    expected = rounded(soft * np.asarray(scale)[:, None, None], dtype)
    np.testing.assert_array_equal(np.asarray(packed.dense).astype(np.float32), expected)
    np.testing.assert_array_equal(dense(packed.operand), expected if axis == -1 else np.swapaxes(expected, 1, 2))
    self.assertEqual(np.abs(expected).max(), LARGEST[dtype])

  def test_what_rounds_to_zero_is_not_kept_and_has_no_sign(self):
    w = jnp.tile(jnp.array([-1.0, 1e-6, -0.25, 0.25]), (4, 16))
    packed = soft_threshold_pack(w, jnp.float32(1e-4), axis=-1, dtype=E4M3)
    np.testing.assert_array_equal(np.asarray(packed.dense).view(np.uint8), np.zeros((4, 64), np.uint8))
    np.testing.assert_array_equal(np.asarray(packed.operand.values).view(np.uint8), np.zeros((4, 32), np.uint8))

  def test_nan_stays(self):
    w = normal((8, 64)).at[3, 5].set(jnp.nan)
    packed = soft_threshold_pack(w, jnp.float32(100), axis=-1, dtype=E4M3)
    for found in (dense(packed.operand), np.asarray(packed.dense).astype(np.float32)):
      np.testing.assert_array_equal(np.argwhere(np.isnan(found)), [[3, 4], [3, 5]])


class MaskedTest(parameterized.TestCase):

  @parameterized.parameters(E4M3, E5M2)
  @pytest.mark.few
  def test_operands_hold_the_rounded_weight_under_the_mask(self, dtype):
    w, mask = normal((2, 68, 132), jnp.float32), transposable_mask(normal((2, 68, 132), jnp.float32, seed=1))
    # A largest entry that saturates and one that is just the largest.
    scale = np.asarray(LARGEST[dtype] / np.abs(np.asarray(w)).max((1, 2)) * [2.0, 1.0], np.float32)
    packed = masked_pack(w, mask_codes(mask), scale, dtype=dtype)
    expected = rounded(np.asarray(w) * scale[:, None, None], dtype) * np.asarray(mask)
    self.assertEqual(packed.rows.dtype, dtype)
    np.testing.assert_array_equal(dense(packed.rows), expected)
    np.testing.assert_array_equal(dense(packed.columns), np.swapaxes(expected, 1, 2))

  def test_free_positions_hold_zeros_without_a_sign(self):
    # Of each group one entry is kept, the last; what else is stored is none of the weight's.
    mask = jnp.asarray(np.tile(np.eye(4, dtype=bool)[::-1], (2, 16)))
    packed = masked_pack(jnp.full((8, 64), -1.0), mask_codes(mask), jnp.float32(1), dtype=E4M3)
    for operand in (packed.rows, packed.columns):
      bits, count = np.unique(np.asarray(operand.values).view(np.uint8), return_counts=True)
      self.assertEqual(dict(zip(bits.tolist(), count.tolist(), strict=True)), {0x00: 128, 0xB8: 128})

  def test_nan_stays_where_it_is_kept(self):
    w = normal((8, 64)).at[2:4, 5].set(jnp.nan)
    mask = jnp.zeros((8, 64), bool).at[3, 5].set(True)
    found = dense(masked_pack(w, mask_codes(mask), jnp.float32(100), dtype=E4M3).rows)
    np.testing.assert_array_equal(np.argwhere(np.isnan(found)), [[3, 5]])


class MvueTest(parameterized.TestCase):

  @parameterized.parameters(E4M3, E5M2)
  @pytest.mark.few
  def test_takes_the_decisions_of_mvue24_and_rounds_after(self, dtype):
    x, key, origin = normal((2, 68, 132)), jax.random.key(5), (1, 2, 4)
    scale = current_scale(amax(x), dtype)
    packed = mvue_pack(x, key, scale, origin=origin, dtype=dtype)
    sample = jax.jit(functools.partial(mvue.mvue24, axis=-2, origin=origin))(x.astype(jnp.float32), key)
    factors = np.asarray(scale)[:, None, None]
    expected = rounded(np.asarray(sample) * (factors / 2), dtype)
    np.testing.assert_array_equal(dense(packed.operand), np.swapaxes(expected, 1, 2))
    expected = rounded(np.asarray(x).astype(np.float32) * factors, dtype)
    np.testing.assert_array_equal(np.asarray(packed.dense).astype(np.float32), expected)

  def test_what_rounds_to_zero_is_not_kept_whatever_the_compiler_keeps_of_it(self):
    x, key = normal((64, 64), jnp.float32), jax.random.key(5)
    kept = np.asarray(mvue_pack(x, key, jnp.float32(1.5e-3), dtype=E4M3).operand.values)
    self.assertBetween((kept == 0).mean(), 0.2, 0.8)
    np.testing.assert_array_equal(np.signbit(kept.astype(np.float32)[kept == 0]), False)
    # Where rounded numbers are made wide again, a compiler may leave the rounding out: XLA does on a GPU.
    text = mvue_pack.lower(x, key, jnp.float32(1), dtype=E4M3).as_text()
    self.assertNotRegex(text, r'stablehlo\.convert .*f8E4M3FN>\) -> ')

  def test_the_largest_possible_sample_does_not_saturate(self):
    # Four equal entries: each kept one gets the value of two, the bound.
    x = jnp.full((64, 64), -3.0, jnp.bfloat16)
    scale = current_scale(amax(x), E5M2)
    kept = dense(mvue_pack(x, jax.random.key(0), scale, dtype=E5M2).operand)
    self.assertEqual(np.unique(kept).tolist(), [-57344.0, 0.0])
    np.testing.assert_allclose(kept.min() * api.MVUE_HEADROOM / np.asarray(scale), -6.0, rtol=1e-6)

  def test_the_mean_is_the_value_up_to_the_rounding(self):
    draws, x = 4000, normal((8, 4), jnp.float32)
    x = x.at[0, 1].set(20.0).at[2, 2].set(0.0)
    scale = current_scale(amax(x), E5M2)
    many = jnp.broadcast_to(x, (draws, 8, 4))
    packed = mvue_pack(many, jax.random.key(3), jnp.full((draws,), scale), dtype=E5M2)
    kept = dense(packed.operand)
    kept = kept.swapaxes(1, 2).astype(np.float64) / (float(scale) / 2)
    x = np.asarray(x)
    expected = np.empty((8, 4))
    for g, c in itertools.product(range(2), range(4)):
      expected[4 * g : 4 * g + 4, c] = expected_mean(x[4 * g : 4 * g + 4, c], float(scale), E5M2)
    error = np.abs(kept.mean(0) - expected)
    self.assertTrue((error <= 5 * kept.std(0) / np.sqrt(draws) + 1e-9).all())
    # Two bits of mantissa: each value is off by an eighth at most, and so is the mean.
    self.assertTrue((np.abs(expected - x) <= np.abs(x) / 8).all())

  @parameterized.named_parameters(
    ('scale', lambda x, k: api.mvue_pack(x, k, jnp.ones(8), dtype=E5M2), 'one a matrix of x'),
    ('no_scale', lambda x, k: api.mvue_pack(x, k, dtype=E5M2), 'needs a scale .* one a matrix of x, found None'),
    ('masked_scale', lambda x, k: api.masked_pack(x, _CODES, jnp.ones(8), dtype=E4M3), 'one a matrix of w'),
    ('masked_no_scale', lambda x, k: api.masked_pack(x, _CODES, dtype=E4M3), 'needs a scale .* of w, found None'),
    ('masked_dtype', lambda x, k: api.masked_pack(x, _CODES, 1.0), 'float8_e4m3fn or float8_e5m2, found'),
    ('soft_scale', lambda x, k: api.soft_threshold_pack(x, jnp.ones(8), dtype=E4M3), 'one a matrix of w'),
    ('dtype', lambda x, k: api.mvue_pack(x, k, 1.0, dtype=jnp.bfloat16), 'float8_e4m3fn or float8_e5m2, found'),
    ('of_x', lambda x, k: api.mvue_pack(x, k, 1.0), 'float8_e4m3fn or float8_e5m2, found'),
    ('other_float8', lambda x, k: api.mvue_pack(x, k, 1.0, dtype='float8_e5m2fnuz'), 'or float8_e5m2, found'),
    ('source', lambda x, k: api.soft_threshold_pack(x.astype(jnp.int8), 1.0, dtype=E4M3), 'w must be bfloat16'),
    ('axis', lambda x, k: api.soft_threshold_pack(x, 1.0, axis=2, dtype=E4M3), 'last two axes'),
    ('origin', lambda x, k: api.mvue_pack(x, k, 1.0, origin=(0, 0, 2), dtype=E5M2), 'multiple of four'),
    ('other_ops', lambda x, k: api.transposable_pack(x, dtype=E4M3), 'bfloat16 or float16, found'),
  )
  def test_bad_arguments(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call(jnp.ones((8, 8), jnp.bfloat16), jax.random.key(0))


if __name__ == '__main__':
  absltest.main()
