"""Dynamic sparse training through `sparse_training`: links, moments, densities, and the same masks everywhere."""

import functools
from unittest import mock

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.optim import _evolve, sparse_states
from sparse24_jax.topology import Context
from tests.quick import jit

SHAPES = {'attn': {'kernel': (16, 64)}, 'mlp': {'kernel': (2, 32, 16), 'bias': (16,)}, 'head': {'kernel': (16, 8)}}
SPARSE = ('attn/kernel', 'mlp/kernel')
RULE = '(attn|mlp)/.*'
INNERS = {
  'by_prefix': lambda: optax.partition(
    {'block': optax.adam(1e-2), 'rest': optax.set_to_zero()}, {'attn': 'block', 'mlp': 'block', 'head': 'rest'}
  ),
  'momentum': lambda: optax.sgd(0.1, momentum=0.9),
  'adamw': lambda: optax.adamw(1e-2, weight_decay=0.1),
  'by_label': lambda: optax.multi_transform(
    {'matrix': optax.adam(1e-2), 'vector': optax.sgd(0.1)},
    lambda params: jax.tree.map(lambda w: 'matrix' if w.ndim > 1 else 'vector', params),
  ),
  'injected': lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
  # At a weight's place it has rows, columns and an array of one number besides the moment of the weight's shape.
  'adafactor': lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, momentum=0.9),
}


jit_update = functools.cache(lambda tx: jit(tx.update))


def normal(seed):
  leaves, structure = jax.tree.flatten(SHAPES, is_leaf=lambda node: isinstance(node, tuple))
  rng = np.random.default_rng(seed)
  return structure.unflatten([jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in leaves])


def of(tree, path):
  name, leaf = path.split('/')
  return np.asarray(tree[name][leaf])


def recipe_of(*args, refresh_every=2, **kwargs):
  rule = s24.Rule(RULE, s24.DotPolicy(s24.dynamic_sparse(*args, **kwargs)))
  return s24.Recipe('test', (rule,), refresh_every=refresh_every)


@functools.cache
def by_adam():
  """What several tests train with: compiled once."""
  return s24.sparse_training(optax.adam(1e-2), recipe_of(0.25, drop_fraction=0.4, random_share=0.25))


@functools.cache
def by_sgd():
  return s24.sparse_training(optax.sgd(0.1), recipe_of(0.25, drop_fraction=0.4))


def train(tx, params, steps, state=None, seed=1):
  """Yields parameters and state after each step, and its gradient."""
  state, update = jit(tx.init)(params) if state is None else state, jit_update(tx)
  for step in range(steps):
    grads = normal(seed + step)
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
    yield params, state, grads


def moments(inner_state, path):
  """Every array of the shape of a weight inside an optimizer state."""
  shape = of(normal(0), path).shape
  return [np.asarray(leaf) for leaf in jax.tree.leaves(inner_state) if getattr(leaf, 'shape', ()) == shape]


