"""nnx layers on a mesh of explicit axes, where a layer is told how its result is divided."""

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse24_jax as s24
from tests.draws import gaussian

FST = s24.recipes.transposable_srste('kernel', masked_decay=0.0)
AXES = ('data', 'model')


def init(key, shape, dtype):
  """Flax's own is compiled."""
  del key
  return gaussian(1, shape, dtype) / 4


class NnxMeshTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('column_parallel', jax.P(None, 'model'), jax.P('data', None, None)),
    ('row_parallel', jax.P('model', None), jax.P('data', None, 'model')),
  )
  @pytest.mark.few
  def test_the_sharding_asked_of_a_layer_is_that_of_its_result(self, kernel_spec, x_spec):
    """Plain matmuls need it where the contracted axis is divided; values and gradients are those of one device."""
    x, out = gaussian(0, (4, 4, 16)), jax.P('data', None, None)

    def layer(kernel_init):
      return s24.sparsify(nnx.Linear(16, 32, kernel_init=kernel_init, rngs=nnx.Rngs(0)), FST, rngs=nnx.Rngs(mvue=0))

    @nnx.jit(static_argnums=2)
    def run(layer, x, out):
      def loss(layer, x):
        y = layer(x, out_sharding=out)
        return jnp.sum(jnp.sin(y)), y

      return nnx.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    grads, y = run(layer(init), x, None)
    mesh = jax.make_mesh((2, 2), AXES, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
      on_mesh = layer(nnx.with_partitioning(init, tuple(kernel_spec)))
      found, z = run(on_mesh, jax.device_put(np.asarray(x), jax.NamedSharding(mesh, x_spec)), out)
    self.assertEqual(z.sharding.spec, out)
    self.assertEqual(found[0].kernel.get_value().sharding.spec, kernel_spec)
    np.testing.assert_allclose(z, y, rtol=1e-5, atol=1e-5)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(grads), strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


if __name__ == '__main__':
  absltest.main()
