"""Which search finds the mask: the packer's on a GPU that holds the whole array, XLA's elsewhere."""

import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _device
from pallas_kernels.pack import api, reference
from pallas_kernels.two_of_four import transposable
from tests import targets

search = jax.jit(transposable.transposable_mask)


def weight(*shape: int, dtype=jnp.float32) -> jax.Array:
  return jnp.asarray(np.random.default_rng(0).integers(-3, 4, shape), dtype)  # many ties


class ApiTest(parameterized.TestCase):

  @parameterized.parameters(((16, 24), jnp.float32), ((2, 8, 12), jnp.bfloat16))
  def test_is_the_search_of_the_reference_here(self, shape, dtype):
    w = weight(*shape, dtype=dtype)
    with mock.patch.object(api, 'transposable_pack', side_effect=AssertionError):
      np.testing.assert_array_equal(jax.jit(api.transposable_mask)(w), search(w))

  @parameterized.parameters(((16, 24), jnp.float32), ((2, 8, 12), jnp.bfloat16), ((8, 8), jnp.float16))
  def test_takes_the_packer_on_a_gpu(self, shape, dtype):
    w = weight(*shape, dtype=dtype)
    given = []

    def transposable_pack(w):
      given.append(w.shape)
      dtype = jnp.dtype(jnp.bfloat16 if w.dtype == jnp.float32 else w.dtype)
      return reference.transposable_pack(w, dtype=dtype)

    with (
      mock.patch.object(_device, 'arrays_are_whole', lambda: True),
      mock.patch.object(api, 'transposable_pack', transposable_pack),
    ):
      with mock.patch.object(_device, 'current', lambda: targets.target_device('sm_80')):
        jax.eval_shape(functools.partial(api.transposable_mask), w)
      with mock.patch.object(_device, 'current', lambda: targets.target_device('sm_90a')):
        # Under a name of its own: jit keeps what it traced for another GPU.
        found = jax.jit(functools.partial(api.transposable_mask))(w)
    self.assertEqual(given, [shape] * 2)
    self.assertEqual(found.dtype, jnp.bool_)
    np.testing.assert_array_equal(found, search(w))

  def test_inside_a_derivative(self):
    w = weight(8, 8)

    def transposable_pack(w):
      codes = jax.ShapeDtypeStruct((2, 2), jnp.uint16)
      # A call without a rule for derivatives, as the kernel's is.
      codes = jax.pure_callback(lambda w: np.asarray(reference.mask_codes(search(w))), codes, w)
      return mock.Mock(codes=codes)

    with (
      mock.patch.object(_device, 'current', lambda: targets.target_device('sm_90a')),
      mock.patch.object(_device, 'arrays_are_whole', lambda: True),
      mock.patch.object(api, 'transposable_pack', transposable_pack),
    ):
      loss = jax.jit(lambda w: jnp.where(api.transposable_mask(w), w, 0).sum())
      np.testing.assert_array_equal(jax.grad(loss)(w), search(w))

  def test_leaves_to_xla_a_dtype_that_it_does_not_pack(self):
    with (
      mock.patch.object(_device, 'current', lambda: targets.target_device('sm_90a')),
      mock.patch.object(api, 'transposable_pack', side_effect=AssertionError),
      mock.patch.object(transposable, 'transposable_mask', return_value='xla') as xla,
    ):
      self.assertEqual(api.transposable_mask(jnp.zeros((8, 8), jnp.float8_e5m2)), 'xla')
    xla.assert_called_once()

  @parameterized.parameters(((8,),), ((6, 8),), ((8, 6),))
  def test_refuses_the_same_shapes_on_either(self, shape):
    with self.assertRaises(ValueError):
      jax.eval_shape(api.transposable_mask, jnp.zeros(shape))
    with (
      mock.patch.object(_device, 'current', lambda: targets.target_device('sm_90a')),
      mock.patch.object(_device, 'arrays_are_whole', lambda: True),
      self.assertRaises(ValueError),
    ):
      jax.eval_shape(api.transposable_mask, jnp.zeros(shape))


if __name__ == '__main__':
  absltest.main()
