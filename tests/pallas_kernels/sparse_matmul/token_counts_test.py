"""Small numbers of tokens: what the kernels get is padded as their copies need it, and what comes back is cut.

A stand-in multiplies what the kernel or the library would get, in float64; they themselves run on a few ragged sizes
elsewhere.
"""

import functools
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats, operand
from pallas_kernels.ffi import cusparselt as library
from pallas_kernels.sparse_matmul import cusparselt, mosaic_gpu, mosaic_gpu_sm80
from pallas_kernels.sparse_matmul.call import Call, Vectors
from tests import targets
from tests.oracles import wide

_COUNTS = (*range(1, 36), *range(60, 69), *range(124, 130))
_IN, _OUT = 68, 40
_BF16 = jnp.dtype('bfloat16')
_HOPPER, _AMPERE = targets.target_device('sm_90a'), targets.target_device('sm_80')
_BACKENDS = (mosaic_gpu, _HOPPER), (mosaic_gpu_sm80, _AMPERE), (cusparselt, _AMPERE)
_decode = jax.jit(lambda *fields: formats.decompress(operand.from_operand(operand.SparseOperand(*fields))))
_encode = jax.jit(lambda w, keep: operand.to_operand(formats.compress(w, keep, axis=-1)))


def _whole_boxes(x):
  """What TMA can address: rows of whole 16 bytes."""
  assert x.shape[-1] * x.dtype.itemsize % 16 == 0, x.shape


def _on_hopper(p, config, **_):
  """The stand-in for `mosaic_gpu.build`."""
  del config

  def run(values, metadata, b):
    assert p.m % 8 == 0 and (p.n % 8 == 0 or p.n < 8), p
    assert values.shape == (p.m, p.k // 2)
    assert b.shape == ((p.n, p.k) if p.b_layout == 'nk' else (p.k, p.n))
    a, b = wide(_decode(values, metadata)), wide(b)
    d = a @ (b.T if p.b_layout == 'nk' else b)
    d = (d if p.out_layout == 'mn' else d.T).astype(p.out_dtype)
    for x in (values, np.zeros(b.shape, p.b_dtype), d):
      _whole_boxes(x)
    return [d]

  return run


def _on_ampere(m, n, k, dtype, out_dtype, config):
  """The stand-in for `mosaic_gpu_sm80.build`, which has no predicates: whole tiles only."""
  del dtype
  assert m % config.bm == n % config.bn == k % 64 == 0, (m, n, k)

  def run(values, metadata, b):
    assert (values.shape, b.shape) == ((m, k // 2), (n, k))
    return (wide(_decode(values, metadata)) @ wide(b).T).astype(out_dtype)

  return run


class _Library:
  """The stand-in for `jax.ffi.ffi_call`: cuSPARSELt's descriptors take rows by 32 and the sum by 64."""

  def __call__(self, name, result, **_):
    return {library.COMPRESS: self._compress, library.MATMUL: functools.partial(self._matmul, result)}[name]

  def _compress(self, a):
    assert a.shape[0] % 32 == a.shape[1] % 64 == 0, a.shape
    self._a = wide(a)
    return np.zeros(1, np.uint8)

  def _matmul(self, result, blob, b, *, b_layout, out_layout, **_):
    del blob
    b = wide(b if b_layout == 'nk' else b.T)
    assert b.shape[0] % 32 == 0 and b.shape[1] == self._a.shape[1], (b.shape, self._a.shape)
    d = self._a @ b.T
    d = (d if out_layout == 'mn' else d.T).astype(result.dtype)
    assert d.shape == result.shape, (d.shape, result)
    return d


def _pad(x, shape):
  """`operand.pad_to` without a program a shape."""
  return np.pad(np.asarray(x), [(0, new - old) for new, old in zip(shape, x.shape, strict=True)])


def _sparse(rng, rows, columns):
  """A random 2:4 matrix and its operand."""
  keep = np.argsort(rng.random((rows, columns // 4, 4)), axis=-1) < 2
  w = np.where(keep.reshape(rows, columns), rng.standard_normal((rows, columns)), 0.0).astype(_BF16)
  return wide(w), _encode(w, keep.reshape(rows, columns))


class TokenCountsTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.object(mosaic_gpu, 'build', _on_hopper))
    self.enter_context(mock.patch.object(mosaic_gpu_sm80, 'build', _on_ampere))
    self.enter_context(mock.patch.object(jax.ffi, 'ffi_call', _Library()))
    self.enter_context(mock.patch.object(library, 'register', lambda: None))
    for module, name in ((operand, 'from_operand'), (formats, 'decompress'), (cusparselt, '_without_negative_zeros')):
      self.enter_context(mock.patch.object(module, name, jax.jit(getattr(module, name))))
    self.enter_context(mock.patch.object(operand, 'pad_to', _pad))
    self.rng = np.random.default_rng(0)

  def check(self, module, device, a, b, expected, **layouts):
    found = module.sparse_matmul(a, b, Vectors(), Call(_BF16, **layouts), device=device, config=module.Config())
    self.assertEqual(found.shape, expected.shape)
    np.testing.assert_allclose(wide(found), expected, rtol=1e-2, atol=1e-2)

  def test_forward(self):
    dense, a = _sparse(self.rng, _OUT, _IN)
    x = self.rng.standard_normal((max(_COUNTS), _IN)).astype(_BF16)
    for tokens in _COUNTS:
      for module, device in _BACKENDS:
        with self.subTest(tokens=tokens, module=module.__name__):
          expected = wide(x[:tokens]) @ dense.T
          self.check(module, device, a, x[:tokens], expected, b_layout='nk', out_layout='nm')

  @pytest.mark.slow
  def test_weight_gradient_of_whole_groups_of_tokens(self):
    for tokens in (4, 8, 12, 60, 64, 68, 124, 128, 132):
      dense, a = _sparse(self.rng, _OUT, tokens)
      x = self.rng.standard_normal((tokens, _IN)).astype(_BF16)
      for module, device in _BACKENDS:
        with self.subTest(tokens=tokens, module=module.__name__):
          self.check(module, device, a, x, (dense @ wide(x)).T, b_layout='kn', out_layout='nm')


if __name__ == '__main__':
  absltest.main()
