"""`check_step`: trees of parameters that it tells apart, and mistakes of whole steps that it finds."""

import contextlib
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24
from tests.standard import project

FST = s24.recipes.transposable_srste('.*', masked_decay=0.0)
STE = s24.recipes.ste('.*')


def params_of(*shape):
  return {'w': jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)}


class PartsTest(absltest.TestCase):

  def test_a_step_that_takes_the_parameters_in_parts_is_checked_by_a_function_of_all(self):
    params = {'base': params_of(8, 8), 'head': params_of(8, 4)}
    tx = s24.sparse_training(optax.sgd(0.1), FST)
    loss = s24.sparsify(lambda p, x: jnp.mean((x @ p['base']['w']) @ p['head']['w']) ** 2, FST)

    def step(base, head, state, x):
      whole = {'base': base, 'head': head}
      variables = s24.sparse_variables(whole, state, FST)
      grads = jax.grad(loss)(whole, variables, jax.random.key(0), x)
      return tx.update(grads, state, whole)

    state, x = tx.init(params), jnp.ones((4, 8))
    with self.assertRaisesRegex(ValueError, r'parameters in parts, a function of all of them, check_step\(lambda'):
      s24.check_step(step, params['base'], params['head'], state, x)
    checked = s24.check_step(lambda p, *rest: step(p['base'], p['head'], *rest), params, state, x)
    self.assertLen(checked.weights, 2)


class TreesTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('a_path_that_ends_another', lambda w: {'a': w, 'z': {'a': w}}, lambda p: (p['a'], p['z']['a']), ['a', 'z/a']),
    ('pairs', lambda w: [(w, w[0]), (w, w[0])], lambda p: [w for w, _ in p], ['0/0', '1/0']),
    ('a_list', lambda w: [w, w], lambda p: p, ['0', '1']),
    ('one_array', lambda w: w, lambda p: [p], ['']),
  )
  def test_weights_are_told_from_each_other(self, make, weights, paths):
    def f(params, x):
      for w in weights(params):
        x = jnp.tanh(x @ w)
      return x.sum()

    params = make(params_of(8, 8)['w'])
    recipe = s24.Recipe('own', tuple(s24.Rule(path, s24.DotPolicy(s24.magnitude())) for path in paths))
    tx, loss = s24.sparse_training(optax.sgd(0.1), recipe), s24.sparsify(f, recipe)

    def step(params, state, x):
      grads = jax.grad(loss)(params, s24.sparse_variables(params, state, recipe), None, x)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    self.assertEqual(sorted(s24.check_step(step, params, tx.init(params), jnp.ones((4, 8))).weights), paths)


class NearTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('a_step_of_sam', lambda p, a, g: g(p), True), ('noise', lambda p, a, g: p + 0.1 * jnp.ones((8, 8)), True),
    ('the_mean_with_an_average', lambda p, a, g: (p + a) / 2, True),
    ('a_teacher_that_is_updated_first', lambda p, a, g: 0.9 * a + 0.1 * p, False),
  )
  def test_a_dense_loss_of_weights_to_which_something_was_added(self, near, is_dense):
    def f(params, x):
      return jnp.mean((x @ params['w']) ** 2)

    tx, loss = s24.sparse_training(optax.sgd(0.1), STE), s24.sparsify(f, STE)

    def step(params, average, state, x, *, plain):
      def sparse(params):
        return loss(params, s24.sparse_variables(params, state, STE), None, x)

      def ahead(w):
        g = jax.lax.stop_gradient(jax.grad(sparse)({'w': jax.lax.stop_gradient(w)})['w'])
        return w + 0.1 * g / jnp.linalg.norm(g)

      def both(params):
        other = {'w': near(params['w'], average['w'], ahead)}
        return sparse(params) + (f(other, x) if plain else sparse(other))

      updates, state = tx.update(jax.grad(both)(params), state, params)
      return optax.apply_updates(params, updates), state

    params = params_of(8, 8)
    for plain in (False, True):
      refused = self.assertRaisesRegex(ValueError, 'w: the step reads it dense at .*, and sparse at')
      with refused if plain and is_dense else contextlib.nullcontext():
        s24.check_step(functools.partial(step, plain=plain), params, params, tx.init(params), jnp.ones((4, 8)))


class WarmUpTest(absltest.TestCase):

  def test_a_dense_warm_up_by_where(self):
    tx, params = s24.sparse_training(optax.sgd(0.1), STE), params_of(8, 8)

    def step(params, state, x, i, *, starts_dense):
      def loss(params):
        w = project(params, state, STE)['w']
        return jnp.mean((x @ (jnp.where(i < 100, params['w'], w) if starts_dense else w)) ** 2)

      updates, state = tx.update(jax.grad(loss)(params), state, params)
      return optax.apply_updates(params, updates), state

    given = params, tx.init(params), jnp.ones((4, 8)), jnp.int32(0)
    s24.check_step(functools.partial(step, starts_dense=False), *given)
    with self.assertRaisesRegex(ValueError, 'w: the step reads it dense at'):
      s24.check_step(functools.partial(step, starts_dense=True), *given)


class LostStateTest(parameterized.TestCase):

  @parameterized.product(recipe=(FST, STE), jit=(False, True))
  def test_a_step_that_returns_the_old_state(self, recipe, jit):
    tx = s24.sparse_training(optax.sgd(0.1), recipe)
    loss = s24.sparsify(lambda p, x: jnp.mean((x @ p['w']) ** 2), recipe)

    def check(returned):
      def step(params, state, x):
        variables = s24.sparse_variables(params, state, recipe)
        updates, new = tx.update(jax.grad(loss)(params, variables, jax.random.key(0), x), state, params)
        logged = jax.tree.leaves(new.projections)[0].mean()
        return optax.apply_updates(params, updates), {'new': new, 'old': state}[returned], logged

      params = params_of(8, 8)
      s24.check_step(jax.jit(step) if jit else step, params, tx.init(params), jnp.ones((4, 8)))

    check('new')
    with self.assertRaisesRegex(ValueError, 'w: the step returns the state of sparse_training as it was given'):
      check('old')


if __name__ == '__main__':
  absltest.main()
