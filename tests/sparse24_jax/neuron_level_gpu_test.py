"""The squared-ReLU block on a GPU: by `implementation=None`, where records expect it to pay, and with clusters."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _device, _tuning
import sparse24_jax as s24
from sparse24_jax.projections import projections_of
from tests.oracles import assert_close

pytestmark = [
  pytest.mark.gpu,
  pytest.mark.skipif(
    _device.current().arch.kernel('vnm_matmul') is None, reason='needs compute capability 9.0'
  ),
]

TOKENS, D, HIDDEN = 8192, 2048, 8192
POLICY = s24.ActivationPolicy(s24.VNM(128, 8), s24.VNM(128, 8), dense_features=0.05)
TWO_OF_FOUR_TOKENS = s24.ActivationPolicy(s24.VNM(128, 8))  # the default
# What XLA and the host name a launch of a V:N:M matmul.
MATMUL = 'mosaic_gpu_v2'


def arguments(lead=()):
  sides, scales = ((TOKENS, D), (D, HIDDEN), (HIDDEN, D), (TOKENS, D)), (1, D**-0.5, HIDDEN**-0.5, 1)
  keys = jax.random.split(jax.random.key(0), 4)
  arrays = [
    (jax.random.normal(key, (*lead, *side), jnp.float32) * scale).astype(jnp.bfloat16)
    for key, side, scale in zip(keys, sides, scales, strict=True)
  ]
  state = {}
  for (name, projection), w in zip(projections_of(POLICY).items(), arrays[1:3], strict=True):
    assert projection is not None
    state[name] = jax.vmap(projection.init)(w) if lead else projection.init(w)
  return *arrays, state


def compiled(policy, args, mapped=False):
  def step(x, w_up, w_down, dz, state):
    z, vjp = jax.vjp(functools.partial(s24.neuron_level_ffn, state=state, policy=policy), x, w_up, w_down)
    return z, *vjp(dz)

  return jax.jit(jax.vmap(step) if mapped else step).lower(*args).compile()


class DefaultTest(parameterized.TestCase):

  @parameterized.parameters((POLICY, (), 1), (POLICY, (2,), 2), (TWO_OF_FOUR_TOKENS, (), 1))
  def test_same_bits_as_named_kernels(self, policy, lead, times):
    args = arguments(lead)
    default = compiled(policy, args)
    self.assertEqual((default.as_text() or '').count(f'custom_call_target="{MATMUL}"'), 6 * times)
    found = default(*args)
    named = compiled(dataclasses.replace(policy, implementation='sparse'), args)(*args)
    jax.tree.map(np.testing.assert_array_equal, named, found)
    if lead:  # experts under vmap: a mapped launch takes one after the other, so the order of sums differs
      for mapped, expected in zip(compiled(policy, args, mapped=True)(*args), found, strict=True):
        self.assertLessEqual(_tuning.relative_error(mapped, expected), 1e-3)


class NamedTest(parameterized.TestCase):

  @parameterized.parameters(
    POLICY, TWO_OF_FOUR_TOKENS,
    s24.ActivationPolicy(s24.VNM(64, 8)), s24.ActivationPolicy(s24.VNM(128, 8), dense_features=0.05),
  )
  def test_as_the_reference(self, policy):
    """Whole numbers, and tokens that are clearly of one cluster: sums are exact, so the patterns are the same."""
    tokens, d, hidden, clusters = 1024, 512, 2048, 4
    rng = np.random.default_rng(0)
    own = rng.permutation(hidden) % clusters
    part = np.arange(d) * clusters // d  # of the width, for each cluster
    x = (rng.random((tokens, d)) < np.where(part == rng.integers(clusters, size=(tokens, 1)), 0.3, 0.02)).astype(int)
    w_up = rng.integers(-4, 5, (d, hidden)) + 6 * (part[:, None] == own)
    w_down, dz = rng.integers(-4, 5, (hidden, d)), rng.integers(-2, 3, (tokens, d))
    args = [jnp.asarray(a, jnp.bfloat16) for a in (x, w_up, w_down, dz)]
    one = jnp.float32(1)
    state = {'up': one, 'down': one, 'neurons': jnp.asarray(own, jnp.int32)}
    kernels, plain = (
      compiled(dataclasses.replace(policy, implementation=name), [*args, state]) for name in ('sparse', 'reference')
    )
    self.assertEqual((kernels.as_text() or '').count(f'custom_call_target="{MATMUL}"'), 6)
    found = kernels(*args, state)
    assert_close(found, plain(*args, state), _tuning.TOLERANCE)
    for _ in range(20):
      jax.tree.map(np.testing.assert_array_equal, kernels(*args, state), found)


if __name__ == '__main__':
  absltest.main()
