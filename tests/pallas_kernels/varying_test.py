"""What dispatch asks of the mesh: whether arrays are whole, and that a kernel's result varies as its arguments do."""

from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from pallas_kernels import _device, _dispatch
from pallas_kernels._varying import vary_like, varying_axes

PLAIN = PartitionSpec()


def mesh():
  return Mesh(np.array(jax.devices()).reshape(4, 2), ('data', 'model'))


def silent(*args):
  """A back end whose custom call does not say that its result varies."""
  del args
  return jnp.ones((2, 2))


class ArraysAreWholeTest(absltest.TestCase):

  def seen_in(self, **kwargs) -> bool:
    seen = []

    def body(x):
      seen.append(_device.arrays_are_whole())
      return x

    mapped = jax.shard_map(body, mesh=mesh(), in_specs=PLAIN, out_specs=PLAIN, **kwargs)
    jax.eval_shape(mapped, jnp.zeros((8, 8)))
    return seen[0]

  def test_one_device(self):
    with mock.patch.object(jax, 'device_count', lambda: 1):
      self.assertTrue(_device.arrays_are_whole())

  def test_eight_devices(self):
    self.assertEqual(jax.device_count(), 8)
    self.assertFalse(_device.arrays_are_whole())
    seen = []
    jax.eval_shape(jax.jit(lambda x: seen.append(_device.arrays_are_whole()) or x), jnp.zeros(4))
    self.assertEqual(seen, [False])

  def test_inside_shard_map_over_all_axes(self):
    self.assertTrue(self.seen_in())
    self.assertTrue(self.seen_in(axis_names={'data', 'model'}))

  def test_inside_shard_map_over_some_axes(self):
    self.assertFalse(self.seen_in(axis_names={'data'}))

  def test_inside_a_set_mesh(self):
    with jax.set_mesh(jax.make_mesh((8,), ('d',))):
      self.assertFalse(_device.arrays_are_whole())


class VaryLikeTest(parameterized.TestCase):

  def test_outside_shard_map_nothing_changes(self):
    x = jnp.ones(4)
    self.assertIs(vary_like(x, (x, 3, 'nk', None)), x)

  @parameterized.parameters(
    (PLAIN, ()), (PartitionSpec('data'), ('data',)), (PartitionSpec('data', 'model'), ('data', 'model'))
  )
  def test_a_kernels_result_varies_as_its_arguments_do(self, spec, axes):
    """Which is what lets a `custom_vjp` around it return it as a cotangent."""
    seen = []

    def body(x):
      with mock.patch.object(_dispatch, 'load', lambda path: silent):
        out = _dispatch.dispatch('op', {'kernel': 'a:b'}, 'kernel', (), x, {'b': jnp.ones(3)}, 'nk', None)
      seen.append((varying_axes(x), varying_axes(out)))
      return jax.lax.psum(out, tuple(axes)) if axes else out

    mapped = jax.shard_map(body, mesh=mesh(), in_specs=spec, out_specs=PLAIN)
    self.assertEqual(jax.eval_shape(mapped, jnp.zeros((8, 8))).shape, (2, 2))
    self.assertEqual(seen[0], (frozenset(axes), frozenset(axes)))


if __name__ == '__main__':
  absltest.main()
