"""A precision as a value: the op computes by it, the plan prices by it, and neither knows it by name."""

import dataclasses
from typing import get_args
from unittest import mock

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import costs
import sparse24_jax as s24
from sparse24_jax.availability import target
from sparse24_jax.plan import plan_layer, PRECISIONS
from sparse24_jax.policy import PrecisionName
from sparse24_jax.precision import Precision, Rounded

H100 = 'nvidia_h100_80gb_hbm3'
POLICY = s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue', implementation='dense')


@dataclasses.dataclass(frozen=True)
class Halves(Precision):
  """Takes half of the activations, as if that were a way to round them, and refuses exact gradients."""

  def unfit(self, policy):
    return None if policy.weight_grad == 'mvue' else 'halves are sampled'

  def rounded(self, x, *, keep, amax=None):
    return Rounded(x / 2, x / 2)

  def rounding(self, entries, wide, *, scaled=False):
    return (('halve', 2 * wide * entries),)


class PrecisionTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enter_context(mock.patch.dict(PRECISIONS, default=Halves()))

  def test_policies_name_them(self):
    self.assertCountEqual(get_args(PrecisionName), PRECISIONS)

  def test_the_op_runs_it(self):
    x, w = (jnp.asarray(np.random.default_rng(i).normal(size=(16, 16)), jnp.bfloat16) for i in range(2))
    state, key = POLICY.projection.init(w), jax.random.key(0)

    def step():
      @jax.jit
      def run(x, w):
        z, vjp = jax.vjp(lambda x, w: s24.dot(x, w, state, policy=POLICY, key=key), x, w)
        return z, *vjp(x)

      return run(x, w)

    halves = step()
    with mock.patch.dict(PRECISIONS, default=Precision()):
      z, dx, dw = step()
    for found, expected in zip(halves, (z / 2, dx, dw / 2), strict=True):
      np.testing.assert_array_equal(found, expected)

  def test_the_plan_prices_it(self):
    params = {'up': {'kernel': jax.ShapeDtypeStruct((4096, 16384), 'bfloat16')}}
    recipe, plain = s24.recipes.s_ste('.*'), costs.expected_ms
    with mock.patch.object(costs, 'expected_ms', lambda at, op, size: size if op == 'halve' else plain(at, op, size)):
      (layer,) = s24.where_it_pays(params, recipe, tokens=16384, device=H100)
      block = s24.block_gain(4096, 16384, recipe, tokens=16384, device=H100)
    self.assertEqual([role.packing_ms for role in layer.roles][:2], [2 * 2 * 16384 * 4096, 0.0])
    found = [part.ms for part in block.chosen if part.name in ('x of up rounded', 'x of down rounded')]
    self.assertEqual(found, [2 * 2 * 16384 * 4096, 2 * 2 * 16384 * 16384])

  def test_it_says_what_it_does_not_serve(self):
    exact = dataclasses.replace(POLICY, weight_grad='dense')
    with self.assertRaisesRegex(ValueError, 'cannot serve this layer: halves are sampled'):
      plan_layer(exact, 32, 64, 64, jnp.bfloat16)
    self.assertEqual(plan_layer(dataclasses.replace(exact, implementation=None), 32, 64, 64, jnp.bfloat16).plain,
                     'halves are sampled')  # fmt: skip

  def test_its_passes_take_the_back_ends_of_the_plan(self):
    plan = plan_layer(POLICY, 32, 64, 64, jnp.bfloat16)
    self.assertEqual(plan.precision, Halves(pass_backends=('reference',)))  # what a CPU has
    for_h100 = plan_layer(POLICY, 32, 64, 64, jnp.bfloat16, on=target(H100))
    self.assertEqual(for_h100.precision, Halves(pass_backends=('triton', 'reference')))


if __name__ == '__main__':
  absltest.main()
