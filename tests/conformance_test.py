"""What every projection and every recipe must keep to, on one device and on eight.

A two-layer network is trained for three steps by each case in each layout, once; the tests look at that record.
"""

import functools
import re
import tempfile
from typing import Any, NamedTuple

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import sparse24_jax as s24
from sparse24_jax.clusters import with_neurons
from sparse24_jax.optim import sparse_states
from sparse24_jax.rules import rule_for
from tests.quick import jit

RULE = '(up|down)/kernel'
RATE, STEPS = 0.1, 3
NARROW, WIDE, TOKENS = 32, 64, 64

PROJECTIONS = {
  'magnitude_2_4': s24.magnitude(),
  'magnitude_1_4': s24.magnitude(n=1),
  'transposable_exact': s24.transposable(),
  'transposable_two_approx': s24.transposable(method='two_approx'),
  'soft_threshold': s24.soft_threshold_projection(),
  'dynamic_sparse': s24.dynamic_sparse(0.3, drop_fraction=0.3, random_share=0.25),
  'dynamic_sparse_2_4': s24.dynamic_sparse(0.3, drop_fraction=0.3, random_share=0.25, structure='2:4'),
  'dynamic_sparse_transposable': s24.dynamic_sparse(
    0.3, drop_fraction=0.3, random_share=0.25, structure='transposable'
  ),
}
RECIPES = {
  'dense': s24.recipes.dense(RULE, watch=s24.magnitude()),
  'ste': s24.recipes.ste(RULE),
  'sr_ste_on_weights': s24.recipes.sr_ste(RULE, masked_decay=0.1),
  'sr_ste_on_gradients': s24.recipes.sr_ste(RULE, masked_decay=0.1, decay_on='gradients'),
  'transposable_srste': s24.recipes.transposable_srste(RULE, masked_decay=0.1, refresh_every=2),
  's_ste': s24.recipes.s_ste(RULE),
  's_ste_fp8': s24.recipes.s_ste(RULE, fp8=True),
  'step': s24.recipes.step(RULE),
  'mixed_sparsity': s24.recipes.mixed_sparsity(RULE, total_steps=STEPS, warm_up=0.4, restoration=0.3, refresh_every=1),
  'rigl': s24.recipes.rigl(RULE, density=0.4, total_steps=100, refresh_every=2),
  'set_': s24.recipes.set_(RULE, density=0.4, refresh_every=2),
  'static': s24.recipes.static(RULE, density=0.4),
} | {
  f'neuron_level{name}': s24.recipes.neuron_level(
    'up/kernel', 'down/kernel', policy=policy, warmup_fraction=0.0,
    dense_fraction=0.0, refresh_every=2,
  )
  # Clusters keep blocks of tokens, as published.
  for name, policy in (
    ('', s24.ActivationPolicy(s24.VNM(16, 8))),
    ('_clusters', s24.ActivationPolicy(s24.VNM(16, 8), s24.VNM(16, 8), 0.05, s24.Clusters(4, 32))),
  )
}  # fmt: skip
CASES = RECIPES | {
  name: s24.Recipe(name, (s24.Rule(RULE, s24.DotPolicy(projection, weight_grad='mvue')),), masked_decay=0.1)
  for name, projection in PROJECTIONS.items()
}
UNSTRUCTURED = ('dynamic_sparse', 'mixed_sparsity', 'rigl', 'set_', 'static')
# Spec of tokens, of weights. FSDP cuts the contracted axis, tensor parallelism the output axis.
LAYOUTS = {'data': ('d', (None, None)), 'fsdp': ('d', ('d', None)), 'tensor': (None, (None, 'd'))}
# One of each kind: masks for both passes, a scale with real FP8, links that move, moments that rest, activations. They
# are in the fast lane; all recipes train on the layout that cuts groups of weights, these on the others too.
KINDS = ('transposable_srste', 's_ste_fp8', 'mixed_sparsity', 'step', 'neuron_level_clusters')
OTHER_CASES = tuple(case for case in CASES if case not in KINDS)
PROJECTION_KINDS = ('transposable_exact', 'soft_threshold', 'dynamic_sparse')
# What the count of steps, and the layout, could matter to besides: links that move anew, activations without clusters.
OTHERS_THAT_MOVE = ('rigl', 'neuron_level', 'dynamic_sparse_2_4', 'dynamic_sparse_transposable')
OTHER_PROJECTIONS = tuple(name for name in PROJECTIONS if name not in PROJECTION_KINDS)
FAST_MESHES = (*((case, 'fsdp') for case in KINDS), ('transposable_srste', 'data'), ('transposable_srste', 'tensor'))
# Each projection's refresh is held to the same bits on meshes by itself.
SLOW_MESHES = tuple(
  (case, 'fsdp') for case in OTHER_CASES if case in (*RECIPES, *OTHERS_THAT_MOVE)
) + tuple(
  (case, layout) for case in KINDS[1:] for layout in ('data', 'tensor')
)
COLLECTIVES = r'all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast'


