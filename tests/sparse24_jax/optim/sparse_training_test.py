"""`sparse_training` against a loop written in numpy: Adam, decay, masks, flip rates; then each promise by itself."""

import dataclasses
import itertools
import types

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels import _dispatch
import sparse24_jax as s24
from tests.quick import jit

LR, B1, B2, EPS, WEIGHT_DECAY, DECAY = 0.05, 0.9, 0.98, 1e-8, 0.1, 0.3
# Two sparse weights of different sizes, one of them a stack of layers; a bias inside and a kernel outside the rule.
SHAPES = {
  'mlp': {'up': {'kernel': (8, 12), 'bias': (12,)}, 'down': {'kernel': (3, 12, 8)}},
  'head': {'kernel': (8, 4)},
}
SPARSE = ('mlp/down/kernel', 'mlp/up/kernel')
RULE = 'mlp/.*'
PAIRS = [row for row in itertools.product((False, True), repeat=4) if sum(row) == 2]
PATTERNS = np.array([p for p in itertools.product(PAIRS, repeat=4) if (np.sum(p, axis=0) == 2).all()])


def normal(seed, dtype=jnp.float32):
  leaves, structure = jax.tree.flatten(SHAPES, is_leaf=lambda node: isinstance(node, tuple))
  rng = np.random.default_rng(seed)
  drawn = [rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in leaves]
  return structure.unflatten(map(jnp.asarray, drawn))


def flatten(tree):
  """Path to float64 array."""
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {'/'.join(k.key for k in path): np.asarray(leaf, np.float64) for path, leaf in leaves}


def largest_two(w):
  """The mask of the two largest magnitudes in each four along axis -2, by sorting."""
  groups = np.abs(w).reshape(*w.shape[:-2], -1, 4, w.shape[-1])
  rank = np.argsort(np.argsort(-groups, axis=-2, kind='stable'), axis=-2, kind='stable')
  return (rank < 2).reshape(w.shape)


