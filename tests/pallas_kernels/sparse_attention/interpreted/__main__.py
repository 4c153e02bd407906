"""The Triton attention kernels against the masked form, in Triton's interpreter. Run by interpreted_test.py."""

from unittest import mock

from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _triton
from pallas_kernels.sparse_attention import triton
from pallas_kernels.sparse_attention.patterns import Pattern
from tests.pallas_kernels import triton_interpreter
from tests.pallas_kernels.sparse_attention.masked_form import masked_form

# Weights are rounded before their matmul and results after it; partial results once more.
TOLERANCE = {jnp.bfloat16: 8e-3, jnp.float16: 1e-3}


def call(kernel, *args, out_shape, grid, num_warps, **constants):
  """`_triton.call` by the interpreter."""
  del num_warps
  outputs = [(x.shape, x.dtype) for x in out_shape]

  def run(*arrays):
    return tuple(triton_interpreter.run(kernel, grid, arrays, outputs, constants))

  return jax.pure_callback(run, tuple(out_shape), *args)


def numbers_from_tensors() -> None:
  """Bounds of loops are arrays of one entry to the interpreter, which NumPy from 2.5 on does not take for numbers."""
  from triton.runtime import interpreter

  patch = interpreter._patch_lang_tensor

  def with_index(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, '__index__', lambda self: int(self.handle.data.item()))

  interpreter._patch_lang_tensor = with_index


def matmuls_of_bfloat16() -> None:
  """The interpreter takes bfloat16 for its bits, and multiplies these as whole numbers."""
  from triton import language as tl
  from triton.runtime import interpreter

  def dot(self, a, b, d, *_):
    a, b = (x.data.view(jnp.bfloat16).astype(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
    return interpreter.TensorHandle(np.matmul(a, b, dtype=d.data.dtype) + d.data, d.dtype.scalar)

  interpreter.InterpreterBuilder.create_dot = dot


def small_tiles(kernel, count, size):
  """So that short sequences have several."""
  del count, size
  return triton.Tiles(16, 16 if kernel == 'last_keys' else 32, 1, 2)


def setUpModule():
  numbers_from_tensors()
  matmuls_of_bfloat16()


class InterpretedTest(parameterized.TestCase):
  def check(self, pattern, shape, groups, dtype, tiles=small_tiles):
    draw = np.random.default_rng(shape[1])
    shapes = [(*shape[:2], n, shape[3]) for n in (shape[2], groups, groups, shape[2])]
    q, k, v, dy = (draw.standard_normal(s).astype(dtype) for s in shapes)
    share = mock.patch.object(triton, 'TILES_A_SHARE', 1 if tiles is small_tiles else 16)
    with mock.patch.object(_triton, 'call', call), mock.patch.object(triton, 'tiles', tiles), share:
      y, vjp = jax.vjp(lambda *x: triton.attend(pattern, *x, scale=0.2), *map(jnp.asarray, (q, k, v)))
      found = y, *vjp(jnp.asarray(dy))
    expected = masked_form(q, k, v, dy, pattern.mask(shape[1]), 0.2)
    for what, x, right in zip(('y', 'dq', 'dk', 'dv'), found, expected, strict=True):
      self.assertEqual(x.dtype, dtype)
      difference = np.linalg.norm(np.asarray(x, np.float64) - right)
      # With one key a query's gradient is exactly nothing; what is left is rounding.
      size = max(np.linalg.norm(right), 0.05 * np.sqrt(right.size))
      self.assertLess(difference / size, TOLERANCE[dtype], f'{what} of {pattern} on {shape}')

  @parameterized.parameters(
    ('full', 1), ('local', 20), ('strided', 1), ('strided', 7), ('combined', 1), ('combined', 7), ('fixed', 5)
  )  # fmt: skip
  def test_forward_and_gradients(self, kind, window):
    self.check(Pattern(kind, window), (1, 50, 2, 16), 1, jnp.float16)

  @parameterized.parameters('combined', 'fixed')
  def test_tiles_of_gpus(self, kind):
    self.check(Pattern(kind, 24), (2, 70, 1, 32), 1, jnp.bfloat16, triton.tiles)

  @settings(max_examples=4, deadline=None, derandomize=True, database=None)
  @given(
    st.sampled_from(['local', 'combined', 'fixed', 'strided']), st.integers(1, 40), st.integers(1, 30),
    st.sampled_from([(1, 1), (3, 3), (4, 2)]), st.sampled_from([jnp.bfloat16, jnp.float16]),
  )  # fmt: skip
  def test_any_length_and_window(self, kind, length, window, heads, dtype):
    self.check(Pattern(kind, window), (1, length, heads[0], 16), heads[1], dtype)


if __name__ == '__main__':
  absltest.main()
