"""Functions that are one program, and those that are traced once: how often they are traced."""

from absl.testing import absltest
import jax
import jax.numpy as jnp

from pallas_kernels import formats
from pallas_kernels._program import one_program, traced_once


class TracesTest(absltest.TestCase):

  def traces(self, decorate):
    """How often a function is traced in two traces that call it twice each, and gives what it should."""
    shapes = []

    @decorate('n')
    def times(x, n):
      shapes.append(x.shape)
      return x * n

    for shift in (0.0, 1.0):
      doubled = jax.jit(lambda x, shift=shift: times(times(x, 2), 2) + shift)
      self.assertEqual(doubled(jnp.ones(3)).tolist(), [4.0 + shift] * 3)
    self.assertEqual(times(jnp.ones(3), 5).tolist(), [5.0] * 3)
    return shapes

  def test_one_program_is_traced_at_each_call_in_a_trace(self):
    self.assertLen(self.traces(one_program), 5)

  def test_traced_once_is_traced_once_a_shape_and_static_argument(self):
    self.assertLen(self.traces(traced_once), 2)

  def test_gradients_and_batches_of_what_is_traced_once(self):
    square = traced_once()(lambda x: x * x)
    for _ in range(2):  # the second time of the first trace
      self.assertEqual(jax.vmap(jax.grad(square))(jnp.arange(3.0)).tolist(), [0.0, 2.0, 4.0])

  def test_a_trace_that_is_kept_holds_no_array_of_the_first(self):
    """Entries of float8 are placed by a function that JAX keeps with the trace."""
    operand = formats.compress(jnp.ones((4, 8), jnp.float8_e4m3fn), jnp.tile(jnp.arange(8) % 4 < 2, (4, 1)), axis=-1)
    with jax.checking_leaks():
      self.assertEqual(jax.jit(formats.expand)(operand).astype(jnp.float32).sum(), 16)


if __name__ == '__main__':
  absltest.main()
