"""Whole runs: mistakes that must be errors which name the weight, and what must be right, against steps by hand."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24
from tests.standard import project

FST = s24.recipes.transposable_srste('.*', masked_decay=0.0)
STE = s24.recipes.ste('.*')
MVUE = s24.Recipe('own', (s24.Rule('.*', s24.DotPolicy(s24.magnitude(), weight_grad='mvue')),))


def params_of(*shape):
  return {'w': jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)}


def on_shards(p, x):
  f = jax.shard_map(lambda p, x: x @ p['w'], in_specs=(jax.P(), jax.P('d')), out_specs=jax.P('d'))
  return f(p, x)


class AnotherRecipeTest(parameterized.TestCase):

  def test_masks_of_one_shape_by_another_search(self):
    params = params_of(8, 8)
    tx, other = (s24.sparse_training(optax.adam(0.1), recipe) for recipe in (FST, STE))
    state = tx.init(params)
    calls = (
      lambda: jax.jit(other.update)(params, state, params), lambda: project(params, state, STE),
      lambda: s24.sparse_variables(params, state, STE),
    )  # fmt: skip
    for call in calls:
      with self.assertRaisesRegex(ValueError, "w: its state was made by projection 'transposable exact', .*'magnitude"):
        call()
    # What the message says to do.
    going_on = s24.carry_over(other.init(params), state)
    other.update(params, going_on, params)
    project(params, going_on, STE)

  def test_a_scale_in_place_of_a_mask(self):
    params, other = params_of(8, 8), s24.sparse_training(optax.sgd(0.1), s24.recipes.s_ste('.*'))
    state = s24.sparse_training(optax.sgd(0.1), FST).init(params)
    with self.assertRaisesRegex(ValueError, "'transposable exact', and the recipe has 'soft_threshold'"):
      other.update(params, state, params)

  def test_what_may_change_does(self):
    """Patterns of the same weights, schedules of moving links."""
    params = params_of(8, 8)
    state = s24.sparse_training(optax.sgd(0.1), STE).init(params)
    project(params, state, s24.recipes.ste('w'))
    recipes = [s24.recipes.rigl('.*', density=0.5, total_steps=steps) for steps in (1000, 2000)]
    project(params, s24.sparse_training(optax.sgd(0.1), recipes[0]).init(params), recipes[1])

  def test_patterns_are_no_part_of_the_tree_structure_and_kinds_are(self):
    params = params_of(8, 8)
    state, same, other = (
      s24.sparse_training(optax.sgd(0.1), recipe).init(params) for recipe in (STE, s24.recipes.ste('w$|none'), FST)
    )
    equal = jax.tree.map(lambda a, b: bool((a == b).all()), state, same)
    self.assertEqual(set(jax.tree.leaves(equal)), {True})
    self.assertEqual(hash(jax.tree.structure(state)), hash(jax.tree.structure(same)))
    # Or a program that was compiled for the masks of one search would take those of another, unseen.
    program = jax.jit(lambda params, state: project(params, state, STE))
    program.trace(params, same)
    with self.assertRaisesRegex(ValueError, "w: its state was made by projection 'transposable exact'"):
      program.trace(params, other)


class TokensInFoursTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('remat', jax.checkpoint(lambda p, x: x @ p['w']), r'^w: '),
    ('scan', lambda p, x: jax.lax.scan(lambda c, _: (c @ p['w'], None), x, None, length=2)[0], r'^w: '),
    ('shard', on_shards, r"^w on one shard of a shard_map over 'd': "),
  )  # fmt: skip
  def test_the_error_names_the_weight_and_the_shard(self, f, start):
    params, x = params_of(8, 8), jnp.ones((12, 8) if 'shard' in start else (6, 8))
    sparse = s24.sparsify(lambda p, x: f(p, x).sum(), MVUE)
    variables = s24.sparse_variables(params, None, MVUE)
    mesh = jax.make_mesh((2,), ('d',), axis_types=(jax.sharding.AxisType.Auto,))
    found = start + r"weight_grad='mvue' groups tokens in fours: .* 6 tokens\. Make"
    with jax.set_mesh(mesh), self.assertRaisesRegex(ValueError, found):
      jax.eval_shape(jax.grad(sparse), params, variables, jax.random.key(0), x)
    with jax.set_mesh(mesh):
      (weight,) = s24.check(MVUE, f, params, x).weights
    self.assertRegex(weight.problem, found)


class StepsTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_steps_in_one_scan_and_a_frozen_weight(self, donated):
    """Against `project` and the optimizer by hand, a step at a time."""
    x = np.float32(np.random.default_rng(1).normal(size=(8, 8)))
    params = {'a': params_of(8, 8)['w'], 'b': params_of(8, 8)['w'].T}
    frozen = optax.multi_transform({'a': optax.adam(0.1), 'b': optax.set_to_zero()}, {'a': 'a', 'b': 'b'})
    tx = s24.sparse_training(frozen, STE)
    f = lambda p, x: jnp.tanh(jnp.tanh(x @ p['a']) @ p['b']).sum()  # noqa: E731
    sparse = s24.sparsify(f, STE)

    def step(carry, _):
      params, state = carry
      grads = jax.grad(sparse)(params, s24.sparse_variables(params, state, STE), None, x)
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    by_hand, plain = params, optax.adam(0.1)
    moments = plain.init(params['a'])
    for _ in range(3):
      grads = jax.grad(f)(jax.tree.map(lambda w: jnp.where(s24.magnitude_mask(w), w, 0), by_hand), x)
      update, moments = plain.update(grads['a'], moments)
      by_hand = by_hand | {'a': by_hand['a'] + update}
    donate = (0, 1) if donated else ()
    steps = jax.jit(lambda *carry: jax.lax.scan(step, carry, None, length=3)[0], donate_argnums=donate)
    given = jax.tree.map(jnp.copy, params)
    found, _ = steps(given, tx.init(params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, by_hand)


if __name__ == '__main__':
  absltest.main()
