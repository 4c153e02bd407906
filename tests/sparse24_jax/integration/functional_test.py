"""`project`: any pytree, the numbers of the recipe, straight-through gradients."""

import dataclasses
import logging
import re
from typing import NamedTuple

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels import _dispatch
import sparse24_jax as s24
from sparse24_jax.optim import first_states, projections_of
from tests.draws import gaussian
from tests.standard import project, standard

PHASES = 'sparse', 'dense'


class Layer(NamedTuple):
  kernel: jax.Array
  bias: jax.Array


def layer(seed, shape=(8, 4)):
  kernel, bias = np.random.default_rng(seed).standard_normal(shape, np.float32), np.ones(shape[-1], np.float32)
  return Layer(jnp.asarray(kernel), jnp.asarray(bias))


TREE = {'blocks': [layer(0), layer(1)], 'stack': (layer(2, (3, 8, 4)),), 'head': layer(3)}
RULE = r'blocks/.*|stack/.*'
RECIPES = {
  'ste': s24.recipes.ste(RULE),
  'fst': s24.recipes.transposable_srste(RULE, masked_decay=0.1),
  's_ste': s24.recipes.s_ste(RULE),
}


def opt_state(recipe, params=TREE):
  return optax.chain(optax.identity(), s24.sparse_training(optax.sgd(0.1), recipe)).init(params)


def by_hand(name, w):
  if name == 's_ste':
    return s24.soft_threshold(w) * s24.soft_threshold_scale(w)[..., None, None]
  return jnp.where(s24.magnitude_mask(w) if name == 'ste' else s24.transposable_mask(w), w, 0)


