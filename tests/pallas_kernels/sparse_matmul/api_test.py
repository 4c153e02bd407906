"""`sparse_matmul` as users meet it: meaning, refusals, choice of back end, derivative."""

import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _device, formats, operand
from pallas_kernels.sparse_matmul import api
from tests import targets
from tests.quick import jit

_H100 = targets.target_device('sm_90a')


_compress = jax.jit(functools.partial(formats.compress, axis=-1))


@functools.cache
def _inputs(m=6, n=5, k=12, dtype='float32', b_layout='nk'):
  rng = np.random.default_rng(0)
  keep = (np.argsort(rng.random((m, k // 4, 4)), axis=-1) < 2).reshape(m, k)
  w = rng.standard_normal((m, k)).astype(np.float32).astype(jnp.dtype(dtype))
  b = rng.standard_normal((n, k) if b_layout == 'nk' else (k, n)).astype(np.float32).astype(jnp.dtype(dtype))
  a = _compress(w, keep)
  return a, jnp.asarray(b), np.where(keep, w.astype(np.float64), 0)


def _gelu(x):
  return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


_ORACLES = {
  None: lambda x: x, 'gelu': _gelu, 'silu': lambda x: x / (1 + np.exp(-x)), 'relu': lambda x: np.maximum(x, 0),
  'squared_relu': lambda x: np.maximum(x, 0) ** 2,
}


class MeaningTest(parameterized.TestCase):

  # Layouts with each back end; what is chosen here is the reference, once.
  @parameterized.parameters(
    ('nk', 'mn', 'reference'), ('nk', 'nm', 'reference'), ('kn', 'mn', 'reference'), ('nk', 'nm', 'dense'),
    ('kn', 'mn', 'dense'), ('kn', 'nm', None),
  )
  def test_layouts(self, b_layout, out_layout, implementation):
    a, b, dense = _inputs(dtype='bfloat16', b_layout=b_layout)
    options = dict(b_layout=b_layout, out_layout=out_layout, implementation=implementation)
    found = jit(functools.partial(api.sparse_matmul, **options))(a, b)
    b64 = np.asarray(b, np.float64)
    expected = dense @ (b64.T if b_layout == 'nk' else b64)
    self.assertEqual(found.dtype, jnp.bfloat16)
    expected = expected if out_layout == 'mn' else expected.T
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8, atol=1e-6)

  @parameterized.parameters(*_ORACLES)
  def test_scales_then_bias_on_rows_then_activation(self, activation):
    a, b, dense = _inputs(dtype='float16')
    bias, a_scale = np.linspace(-1, 1, 6, dtype=np.float32), np.linspace(0.5, 2, 6, dtype=np.float32)
    b_scale = 0.25
    options = dict(activation=activation, alpha=3.0, out_dtype=jnp.float32)
    given = dict(bias=bias, a_scale=a_scale, b_scale=np.float32(b_scale))
    found = jit(functools.partial(api.sparse_matmul, **options))(a, b, **given)
    d = dense @ np.asarray(b, np.float64).T
    expected = _ORACLES[activation](3 * d / a_scale[:, None] / b_scale + bias[:, None])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

  def test_scale_by_column(self):
    a, b, dense = _inputs(dtype='bfloat16')
    b_scale = np.linspace(0.5, 2, 5, dtype=np.float32)
    found = api.sparse_matmul(a, b, b_scale=jnp.asarray(b_scale), out_dtype=jnp.float32)
    np.testing.assert_allclose(found, (dense @ np.asarray(b, np.float64).T) / b_scale, rtol=1e-4, atol=1e-5)

  def test_float8_of_two_kinds_gives_bfloat16(self):
    a, b, dense = _inputs(dtype='float8_e4m3fn')
    b = b.astype(jnp.float8_e5m2)
    found = api.sparse_matmul(a, b)
    self.assertEqual(found.dtype, jnp.bfloat16)
    expected = dense @ np.asarray(b.astype(jnp.float32), np.float64).T
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8, atol=1e-6)

  def test_kernel_stored_in_by_out_and_operand_mean_the_same(self):
    a, b, _ = _inputs(dtype='bfloat16')
    expected = api.sparse_matmul(a, b)
    stored = formats.Compressed24(a.values.T, a.metadata.T, -2)
    np.testing.assert_array_equal(api.sparse_matmul(stored, b), expected)
    np.testing.assert_array_equal(api.sparse_matmul(operand.to_operand(a), b), expected)

  def test_one_group(self):
    a, b, dense = _inputs(m=1, n=1, k=4)
    np.testing.assert_allclose(api.sparse_matmul(a, b), dense @ np.asarray(b).T, rtol=1e-5)

  # Each activation and each layout with both; neither knows of the other.
  @parameterized.parameters(
    ('gelu', 'mn', 'reference'), ('silu', 'nm', 'reference'), ('relu', 'mn', 'reference'),
    ('squared_relu', 'nm', 'reference'), ('gelu', 'nm', 'dense'), ('silu', 'mn', 'dense'), ('relu', 'nm', 'dense'),
    ('squared_relu', 'mn', 'dense'),
  )  # fmt: skip
  def test_keeps_what_the_activation_was_applied_to(self, activation, out_layout, implementation):
    a, b, dense = _inputs(dtype='bfloat16')
    bias, b_scale = np.linspace(-1, 1, 6, dtype=np.float32), 0.25
    options = dict(
      activation=activation, out_layout=out_layout, keep_preactivation=True, implementation=implementation
    )
    d, z = jit(functools.partial(api.sparse_matmul, **options))(a, b, bias=bias, b_scale=np.float32(b_scale))
    expected = dense @ np.asarray(b, np.float64).T / b_scale + bias[:, None]
    expected = expected if out_layout == 'mn' else expected.T
    # Half a unit in the last place and float32's errors: the activation of a rounded Z can be off by more.
    for found, oracle in ((z, expected), (d, _ORACLES[activation](expected))):
      self.assertEqual(found.dtype, jnp.bfloat16)
      np.testing.assert_allclose(np.asarray(found, np.float64), oracle, rtol=1.01 * 2**-8, atol=1e-6)

  @parameterized.product(implementation=('reference', 'dense'), activation=(None, 'gelu'), whole=(False, True))
  def test_the_largest_magnitude(self, implementation, activation, whole):
    a, b, _ = _inputs(dtype='bfloat16')
    options = dict(activation=activation, keep_preactivation=activation is not None, implementation=implementation)
    with mock.patch.object(_device, 'arrays_are_whole', lambda: whole):
      *found, amax = jit(functools.partial(api.sparse_matmul, amax=True, **options))(a, b)
    self.assertEqual((amax, amax.dtype), (np.abs(np.asarray(found[0], np.float32)).max(), jnp.float32))
    expected = jax.tree.leaves(jit(functools.partial(api.sparse_matmul, **options))(a, b))
    for one, other in zip(found, expected, strict=True):
      np.testing.assert_array_equal(one, other)

  def test_derivative_through_both_outputs(self):
    a, b, _ = _inputs()
    bias = np.linspace(-1, 1, 6, dtype=np.float32)
    weights = np.arange(30, dtype=np.float32).reshape(5, 6) / 30

    def sparse(values, b, bias):
      c = formats.Compressed24(values, a.metadata, -1)
      h, z = api.sparse_matmul(c, b, bias=bias, activation='silu', out_layout='nm', keep_preactivation=True)
      return (h * weights).sum() + jnp.cos(z).sum()

    def plain(values, b, bias):
      w = formats.decompress(formats.Compressed24(values, a.metadata, -1))
      z = jnp.matmul(b, w.T, precision='highest') + bias[None, :]
      return (jax.nn.silu(z) * weights).sum() + jnp.cos(z).sum()

    found = jax.jit(jax.grad(sparse, (0, 1, 2)))(a.values, b, bias)
    expected = jax.jit(jax.grad(plain, (0, 1, 2)))(a.values, b, bias)
    for f, e in zip(found, expected, strict=True):
      np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-5)

  def test_derivative_is_that_of_the_dense_matmul(self):
    a, b, _ = _inputs()
    bias = np.linspace(-1, 1, 6, dtype=np.float32)

    def sparse(values, b, bias):
      c = formats.Compressed24(values, a.metadata, -1)
      return api.sparse_matmul(c, b, bias=bias, activation='silu', out_layout='nm').sum()

    def plain(values, b, bias):
      w = formats.decompress(formats.Compressed24(values, a.metadata, -1))
      return jax.nn.silu(jnp.matmul(b, w.T, precision='highest') + bias[None, :]).sum()

    found = jax.jit(jax.grad(sparse, (0, 1, 2)))(a.values, b, bias)
    expected = jax.jit(jax.grad(plain, (0, 1, 2)))(a.values, b, bias)
    for f, e in zip(found, expected, strict=True):
      np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-5)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
    (dict(b_layout='kk'), "b_layout='kk' is unknown"),
    (dict(out_layout='nn'), "out_layout='nn' is unknown"),
    (dict(activation='tanh'), "activation='tanh' is unknown"),
    (dict(implementation='cublas'), "implementation='cublas' is unknown"),
    (dict(bias=jnp.zeros(5)), r'bias must have shape \(6,\), one entry a row of a, found \(5,\)'),
    (dict(a_scale=jnp.zeros(5)), r'a_scale must be a scalar or have shape \(6,\), found \(5,\)'),
    (dict(b_layout='kn'), r"layout 'kn' has 5 entries along K, a of shape \(6, 12\) has 12"),
    (dict(keep_preactivation=True), 'keep_preactivation=True needs an activation'),
    (dict(implementation='mosaic_gpu'), 'mosaic_gpu: sparse wgmma needs compute capability 9.0'),
    (dict(bias=[0.0] * 6), 'bias must be of type Array or ndarray or None, found list'),
    (dict(out_dtype='int32'), r"out_dtype must be one of \('float32', 'bfloat16', 'float16'\), found int32"),
    (dict(out_dtype='float8_e4m3fn'), 'out_dtype must be one of .*, found float8_e4m3fn'),
    (dict(out_dtype=jnp.float64), 'out_dtype must be one of .*, found float64'),
  )
  def test_names_what_is_off(self, kwargs, message):
    a, b, _ = _inputs(dtype='bfloat16')
    with self.assertRaisesRegex(ValueError, message):
      api.sparse_matmul(a, b, **kwargs)

  def test_operands_of_another_kind(self):
    a, b, dense = _inputs(dtype='bfloat16')
    with self.assertRaisesRegex(ValueError, 'a must be of type Compressed24 or SparseOperand, found an array .*6, 12'):
      api.sparse_matmul(jnp.asarray(dense, jnp.bfloat16), b)
    with self.assertRaisesRegex(ValueError, 'b must be of type Array or ndarray, found Compressed24'):
      api.sparse_matmul(a, a)

  def test_mixed_dtypes(self):
    a, b, _ = _inputs(dtype='bfloat16')
    with self.assertRaisesRegex(ValueError, 'a is bfloat16 and b is float32'):
      api.sparse_matmul(a, b.astype(jnp.float32))

  def test_metadata_of_another_shape(self):
    a, b, _ = _inputs(dtype='bfloat16')
    wrong = operand.SparseOperand(a.values, jnp.zeros((2, 1, 128), jnp.uint32))
    with self.assertRaisesRegex(ValueError, 'a.metadata must be uint32 of shape'):
      api.sparse_matmul(wrong, b)


