"""What `_compat` promises of interpreted kernels: a race is seen, so that its absence elsewhere says something."""

import functools

from absl.testing import absltest, parameterized
import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import _compat


def _handed_over(x, *, waits):
  """One warpgroup copies x to shared memory, another from there to the result, at once or when told."""

  def kernel(x, out):

    def scope(shared, written):
      @pl.when(lax.axis_index('warpgroup') == 0)
      def _():
        shared[...] = x[...]
        plgpu.barrier_arrive(written)

      @pl.when(lax.axis_index('warpgroup') == 1)
      def _():
        if waits:
          plgpu.barrier_wait(written)
        out[...] = shared[...]

    pl.run_scoped(
      scope, shared=plgpu.SMEM(x.shape, x.dtype), written=plgpu.Barrier(), collective_axes='warpgroup'
    )

  return plgpu.kernel(
    kernel, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), num_threads=2, thread_name='warpgroup',
    interpret=_compat.interpret_params(),
  )(x)  # fmt: skip


class RacesTest(parameterized.TestCase):

  @parameterized.parameters((False, True), (True, False))
  def test_a_read_that_does_not_wait_for_the_write_is_a_race(self, waits, races):
    x = jnp.arange(128, dtype=jnp.float32)
    found = jax.block_until_ready(jax.jit(functools.partial(_handed_over, waits=waits))(x))
    self.assertEqual(_compat.races_found(), races)
    if waits:
      self.assertEqual(found.tolist(), x.tolist())


if __name__ == '__main__':
  absltest.main()