def best_pattern(w):
  """The transposable mask, by trying all 90 patterns on each block."""
  mask = np.zeros(w.shape, bool)
  for index in np.ndindex(*w.shape[:-2], w.shape[-2] // 4, w.shape[-1] // 4):
    block = (*index[:-2], slice(4 * index[-2], 4 * index[-2] + 4), slice(4 * index[-1], 4 * index[-1] + 4))
    mask[block] = PATTERNS[np.argmax((np.abs(w[block]) * PATTERNS).sum((1, 2)))]
  return mask


class NumpyRun:
  """AdamW with a recipe's masks and decay, float64."""

  def __init__(self, params, search, *, decay=0.0, decay_on='gradients', refresh_every=1, flip_rate='refresh'):
    self.w = flatten(params)
    self.m, self.v = ({k: np.zeros_like(w) for k, w in self.w.items()} for _ in range(2))
    self.search, self.decay, self.decay_on = search, decay, decay_on
    self.refresh_every, self.flip_rate = refresh_every, flip_rate
    self.masks = {k: search(self.w[k]) for k in SPARSE}
    self.flips = {k: np.full(self.w[k].shape[:-2], np.nan) for k in SPARSE}
    self.overall = np.nan
    self.count = 0

  def step(self, grads):
    decay = self.decay(self.count) if callable(self.decay) else self.decay
    self.count += 1
    before = {k: self.search(self.w[k]) for k in SPARSE} if self.flip_rate == 'step' else self.masks
    for k, grad in flatten(grads).items():
      w = self.w[k]
      pull = decay * np.where(self.masks[k], 0, w) if k in SPARSE else 0
      g = grad + pull if self.decay_on == 'gradients' else grad
      self.m[k] = B1 * self.m[k] + (1 - B1) * g
      self.v[k] = B2 * self.v[k] + (1 - B2) * g**2
      step = self.m[k] / (1 - B1**self.count) / (np.sqrt(self.v[k] / (1 - B2**self.count)) + EPS) + WEIGHT_DECAY * w
      if self.decay_on == 'weights':
        step = step + pull
      self.w[k] = w - LR * step
    due = self.count % self.refresh_every == 0
    if due or self.flip_rate == 'step':
      masks = {k: self.search(self.w[k]) for k in SPARSE}
      changed = {k: masks[k] != before[k] for k in SPARSE}
      self.flips = {k: c.mean((-2, -1)) for k, c in changed.items()}
      self.overall = sum(c.sum() for c in changed.values()) / sum(c.size for c in changed.values())
      if due:
        self.masks = masks


def adamw():
  return optax.adamw(LR, B1, B2, EPS, weight_decay=WEIGHT_DECAY)


FST = s24.recipes.transposable_srste(RULE, masked_decay=DECAY, refresh_every=3)
SR_STE = s24.recipes.sr_ste(RULE, masked_decay=DECAY, decay_on='gradients')


def per_step(recipe):
  return dataclasses.replace(recipe, flip_rate='step')


class AgainstNumpyTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('fst', FST, 'sparse', best_pattern, {'decay': DECAY, 'refresh_every': 3}),
    ('fst_flips_per_step', per_step(FST), 'sparse', best_pattern,
     {'decay': DECAY, 'refresh_every': 3, 'flip_rate': 'step'}),
    ('sr_ste_on_gradients', SR_STE, 'sparse', largest_two, {'decay': DECAY}),
    ('scheduled_decay_on_weights', s24.recipes.sr_ste(RULE, masked_decay=lambda count: 0.1 * count),
     'sparse', largest_two, {'decay': lambda count: 0.1 * count, 'decay_on': 'weights'}),
  )  # fmt: skip
  def test_seven_steps(self, *case):
    self.check_seven_steps(*case)

  @parameterized.named_parameters(
    ('fst_dense_phase', FST, 'dense', best_pattern, {'refresh_every': 3}),
    ('fst_dense_twin', FST.dense_twin(), 'dense', best_pattern, {'refresh_every': 3}),
    ('fst_dense_twin_per_step', per_step(FST).dense_twin(), 'dense', best_pattern,
     {'refresh_every': 3, 'flip_rate': 'step'}),
    ('sr_ste_on_weights', s24.recipes.sr_ste(RULE, masked_decay=DECAY), 'sparse', largest_two,
     {'decay': DECAY, 'decay_on': 'weights'}),
    ('ste', s24.recipes.ste(RULE), 'sparse', largest_two, {}),
    ('ste_per_step', per_step(s24.recipes.ste(RULE)), 'sparse', largest_two, {'flip_rate': 'step'}),
    ('scheduled_decay', s24.recipes.sr_ste(RULE, masked_decay=lambda count: 0.1 * count, decay_on='gradients'),
     'sparse', largest_two, {'decay': lambda count: 0.1 * count}),
  )  # fmt: skip
  @pytest.mark.slow
  def test_seven_steps_of_others(self, *case):
    self.check_seven_steps(*case)

  def check_seven_steps(self, recipe, phase, search, settings):
    params = normal(0)
    expected = NumpyRun(params, search, **settings)
    tx = s24.sparse_training(adamw(), recipe, phase=phase, learning_rate=LR)
    state = tx.init(params)
    update = jax.jit(tx.update)
    rates = []
    for i in range(7):
      grads = normal(i + 1)
      updates, state = update(grads, state, params)
      params = optax.apply_updates(params, updates)
      expected.step(grads)
      with self.subTest(step=i):
        for found, wanted in (
          (params, expected.w),
          (state.inner_state[0].mu, expected.m),
          (state.inner_state[0].nu, expected.v),
        ):
          for k, leaf in flatten(found).items():
            np.testing.assert_allclose(leaf, wanted[k], rtol=1e-4, atol=1e-5, err_msg=k)
        self.assertEqual(int(state.count), i + 1)
        masks = flatten(state.projections)
        self.assertEqual(tuple(sorted(masks)), SPARSE)
        for k in SPARSE:
          np.testing.assert_array_equal(masks[k], expected.masks[k])
        flips = s24.get_flip_rate(state)
        self.assertEqual(sorted(flips.per_weight), list(SPARSE))
        for k in SPARSE:
          self.assertEqual(flips.per_weight[k].dtype, jnp.float32)
          np.testing.assert_allclose(flips.per_weight[k], expected.flips[k], rtol=1e-6, err_msg=k)
        np.testing.assert_allclose(flips.overall, expected.overall, rtol=1e-6)
        rates.append(float(flips.overall))
    self.assertGreater(np.nanmax(rates), 0)  # or the comparison of rates compared zeros

  def test_learning_rate_schedule_multiplies_decay_on_weights(self):
    recipe = s24.recipes.sr_ste(RULE, masked_decay=DECAY)
    schedule = optax.linear_schedule(0.1, 0.5, 4)
    tx = s24.sparse_training(optax.sgd(schedule), recipe, learning_rate=schedule)
    params = normal(0)
    state, update = tx.init(params), jax.jit(tx.update)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for count in range(3):
      updates, state = update(zeros, state, params)
      w = np.asarray(params['mlp']['up']['kernel'])
      pull = np.where(largest_two(w), 0, w)
      np.testing.assert_allclose(updates['mlp']['up']['kernel'], -schedule(count) * DECAY * pull, rtol=1e-5)