class LinksTest(parameterized.TestCase):
  @parameterized.parameters(*INNERS)
  @pytest.mark.few
  def test_pruned_weights_and_their_moments_are_zero(self, inner):
    recipe = recipe_of(0.25, drop_fraction=0.4, random_share=0.25)
    changes = 0
    old = None
    for params, state, _ in train(s24.sparse_training(INNERS[inner](), recipe), normal(0), 5):
      masks = sparse_states(state)
      for path in SPARSE:
        mask = np.asarray(masks[path])
        np.testing.assert_array_equal(of(params, path)[~mask], 0)
        self.assertNotEmpty(moments(state.inner_state, path))
        for moment in moments(state.inner_state, path):
          np.testing.assert_array_equal(moment[~mask], 0)
          self.assertGreater(np.abs(moment[mask]).sum(), 0)
        if old is not None:
          new_links = mask & ~np.asarray(old[path])
          np.testing.assert_array_equal(of(params, path)[new_links], 0)
          changes += new_links.sum()
      old = masks
    self.assertGreater(changes, 0)

  @parameterized.parameters(2, 1)
  @pytest.mark.few
  def test_pruned_weights_are_zero_beside_gradients_of_few_bits(self, refresh_every):
    """Which plain SGD hands on: -w, rounded to bfloat16, would leave a rest of w."""
    tx = s24.sparse_training(optax.sgd(0.1), recipe_of(0.25, drop_fraction=0.4, refresh_every=refresh_every))
    params = normal(0)
    state = jit(tx.init)(params)
    for step in range(1, 4):
      updates, state = jit_update(tx)(jax.tree.map(lambda g: g.astype(jnp.bfloat16), normal(step)), state, params)
      self.assertEqual(updates['head']['kernel'].dtype, jnp.bfloat16)
      params = optax.apply_updates(params, updates)
      for path, mask in sparse_states(state).items():
        np.testing.assert_array_equal(of(params, path)[~np.asarray(mask)], 0)

  def test_first_step_against_plain_adam_on_the_links(self):
    """Between updates of the topology: the inner optimizer on masked gradients, nothing else."""
    recipe, params = recipe_of(0.5, refresh_every=10), normal(0)
    inner = optax.adamw(1e-2, weight_decay=0.1)
    tx = s24.sparse_training(inner, recipe)
    masks = {path: np.asarray(mask) for path, mask in sparse_states(jit(tx.init)(params)).items()}

    def masked(tree):
      tree = jax.tree.map(jnp.copy, tree)
      for path in SPARSE:
        name, leaf = path.split('/')
        tree[name][leaf] = jnp.where(masks[path], tree[name][leaf], 0)
      return tree

    expected = masked(params)
    inner_state = inner.init(expected)
    for found, _, grads in train(tx, params, 3):
      updates, inner_state = jit_update(inner)(masked(grads), inner_state, expected)
      expected = optax.apply_updates(expected, updates)
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found, expected)

  def test_growth_follows_the_dense_gradient_of_the_step(self):
    topology = recipe_of(0.25, drop_fraction=0.4).rules[0].policy.projection.update
    tx, params = by_sgd(), normal(0)
    (first, before, _), (second, after, grads) = train(tx, params, 2)
    del first
    masks, new = sparse_states(before), sparse_states(after)
    step = jnp.asarray(2, jnp.int32)
    shapes = {path: of(params, path).shape for path in SPARSE}
    for path in SPARSE:
      mask = masks[path]
      # The weight as the step left it, before links were dropped.
      stepped = np.where(mask, of(self._one_step(tx, params), path), 0)
      stepped = stepped - np.float32(0.1) * np.where(mask, of(grads, path), 0)
      update = jit(lambda *args, path=path: topology(*args, Context(step, path, shapes)).state)
      expected = update(stepped, of(grads, path), mask)
      np.testing.assert_array_equal(new[path], expected)
      self.assertTrue((expected != mask).any())
      np.testing.assert_array_equal(of(second, path) != 0, np.asarray(expected) & np.asarray(mask))

  def _one_step(self, tx, params):
    return next(train(tx, params, 1))[0]

  @parameterized.product(refresh_every=(2, 1), value=(np.nan, np.inf))
  @pytest.mark.few
  def test_an_inner_optimizer_that_skips_a_step_finds_its_links_unmoved(self, refresh_every, value):
    inner = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=9)
    recipe = recipe_of(0.3, drop_fraction=0.5, refresh_every=refresh_every)
    tx = s24.sparse_training(inner, recipe)
    params = normal(0)
    state = jit(tx.init)(params)
    for step in range(1, 5):
      skipped = step == 2
      grads = normal(step)
      if skipped:  # in one matrix, which is not even a sparse one
        grads['head']['kernel'] = grads['head']['kernel'].at[3, 3].set(value)
      updates, new = jit_update(tx)(grads, state, params)
      stepped = optax.apply_updates(params, updates)
      moved = sum(int((sparse_states(state)[path] != sparse_states(new)[path]).sum()) for path in SPARSE)
      self.assertEqual(moved > 0, not skipped and step % refresh_every == 0, step)
      if skipped:
        jax.tree.map(np.testing.assert_array_equal, stepped, params)
      params, state = stepped, new

  def test_links_of_a_weight_that_is_not_finite_stay(self):
    """A NaN counts as the smallest magnitude: its link would be dropped, and it be hidden as a zero."""
    tx, params, grads = by_sgd(), normal(0), normal(1)
    state = jit(tx.init)(params)
    mask = np.asarray(sparse_states(state)['attn/kernel'])
    at = tuple(np.argwhere(mask)[0])
    params['attn']['kernel'] = params['attn']['kernel'].at[at].set(np.nan)
    for _ in range(2):
      updates, state = jit_update(tx)(grads, state, params)
      params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(sparse_states(state)['attn/kernel'], mask)
    self.assertTrue(np.isnan(of(params, 'attn/kernel')[at]))
    rates = s24.get_flip_rate(state)
    self.assertTrue(np.isnan(rates.overall) and np.isnan(rates.per_weight['attn/kernel']))
    self.assertGreater(rates.per_weight['mlp/kernel'].min(), 0)

  @pytest.mark.slow
  def test_moments_stay_when_told_to(self):
    keeps = recipe_of(0.25, drop_fraction=0.4, random_share=0.25, reset_moments=False)
    optimizers = by_adam(), s24.sparse_training(optax.adam(1e-2), keeps)
    reset, kept = (list(train(tx, normal(0), 2)) for tx in optimizers)
    for path in SPARSE:
      mask = np.asarray(sparse_states(kept[-1][1])[path])
      np.testing.assert_array_equal(mask, sparse_states(reset[-1][1])[path])
      for a, b in zip(moments(reset[-1][1].inner_state, path), moments(kept[-1][1].inner_state, path), strict=True):
        self.assertGreater(np.abs(b[~mask]).sum(), 0)
        np.testing.assert_array_equal(a[~mask], 0)
        np.testing.assert_array_equal(a[mask], b[mask])

  def test_weights_are_searched_together_or_apart(self):
    sizes = {i: of(normal(0), path).size for i, path in enumerate(SPARSE)}
    self.assertEqual(_evolve._groups(sizes), [[0], [1]])
    *_, (params, state, _) = train(by_adam(), normal(0), 4)
    with mock.patch.object(_evolve, '_LOOPS', 1):
      self.assertEqual(_evolve._groups(sizes), [[0, 1]])
      *_, found = train(by_adam.__wrapped__(), normal(0), 4)
    jax.tree.map(np.testing.assert_array_equal, found[:2], (params, state))

  def test_a_dense_phase_trains_everything_and_the_next_sparse_one_prunes(self):
    recipe = s24.recipes.mixed_sparsity(
      RULE, total_steps=10, density=0.2, warm_up=0.4, restoration=0.2, structure='2:4', refresh_every=2
    )
    build = {p: s24.sparse_training(optax.sgd(0.1), recipe, phase=p) for p in ('dense', 'sparse')}
    params, state, found = normal(0), None, []
    for step in range(10):
      phase = s24.phase_at(recipe, step, 10)
      params, state, _ = next(train(build[phase], params, 1, state, seed=step))
      found.append((phase, float(np.mean(of(params, 'attn/kernel') != 0))))
      if phase == 'sparse':
        for path in SPARSE:
          s24.verify24(jnp.asarray(of(params, path)))
    self.assertEqual([phase for phase, _ in found], ['dense'] * 4 + ['sparse'] * 4 + ['dense'] * 2)
    self.assertEqual([share for phase, share in found if phase == 'dense'], [1.0] * 6)
    self.assertEqual(found[4][1], 0.5)
    self.assertLess(found[7][1], 0.35)

  @parameterized.parameters('step', 'refresh')
  @pytest.mark.few
  def test_beside_a_projection_of_another_kind(self, flip_rate):
    rules = (
      s24.Rule('attn/.*', s24.DotPolicy(s24.magnitude())),
      s24.Rule('mlp/.*', s24.DotPolicy(s24.dynamic_sparse(0.25, drop_fraction=0.4))),
    )
    recipe = s24.Recipe('both', rules, refresh_every=2, flip_rate=flip_rate)
    old = normal(0)
    search = jit(s24.magnitude_mask)
    for step, (params, state, _) in enumerate(train(s24.sparse_training(optax.sgd(0.1), recipe), old, 4), 1):
      masks, rates = sparse_states(state), s24.get_flip_rate(state).per_weight
      self.assertTrue((of(params, 'attn/kernel') != 0).all())  # pruned there is not gone
      if step % 2 == 0:
        np.testing.assert_array_equal(masks['attn/kernel'], search(params['attn']['kernel']))
        self.assertGreater(float(rates['mlp/kernel'].min()), 0)
      elif flip_rate == 'step':
        self.assertEqual(float(rates['mlp/kernel'].max()), 0)
      np.testing.assert_array_equal(of(params, 'mlp/kernel')[~np.asarray(masks['mlp/kernel'])], 0)

  def test_flip_rate(self):
    states = [state for _, state, _ in train(by_sgd(), normal(0), 3)]
    old, new = (sparse_states(states[i]) for i in (0, 1))
    rate = s24.get_flip_rate(states[1])
    np.testing.assert_allclose(rate.overall, s24.flip_rate(old, new), rtol=1e-6)
    self.assertGreater(float(rate.overall), 0)
    self.assertEqual(rate.per_weight['mlp/kernel'].shape, (2,))
    self.assertEqual(float(s24.get_flip_rate(states[2]).overall), float(rate.overall))  # until the next one


