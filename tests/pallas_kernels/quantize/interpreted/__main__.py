"""The Triton quantiser against the reference, bit for bit, in Triton's interpreter. Run by interpreted_test.py."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantize import reference
from pallas_kernels.quantize._kernels import quantize_kernel
from pallas_kernels.triton_blocks import launch
from tests.pallas_kernels import triton_interpreter


class InterpretedTest(parameterized.TestCase):

  @parameterized.parameters(
    ((2, 20, 132), jnp.bfloat16, jnp.float8_e4m3fn), ((128, 64), jnp.float16, jnp.float8_e5m2),
    ((68, 4), jnp.float32, jnp.float8_e4m3fn),
  )  # fmt: skip
  def test_both_layouts(self, shape, source, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    for value in (0.0, -0.0, np.inf, -np.inf, np.nan):
      x = np.where(rng.random(shape) < 0.02, np.float32(value), x)
    x = jnp.asarray(x.astype(source))
    batches, rows, columns = int(np.prod(shape[:-2])), *shape[-2:]
    # A third of the entries saturates in the first matrix.
    scale = np.linspace(float(jnp.finfo(dtype).max), 1.0, batches, dtype=np.float32).reshape(shape[:-2])
    config = launch.Config()
    found = triton_interpreter.run(
      quantize_kernel, config.grid(batches, rows, columns), [x, scale.reshape(-1)],
      [(shape, dtype), ((*shape[:-2], columns, rows), dtype)],
      dict(PLAIN=True, TRANSPOSED=True, **config.constants(rows, columns)),
    )  # fmt: skip
    expected = jax.jit(functools.partial(reference.quantize, dtype=jnp.dtype(dtype), transpose='both'))(x, scale)
    for f, e in zip(found, expected, strict=True):
      triton_interpreter.assert_equal_float8(f, e)
      self.assertTrue(np.isnan(np.asarray(e).astype(np.float32)).any())


if __name__ == '__main__':
  absltest.main()