class DecayTest(parameterized.TestCase):

  def pull(self, params, recipe=SR_STE):
    """(1 - M) W at sparse weights, zero elsewhere."""
    masks = jit(s24.sparse_training(optax.sgd(1.0), recipe).init)(params).projections
    return jax.tree.map(
      lambda w, m: w * (0 if isinstance(m, optax.MaskedNode) else 1 - np.asarray(m, w.dtype)),
      jax.tree.map(np.asarray, params), masks,
    )  # fmt: skip

  def assert_trees_close(self, found, expected, **kwargs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **kwargs), found, expected)

  def assert_trees_equal(self, found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)

  def test_is_not_clipped(self):
    params, grads, clip = normal(0), normal(1), 1e-3
    tx = optax.chain(optax.clip_by_global_norm(clip), s24.sparse_training(optax.sgd(1.0), SR_STE))
    updates, _ = tx.update(grads, tx.init(params), params)
    clipped = jax.tree.map(lambda g: g * clip / optax.tree.norm(grads), grads)
    pull = self.pull(params)
    self.assertGreater(DECAY * optax.tree.norm(pull), 100 * clip)
    self.assert_trees_close(updates, jax.tree.map(lambda g, p: -g - DECAY * p, clipped, pull), rtol=1e-5, atol=1e-7)

  def test_an_optimizer_that_has_both_functions_will_do(self):
    init, update = optax.sgd(0.5)
    tx = s24.sparse_training(types.SimpleNamespace(init=init, update=update), s24.recipes.ste(RULE))
    params = normal(0)
    updates, _ = tx.update(normal(1), tx.init(params), params)
    self.assert_trees_close(updates, jax.tree.map(lambda g: -0.5 * g, normal(1)))

  @parameterized.parameters('gradients', 'weights')
  def test_is_added_once_for_four_micro_batches(self, decay_on):
    recipe = s24.recipes.sr_ste(RULE, masked_decay=DECAY, decay_on=decay_on)
    params, micro = normal(0), [normal(i) for i in range(1, 5)]
    inner = s24.sparse_training(optax.sgd(0.5), recipe, learning_rate=0.5)
    tx = optax.MultiSteps(inner, every_k_schedule=4).gradient_transformation()
    state = tx.init(params)
    start, update = state.inner_opt_state, jax.jit(tx.update)
    for i, grads in enumerate(micro):
      updates, state = update(grads, state, params)
      if i < 3:
        self.assert_trees_equal(state.inner_opt_state, start)
        self.assertEqual(optax.tree.norm(updates), 0)
    mean = jax.tree.map(lambda *g: sum(g) / 4, *micro)
    expected, expected_state = inner.update(mean, inner.init(params), params)
    self.assert_trees_close(updates, expected, rtol=1e-5, atol=1e-6)
    self.assertEqual(int(state.inner_opt_state.count), 1)
    self.assert_trees_equal(state.inner_opt_state.projections, expected_state.projections)
    self.assertGreater(float(s24.get_flip_rate(state).overall), 0)

  @parameterized.parameters('gradients', 'weights')
  def test_is_absent_from_the_dense_phase(self, decay_on):
    recipe = s24.recipes.sr_ste(RULE, masked_decay=DECAY, decay_on=decay_on)
    params, grads = normal(0), normal(1)
    tx = s24.sparse_training(adamw(), recipe, phase='dense', learning_rate=LR)
    updates, state = tx.update(grads, tx.init(params), params)
    expected, expected_state = adamw().update(grads, adamw().init(params), params)
    self.assert_trees_equal(updates, expected)
    self.assert_trees_equal(state.inner_state, expected_state)

  def test_is_not_scaled_with_the_loss(self):
    params, grads = normal(0), normal(1)
    found = []
    for scale in (1.0, 2.0**10):
      tx = optax.chain(optax.scale(1 / scale), optax.clip_by_global_norm(1.0), s24.sparse_training(adamw(), FST))
      state, p = tx.init(params), params
      for _ in range(2):
        updates, state = tx.update(jax.tree.map(lambda g, s=scale: g * s, grads), state, p)
        p = optax.apply_updates(p, updates)
      found.append((p, state))
    self.assert_trees_equal(*found)

  def test_its_factor_matters(self):
    params, grads = normal(0), normal(1)
    first, second = (
      tx.update(grads, tx.init(params), params)[0]
      for decay in (0.1, 0.4)
      for tx in [s24.sparse_training(optax.sgd(1.0), dataclasses.replace(SR_STE, masked_decay=decay))]
    )
    difference = jax.tree.map(lambda a, b: a - b, first, second)
    expected = jax.tree.map(lambda p: 0.3 * p, self.pull(params))
    self.assertGreater(optax.tree.norm(expected), 1)
    self.assert_trees_close(difference, expected, rtol=1e-4, atol=1e-6)

  def test_bfloat16_gradients_are_decayed_in_float32(self):
    params, grads = normal(0, jnp.bfloat16), normal(1, jnp.bfloat16)
    tx = s24.sparse_training(optax.identity(), SR_STE)
    updates, _ = tx.update(grads, tx.init(params), params)
    wide = jax.tree.map(
      lambda g, p: (np.asarray(g, np.float32) + np.float32(DECAY) * p.astype(np.float32)).astype(jnp.bfloat16),
      grads, self.pull(params),
    )  # fmt: skip
    self.assert_trees_equal(updates, wide)


class LogTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    _dispatch.log_once.cache_clear()

  def test_init_tells_what_the_rules_match(self):
    fp8 = s24.Rule('head/kernel', s24.DotPolicy(precision='fp8'))
    recipe = s24.Recipe('two', (s24.Rule(RULE, s24.DotPolicy(s24.magnitude())), fp8))
    tx = s24.sparse_training(optax.adam(LR), recipe)
    with self.assertLogs('sparse24_jax', 'INFO') as logs:
      state = jax.jit(tx.init)(normal(0))
      tx.init(normal(0))  # of another phase, say: the same table
      optax.tree_map_params(tx, lambda leaf: leaf, state)  # calls init with placeholders
    self.assertLen(logs.records, 1)
    first, *rows = logs.records[0].getMessage().splitlines()
    self.assertEqual(first, "recipe 'two' matches 3 weights:")
    self.assertEqual([row.split() for row in rows], [
      ['head/kernel', '(8,', '4)', 'no', 'projection'],
      ['mlp/down/kernel', '(3,', '12,', '8)', 'magnitude', '2:4'],
      ['mlp/up/kernel', '(8,', '12)', 'magnitude', '2:4'],
    ])  # fmt: skip

  def test_a_phase_that_is_not_named_where_there_are_two_is_logged_once_by_updates(self):
    recipe, params = s24.Recipe('unnamed', phases=FST.phases), normal(0)
    with self.assertNoLogs('sparse24_jax', 'WARNING'):
      state = s24.sparse_training(optax.sgd(LR), recipe).init(params)  # the same in all phases
      for phase in ('sparse', 'dense'):
        s24.sparse_training(optax.sgd(LR), recipe, phase=phase).update(params, state, params)
      one = s24.Recipe('one kind', phases=(s24.Phase('sparse', 0.5),) * 2)
      s24.sparse_training(optax.sgd(LR), one).update(params, state, params)
    with self.assertLogs('sparse24_jax', 'WARNING') as logs:
      for _ in range(2):
        s24.sparse_training(optax.sgd(LR), recipe).update(params, state, params)
    (message,) = (record.getMessage() for record in logs.records)
    found = "recipe 'unnamed' has phases 'sparse', 'dense'; none is given"
    self.assertEqual(message, f"{found}, so this optimizer is of 'sparse' throughout; see phase_at")

  def test_a_recipe_that_matches_nothing_says_nothing(self):
    with self.assertNoLogs('sparse24_jax'):
      s24.sparse_training(optax.adam(LR), s24.recipes.dense()).init(normal(0))


