"""`sparse_training` among the transformations of Optax, under jit, and without arrays."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from tests.quick import jit

RULE = 'mlp/.*'
RATE = 0.3  # so large that masks change in every step
FST = s24.recipes.transposable_srste(RULE, masked_decay=0.1, refresh_every=2)


def normal(seed):
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32))

  return {'mlp': {'kernel': draw(8, 8), 'bias': draw(8)}, 'head': {'kernel': draw(8, 4)}}


def adam(recipe=FST, phase='sparse'):
  return s24.sparse_training(optax.adam(RATE), recipe, phase=phase, learning_rate=RATE)


def assert_trees_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def kinds(params):
  return jax.tree.map(lambda w: 'w' if w.ndim > 1 else 'b', params)


class Counted:
  """A jitted step of an optimizer that counts its traces."""

  def __init__(self, tx):
    self.traces = 0

    def step(params, state, grads):
      self.traces += 1
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    self.step = jax.jit(step)


class CompositionTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('alone', lambda tx: tx),
    ('chain', lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx)),
    ('multi_steps', lambda tx: optax.MultiSteps(tx, every_k_schedule=1).gradient_transformation()),
    ('apply_if_finite', lambda tx: optax.apply_if_finite(tx, max_consecutive_errors=3)),
    ('partition', lambda tx: optax.partition({'sparse': tx, 'plain': optax.sgd(0.1)},
                                             {'mlp': 'sparse', 'head': 'plain'})),
    ('nested_chain', lambda tx: optax.chain(optax.scale(2.0), optax.chain(optax.identity(), tx))),
    ('masked', lambda tx: optax.masked(tx, {'mlp': True, 'head': False})),
    ('inject_hyperparams', lambda tx: optax.inject_hyperparams(
      lambda learning_rate: s24.sparse_training(optax.adam(learning_rate), FST))(learning_rate=RATE)),
    ('with_extra_args', optax.with_extra_args_support),
  )  # fmt: skip
  @pytest.mark.few(5)
  def test_masks_counters_and_rates_move_as_alone(self, wrap):
    """Whatever is around it, the sparse weight's masks, rates and variables are found and refreshed on time."""
    tx = wrap(adam())
    params = normal(0)
    state = tx.init(params)
    structure = jax.tree.structure(state)
    first = s24.sparse_variables(params, state, FST)['mlp']['kernel']
    step, rates = Counted(tx), []
    for i in range(1, 5):
      params, state = step.step(params, state, normal(i))
      rates.append(float(s24.get_flip_rate(state).overall))
      mask = s24.sparse_variables(params, state, FST)['mlp']['kernel']
      if i == 1:
        np.testing.assert_array_equal(mask, first)
      if i % 2 == 0:
        np.testing.assert_array_equal(mask, s24.transposable_mask(params['mlp']['kernel']))
    self.assertEqual(jax.tree.structure(state), structure)
    self.assertEqual(list(s24.get_flip_rate(state).per_weight), ['mlp/kernel'])
    self.assertTrue(np.isnan(rates[0]))
    self.assertGreater(max(rates[1:]), 0)
    self.assertEqual(step.traces, 1)

  def test_one_optimizer_for_each_of_two_groups(self):
    """Two wrappers are two recipes; whoever reads the state must say which part is meant."""
    tx = optax.partition(
      {'a': adam(), 'b': adam(s24.recipes.ste('head/.*'))}, {'mlp': 'a', 'head': 'b'}
    )  # fmt: skip
    params = normal(0)
    _, state = tx.update(normal(1), tx.init(params), params)
    with self.assertRaisesRegex(ValueError, 'holds 2 states of sparse_training, expected one'):
      s24.get_flip_rate(state)
    self.assertEqual(list(s24.get_flip_rate(state.inner_states['b']).per_weight), ['head/kernel'])

  @parameterized.named_parameters(
    ('both_groups', lambda: optax.multi_transform({'w': adam(), 'b': adam()}, kinds),
     'decides for no weight; .* 2 of the 3'),
    ('two_states', lambda: optax.partition({'a': adam(), 'b': adam(s24.recipes.ste('head/.*'))},
                                           {'mlp': 'a', 'head': 'b'}),
     'holds 2 states of sparse_training, expected one: .* partition or masked, which go inside'),
    ('twice_in_a_chain', lambda: optax.chain(adam(), adam()),
     'holds 2 states of sparse_training, expected one: sparse_training stands in the chain more than once'),
    ('masked', lambda: optax.masked(adam(s24.recipes.ste('.*')), {'mlp': True, 'head': False}),
     r"makes head/kernel, mlp/kernel sparse, .* which go inside"),
    ('micro_batches', lambda: s24.sparse_training(optax.MultiSteps(optax.adam(RATE), 2), FST),
     r'inner holds optax.MultiSteps, .*: put it outside, optax.MultiSteps\(sparse_training'),
  )  # fmt: skip
  def test_what_stands_on_the_wrong_side_is_told_where_to_go(self, make, message):
    params = normal(0)
    with self.assertRaisesRegex(ValueError, message):
      s24.project(params, make().init(params), s24.recipes.ste('.*'))

  def test_nan_gradients_leave_state_and_masks(self):
    tx = optax.apply_if_finite(adam(s24.recipes.ste(RULE)), max_consecutive_errors=5)
    params = normal(0)
    update = jax.jit(tx.update)
    _, state = update(normal(1), tx.init(params), params)
    bad = normal(2)
    bad['head']['kernel'] = bad['head']['kernel'].at[0, 0].set(jnp.nan)
    updates, after = update(bad, state, params)
    self.assertEqual(optax.tree.norm(updates), 0)
    assert_trees_equal(after.inner_state, state.inner_state)
    self.assertEqual(int(after.total_notfinite), 1)

  @parameterized.parameters(
    (lambda tx: optax.apply_if_finite(tx, max_consecutive_errors=3),),
    (lambda tx: optax.conditionally_mask(tx, lambda step: step >= 0),),
    (lambda tx: optax.conditionally_transform(tx, lambda step: step >= 0),),
  )
  @pytest.mark.few
  def test_conditional_wrappers_want_gradients_in_the_dtype_of_the_parameters(self, wrap):
    """A decay that is not lost beside bfloat16 is wider than that, as are the updates of Adam by itself."""
    params, few_bits = normal(0), jax.tree.map(lambda g: g.astype(jnp.bfloat16), normal(1))
    for inner in (adam(), optax.adam(RATE)):
      tx = wrap(inner)
      with self.assertRaisesRegex(TypeError, 'cond branches must have equal output types'):
        jax.eval_shape(tx.update, few_bits, jax.eval_shape(tx.init, params), params)
      cast = optax.tree.cast_like(few_bits, params)
      found, expected = (jit(lambda g, w, t=t: t.update(g, t.init(w), w)[0])(cast, params) for t in (tx, inner))
      # A branch is compiled, with sums that are fused.
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)

  def test_injected_rate_reaches_the_decay_on_weights(self):
    recipe = s24.recipes.sr_ste(RULE, masked_decay=0.5)

    def build(rate):
      return s24.sparse_training(optax.sgd(rate), recipe, learning_rate=rate)

    tx = optax.inject_hyperparams(build)(rate=0.1)
    params = normal(0)
    state = tx.init(params)
    state.hyperparams['rate'] = jnp.asarray(0.3)
    updates, _ = jax.jit(tx.update)(normal(1), state, params)
    expected, _ = build(0.3).update(normal(1), build(0.3).init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, expected)

  @parameterized.parameters('gradients', 'weights')
  def test_the_decay_itself_can_be_injected(self, decay_on):
    """A recipe is data, so a decay that is traced goes in as a schedule."""

    def build(decay):
      recipe = s24.recipes.sr_ste(RULE, masked_decay=lambda count: decay, decay_on=decay_on)
      return s24.sparse_training(optax.sgd(0.1), recipe, learning_rate=0.1)

    tx = optax.inject_hyperparams(build)(decay=0.2)
    params = normal(0)
    updates, _ = jax.jit(tx.update)(normal(1), tx.init(params), params)
    expected, _ = build(0.2).update(normal(1), build(0.2).init(params), params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, expected)

  def test_tree_map_params_sees_masks_and_moments(self):
    params = normal(0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adam())
    state = tx.init(params)
    seen = optax.tree_map_params(tx, lambda leaf: 'param', state, transform_non_params=lambda leaf: 'other')
    self.assertEqual(seen[1].count, 'other')
    self.assertEqual(seen[1].flip_rate.overall, 'other')
    self.assertEqual(seen[1].inner_state[0].mu['mlp']['kernel'], 'param')
    self.assertEqual(jax.tree.structure(seen), jax.tree.structure(state))
    self.assertEqual(seen[1].projections['mlp']['kernel'], 'param')
    self.assertEqual(seen[1].flip_rate.per_weight['mlp']['kernel'], 'param')

  def test_extra_arguments_reach_the_inner_optimizer(self):
    def update(updates, state, params=None, *, scale, **extra):
      del params, extra
      return jax.tree.map(lambda u: u * scale, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    params, grads = normal(0), normal(1)
    tx = s24.sparse_training(inner, s24.recipes.ste(RULE))
    state = jax.jit(tx.init)(params)
    updates, _ = jax.jit(tx.update)(grads, state, params, scale=3.0, unknown=None)
    assert_trees_equal(updates, jax.tree.map(lambda g: g * 3.0, grads))


class PhasesTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('fst', FST, lambda phase: optax.adam(0.1)),
    ('sr_ste', s24.recipes.sr_ste(RULE, masked_decay=0.1), lambda phase: optax.adam(0.1)),
    ('s_ste', s24.recipes.s_ste(RULE), lambda phase: optax.adam(0.1)),
    ('step', s24.recipes.step(RULE), lambda phase: s24.step_adam(0.1, phase=phase)),
  )
  @pytest.mark.few
  def test_one_state_and_one_compilation_for_each_phase(self, recipe, inner):
    txs = {p: s24.sparse_training(inner(p), recipe, phase=p, learning_rate=0.1) for p in ('dense', 'sparse')}
    steps = {phase: Counted(tx) for phase, tx in txs.items()}
    params = normal(0)
    state = txs['dense'].init(params)
    signature = jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), state)
    self.assertEqual(jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), txs['sparse'].init(params)), signature)
    for i, phase in enumerate(['sparse'] * 3 + ['dense'] * 3 + ['sparse'] * 2):
      params, state = steps[phase].step(params, state, normal(i))
      self.assertEqual(jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), state), signature)
    self.assertEqual(int(state.count), 8)
    for step in steps.values():
      self.assertEqual((step.traces, step.step._cache_size()), (1, 1))

  def test_the_dense_phase_holds_no_decay_and_the_sparse_one_no_branch(self):
    """A phase is a Python value: the compiled step of one has nothing of the other."""
    params = normal(0)
    recipe = s24.recipes.sr_ste(RULE, masked_decay=0.1, decay_on='gradients')
    jaxprs = {}
    for phase in ('dense', 'sparse'):
      tx = s24.sparse_training(optax.sgd(0.1), recipe, phase=phase)
      jaxprs[phase] = str(jax.make_jaxpr(tx.update)(normal(1), tx.init(params), params))
      self.assertNotIn('cond[', jaxprs[phase])
    self.assertGreater(jaxprs['sparse'].count('select_n'), jaxprs['dense'].count('select_n'))

  def test_abstract_init(self):
    params, tx = normal(0), optax.chain(optax.clip_by_global_norm(1.0), adam())
    abstract = jax.eval_shape(tx.init, jax.eval_shape(lambda: params))
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), abstract)
    self.assertEqual(shapes, jax.tree.map(lambda a: (a.shape, a.dtype), tx.init(params)))

  def test_state_can_be_donated(self):
    params, tx = normal(0), adam()
    step = jax.jit(lambda p, s, g: tx.update(g, s, p), donate_argnums=1)
    state = tx.init(params)
    for i in range(3):
      _, state = step(params, state, normal(i))
    self.assertEqual(int(state.count), 3)

  def test_in_a_scan_over_steps(self):
    params, tx = normal(0), adam()
    grads = jax.tree.map(lambda *g: jnp.stack(g), *[normal(i) for i in range(1, 5)])

    def step(carry, g):
      updates, state = tx.update(g, carry[1], carry[0])
      return (optax.apply_updates(carry[0], updates), state), s24.get_flip_rate(state).overall

    (scanned, state), rates = jax.jit(lambda p, s: jax.lax.scan(step, (p, s), grads))(params, tx.init(params))
    self.assertEqual(rates.shape, (4,))
    one = Counted(tx)
    expected = (params, tx.init(params))
    for i in range(1, 5):
      expected = one.step(*expected, normal(i))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), scanned, expected[0])
    assert_trees_equal(state.projections, expected[1].projections)


if __name__ == '__main__':
  absltest.main()
