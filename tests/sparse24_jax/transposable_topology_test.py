"""Topologies whose masks are parts of transposable ones, against enumeration of the 90 patterns."""

import functools
import itertools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.optim import sparse_states
from sparse24_jax.rules import match_rules
from sparse24_jax.topology import _best_pattern, Context
from tests.quick import jit

SHAPE = (2, 16, 12)
SIZE = 16 * 12

PAIRS = [np.array([i in pair for i in range(4)]) for pair in itertools.combinations(range(4), 2)]
PATTERNS = np.array([rows for rows in itertools.product(PAIRS, repeat=4) if (np.sum(rows, axis=0) == 2).all()])


def normal(seed, shape=SHAPE):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def blocks(a):
  """[blocks, 4, 4] of an array [..., rows, columns]."""
  a = np.asarray(a)
  tiles = a.reshape(*a.shape[:-2], a.shape[-2] // 4, 4, a.shape[-1] // 4, 4)
  return np.moveaxis(tiles, -3, -2).reshape(-1, 4, 4)


def holding(tile):
  """The patterns that hold all links of a block."""
  return PATTERNS[(PATTERNS | ~tile).all((1, 2))]


@functools.partial(jit, static_argnums=0)
def evolve(topology, w, grad, mask, step):
  return topology(w, grad, mask, Context(step, 'a', {'a': w.shape}))


def topology_of(density, **settings):
  """Its drop fraction is the step's thousandth, so that one compilation serves many."""
  return s24.Topology(density, structure='transposable', **{'drop_fraction': _thousandth} | settings)


def _thousandth(step):
  return step.astype(jnp.float32) / 1000


def start_of(topology):
  return evolve(topology, normal(0), None, jnp.ones(SHAPE, bool), jnp.int32(0)).state


class PatternsTest(parameterized.TestCase):
  def test_ninety(self):
    self.assertLen(PATTERNS, 90)

  @parameterized.product(density=(0.1, 0.35, 0.5), start=('random', 'magnitude'))
  @pytest.mark.few(3)
  def test_start(self, density, start):
    topology = topology_of(density, start=start)
    mask = start_of(topology)
    self.assertEqual(mask.sum((1, 2)).tolist(), [round(density * SIZE)] * 2)
    self.assertTrue(all(len(holding(tile)) for tile in blocks(mask)))
    if start == 'magnitude':
      # The largest of what the best masks keep.
      kept = np.where(s24.transposable_mask(normal(0)), np.abs(normal(0)), 0)
      for i in range(2):
        least = np.sort(kept[i].ravel())[-round(density * SIZE)]
        np.testing.assert_array_equal(mask[i], kept[i] >= least)

  @parameterized.product(density=(0.1, 0.5), random_share=(0.25, 0.0))
  @pytest.mark.few
  def test_many_updates(self, density, random_share):
    """Every mask is a part of a pattern, 2:4 both ways, of the density; no more links change than the share says."""
    topology = topology_of(density, random_share=random_share)
    mask, moved = start_of(topology), 0
    count = round(density * SIZE)
    for i, zeta in enumerate((300, 500, 0, 100, 1000, 300)):
      w, grad = jnp.where(mask, normal(i), 0), normal(100 + i)
      new, reset = evolve(topology, w, grad, mask, jnp.int32(zeta))
      self.assertEqual(new.sum((1, 2)).tolist(), [count] * 2)
      for axis in (-1, -2):
        s24.verify24(jnp.where(new, 1.0, 0.0), axis=axis)
      self.assertTrue(all(len(holding(tile)) for tile in blocks(new)))
      gone, come = mask & ~new, new & ~mask
      np.testing.assert_array_equal(reset, gone | come)
      np.testing.assert_array_equal(gone.sum((1, 2)), come.sum((1, 2)))
      allowed = round(zeta / 1000 * count)
      self.assertLessEqual(int(gone.sum((1, 2)).max()), allowed)
      # Who goes is of the smallest magnitudes.
      for layer in range(2):
        least = np.sort(np.abs(w[layer])[np.asarray(mask[layer])])
        if gone[layer].any():
          self.assertLessEqual(np.abs(w[layer])[np.asarray(gone[layer])].max(), least[allowed - 1])
      if zeta == 0:
        np.testing.assert_array_equal(new, mask)
      moved += int(gone.sum())
      mask = new
    self.assertGreater(moved, 0.2 * count)

  def test_growth_takes_the_best_pattern_of_each_block(self):
    """If all links but a few are dropped, the pattern with the largest sum of gradients grows, by enumeration."""
    topology = topology_of(0.5)
    start = start_of(topology)
    w = jnp.where(start, normal(1), 0)
    # The scores of one block must not drown in those of another.
    exponents = np.random.default_rng(3).integers(-60, 60, (2, 4, 3)).repeat(4, -2).repeat(4, -1)
    grad = normal(2) * jnp.asarray(2.0**exponents, jnp.float32)
    new = evolve(topology, w, grad, start, jnp.int32(700)).state
    for layer in range(2):
      active = SIZE // 2
      magnitudes = np.where(start[layer], np.abs(w[layer]), np.inf)
      dropped = np.argsort(magnitudes.ravel(), kind='stable')[: round(0.7 * active)]
      links = np.asarray(start[layer]).copy()
      links.ravel()[dropped] = False
      for tile, g, found in zip(blocks(links), blocks(grad[layer]), blocks(new[layer]), strict=True):
        choices = holding(tile)
        sums = (np.abs(g.astype(np.float64)) * (choices & ~tile)).sum((1, 2))
        self.assertTrue((found | ~tile).all())
        chosen = float((np.abs(g.astype(np.float64)) * (found & ~tile)).sum())
        self.assertGreaterEqual(chosen, sums.max() * (1 - 1e-4))

  def test_no_sum_of_scores_outweighs_a_link(self):
    """All parts of a pattern of each kind, under all patterns as scores; rows and columns permute to the rest."""
    # The last of each kind: ties go to earlier ones.
    kinds = [next(p for p in PATTERNS[::-1] if len(np.unique(p, axis=0)) == rows) for rows in (2, 4)]
    parts = np.zeros((2, 2**8, 4, 4), bool)
    for part, kind in zip(parts, kinds, strict=True):
      part[:, kind] = list(itertools.product((False, True), repeat=8))
    parts = parts.reshape(-1, 1, 4, 4)
    free = PATTERNS & ~parts
    links = np.broadcast_to(parts, free.shape)
    found = np.asarray(jit(_best_pattern)(jnp.asarray(links), jnp.asarray(free, jnp.float32)))
    self.assertFalse((links & ~found).any())
    holds = (PATTERNS | ~parts).all((2, 3))[:, None]
    sums = np.einsum('pbij,cij->pbc', free.astype(np.float32), PATTERNS.astype(np.float32))
    np.testing.assert_array_equal((free & found).sum((2, 3)), np.where(holds, sums, -1).max(-1))

  @parameterized.parameters(0.0, np.nan, np.inf, 1e-38, 3e38)
  def test_gradients_of_any_size_leave_masks_whole(self, value):
    topology = topology_of(0.5)
    start = start_of(topology)
    grad = jnp.full(SHAPE, value, jnp.float32).at[:, ::3].set(normal(2)[:, ::3])
    new = evolve(topology, jnp.where(start, normal(1), 0), grad, start, jnp.int32(400)).state
    self.assertEqual(new.sum((1, 2)).tolist(), [SIZE // 2] * 2)
    self.assertTrue(all(len(holding(tile)) for tile in blocks(new)))

  def test_random_choices(self):
    topology = topology_of(0.25, random_share=1.0)
    start = start_of(topology)
    given = (jnp.where(start, normal(1), 0), normal(2), start, jnp.int32(500))
    found = evolve(topology, *given).state
    np.testing.assert_array_equal(found, evolve(topology, *given).state)
    self.assertTrue((found != evolve(topology, *given[:3], jnp.int32(501)).state).any())


class TrainingTest(parameterized.TestCase):
  def train(self, recipe, steps, phase_of=lambda step: 'sparse'):
    """Yields (phase, weight, mask, moments) after each step."""
    build = {p: s24.sparse_training(optax.adam(1e-2), recipe, phase=p) for p in {*map(phase_of, range(steps))}}
    params = {'w': normal(0)}
    update = {phase: jit(tx.update) for phase, tx in build.items()}
    state = next(iter(build.values())).init(params)
    for step in range(steps):
      updates, state = update[phase_of(step)]({'w': normal(50 + step)}, state, params)
      params = optax.apply_updates(params, updates)
      adam, (w,) = state.inner_state[0], jax.tree.leaves(params)
      yield phase_of(step), np.asarray(w), np.asarray(sparse_states(state)['w']), (adam.mu['w'], adam.nu['w'])

  def test_links_that_stay_keep_weights_and_moments_and_grown_ones_start_at_zero(self):
    """A run whose topology moves at its last step beside one that rests."""
    moving, resting = (
      s24.Recipe('r', (s24.Rule('w', s24.DotPolicy(s24.dynamic_sparse(
        0.4, drop_fraction=zeta, random_share=0.25, structure='transposable'
      ))),), refresh_every=3)
      for zeta in (0.4, 0.0)
    )  # fmt: skip
    *_, (_, w, mask, moments) = self.train(moving, 3)
    *_, (_, other_w, old, other_moments) = self.train(resting, 3)
    stays, grown, gone = mask & old, mask & ~old, old & ~mask
    self.assertGreater(grown.sum(), 10)
    self.assertEqual(grown.sum(), gone.sum())
    for found, other in zip((w, *moments), (other_w, *other_moments), strict=True):
      np.testing.assert_array_equal(np.asarray(found)[stays], np.asarray(other)[stays])
      np.testing.assert_array_equal(np.asarray(found)[~stays], 0)
      self.assertTrue((np.asarray(other)[gone] != 0).all())

  @pytest.mark.slow
  def test_mixed_sparsity(self):
    recipe = s24.recipes.mixed_sparsity(
      'w', total_steps=10, density=0.2, warm_up=0.4, restoration=0.2, structure='transposable', refresh_every=2
    )
    shares = []
    for phase, w, mask, _ in self.train(recipe, 10, lambda step: s24.phase_at(recipe, step, 10)):
      shares.append(round(float(np.mean(w != 0)), 3))
      if phase == 'sparse':
        np.testing.assert_array_equal(w[~mask], 0)
        self.assertTrue(all(len(holding(tile)) for tile in blocks(mask)))
    self.assertEqual(shares[:5] + shares[8:], [1.0] * 4 + [0.5] + [1.0] * 2)
    np.testing.assert_allclose(shares[5:8], 0.2, atol=0.01)

  def test_the_recipe_reaches_all_three_matmuls(self):
    params = {name: {'kernel': normal(0, (16, 16))} for name in ('attn', 'mlp')}
    make = functools.partial(s24.recipes.mixed_sparsity, total_steps=1000, structure='transposable', refresh_every=10)
    recipe = make('(attn|mlp)/.*', mvue_path='mlp/.*')
    found = {path: rule.policy for path, rule in match_rules(params, recipe).items()}
    self.assertEqual({path: policy.weight_grad for path, policy in found.items()},
                     {'attn/kernel': 'dense', 'mlp/kernel': 'mvue'})
    self.assertEqual({policy.input_grad for policy in found.values()}, {'sparse'})
    # One projection, so that both share one density.
    self.assertLen({policy.projection for policy in found.values()}, 1)
    self.assertLen(make('.*', mvue_path='.*').rules, 1)
    # What is sampled is sparse first.
    beyond = make('(attn|mlp)/.*', mvue_path='(mlp|head)/.*')
    self.assertEqual(set(match_rules(params | {'head': {'kernel': normal(0, (16, 16))}}, beyond)), set(found))
    with self.assertRaisesRegex(ValueError, "above the 0.5 that structure='transposable'"):
      make('.*', density=0.6)


if __name__ == '__main__':
  absltest.main()
