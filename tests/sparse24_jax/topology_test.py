"""Topology updates against NumPy, with sorting in place of counting."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse24_jax as s24
from sparse24_jax.selection import draw, keep_largest, word_of
from sparse24_jax.topology import _links_at, Context
from tests import oracles

SHAPE = (2, 16, 12)
SIZE = 16 * 12


def normal(seed, shape=SHAPE, dtype=jnp.float32):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def sorted_largest(score, count, among):
  """The `count` largest of one matrix by a stable sort."""
  score = np.where(np.isnan(score), 0, np.abs(np.asarray(score, np.float64)))
  flat = np.where(among, score, -1).ravel()
  chosen = np.argsort(-flat, kind='stable')[: max(count, 0)]
  mask = np.zeros(flat.shape, bool)
  mask[chosen] = flat[chosen] >= 0
  return mask.reshape(among.shape)


@functools.partial(jax.jit, static_argnames=('topology', 'path'))
def evolve(topology, w, grad, mask, step=0, path='a'):
  return topology(w, grad, mask, Context(jnp.asarray(step, jnp.int32), path, {path: w.shape}))


def some_links(density, structure=None):
  """A random mask of the density, by NumPy."""
  score, among = np.random.default_rng(9).random(SHAPE), np.ones(SHAPE, bool)
  if structure:
    among = oracles.magnitude_mask(score)
  return jnp.asarray(np.stack([sorted_largest(score[i], round(density * SIZE), among[i]) for i in range(2)]))


def start_of(topology, path='a'):
  return evolve(topology, normal(0), None, jnp.ones(SHAPE, bool), path=path).state


largest = jax.jit(keep_largest)
A, B = map(word_of, 'ab')


class KeepLargestTest(parameterized.TestCase):
  @parameterized.product(count=(-3, 0, 1, 7, 100, 191, 192, 500), kind=('normal', 'ties', 'special', 'uint32'))
  def test_against_a_sort(self, count, kind):
    rng = np.random.default_rng(count % 97)
    score = {
      'normal': rng.standard_normal(SHAPE),
      'ties': rng.integers(0, 3, SHAPE),
      'special': rng.choice([0.0, -0.0, 1e-40, -1e-40, np.inf, -np.inf, np.nan, 2.0], SHAPE),
      'uint32': rng.integers(0, 2**32 - 2, SHAPE),
    }[kind]
    score = score.astype(np.uint32 if kind == 'uint32' else np.float32)
    among = rng.random(SHAPE) < 0.7
    found = largest(score, count, among)
    for i in range(2):
      np.testing.assert_array_equal(found[i], sorted_largest(score[i], count, among[i]))

  def test_without_jit(self):
    with jax.disable_jit():
      self.assertEqual(keep_largest(jnp.arange(8.0).reshape(2, 4), 3, jnp.ones((2, 4), bool)).sum(), 3)

  def test_a_count_a_matrix(self):
    found = largest(normal(0), jnp.array([3, 50], jnp.int32).reshape(2, 1, 1), jnp.ones(SHAPE, bool))
    self.assertEqual(found.sum((1, 2)).tolist(), [3, 50])


class DrawTest(absltest.TestCase):
  def test_is_uniform_and_tells_seeds_steps_paths_and_layers_apart(self):
    shape = (2, 64, 64)
    first = np.asarray(draw(0, 0, A, shape))
    others = [draw(1, 0, A, shape), draw(0, 1, A, shape), draw(0, 0, B, shape), draw(0, 100, A, shape)]
    for other in [*np.asarray(others), first[::-1], first[:, ::-1], np.roll(first, 1, axis=-1)]:
      # Each of the 32 bits flips half of the time: 8192 draws, 5 standard deviations.
      flips = np.unpackbits((first ^ other).view(np.uint8).reshape(-1, 4), axis=-1).mean(0)
      np.testing.assert_allclose(flips, 0.5, atol=5 * 0.5 / np.sqrt(8192))
    np.testing.assert_allclose(np.histogram(first, 16, (0, 2**32))[0], 512, atol=5 * np.sqrt(512))
    np.testing.assert_array_equal(first, jax.jit(lambda step: draw(0, step, A, shape))(0))

  def test_is_the_same_in_every_version(self):
    """Or a run that is resumed would draw other links."""
    self.assertEqual(draw(2**40 + 1, 3, A, (2, 2)).tolist(), [[1525506480, 1972522519], [3053569801, 2443830478]])


SHAPES = {'a': (64, 64), 'b': (3, 64, 256), 'c': (8, 4), 'd': (256, 64)}


class LayerDensitiesTest(parameterized.TestCase):
  @parameterized.product(density=(0.0, 0.01, 0.1, 0.3, 0.9, 1.0))
  def test_erdos_renyi_keeps_the_density_and_the_proportions(self, density):
    found = {k: float(d) for k, d in s24.layer_densities(density, SHAPES, 'erdos_renyi').items()}
    sizes = {k: np.prod(s) for k, s in SHAPES.items()}
    kept = sum(found[k] * sizes[k] for k in found)
    self.assertAlmostEqual(kept / sum(sizes.values()), density, places=5)
    # Below 1, density is eps (in + out) / (in out) with one eps.
    eps = [d * s[-2] * s[-1] / (s[-2] + s[-1]) for d, s in zip(found.values(), SHAPES.values(), strict=True)]
    free = [e for e, d in zip(eps, found.values(), strict=True) if d < 1]
    np.testing.assert_allclose(free, free[0] if free else [], rtol=1e-4)
    self.assertTrue(all(e <= min(free, default=e) * 1.0001 for e, d in zip(eps, found.values(), strict=True) if d == 1))
    if density == 0.1:
      self.assertEqual(found['c'], 1.0)

  def test_uniform(self):
    found = s24.layer_densities(0.3, SHAPES, 'uniform')
    np.testing.assert_allclose(list(found.values()), 0.3)


class LinksTest(parameterized.TestCase):
  @parameterized.parameters(2**24 + 1, 2**24 + 3, 2**25 + 2, 2**31 - 1)
  def test_of_more_entries_than_float32_counts_none_and_all_are_exact(self, size):
    """The first is rounded down to 2^24, the second up, beyond all."""
    found = [int(_links_at(jnp.float32(share), size)) for share in (0.0, 0.5, 1.0)]
    self.assertEqual(found[::2], [0, size])
    np.testing.assert_allclose(found[1], size / 2, rtol=2.0**-23)
    self.assertLessEqual(int(_links_at(jnp.float32(1 - 2.0**-24), size)), size)

  @parameterized.parameters((0.5, 6, 3), (0.25, 10, 2), (0.35, 10, 4), (1.0, 7, 7))
  def test_of_few_is_the_nearest_number(self, share, size, expected):
    found = _links_at(jnp.float32(share), size)
    self.assertEqual((int(found), found.dtype), (expected, jnp.int32))


class UpdateTest(parameterized.TestCase):
  @parameterized.product(density=(0.05, 0.25, 0.5), start=('random', 'magnitude'), structure=(None, '2:4'))
  @pytest.mark.few(4)
  def test_start(self, density, start, structure):
    topology = s24.Topology(density, start=start, structure=structure)
    w = normal(0)
    mask, reset = evolve(topology, w, None, jnp.ones(SHAPE, bool))
    self.assertEqual(mask.sum((1, 2)).tolist(), [round(density * SIZE)] * 2)
    self.assertFalse(reset.any())
    if structure:
      s24.verify24(jnp.where(mask, 1.0, 0.0))
    elif start == 'magnitude':
      for i in range(2):
        np.testing.assert_array_equal(mask[i], sorted_largest(w[i], round(density * SIZE), np.ones((16, 12), bool)))
    if start == 'random':
      self.assertTrue((mask[0] != mask[1]).any())
      other = start_of(topology, path='b')
      self.assertTrue((mask != other).any())
      self.assertTrue((start_of(s24.Topology(density, structure=structure, seed=1)) != mask).any())

  # Of 96 links, 0.3 are 28.8.
  @parameterized.parameters((0.25, 0.25), (0.5, 0.5), (0.5, 0.2), (0.2, 0.5), (0.3, 1.0), (1.0, 0.1))
  @pytest.mark.few(3)
  def test_gradient_growth_against_a_sort(self, before, after):
    """RigL's update with a target that may move: what MST's formula says, by sorting."""
    zeta = 0.3
    start = some_links(before)
    w, grad = jnp.where(start, normal(1), 0), normal(2)
    mask, reset = evolve(s24.Topology(after, drop_fraction=zeta), w, grad, start, 100)
    for i in range(2):
      active, target = int(start[i].sum()), round(after * SIZE)
      drop = max(round(zeta * active), active - target)
      kept = sorted_largest(w[i], active - drop, np.asarray(start[i]))
      grown = sorted_largest(grad[i], target - (active - drop), ~kept)
      np.testing.assert_array_equal(mask[i], kept | grown)
    np.testing.assert_array_equal(reset, mask != start)

  # Of 24 that grow, 0.28 are 6.72.
  @parameterized.parameters((0.28, None), (1.0, None), (0.25, '2:4'))
  def test_random_share(self, share, structure):
    density = 0.25
    start = some_links(density, structure)
    topology = s24.Topology(density, drop_fraction=0.5, random_share=share, structure=structure)
    w = jnp.where(start, normal(1), 0)
    # The gradient points at the first rows: what grows elsewhere grew at random.
    grad = jnp.where(jnp.arange(16)[:, None] < 8, 1 + jnp.abs(normal(2)), 0)
    mask = evolve(topology, w, grad, start, 100).state
    np.testing.assert_array_equal(mask, evolve(topology, w, grad, start, 100).state)
    self.assertTrue((mask != evolve(topology, w, grad, start, 200).state).any())
    grown = 24
    self.assertEqual(mask.sum((1, 2)).tolist(), [48, 48])
    for i in range(2):
      kept = sorted_largest(w[i], 48 - grown, np.asarray(start[i]))
      self.assertTrue(np.asarray(mask[i])[kept].all())
      new = np.asarray(mask[i]) & ~kept
      self.assertEqual(new.sum(), grown)
      by_gradient = grown - round(share * grown)
      self.assertGreaterEqual(new[:8].sum(), by_gradient)
      self.assertGreater(new[8:].sum(), 0)
      if structure is None:
        links = kept | sorted_largest(grad[i], by_gradient, ~kept)
        at_random = sorted_largest(draw(0, 100, A, SHAPE)[i], grown - by_gradient, ~links)
        np.testing.assert_array_equal(mask[i], links | at_random)
    if structure:
      s24.verify24(jnp.where(mask, 1.0, 0.0))

  @parameterized.product(density=(0.1, 0.5), random_share=(0.0, 0.25, 1.0))
  @pytest.mark.few
  def test_2_of_4_holds_for_many_updates(self, density, random_share):
    topology = s24.Topology(density, drop_fraction=0.3, random_share=random_share, structure='2:4')
    mask = some_links(density, '2:4')
    moved = 0
    for step in range(1, 11):
      w = jnp.where(mask, normal(step), 0)
      new = evolve(topology, w, normal(100 + step), mask, step).state
      s24.verify24(jnp.where(new, 1.0, 0.0))
      self.assertEqual(new.sum((1, 2)).tolist(), [round(density * SIZE)] * 2)
      moved += int((new != mask).sum())
      mask = new
    self.assertGreater(moved, 0)

  def test_2_of_4_growth_takes_the_best_that_fits(self):
    """Against a greedy loop over candidates in order of their gradient."""
    topology = s24.Topology(0.4, drop_fraction=0.5, structure='2:4')
    mask = some_links(0.4, '2:4')
    w, grad = jnp.where(mask, normal(1), 0), normal(2)
    found = evolve(topology, w, grad, mask, 1).state
    for i in range(2):
      active = int(mask[i].sum())
      links = sorted_largest(w[i], active - round(0.5 * active), np.asarray(mask[i]))
      for flat in np.argsort(-np.abs(np.asarray(grad[i])).ravel()):
        row, column = np.unravel_index(flat, (16, 12))
        fours = slice(row // 4 * 4, row // 4 * 4 + 4)
        if not links[row, column] and links[fours, column].sum() < 2 and links.sum() < round(0.4 * SIZE):
          links[row, column] = True
      np.testing.assert_array_equal(found[i], links)

  def test_settings_that_rest(self):
    start = some_links(0.3)
    w, grad = jnp.where(start, normal(1), 0), normal(2)
    mask, reset = evolve(s24.Topology(0.3), w, grad, start, 100)  # static
    np.testing.assert_array_equal(mask, start)
    self.assertFalse(reset.any())
    changed, reset = evolve(s24.Topology(0.3, drop_fraction=0.3, reset_moments=False), w, grad, start, 100)
    self.assertTrue((changed != start).any())
    self.assertFalse(reset.any())

  @parameterized.parameters(
    ({'density': 1.5}, 'density'),
    ({'density': -0.1}, 'density'),
    ({'density': 0.6, 'structure': '2:4'}, 'above the 0.5'),
    ({'density': 0.5, 'drop_fraction': 2.0}, 'drop_fraction'),
    ({'density': 0.5, 'random_share': lambda step: 0.5}, 'random_share'),
    ({'density': 0.5, 'distribution': 'normal'}, 'distribution'),
    ({'density': 0.5, 'start': 'zeros'}, 'start'),
    ({'density': 0.5, 'structure': '1:4'}, 'structure'),
  )
  def test_refuses(self, settings, message):
    with self.assertRaisesRegex(ValueError, message):
      s24.dynamic_sparse(**settings)

  def test_refuses_more_links_than_it_can_count(self):
    w, mask = (jax.ShapeDtypeStruct((2, 2**16, 2**15), dtype) for dtype in (jnp.float32, jnp.bool_))
    context = Context(jnp.int32(1), 'h/up', {'h/up': w.shape})
    with self.assertRaisesRegex(ValueError, r'h/up of shape \(2, 65536, 32768\) has matrices of 2147483648 entries'):
      jax.eval_shape(lambda w, mask: s24.Topology(0.3)(w, None, mask, context), w, mask)


if __name__ == '__main__':
  absltest.main()