def mesh(axis_type=AxisType.Auto):
  return Mesh(np.array(jax.devices()[:8]), ('d',), axis_types=(axis_type,))


def place(tree, spec, axis_type=AxisType.Auto):
  return jax.device_put(tree, NamedSharding(mesh(axis_type), PartitionSpec(*spec)))


def weights(dtype=jnp.float32, seed=0):
  keys = jax.random.split(jax.random.key(seed), 2)
  shapes = {'up': (NARROW, WIDE), 'down': (WIDE, NARROW)}
  return {
    name: {'kernel': (jax.random.normal(key, shape) / 6).astype(dtype)}
    for key, (name, shape) in zip(keys, shapes.items(), strict=True)
  }


def phase_of(recipe):
  return 'dense' if recipe.name == 'dense' else 'sparse'


def optimizer(recipe, phase=None):
  phase = phase or phase_of(recipe)
  inner = s24.step_adam(RATE, eps=1e-2, phase=phase) if recipe.name == 'step' else optax.adam(RATE)
  return optax.chain(
    optax.clip_by_global_norm(1.0), s24.sparse_training(inner, recipe, phase=phase, learning_rate=RATE)
  )


def block(policy, params, states, x):
  """Both layers at once, which is how sparse activations run."""
  up, down = (params[name]['kernel'] for name in ('up', 'down'))
  by_role = with_neurons({name: states[name]['kernel'] for name in ('up', 'down')}, policy)
  return s24.neuron_level_ffn(jnp.tanh(x), up, down, by_role, policy=policy)


def loss(recipe, params, states, x, key):
  if activation := recipe.rules[0].activation:
    return jnp.mean(jnp.square(block(activation, params, states, x).astype(jnp.float32) - 1))
  policy = s24.DotPolicy() if phase_of(recipe) == 'dense' else recipe.rules[0].policy
  for name in ('up', 'down'):
    key, own = jax.random.split(key)
    state = states[name]['kernel'] if states else None
    x = s24.dot(jnp.tanh(x), params[name]['kernel'], state, policy=policy, key=own)
  return jnp.mean(jnp.square(x.astype(jnp.float32) - 1))


def make_step(recipe):
  tx = optimizer(recipe)

  def step(params, state, x, key):
    states = s24.sparse_variables(params, state, recipe, phase=phase_of(recipe))
    value, grads = jax.value_and_grad(lambda p: loss(recipe, p, states, x, key))(params)
    updates, state = tx.update(grads, state, params, unknown_extra=1)
    return optax.apply_updates(params, updates), state, value

  return jit(step)


class Record(NamedTuple):
  """A training: its losses, and parameters and state at the start, after one step and at the end."""

  losses: list[float]
  params: Any
  states: list[Any]
  compilations: int