class DensityTest(parameterized.TestCase):
  @parameterized.parameters(None, '2:4')
  @pytest.mark.few
  def test_schedule_and_distribution_are_followed_in_one_compilation(self, structure):
    schedule = s24.DensitySchedule((s24.Stage(0.5, 0.2, 'linear'), s24.Stage(0.5, 0.4)), 8, start=0.5)
    recipe = recipe_of(
      schedule, drop_fraction=0.2, random_share=0.5, distribution='erdos_renyi', structure=structure, refresh_every=1
    )
    tx, params = s24.sparse_training(optax.sgd(0.1), recipe), normal(0)
    state, update = jit(tx.init)(params), jit(tx.update)
    shapes = {path: of(params, path).shape for path in SPARSE}
    for step in range(1, 8):
      updates, state = update(normal(step), state, params)
      params = optax.apply_updates(params, updates)
      wanted = s24.layer_densities(schedule(step), shapes, 'erdos_renyi')
      for path, mask in sparse_states(state).items():
        size = np.prod(mask.shape[-2:])
        share = min(float(wanted[path]), 0.5) if structure else float(wanted[path])
        np.testing.assert_allclose(mask.sum((-2, -1)), share * size, atol=0.51)
        if structure:
          s24.verify24(jnp.where(mask, 1.0, 0.0))
      if not structure:
        total = sum(int(mask.sum()) for mask in sparse_states(state).values())
        size = sum(mask.size for mask in sparse_states(state).values())
        self.assertAlmostEqual(total / size, float(schedule(step)), delta=2 / size)
    self.assertEqual(update._cache_size(), 1)
    self.assertNotEqual(*(round(float(d), 3) for d in wanted.values()))

  def test_mixed_sparsity_goes_there_and_back(self):
    recipe = s24.recipes.mixed_sparsity(
      RULE, total_steps=20, density=0.1, warm_up=0.4, restoration=0.2, refresh_every=2
    )
    shares = []
    for params, state, _ in train(s24.sparse_training(optax.sgd(0.1), recipe), normal(0), 18):
      shares.append(np.mean(np.concatenate([np.asarray(m).ravel() for m in sparse_states(state).values()])))
      del params
    self.assertEqual(shares[0], 1.0)
    np.testing.assert_allclose(shares[7:15], 0.1, atol=1e-3)
    self.assertEqual(shares[16:], [1.0, 1.0])
    self.assertGreater(shares[3], shares[5])


