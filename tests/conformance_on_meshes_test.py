"""What every projection and recipe must keep to on eight devices: the bits of one, shardings, no communication."""

import re

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.optim import sparse_states
from sparse24_jax.optim._left import SUMS
from tests.conformance import (
  assert_trees_equal,
  CASES,
  KINDS,
  LAYOUTS,
  make_step,
  mesh,
  NARROW,
  optimizer,
  OTHER_CASES,
  OTHER_PROJECTIONS,
  OTHERS_THAT_MOVE,
  phase_of,
  place,
  PROJECTION_KINDS,
  projection_of,
  PROJECTIONS,
  RECIPES,
  run,
  TOKENS,
  weights,
)
from tests.draws import gaussian
from tests.quick import jit

# Masks on weights that are cut along their groups, and activations. That samples and searches are the same under tensor
# parallelism tests below say; that moving links are the same on any mesh, dynamic_sparse_test.
FAST_MESHES = (('transposable_srste', 'fsdp'), ('neuron_level_clusters', 'data'))
# Each projection's refresh is held to the same bits on meshes by itself.
SLOW_MESHES = tuple(
  (case, 'fsdp') for case in OTHER_CASES if case in (*RECIPES, *OTHERS_THAT_MOVE)
) + tuple(
  (case, layout) for case in KINDS for layout in LAYOUTS
  if (case, layout) not in FAST_MESHES and (layout != 'data' or 'fp8' in case)  # whose scale is that of all tokens
)
COLLECTIVES = r'all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast'


def masks(state, params, case):
  def mask(name, w):
    return jax.jit(projection_of(case, name).mask)(np.asarray(w), np.asarray(sparse_states(state)[f'{name}/kernel']))

  return {name: mask(name, leaf['kernel']) for name, leaf in params.items()}


class EightDevicesTest(parameterized.TestCase):

  @parameterized.parameters(*FAST_MESHES)
  @pytest.mark.few
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
  @pytest.mark.few
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

  @parameterized.parameters(
    *zip(PROJECTION_KINDS, ('fsdp', 'tensor', 'fsdp'), strict=True),
    *zip(PROJECTION_KINDS, ('tensor', 'fsdp', 'tensor'), strict=True),
  )
  @pytest.mark.few(len(PROJECTION_KINDS))
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

  @parameterized.parameters('transposable_exact', 'dynamic_sparse')
  @pytest.mark.few
  def test_optimizer_step_reduces_numbers_only(self, name):
    """With a plain SGD the whole update, refresh and flip rate included, moves counts and sums, and no weights."""
    self.check_communication(name)

  @parameterized.parameters('soft_threshold', *OTHER_PROJECTIONS)
  @pytest.mark.slow
  def test_optimizer_step_of_others_reduces_numbers_only(self, name):
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
        self.assertLessEqual(set(shapes), {'', str(SUMS), str(SUMS + 1)}, line)

  @parameterized.product(layout=('fsdp', 'tensor'), name=('transposable_exact', 'soft_threshold', 'magnitude_2_4'))
  @pytest.mark.few
  def test_refresh_on_an_explicit_mesh(self, name, layout):
    projection, w = PROJECTIONS[name], weights()['up']['kernel']
    explicit = mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
      sharded = place(w, LAYOUTS[layout][1], AxisType.Explicit)
      mask = jax.jit(lambda w: projection.mask(w, projection.init(w)))(sharded)
    np.testing.assert_array_equal(mask, projection.mask(w, projection.init(w)))

  @parameterized.parameters(
    ('transposable_srste', 'fsdp'), ('transposable_srste', 'tensor'), ('s_ste', 'fsdp'), ('s_ste', 'tensor')
  )
  @pytest.mark.slow
  def test_trains_on_an_explicit_mesh(self, case, layout):
    """`jax.make_mesh` makes such meshes: what JAX does not decide there, we must. An nnx layer, moving links: fast."""
    tokens, spec = LAYOUTS[layout]
    x = gaussian(5, (TOKENS, NARROW))
    with jax.set_mesh(mesh(AxisType.Explicit)):
      params = place(weights(), spec, AxisType.Explicit)
      x, key = place(x, (tokens, None), AxisType.Explicit), place(jax.random.key(0), (), AxisType.Explicit)
      state = jit(optimizer(CASES[case]).init)(params)
      params, state, value = make_step(CASES[case])(params, state, x, key)
    np.testing.assert_allclose(value, run(case).losses[0], rtol=1e-5)
    states = s24.sparse_variables(params, state, CASES[case])
    expected = s24.sparse_variables(params, run(case).states[1], CASES[case])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), states, expected)  # masks, or a scale each

  @parameterized.parameters((('d', None), False), ((None, 'd'), True), (('d', None), True), ((None, 'd'), False))
  @pytest.mark.few(2)
  def test_samples_have_the_same_bits(self, spec, transposed):
    """With the identity as activations, the weight gradient is the sampled output gradient itself."""
    x, w = np.eye(TOKENS, dtype=np.float32), np.zeros((TOKENS, NARROW), np.float32)
    dz = gaussian(1, (TOKENS, NARROW))
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