@functools.cache
def run(case, layout=None):
  """Trains `case`, on one device if no layout is given."""
  params, x = weights(), jax.random.normal(jax.random.key(5), (TOKENS, NARROW))
  if layout:
    tokens, spec = LAYOUTS[layout]
    params, x = place(params, spec), place(x, (tokens, None))
  step = make_step(CASES[case])
  states = [jit(optimizer(CASES[case]).init)(params)]
  if layout:  # Zeros of moments follow nothing, so jit leaves them whole; everything like a weight goes with it.
    states = [jax.tree.map(lambda a: place(a, spec if a.ndim == 2 else ()), states[0])]
  losses = []
  for i in range(STEPS):
    key = jax.random.key(i)
    if layout:
      key = place(key, ())
    params, state, value = step(params, states[-1], x, key)
    states.append(state)
    losses.append(float(value))
  return Record(losses, params, states, step._cache_size())


def projection_of(case, name):
  return rule_for(f'{name}/kernel', CASES[case]).policy.projection


def masks(state, params, case):
  def mask(name, w):
    return jax.jit(projection_of(case, name).mask)(np.asarray(w), np.asarray(sparse_states(state)[f'{name}/kernel']))

  return {name: mask(name, leaf['kernel']) for name, leaf in params.items()}


def describe(tree):
  return jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), tree)


def assert_trees_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


class OneDeviceTest(parameterized.TestCase):

  @parameterized.parameters(
    *((case, 'bfloat16') for case in CASES), *((case, 'float32') for case in (*KINDS, *OTHER_CASES))
  )
  @pytest.mark.few(len(CASES) + len(KINDS))
  def test_dtypes_shapes_and_structure_stay(self, case, dtype):
    """Abstractly, for parameters of both dtypes, through init and a step of either phase."""
    recipe = CASES[case]
    params = jax.eval_shape(lambda: weights(dtype))
    for phase in {'dense', phase_of(recipe)}:
      tx = optimizer(recipe, phase)
      state = jax.eval_shape(tx.init, params)
      updates, after = jax.eval_shape(tx.update, params, state, params)
      self.assertEqual(describe(state), describe(after))
      self.assertEqual(describe(updates), describe(params))
      self.assertEqual({u.dtype for u in jax.tree.leaves(updates)}, {jnp.dtype(dtype)})
    x = jax.ShapeDtypeStruct((TOKENS, NARROW), dtype)
    stepped, after, _ = jax.eval_shape(make_step(recipe), params, state, x, jax.random.key(0))
    self.assertEqual((describe(stepped), describe(after)), (describe(params), describe(state)))

  @parameterized.parameters(*KINDS)
  def test_trains_with_one_compilation(self, case):
    self.check_training(case)

  @parameterized.parameters(*OTHER_CASES)
  @pytest.mark.slow
  def test_other_cases_train_with_one_compilation(self, case):
    self.check_training(case)

  def check_training(self, case):
    record = run(case)
    self.assertLess(record.losses[-1], record.losses[0])
    self.assertEqual(record.compilations, 1)
    for state in record.states:
      self.assertEqual(describe(state), describe(record.states[0]))
    abstract = jax.eval_shape(optimizer(CASES[case]).init, jax.eval_shape(weights))
    self.assertEqual(
      jax.tree.map(lambda a: (a.shape, a.dtype), abstract), jax.tree.map(lambda a: (a.shape, a.dtype), record.states[0])
    )
    if phase_of(CASES[case]) == 'sparse' and case not in UNSTRUCTURED:
      for name, leaf in s24.project(record.params, record.states[-1], CASES[case], phase='sparse').items():
        s24.verify24(leaf['kernel'], axis=-2 if projection_of(case, name).divisor[0] == 4 else -1)

  @parameterized.parameters(*KINDS)
  @pytest.mark.few(3)
  def test_accumulated_micro_batches_are_one_step(self, case):
    """Two halves of a gradient under MultiSteps give the state and the update of the whole."""
    self.check_accumulation(case)

  @parameterized.parameters(*OTHERS_THAT_MOVE)
  @pytest.mark.slow
  def test_accumulated_micro_batches_of_other_cases(self, case):
    self.check_accumulation(case)

  def check_accumulation(self, case):
    tx, params = optimizer(CASES[case]), weights()
    halves = weights(seed=1), weights(seed=2)
    multi = optax.MultiSteps(tx, every_k_schedule=2)

    @jit
    def both(params, a, b):
      state = multi.init(params)
      _, state = multi.update(a, state, params)
      between = state.inner_opt_state
      updates, state = multi.update(b, state, params)
      whole = jax.tree.map(lambda a, b: (a + b) / 2, a, b)
      return (updates, state.inner_opt_state), tx.update(whole, tx.init(params), params), between, tx.init(params)

    found, expected, between, start = both(params, *halves)
    assert_trees_equal(between, start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
    self.assertEqual(int(found[1][1].count), 1)

  def test_checkpoint_round_trip(self):
    self.check_checkpoint(KINDS)

  @pytest.mark.slow
  def test_checkpoint_round_trip_of_other_cases(self):
    self.check_checkpoint(OTHER_CASES)

  def check_checkpoint(self, cases):
    saved = {case: {'params': run(case).params, 'state': run(case).states[-1]} for case in cases}
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(f'{folder}/checkpoint', saved)
      checkpointer.wait_until_finished()
      abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), saved)
      loaded = checkpointer.restore(f'{folder}/checkpoint', abstract)
    self.assertEqual(jax.tree.structure(loaded), jax.tree.structure(saved))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(loaded), jax.tree.leaves(saved), strict=True):
      self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape), path)
      self.assertEqual(np.asarray(a).tobytes(), np.asarray(b).tobytes(), path)

  @pytest.mark.slow
  def test_checkpoint_of_a_sharded_run_keeps_values_and_shardings(self):
    record = run('transposable_srste', 'fsdp')
    saved = {'params': record.params, 'state': record.states[-1]}
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(f'{folder}/checkpoint', saved)
      checkpointer.wait_until_finished()
      abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), saved)
      loaded = checkpointer.restore(f'{folder}/checkpoint', abstract)
    assert_trees_equal(loaded, saved)
    jax.tree.map(lambda a, b: self.assertTrue(a.sharding.is_equivalent_to(b.sharding, a.ndim)), loaded, saved)