class RefreshTest(parameterized.TestCase):

  @parameterized.product(refresh_every=(2, 3, 1), flip_rate=('refresh', 'step'))
  @pytest.mark.few(2)
  def test_masks_change_when_due_and_come_from_the_updated_weights(self, refresh_every, flip_rate):
    recipe = dataclasses.replace(FST, refresh_every=refresh_every, flip_rate=flip_rate)
    projection = recipe.rules[0].policy.projection
    tx = s24.sparse_training(optax.sgd(0.3), recipe)
    params = normal(0)
    state, update = tx.init(params), jax.jit(tx.update)
    for count in range(1, 8):
      updates, new_state = update(normal(count), state, params)
      params = optax.apply_updates(params, updates)
      for name in ('up', 'down'):
        mask, old = (s.projections['mlp'][name]['kernel'] for s in (new_state, state))
        if count % refresh_every:
          np.testing.assert_array_equal(mask, old)
        else:
          np.testing.assert_array_equal(mask, projection.init(params['mlp'][name]['kernel']))
          self.assertTrue((mask != old).any())
      state = new_state

  @parameterized.parameters('step', 'refresh')
  @pytest.mark.few
  def test_flip_rate_is_unknown_at_first_and_zero_for_frozen_weights(self, flip_rate):
    tx = s24.sparse_training(optax.sgd(0.3), dataclasses.replace(FST, masked_decay=0.0, flip_rate=flip_rate))
    params = normal(0)
    state, update = tx.init(params), jax.jit(tx.update)
    for i in range(4):
      rate, expected = s24.get_flip_rate(state), np.nan if i < (1 if flip_rate == 'step' else 3) else 0.0
      np.testing.assert_array_equal(rate.overall, expected)
      np.testing.assert_array_equal(rate.per_weight['mlp/down/kernel'], [expected] * 3)
      # A search for bad numbers in the state finds none.
      self.assertTrue(all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(state)))
      _, state = update(jax.tree.map(jnp.zeros_like, params), state, params)

  @parameterized.parameters((np.nan, 'refresh'), (np.inf, 'step'))
  def test_a_weight_that_is_not_finite_shows_in_the_flip_rates(self, value, flip_rate):
    recipe = dataclasses.replace(s24.recipes.ste(RULE), flip_rate=flip_rate)
    tx, params = s24.sparse_training(optax.sgd(0.1), recipe), normal(0)
    state, grads = tx.init(params), normal(1)
    _, good = tx.update(grads, state, params)
    params['mlp']['up']['kernel'] = params['mlp']['up']['kernel'].at[5, 3].set(value)
    _, bad = tx.update(grads, state, params)
    found, expected = map(s24.get_flip_rate, (bad, good))
    self.assertTrue(np.isnan(found.overall) and np.isnan(found.per_weight['mlp/up/kernel']))
    np.testing.assert_array_equal(found.per_weight['mlp/down/kernel'], expected.per_weight['mlp/down/kernel'])
    if np.isnan(value):  # its group keeps the old mask
      masks = (each.projections['mlp']['up']['kernel'][4:8, 3] for each in (bad, state))
      np.testing.assert_array_equal(*masks)

  def test_a_rate_that_is_not_there_yet_is_no_error(self):
    tx, params = s24.sparse_training(optax.sgd(1.0), FST), normal(0)
    with jax.debug_nans(True):
      found = s24.get_flip_rate(tx.init(params))
    self.assertTrue(all(np.isnan(np.asarray(rate)).all() for rate in jax.tree.leaves(found)))
    shapes = s24.get_flip_rate(jax.eval_shape(tx.init, params))
    self.assertEqual(shapes, jax.eval_shape(lambda: found))

  def test_a_number_among_parameters_is_trained(self):
    tx, params = s24.sparse_training(optax.sgd(1.0), FST), {**normal(0), 'scale': 1.0}
    updates, _ = tx.update(params, tx.init(params), params)
    self.assertEqual(float(updates['scale']), -1.0)

  def test_rates_are_printed_as_numbers(self):
    layers, one = jnp.float32([0.25, 0.125]), jnp.float32(1 / 3)
    self.assertEqual(str(s24.FlipRate(one, {'h/up': layers, 'head': one})), '0.3333 (h/up [0.25  0.125], head 0.3333)')
    self.assertEqual(str(s24.FlipRate(layers, {'up': layers})), '[0.25  0.125] (up [0.25  0.125])')  # of a vmap
    printed = []
    jax.jit(lambda x: printed.append(str(s24.FlipRate(x, {'up': x}))))(one)
    self.assertRegex(printed[0], r'FlipRate\(overall=.*Tracer')

  def test_no_rate_is_reported_before_the_first_refresh(self):
    tx = s24.sparse_training(optax.sgd(1.0), FST)
    params = normal(0)
    state, update, rates = tx.init(params), jax.jit(tx.update), []
    for i in range(4):
      updates, state = update(normal(i + 1), state, params)
      params = optax.apply_updates(params, updates)
      rates.append(float(s24.get_flip_rate(state).overall))
    self.assertTrue(np.isnan(rates[:2]).all())
    self.assertGreater(rates[2], 0)
    self.assertEqual(rates[3], rates[2])  # until the next refresh

  @parameterized.parameters((2, 'refresh'), (2, 'step'), (1, 'refresh'))
  @pytest.mark.few(2)
  def test_the_scale_of_s_ste_stays_and_its_flip_rate_is_of_one_step(self, every, flip_rate):
    recipe = dataclasses.replace(s24.recipes.s_ste(RULE, refresh_every=every), flip_rate=flip_rate)
    tx = s24.sparse_training(optax.sgd(0.3), recipe)
    params = normal(0)
    state, update = tx.init(params), jax.jit(tx.update)
    beta = state.projections['mlp']['down']['kernel']
    self.assertEqual(beta.shape, (3,))
    expected = np.nan
    for i in range(3):
      updates, state = update(normal(i + 1), state, params)
      old, params = params, optax.apply_updates(params, updates)
      np.testing.assert_array_equal(state.projections['mlp']['down']['kernel'], beta)
      before, after = (np.asarray(s24.soft_threshold(p['mlp']['up']['kernel']) != 0) for p in (old, params))
      self.assertTrue((before != after).any())
      rate = s24.get_flip_rate(state).per_weight['mlp/up/kernel']
      expected = np.mean(before != after) if (i + 1) % every == 0 or flip_rate == 'step' else expected
      np.testing.assert_allclose(rate, expected, rtol=1e-6)


if __name__ == '__main__':
  absltest.main()
