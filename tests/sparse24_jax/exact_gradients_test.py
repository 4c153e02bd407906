"""Recipes of which some weight gradients are not sampled: which ones, and with whose optimizer state."""

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.rules import keep_dense, match_rules
from tests.oracles import assert_close

RNG = np.random.default_rng(0)
UP, DOWN, HEAD, X = (RNG.standard_normal(s).astype(np.float32) for s in ((8, 32), (32, 8), (8, 8), (16, 8)))
PARAMS = jax.tree.map(jnp.asarray, {'mlp': {'up': UP, 'down': DOWN}, 'head': HEAD})
KEY = jax.random.key(3)
S_STE = s24.recipes.s_ste('mlp/.*')
FST = s24.recipes.transposable_srste('mlp/.*', masked_decay=1e-3)


def loss_of(params, x):
  return jnp.mean((jax.nn.gelu(x @ params['mlp']['up']) @ params['mlp']['down'] @ params['head']) ** 2)


def gradients(recipe, state, params=PARAMS):
  """Of a bound recipe, in its first phase."""
  phase = recipe.phases[0].name
  variables = s24.sparse_variables(params, state, recipe, phase=phase)
  return jax.jit(jax.grad(s24.sparsify(loss_of, recipe, phase=phase)))(params, variables, KEY, X)


def state_of(recipe):
  return jax.jit(s24.sparse_training(optax.adam(1e-3), recipe, phase=recipe.phases[0].name).init)(PARAMS)


def kinds(rules):
  return {path: rule.policy.weight_grad for path, rule in rules.items()}


class WhichTest(parameterized.TestCase):

  def test_of_the_weights_that_are_named_and_sparse(self):
    rules = match_rules(PARAMS, S_STE.with_exact_gradients('.*down'))
    self.assertEqual(kinds(rules), {'mlp/up': 'mvue', 'mlp/down': 'dense'})
    rules = match_rules(PARAMS, S_STE.with_exact_gradients('.*'))  # which makes no other weight sparse
    self.assertEqual(kinds(rules), {'mlp/up': 'dense', 'mlp/down': 'dense'})
    self.assertEqual(kinds(match_rules(PARAMS, S_STE.with_exact_gradients())), kinds(rules))
    twice = S_STE.with_exact_gradients('mlp/up').with_exact_gradients('mlp/down')
    self.assertEqual(match_rules(PARAMS, twice), rules)
    # Where nothing is sampled all is as it was.
    self.assertEqual(s24.recipes.ste('.*').with_exact_gradients('.*down'), s24.recipes.ste('.*'))

  def test_a_pattern_that_takes_none_is_an_error(self):
    for pattern in ('.*/donw', 'head', 'down'):
      recipe = S_STE.with_exact_gradients('mlp/up', pattern)
      with self.assertRaisesRegex(ValueError, rf"gradients\('{pattern}'\) of recipe 's_ste' is of no weight"):
        state_of(recipe)
    with self.assertRaisesRegex(ValueError, r'mlp/down, mlp/up; did you mean \'\.\*/down\'\?'):
      s24.bind(S_STE.with_exact_gradients('down'), loss_of, PARAMS, X)
    with self.assertRaisesRegex(ValueError, r"path of exact gradients '\[up' is not a regular expression"):
      S_STE.with_exact_gradients('[up')

  def test_weights_that_are_dense_may_be_named(self):
    """As for a GPU on which they do not pay."""
    for recipe in (
      S_STE.with_dense('mlp/down').with_exact_gradients('.*down'),
      S_STE.with_exact_gradients('.*down').with_dense('mlp/down'),
      keep_dense(PARAMS, S_STE.with_exact_gradients('.*down'), ['mlp/down']),
      s24.bind(S_STE.with_exact_gradients('.*down'), loss_of, PARAMS, X).with_dense('mlp/down'),
    ):
      rules = match_rules(PARAMS, recipe)
      self.assertEqual([rules[path].policy.weight_grad for path in ('mlp/up', 'mlp/down')], ['mvue', 'dense'])
      self.assertTrue(rules['mlp/down'].is_plain)
    with self.assertRaisesRegex(ValueError, "exact of rule 'up' must be a tuple of regular expressions, found 'up'"):
      s24.Rule('up', s24.DotPolicy(), exact='up')

  def test_is_told(self):
    told = [rule['exact'] for rule in S_STE.with_exact_gradients('.*down').describe()['rules']]
    self.assertEqual(told, [['.*down']])
    self.assertNotIn('exact', S_STE.describe()['rules'][0])
    self.assertEqual(S_STE.with_exact_gradients(), s24.recipes.s_ste('mlp/.*', weight_grad='dense'))
    self.assertEqual(S_STE.with_exact_gradients('a', 'a').rules[0].exact, ('a',))

  def test_a_dense_phase_samples_nothing(self):
    fp8 = s24.recipes.transposable_srste('mlp/.*', masked_decay=1e-3, fp8=True)
    self.assertEqual(fp8.with_exact_gradients('.*down').in_dense_phase(), fp8.in_dense_phase())