class ChoiceTest(absltest.TestCase):

  def _candidates(self, m, n, k, device=_H100, dtype='bfloat16'):
    return api.candidates_for(
      m, n, k, dtype=dtype, out_dtype='bfloat16', b_layout='nk', out_layout='nm', device=device
    )

  def test_reference_on_a_cpu(self):
    self.assertEqual(tuple(self._candidates(64, 64, 64, _device.current())), ('reference',))

  def test_measured_winner_on_its_gpu(self):
    self.assertEqual(self._candidates(16384, 16384, 4096)[0], 'mosaic_gpu')
    self.assertEqual(self._candidates(14336, 16384, 4096)[0], 'mosaic_gpu')

  def test_dense_where_nothing_near_was_measured(self):
    self.assertEqual(tuple(self._candidates(16, 16, 16)), ('dense',))
    other = _device.Device('NVIDIA H20', 'gpu', (9, 0), 78)
    self.assertEqual(tuple(self._candidates(16384, 16384, 4096, other)), ('dense',))

  def test_a_back_end_that_refuses_leaves_it_to_the_next(self):
    a, b, _ = _inputs(dtype='bfloat16')
    with mock.patch.object(api, 'candidates_for', return_value=('mosaic_gpu', 'dense')):
      np.testing.assert_array_equal(api.sparse_matmul(a, b), api.sparse_matmul(a, b, implementation='dense'))


if __name__ == '__main__':
  absltest.main()