class ProjectTest(parameterized.TestCase):

  @parameterized.parameters(*RECIPES)
  @pytest.mark.few(2)
  def test_formula_on_lists_tuples_and_named_tuples(self, name):
    found = jax.jit(lambda p, s: project(p, s, RECIPES[name]))(TREE, opt_state(RECIPES[name]))
    self.assertEqual(jax.tree.structure(found), jax.tree.structure(TREE))
    for f, w in ((found['blocks'][0], TREE['blocks'][0]), (found['stack'][0], TREE['stack'][0])):
      np.testing.assert_allclose(f.kernel, by_hand(name, w.kernel), rtol=1e-6)
      s24.verify24(f.kernel)
      np.testing.assert_array_equal(f.bias, w.bias)
    np.testing.assert_array_equal(found['head'].kernel, TREE['head'].kernel)

  @parameterized.parameters(*RECIPES)
  @pytest.mark.few
  def test_the_zeros_of_projected_weights_are_verified(self, name):
    recipe = RECIPES[name]
    recipe = standard(recipe, TREE)
    found = s24.project(TREE, opt_state(recipe), recipe)
    shares = {'blocks/0/kernel': 0.5, 'blocks/1/kernel': 0.5, 'stack/0/kernel': 0.5}
    self.assertEqual(s24.verify_weights(found, recipe), shares)
    dead = s24.project(jax.tree.map(lambda w: w * jnp.nan, TREE), opt_state(recipe), recipe)
    with self.assertRaisesRegex(ValueError, 'blocks/0/kernel: it holds NaN'):
      s24.verify_weights(dead, recipe)
    found['blocks'][1] = TREE['blocks'][1]
    with self.assertRaisesRegex(ValueError, 'blocks/1/kernel: not 2:4 along axis -2: group'):
      s24.verify_weights(found, recipe)

  def test_of_one_of_four_no_second_is_verified(self):
    recipe = standard(s24.Recipe('one', (s24.Rule('w', s24.DotPolicy(s24.magnitude(n=1))),)), {'w': jnp.ones((8, 4))})
    one = jnp.tile(jnp.array([[1.0], [0.0], [0.0], [0.0]]), (2, 4))
    self.assertEqual(s24.verify_weights({'w': one}, recipe), {'w': 0.75})
    with self.assertRaisesRegex(ValueError, r'w: not 1:4 along axis -2: group \(0, 0\) holds'):
      s24.verify_weights({'w': one.at[1].set(2.0)}, recipe)

  @parameterized.named_parameters(
    ('static', s24.recipes.static('.*', density=0.25), 0.75),
    ('set', s24.recipes.set_('.*', density=0.25), 0.75),
    ('rigl', s24.recipes.rigl('.*', density=0.25, total_steps=400), 0.75),
    ('mixed_sparsity', s24.recipes.mixed_sparsity('.*', density=0.25, total_steps=4000, restoration=0.0), 0.75),
    ('mixed_sparsity_that_ends_dense', s24.recipes.mixed_sparsity('.*', density=0.25, total_steps=4000), 0.0),
  )
  def test_links_that_come_and_go_are_held_to_the_density_of_the_end(self, recipe, zeros):
    params = {'up': gaussian(0, (2, 16, 64)), 'down': gaussian(1, (64, 16)), 'out': gaussian(2, (4, 4, 16))}

    def f(p, x):
      return (x @ p['up'][0] + x @ p['up'][1]) @ p['down'] @ p['out'].reshape(16, 16)

    recipe = s24.bind(recipe, f, params, jnp.ones((4, 16)))
    if zeros:
      # As the last change leaves them.
      chosen = first_states(projections_of(params, recipe), params, lambda _: 4000)
      pruned = jax.tree.map(lambda w, mask: jnp.where(mask, w, 0), params, chosen)
      shares = s24.verify_weights(pruned, recipe)
      self.assertAlmostEqual(sum(shares[path] * w.size for path, w in params.items()) / 3328, zeros, delta=1e-3)
      with self.assertRaisesRegex(ValueError, r'down: 1024 of 1024 entries are not zero, .* keeps \d+, its share'):
        s24.verify_weights(pruned | {'down': params['down']}, recipe)
    else:
      self.assertEqual(set(s24.verify_weights(params, recipe).values()), {0.0})

  def test_zeros_are_verified_along_the_axes_that_a_model_contracts(self):
    """A square weight [out, in] with its zeros along out, and one 2:4 along in but not along out."""
    w = gaussian(0, (8, 8))
    f, transposed = lambda p, x: x @ p['w'].T, s24.Rule('w', s24.DotPolicy(s24.transposable()))
    bound = s24.bind(s24.recipes.ste('w'), f, {'w': w}, jnp.ones((4, 8)))
    along_in, along_out = ({'w': jnp.where(s24.magnitude_mask(w, axis=axis), w, 0)} for axis in (-1, -2))
    self.assertEqual(s24.verify_weights(along_in, bound), {'w': 0.5})
    where = r'w: not 2:4 along axis 1 as stored, its inputs: group \(\d, \d\) holds .* in the weight as \[in, out\];'
    with self.assertRaisesRegex(ValueError, where):
      s24.verify_weights(along_out, bound)
    with self.assertRaisesRegex(ValueError, 'w: not 2:4 along axis -1'):
      s24.verify_weights(along_out, standard(s24.Recipe('both', (transposed,)), along_out))

  @parameterized.parameters(
    ('up/weight', (8, 12), -1, lambda w, x: x @ w.T),  # Equinox, PyTorch
    ('blocks/kernel', (12, 4, 8), 0, lambda w, x: sum(x @ w[:, i] for i in range(4))),  # a scan over axis 1
    ('query/kernel', (12, 4, 4), 0, lambda w, x: jnp.einsum('td,dhk->thk', x, w)),
    ('w', (12, 8), -2, lambda w, x: x @ w),
    ('c_fc/kernel', (8, 12), -1, lambda w, x: x @ w.T),  # Hugging Face's Conv1D, which its bias tells
  )
  def test_axes_that_nothing_tells_are_refused_by_name(self, path, shape, axis, f):
    """They were taken for [stacked..., in, out], with a warning."""
    w, recipe = np.random.default_rng(0).normal(size=shape).astype(np.float32), s24.recipes.ste('.*')
    params = {path: w} | ({'c_fc/bias': np.zeros(8, np.float32)} if path == 'c_fc/kernel' else {})
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params) if axis == -2 else None
    calls = lambda: s24.project(params, state, recipe), lambda: s24.verify_weights(params, recipe)
    message = rf'^{path} \(.*\): \w+ does not see along which axes .*\.bind.* Make the optimizer state with that recipe'
    for call in calls:
      with self.assertRaisesRegex(ValueError, message):
        call()
    bound = s24.bind(recipe, lambda p, x: f(p[path], x), params, jnp.ones((2, 12)))
    if axis != -2:  # a state of the recipe by itself serves weights alone that are read as [..., in, out]
      unbound = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
      with self.assertRaisesRegex(ValueError, 'one recipe, the one that bind returned'):
        s24.project(params, unbound, bound)
    found = s24.project(params, state, bound)
    np.testing.assert_array_equal(found[path], np.where(s24.magnitude_mask(w, axis=axis), w, 0))
    self.assertEqual(s24.verify_weights(found, bound), {path: 0.5})

  @parameterized.parameters(*RECIPES)
  def test_gradient_passes_straight_through(self, name):
    recipe, state = RECIPES[name], opt_state(RECIPES[name])
    cotangent = jax.tree.map(lambda w: gaussian(5, w.shape), TREE)
    found = jax.jit(lambda p, g: jax.vjp(lambda p: project(p, state, recipe), p)[1](g)[0])(TREE, cotangent)
    jax.tree.map(np.testing.assert_array_equal, found, cotangent)

  def test_dense_phase_returns_the_parameters(self):
    self.assertIs(s24.project(TREE, opt_state(RECIPES['ste']), RECIPES['ste'], phase='dense'), TREE)

  def test_weights_of_another_step_are_told_outside_of_jit(self):
    recipe, params, other = s24.recipes.ste('head/kernel'), {'head': layer(3)}, {'head': layer(4)}
    state = jax.block_until_ready(opt_state(recipe, params))
    _dispatch.log_once.cache_clear()
    with self.assertNoLogs('sparse24_jax', 'WARNING'):
      s24.project(other, None, recipe)
      s24.project(params, state, recipe)
    with self.assertLogs('sparse24_jax', 'WARNING') as logged:
      s24.project(other, state, recipe)
    said = r'kernel: params are not the weights of the last step .* right for an average .* of the same step'
    self.assertRegex(logged.output[-1], said)

  def test_a_dense_end_begins_with_what_the_sparse_steps_computed_with(self):
    """Said of weights that a soft threshold changed; masks leave the choice, and later dense steps are as any."""
    phases = s24.Phase('sparse', 0.5), s24.Phase('dense', 0.5)
    for base, told in ((s24.recipes.s_ste('head/kernel'), True), (s24.recipes.ste('head/kernel'), False)):
      recipe, params = dataclasses.replace(base, phases=phases), {'head': layer(3)}
      state = s24.sparse_training(optax.sgd(0.1), recipe, phase='sparse').init(params)
      updates = {phase: s24.sparse_training(optax.sgd(0.1), recipe, phase=phase).update for phase in PHASES}
      left = params
      for _ in range(2):
        changes, state = jax.block_until_ready(updates['sparse'](params, state, left))
        left = optax.apply_updates(left, changes)
      _dispatch.log_once.cache_clear()
      with self.assertLogs('sparse24_jax') as logged:
        s24.sparse_variables(left, state, recipe, phase='dense')
        logging.getLogger('sparse24_jax').info('end')
      self.assertEqual(bool(re.search('head/kernel: the sparse steps .* project', logged.output[0])), told)
      if not told:
        continue
      begun = s24.project(left, state, recipe, phase='sparse')
      with self.assertNoLogs('sparse24_jax', 'WARNING'):
        s24.sparse_variables(begun, state, recipe, phase='dense')
        changes, after = jax.block_until_ready(updates['dense'](params, state, begun))
        s24.sparse_variables(optax.apply_updates(begun, changes), after, recipe, phase='dense')
      with self.assertLogs('sparse24_jax', 'WARNING'):
        s24.sparse_variables({'head': layer(4)}, after, recipe, phase='dense')

  def test_an_average_that_is_evaluated_hides_no_mistake_elsewhere(self):
    recipe, params, average = s24.recipes.ste('head/kernel'), {'head': layer(3)}, {'head': layer(4)}
    state = jax.block_until_ready(opt_state(recipe, params))

    def evaluate(params):
      return s24.project(params, state, recipe)

    with self.assertLogs('sparse24_jax', 'WARNING') as logged:
      for _ in range(3):
        evaluate(average)
      evaluate(average)  # the mistake
    self.assertLen(logged.output, 2)

  def test_weights_that_are_still_computed_are_waited_for(self):
    recipe, params = s24.recipes.ste('head/kernel'), {'head': layer(3)}

    @jax.jit
    def later(params, m):
      return jax.tree.map(lambda w: w + 1 + jax.lax.fori_loop(0, 20, lambda _, m: m @ m, m).sum(), params)

    # On a device of their own: else whatever is asked of the state waits for them, too.
    given = jax.device_put((params, jnp.zeros((512, 512))), jax.devices()[1])
    state = jax.tree.map(np.asarray, opt_state(recipe, params))
    jax.block_until_ready((later(*given), s24.project(given[0], state, recipe)))  # nothing is compiled below
    _dispatch.log_once.cache_clear()
    with self.assertLogs('sparse24_jax', 'WARNING') as logged:
      s24.project(later(*given), state, recipe)
    self.assertIn('not the weights of the last step of opt_state', logged.output[-1])

  def test_uses_the_mask_of_the_state_not_of_the_weights(self):
    recipe, other = RECIPES['fst'], jax.tree.map(jnp.negative, TREE)
    other['blocks'][0] = layer(9)
    found = project(other, opt_state(recipe), recipe)['blocks'][0].kernel
    mask = s24.transposable_mask(TREE['blocks'][0].kernel)
    np.testing.assert_array_equal(found, jnp.where(mask, layer(9).kernel, 0))

  def test_nnx_state(self):
    params = nnx.state(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), nnx.Param)
    recipe = s24.recipes.ste('kernel')
    found = s24.project(params, opt_state(recipe, params), recipe)
    np.testing.assert_array_equal(found['kernel'][...], by_hand('ste', params['kernel'][...]))

  def test_bfloat16_stays(self):
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), TREE)
    for recipe in RECIPES.values():
      found = jax.eval_shape(lambda p, r=recipe: project(p, opt_state(r, p), r), params)
      self.assertEqual({leaf.dtype for leaf in jax.tree.leaves(found)}, {jnp.dtype('bfloat16')})

  def test_project_is_straight_through_in_second_derivatives(self):
    def energy(params, x):
      return jnp.sum((jnp.tanh(x @ params['w']) @ params['v']) ** 2)

    params, x = {'w': gaussian(0, (16, 32)), 'v': gaussian(1, (32, 4))}, gaussian(2, (8, 16))
    recipe = s24.bind(s24.recipes.ste('.'), energy, params, x)
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    masks = {name: s24.magnitude_mask(w) for name, w in params.items()}

    def loss(weights_of):
      return lambda params: jnp.mean(jax.grad(energy, 1)(weights_of(params), x) ** 2)

    def by_hand(params):
      return {name: w + jax.lax.stop_gradient(masks[name] * w - w) for name, w in params.items()}

    found = jax.jit(jax.grad(loss(lambda params: s24.project(params, state, recipe))))(params)
    expected = jax.jit(jax.grad(loss(by_hand)))(params)
    for name, w in expected.items():
      np.testing.assert_allclose(found[name], w, atol=1e-5 * float(jnp.abs(w).max()))

  @parameterized.parameters('ste', 's_ste')
  def test_every_derivative_by_the_weights_is_that_at_the_projected_ones(self, name):
    """As of a Hessian or of MAML: of pruned entries too."""

    def energy(params):
      return jnp.sum((jnp.tanh(x @ params['w']) @ params['v']) ** 2)

    params, x = {'w': gaussian(0, (16, 32)), 'v': gaussian(1, (32, 4))}, gaussian(2, (8, 16))
    recipe = s24.bind(getattr(s24.recipes, name)('.'), energy, params)
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    ones = jax.tree.map(jnp.ones_like, params)

    def derivatives(f, params):
      slope = jax.grad(f)
      by_reverse = jax.grad(lambda params: sum(map(jnp.sum, jax.tree.leaves(slope(params)))))(params)
      return jax.jvp(f, (params,), (ones,)), jax.jvp(slope, (params,), (ones,)), by_reverse

    found = jax.jit(lambda params: derivatives(lambda p: energy(s24.project(p, state, recipe)), params))(params)
    expected = jax.jit(lambda params: derivatives(energy, s24.project(params, state, recipe)))(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


if __name__ == '__main__':
  absltest.main()