@functools.cache
def masks_after_two_updates(structure, place=lambda tree: tree):
  recipe = recipe_of(0.25, drop_fraction=0.4, random_share=0.5, structure=structure, refresh_every=1)
  tx = s24.sparse_training(optax.sgd(0.0), recipe)

  params = place(normal(0))
  state, update = jit(tx.init)(params), jit_update(tx)
  for seed in (1, 2):
    updates, state = update(place(normal(seed)), state, params)
    params = optax.apply_updates(params, updates)
  return sparse_states(state)


class EverywhereTest(parameterized.TestCase):

  @parameterized.product(structure=(None, '2:4', 'transposable'), axis_type=(AxisType.Auto, AxisType.Explicit))
  @pytest.mark.few(3)
  def test_the_first_mask_is_divided_as_its_weight_is(self, structure, axis_type):
    """It is random, and would otherwise be whole on one device until the second step, which is then compiled anew."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('a', 'b'), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec('a', 'b'))
    params = {'mlp': {'kernel': jax.device_put(normal(0)['attn']['kernel'], sharding)}}
    recipe = s24.Recipe('one', (s24.Rule('.*', s24.DotPolicy(s24.dynamic_sparse(0.25, structure=structure))),))
    with jax.set_mesh(mesh):
      state = jit(s24.sparse_training(optax.sgd(0.1), recipe).init)(params)
    self.assertEqual(state.projections['mlp']['kernel'].sharding, sharding)

  @parameterized.parameters(
    (None, AxisType.Explicit), (None, AxisType.Auto), ('2:4', AxisType.Explicit), ('2:4', AxisType.Auto),
    ('transposable', AxisType.Auto), ('transposable', AxisType.Explicit),
  )  # fmt: skip
  @pytest.mark.few
  def test_masks_do_not_depend_on_sharding(self, structure, axis_type):
    """Eight devices, each weight cut along another axis: the masks of one device, bit for bit."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('a', 'b'), axis_types=(axis_type,) * 2)
    specs = {'attn': ('a', 'b'), 'mlp': (None, 'a', 'b'), 'head': ()}

    def place(tree):
      return {
        name: {
          leaf: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*(specs[name] if leaf == 'kernel' else ()))))
          for leaf, x in node.items()
        }
        for name, node in tree.items()
      }

    with jax.set_mesh(mesh):
      found = masks_after_two_updates(structure, place)
    for path, mask in masks_after_two_updates(structure).items():
      np.testing.assert_array_equal(found[path], mask)
      self.assertFalse(found[path].sharding.is_fully_replicated)

  @pytest.mark.slow
  def test_nnx_optimizer(self):
    class Model(nnx.Module):
      def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

    model = Model(nnx.Rngs(0))
    rule = s24.Rule('(up|down)/kernel', s24.DotPolicy(s24.dynamic_sparse(0.25, drop_fraction=0.4)))
    recipe = s24.Recipe('test', (rule,), refresh_every=2)
    optimizer = nnx.Optimizer(model, s24.sparse_training(optax.adam(1e-2), recipe), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
      grads = nnx.grad(lambda model: jnp.sum((model.down(model.up(jnp.ones((4, 8)))) - 1) ** 2))(model)
      optimizer.update(model, grads)

    for _ in range(2):
      step(model, optimizer)
    masks = sparse_states(optimizer.opt_state)
    for path, layer in (('up/kernel', model.up), ('down/kernel', model.down)):
      mask = np.asarray(jax.tree.leaves(masks[path])[0])
      self.assertEqual(mask.sum(), 32)
      np.testing.assert_array_equal(np.asarray(layer.kernel[...])[~mask], 0)


class AlikeTest(parameterized.TestCase):
  """Weights of one kind are changed by one program in turn."""

  def _params(self, count, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {f'h{i}': (32, 16) for i in range(count)} | {'other': (16, 32)}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}

  def _recipe(self, **kwargs):
    kwargs = dict(drop_fraction=0.4, random_share=0.5, distribution='erdos_renyi') | kwargs
    rule = s24.Rule('h.*|other', s24.DotPolicy(s24.dynamic_sparse(0.3, **kwargs)))
    return s24.Recipe('test', (rule,), refresh_every=2)

  def _trained(self, recipe):
    tx, params = s24.sparse_training(optax.adam(1e-2), recipe), self._params(5)
    state = jit(tx.init)(params)
    for step in range(4):
      updates, state = jit(tx.update)(self._params(5, step + 1), state, params)
      params = optax.apply_updates(params, updates)
    return params, state

  @parameterized.parameters(
    {}, dict(structure='2:4'), dict(structure='transposable', distribution='uniform'), dict(bound=True)
  )
  @pytest.mark.few
  def test_each_changes_as_by_itself(self, bound=False, **kwargs):
    recipe = self._recipe(**kwargs)
    if bound:  # stored as [out, in]

      def f(params, x):
        return sum(jnp.sum(jnp.dot(x[: w.shape[1]], w.T) ** 2) for w in params.values())

      recipe = s24.bind(recipe, f, self._params(5), jnp.ones(32))
    with mock.patch.object(_evolve, '_LOOPS', 1):
      params, state = self._trained(recipe)
    with mock.patch.object(_evolve, '_kind', lambda weight, state: weight.context.path):
      one_by_one, its_state = self._trained(recipe)
    jax.tree.map(np.testing.assert_array_equal, params, one_by_one)
    jax.tree.map(np.testing.assert_array_equal, sparse_states(state), sparse_states(its_state))
    masks = sparse_states(state)
    self.assertTrue((np.asarray(masks['h0']) != np.asarray(masks['h1'])).any())

  def test_those_of_other_names_or_of_a_topology_of_their_own_have_their_own_program(self):
    """On a mesh q and o may be divided in other ways, which types need not say."""

    class Own(s24.Topology):
      pass

    projection, w = s24.dynamic_sparse(0.3), jnp.ones((8, 8))

    def kind(path, projection=projection):
      context = Context(jnp.int32(0), path, {path: w.shape})
      return _evolve._kind(_evolve._Weight(projection, w, w, context), w > 0)

    self.assertEqual(kind('h_0/q'), kind('h_11/q'))
    self.assertNotEqual(kind('h_0/q'), kind('h_0/o'))
    own = projection._replace(update=Own(0.3))
    self.assertNotEqual(kind('h_0/q', own), kind('h_1/q', own))

  def test_the_program_does_not_grow_by_their_number(self):
    def loops(count):
      tx, params = s24.sparse_training(optax.sgd(0.1), self._recipe()), self._params(count)
      return str(jax.make_jaxpr(tx.update)(params, tx.init(params), params)).count('while[')

    with mock.patch.object(_evolve, '_LOOPS', 1):
      self.assertEqual(loops(6), loops(2))


if __name__ == '__main__':
  absltest.main()
