"""Masks from before a step, which flip rates are taken from where no state holds them: when and how they are made."""

from absl.testing import absltest, parameterized
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

import sparse24_jax as s24


def normal(seed):
  keys = jax.random.split(jax.random.key(seed))
  return {'up': jax.random.normal(keys[0], (8, 16)), 'down': jax.random.normal(keys[1], (16, 8))}


def barriers(tx, params):
  """How many arrays each optimization barrier of a step takes."""
  jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
  return [len(eqn.invars) for eqn in jaxpr.eqns if eqn.primitive.name == 'optimization_barrier']


class ComparedMasksTest(parameterized.TestCase):

  def test_outside_of_jit_nothing_is_searched_between_refreshes(self):
    seen = []

    def mask(w, scale):
      del scale
      found = s24.soft_threshold(w) != 0
      seen.append(isinstance(found, jax.core.Tracer))
      return found

    projection = s24.soft_threshold_projection()._replace(mask=mask)
    recipe = s24.Recipe('test', (s24.Rule('.*', s24.DotPolicy(projection)),), refresh_every=3)
    tx, params = s24.sparse_training(optax.sgd(0.3), recipe), normal(0)
    tx.update(normal(1), tx.init(params), params)
    self.assertNotEmpty(seen)
    self.assertTrue(all(seen))  # traced for the loop, and never run

  @parameterized.parameters(1, 2)
  def test_the_inner_optimizer_waits_for_masks_and_for_little_else(self, refresh_every):
    """Adam's count and four moments, with samples of two weights and what is known of the weights, then two masks."""
    held = s24.Recipe('held', (s24.Rule('.*', s24.DotPolicy(s24.magnitude())),), refresh_every=refresh_every)
    made = s24.recipes.s_ste('.*', refresh_every=refresh_every)
    found = [barriers(s24.sparse_training(optax.adam(0.1), recipe), normal(0)) for recipe in (held, made)]
    self.assertEqual(found, [[9, 2], [9, 7, 2]])

  @parameterized.product(axis_type=(AxisType.Auto, AxisType.Explicit), jit=(False, True))
  @pytest.mark.slow
  def test_rates_do_not_depend_on_sharding(self, axis_type, jit):
    """Holds for masks that the state keeps and for others; a loop begins with masks divided as its last."""
    rules = (
      s24.Rule('up', s24.DotPolicy(s24.magnitude())), s24.Rule('down', s24.DotPolicy(s24.soft_threshold_projection()))
    )
    tx = s24.sparse_training(optax.sgd(0.3), s24.Recipe('both', rules, refresh_every=2))

    def rates(place):
      params = place(normal(0))
      state, update = tx.init(params), jax.jit(tx.update) if jit else tx.update
      for seed in (1, 2):
        updates, state = update(place(normal(seed)), state, params)
        params = optax.apply_updates(params, updates)
      return {path: float(rate) for path, rate in s24.get_flip_rate(state).per_weight.items()}

    expected = rates(lambda tree: tree)
    self.assertGreater(min(expected.values()), 0)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('a', 'b'), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
      found = rates(lambda tree: jax.device_put(tree, NamedSharding(mesh, PartitionSpec('a', 'b'))))
    self.assertEqual(found, expected)

  @parameterized.named_parameters(
    ('held', s24.recipes.transposable_srste('.*', masked_decay=0.01, dense_fraction=0.0, refresh_every=2)),
    ('made', s24.recipes.s_ste('.*', refresh_every=2)),
    ('links', s24.recipes.rigl('.*', density=0.5, total_steps=9, refresh_every=2)),
  )
  def test_stacked_weights_are_divided_along_their_stack(self, recipe):
    """A loop over steps carries rates as they come, by the types of a mesh of explicit axes, and so does each step."""
    tx = s24.sparse_training(optax.sgd(0.3), recipe)

    def trained(experts, gradients):
      def step(carry, gradient):
        updates, state = tx.update(gradient, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

      (experts, state), _ = jax.lax.scan(step, (experts, tx.init(experts)), gradients)
      return experts, state.flip_rate.per_weight

    given = {'experts': jax.random.normal(jax.random.key(0), (4, 8, 16))}
    gradients = {'experts': jax.random.normal(jax.random.key(1), (4, 4, 8, 16))}
    expected = jax.jit(trained)(given, gradients)
    self.assertGreater(float(expected[1]['experts'].min()), 0)
    mesh = Mesh(np.array(jax.devices()[:2]), ('e',), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
      divided = (jax.device_put(given, jax.P('e')), jax.device_put(gradients, jax.P(None, 'e')))
      found = jax.jit(trained)(*divided)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


if __name__ == '__main__':
  absltest.main()