class EightDevicesTest(parameterized.TestCase):

  @parameterized.parameters(*FAST_MESHES)
  def test_trains_as_on_one_device(self, case, layout):
    self.check_losses_and_masks(case, layout)

  @parameterized.parameters(*SLOW_MESHES)
  @pytest.mark.slow
  def test_other_cases_train_as_on_one_device(self, case, layout):
    self.check_losses_and_masks(case, layout)

  def check_losses_and_masks(self, case, layout):
    one, eight = run(case), run(case, layout)
    self.assertEqual(eight.compilations, 1)
    assert_trees_equal(masks(eight.states[0], weights(), case), masks(one.states[0], weights(), case))
    np.testing.assert_allclose(eight.losses[0], one.losses[0], rtol=1e-5)
    # Gradients are summed in another order. Rounding to 8 bits makes a step of that, in one value of many, and so does
    # growth among sampled gradients, many of which are nearly equal.
    steps = 'fp8' in case or 'dynamic' in case
    np.testing.assert_allclose(eight.losses, one.losses, rtol=2e-3 if steps else 1e-5)
    if not steps:
      assert_trees_equal(masks(eight.states[-1], eight.params, case), masks(one.states[-1], one.params, case))
      rates = [s24.get_flip_rate(record.states[-1]).overall for record in (eight, one)]
      np.testing.assert_allclose(*rates, rtol=1e-6)

  @parameterized.parameters(*FAST_MESHES)
  def test_shardings_stay(self, case, layout):
    self.check_shardings(case, layout)

  @parameterized.parameters(*SLOW_MESHES)
  @pytest.mark.slow
  def test_shardings_of_other_cases_stay(self, case, layout):
    self.check_shardings(case, layout)

  def check_shardings(self, case, layout):
    record = run(case, layout)
    sharding = NamedSharding(mesh(), PartitionSpec(*LAYOUTS[layout][1]))
    first, last = record.states[0], record.states[-1]
    jax.tree.map(lambda a, b: self.assertTrue(a.sharding.is_equivalent_to(b.sharding, a.ndim)), first, last)
    states = s24.sparse_variables(record.params, last, CASES[case], phase=phase_of(CASES[case]))
    for leaf in jax.tree.leaves((record.params, states)):
      if leaf.ndim == 2:
        self.assertTrue(leaf.sharding.is_equivalent_to(sharding, 2), leaf.sharding)

  @parameterized.product(name=PROJECTION_KINDS, layout=('fsdp', 'tensor'))
  def test_refresh_needs_no_communication_and_gives_the_same_bits(self, name, layout):
    self.check_refresh(name, layout)

  @parameterized.product(name=OTHER_PROJECTIONS, layout=('fsdp', 'tensor'))
  @pytest.mark.slow
  def test_refresh_of_others_needs_no_communication_and_gives_the_same_bits(self, name, layout):
    self.check_refresh(name, layout)

  def check_refresh(self, name, layout):
    projection, w = PROJECTIONS[name], weights()['up']['kernel']
    sharded = place(w, LAYOUTS[layout][1])
    old = jit(projection.init)(w)
    state = place(old, LAYOUTS[layout][1] if old.ndim else ())

    def refresh(w, state):
      state = projection.refresh(w, state)
      return state, projection.mask(w, state), projection.apply(w, state)

    refresh = jit(refresh)
    compiled = refresh.lower(sharded, state).compile()
    self.assertEqual(re.findall(COLLECTIVES, compiled.as_text()), [])
    found = compiled(sharded, state)
    assert_trees_equal(found, refresh(w, old))
    self.assertTrue(found[1].sharding.is_equivalent_to(sharded.sharding, 2))

  @parameterized.parameters(*PROJECTION_KINDS)
  def test_optimizer_step_reduces_scalars_only(self, name):
    """With a plain SGD the whole update, refresh and flip rate included, moves a few counts and no weights."""
    self.check_communication(name)

  @parameterized.parameters(*OTHER_PROJECTIONS)
  @pytest.mark.slow
  def test_optimizer_step_of_others_reduces_scalars_only(self, name):
    self.check_communication(name)

  def check_communication(self, name):
    recipe = CASES[name]
    tx = s24.sparse_training(optax.sgd(0.1), recipe)
    params = place(weights(), LAYOUTS['fsdp'][1])
    state = jit(tx.init)(params)
    text = jit(tx.update).lower(params, state, params).compile().as_text()
    for line in text.splitlines():
      if re.search(rf'= .*\b({COLLECTIVES})(-start)?\(', line):
        self.assertRegex(line, r'\ball-reduce')
        shapes = re.findall(r'\w+\[([\d,]*)\]', line.split(' all-reduce')[0])
        self.assertEqual(set(shapes), {''}, line)

  @parameterized.product(name=('magnitude_2_4', 'transposable_exact', 'soft_threshold'), layout=('fsdp', 'tensor'))
  def test_refresh_on_an_explicit_mesh(self, name, layout):
    projection, w = PROJECTIONS[name], weights()['up']['kernel']
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
      sharded = place(w, LAYOUTS[layout][1], AxisType.Explicit)
      mask = jax.jit(lambda w: projection.mask(w, projection.init(w)))(sharded)
    np.testing.assert_array_equal(mask, projection.mask(w, projection.init(w)))

  @parameterized.parameters(('transposable_srste', 'fsdp'), ('s_ste', 'tensor'))
  @pytest.mark.few
  def test_trains_on_an_explicit_mesh(self, case, layout):
    """`jax.make_mesh` makes such meshes: what JAX does not decide there, we must."""
    self.check_explicit_mesh(case, layout)

  @parameterized.parameters(('transposable_srste', 'tensor'), ('s_ste', 'fsdp'), ('s_ste', 'data'))
  @pytest.mark.slow
  def test_trains_on_other_explicit_meshes(self, case, layout):
    self.check_explicit_mesh(case, layout)

  def check_explicit_mesh(self, case, layout):
    tokens, spec = LAYOUTS[layout]
    x = jax.random.normal(jax.random.key(5), (TOKENS, NARROW))
    with jax.set_mesh(mesh(AxisType.Explicit)):
      params = place(weights(), spec, AxisType.Explicit)
      x, key = place(x, (tokens, None), AxisType.Explicit), place(jax.random.key(0), (), AxisType.Explicit)
      state = jit(optimizer(CASES[case]).init)(params)
      params, state, value = make_step(CASES[case])(params, state, x, key)
    np.testing.assert_allclose(value, run(case).losses[0], rtol=1e-5)
    states = s24.sparse_variables(params, state, CASES[case])
    expected = s24.sparse_variables(params, run(case).states[1], CASES[case])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), states, expected)  # masks, or a scale each

  @parameterized.product(spec=(('d', None), (None, 'd')), transposed=(False, True))
  def test_samples_have_the_same_bits(self, spec, transposed):
    """With the identity as activations, the weight gradient is the sampled output gradient itself."""
    x, w = jnp.eye(TOKENS), jnp.zeros((TOKENS, NARROW))
    dz = jax.random.normal(jax.random.key(1), (TOKENS, NARROW))
    key = jax.random.key(2)

    def sample(x, w, dz):
      return jax.vjp(lambda w: s24.dot(x, w, policy=s24.DotPolicy(weight_grad='mvue'), key=key), w)[1](dz)[0]

    sample = jit(sample)
    expected = sample(x, w, dz)
    s24.verify24(expected)
    found = sample(place(x, ('d', None) if transposed else ()), place(w, spec), place(dz, spec))
    np.testing.assert_array_equal(found, expected)

  @parameterized.named_parameters(
    ('magnitude_in', s24.magnitude(), (16, 64), ('d', None),
     r'mlp/kernel of shape \(16, 64\) is sharded to \(2, 64\).* 2 entries along axis -2.*multiple of 4'),
    ('two_of_eight_in', s24.magnitude(m=8), (32, 64), ('d', None),
     r'\(4, 64\).* 4 entries along axis -2.*multiple of 8'),
    ('transposable_out', s24.transposable(), (64, 16), (None, 'd'), r'\(64, 2\).* 2 entries along axis -1.*of 4'),
    ('scanned_layers', s24.magnitude(), (3, 16, 64), (None, 'd', None), r'\(3, 2, 64\).* 2 entries along axis -2'),
  )  # fmt: skip
  def test_groups_that_straddle_shards_are_refused(self, projection, shape, spec, message):
    recipe = s24.Recipe('r', (s24.Rule('mlp/.*', s24.DotPolicy(projection)),))
    tx = s24.sparse_training(optax.sgd(0.1), recipe)
    whole = {'mlp': {'kernel': jnp.ones(shape)}}
    params, state = place(whole, spec), tx.init(whole)
    for call in (
      lambda: tx.init(params),
      lambda: s24.sparse_variables(params, state, recipe),
      lambda: s24.project(params, state, recipe),
    ):
      with self.assertRaisesRegex(ValueError, message):
        call()

  def test_other_shardings_are_fine(self):
    """Cutting the output axis of a magnitude mask, or the layers of a stack, cuts no group."""
    recipe = s24.recipes.ste('.*')
    params = {'a': place(jnp.ones((8, 16)), (None, 'd')), 'b': place(jnp.ones((8, 4, 4)), ('d', None, None))}
    s24.sparse_training(optax.sgd(0.1), recipe).init(params)


if __name__ == '__main__':
  absltest.main()
