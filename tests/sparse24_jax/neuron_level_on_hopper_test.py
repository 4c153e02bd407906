"""The squared-ReLU block with V:N:M activations, lowered for an H100 without one: where kernels pay it is made of them.

Runs where the CUDA plug-in wheels are, in the kernels' environment.
"""

from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels.vnm import api
import sparse24_jax as s24
from sparse24_jax import _activation_gain as gain
from tests.sparse24_jax import on_hopper_test as hopper

TOKENS, D, HIDDEN = 256, 128, 512
POLICY = s24.ActivationPolicy(v=128, m=8)


def step(x, w_up, w_down, dz, state):
  z, vjp = jax.vjp(lambda *args: s24.neuron_level_ffn(*args, state, policy=POLICY), x, w_up, w_down)
  return z, vjp(dz)


@hopper.needs_plugins
class KernelsTest(parameterized.TestCase):

  # Under vmap a launch is in a loop; experts have one of their own.
  @parameterized.parameters(('none', 1), ('vmap', 1), ('experts', 2))
  def test_six_products_and_ten_passes(self, kind, times):
    lead = () if kind == 'none' else (2,)
    scale = jax.ShapeDtypeStruct(lead, jnp.float32)
    sides = ((TOKENS, D), (D, HIDDEN), (HIDDEN, D), (TOKENS, D))
    args = [*(hopper.struct(*lead, *side) for side in sides), {'up': scale, 'down': scale}]
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=hopper.sharding()), args)
    with (
      hopper.hopper(),
      mock.patch.object(gain, 'expected', lambda *_: gain.Expected(1.0, 2.0)),
      mock.patch.object(api, '_candidates', lambda *_: ('mosaic_gpu', 'dense')),
    ):
      text = jax.jit(jax.vmap(step) if kind == 'vmap' else step).lower(*args).as_text()
    for target, count in ((hopper.SPARSE, 6), (hopper.TRITON, 10)):
      self.assertEqual(text.count(f'custom_call @{target}('), times * count, target)


if __name__ == '__main__':
  absltest.main()