class GradientTest(parameterized.TestCase):

  @parameterized.parameters('S_STE', 'FST')
  @pytest.mark.few
  def test_one_is_exact_and_the_other_as_before(self, name):
    recipe = {'S_STE': S_STE, 'FST': FST}[name]
    bound = s24.bind(recipe, loss_of, PARAMS, X)
    state = state_of(bound)  # serves all of them
    sampled = gradients(bound, state)
    exact = gradients(s24.bind(recipe.with_exact_gradients(), loss_of, PARAMS, X), state)
    some = gradients(s24.bind(recipe.with_exact_gradients('.*down'), loss_of, PARAMS, X), state)
    assert_close(some['mlp']['down'], exact['mlp']['down'], 1e-6)
    assert_close(some['mlp']['up'], sampled['mlp']['up'], 0.0)
    for weight in ('up', 'down'):
      self.assertGreater(np.abs(np.subtract(sampled['mlp'][weight], exact['mlp'][weight])).max(), 1e-3)
    # Exact gradients are those of the projected weights, straight through.
    projected = s24.project(PARAMS, state, bound, phase='sparse')
    assert_close(exact, jax.jit(jax.grad(loss_of))(projected, X), 1e-5)
    # Variables of one serve the other.
    phase = bound.phases[0].name
    variables = s24.sparse_variables(PARAMS, state, bound, phase=phase)
    exact_too = s24.bind(recipe.with_exact_gradients('.*down'), loss_of, PARAMS, X)
    self.assertLen(exact_too.blocks, 1)
    found = jax.jit(jax.grad(s24.sparsify(loss_of, exact_too, phase=phase)))(PARAMS, variables, KEY, X)
    assert_close(found, some, 1e-5)
    with self.assertRaisesRegex(ValueError, r"bind\(recipe_before_bind.with_exact_gradients\('.\*down'\), f, p"):
      bound.with_exact_gradients('.*down')

  def test_a_block_whose_first_gradient_alone_is_exact_is_none(self):
    bound = s24.bind(S_STE.with_exact_gradients('mlp/up'), loss_of, PARAMS, X)
    self.assertEqual({use.apart for w in bound.weights for use in w.uses}, {'its weights have different policies'})

  def test_the_optimizer_goes_on_with_exact_gradients(self):
    first, last = (s24.bind(r, loss_of, PARAMS, X) for r in (S_STE, S_STE.with_exact_gradients()))
    params, state = PARAMS, state_of(first)
    for recipe in (first, last):
      tx = s24.sparse_training(optax.adam(1e-3), recipe)
      updates, state = jax.jit(tx.update)(gradients(recipe, state, params), state, params)
      params = optax.apply_updates(params, updates)
    self.assertEqual(int(state.count), 2)
    s24.verify_weights(s24.project(params, state, last), last)

  def test_linen_and_nnx(self):
    class Mlp(nn.Module):

      @nn.compact
      def __call__(self, x):
        return nn.Dense(8, use_bias=False, name='down')(nn.gelu(nn.Dense(32, use_bias=False, name='up')(x)))

    params = {name: {'kernel': PARAMS['mlp'][name]} for name in ('up', 'down')}
    found = {}
    sampled = s24.recipes.s_ste('.*')
    some = sampled.with_exact_gradients('down/.*')
    for name, recipe in (('sampled', sampled), ('some', some)):
      model, state = s24.sparsify(Mlp(), recipe), s24.sparse_training(optax.sgd(0.1), recipe).init(params)
      variables = {'sparse24': s24.sparse_variables(params, state, recipe)}

      def loss(params, model=model, variables=variables):
        return jnp.sum(model.apply({'params': params, **variables}, X, rngs={'mvue': KEY}) ** 2)

      found[name] = jax.jit(jax.grad(loss))(params)
    assert_close(found['some']['up'], found['sampled']['up'], 0.0)
    down, sampled_down = (np.asarray(found[name]['down']['kernel']) for name in ('some', 'sampled'))
    self.assertGreater(np.abs(down - sampled_down).max(), 1e-3)

    class Net(nnx.Module):

      def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

      def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))

    made = s24.sparsify(Net(nnx.Rngs(0)), some, rngs=nnx.Rngs(mvue=1))
    gradient = nnx.jit(nnx.grad(lambda m: jnp.sum(m(X) ** 2)))
    grads = [gradient(made) for _ in range(2)]  # another sample each time
    same = [bool(np.array_equal(*(getattr(g, name).kernel[...] for g in grads))) for name in ('up', 'down')]
    self.assertEqual(same, [False, True])


if __name__ == '__main__':
  absltest.main()
