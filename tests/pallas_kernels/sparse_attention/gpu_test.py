"""Sparse attention on a GPU: `pytest -m gpu`."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _device
from pallas_kernels.sparse_attention.api import Pattern, sparse_attention
from tests.pallas_kernels.sparse_attention.masked_form import masked_form

pytestmark = [
  pytest.mark.gpu, pytest.mark.skipif(_device.current().capability < (8, 0), reason='needs compute capability 8.0')
]


class SparseAttentionTest(parameterized.TestCase):

  @parameterized.parameters(
    ('full', 1, (300, 4, 2, 64), jnp.bfloat16), ('local', 100, (1000, 4, 2, 64), jnp.bfloat16),
    ('local', 16, (200, 2, 2, 128), jnp.float16), ('strided', 128, (1000, 4, 4, 64), jnp.bfloat16),
    ('strided', 3, (300, 2, 1, 32), jnp.float16), ('combined', 128, (1024, 4, 4, 64), jnp.bfloat16),
    ('combined', 10, (999, 2, 1, 128), jnp.bfloat16), ('fixed', 128, (1024, 4, 4, 64), jnp.bfloat16),
    ('fixed', 7, (999, 4, 2, 128), jnp.float16), ('fixed', 33, (500, 2, 2, 16), jnp.float16),
  )  # fmt: skip
  def test_against_the_masked_form(self, kind, window, shape, dtype):
    length, heads, groups, size = shape
    draw = np.random.default_rng(length + size)
    args = [draw.standard_normal((2, length, n, size)).astype(dtype) for n in (heads, groups, groups, heads)]
    pattern = Pattern(kind, window)

    @jax.jit
    def step(q, k, v, dy):
      y, vjp = jax.vjp(lambda *x: sparse_attention(*x, patterns=pattern, implementation='triton'), q, k, v)
      return y, *vjp(dy)

    found = step(*args)
    expected = masked_form(*args, pattern.mask(length), size**-0.5)
    for what, x, right in zip(('y', 'dq', 'dk', 'dv'), found, expected, strict=True):
      error = np.linalg.norm(np.asarray(x, np.float64) - right) / np.linalg.norm(right)
      self.assertLess(error, 6e-3 if dtype == jnp.bfloat16 else 1e-3, what)
    for _ in range(20):
      for again, x in zip(step(*args), found, strict=True):
        np.testing.assert_array_equal(np.asarray(again).view(np.uint16), np.asarray(x).view(np.uint16))


if __name__ == '__main__':
  absltest.main()
