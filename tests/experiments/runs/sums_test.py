"""Checksums are those of the values, however they are split; every changed bit is seen."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from experiments.runs import sums


def by_hand(array):
  """The sum as its definition has it, word by word in Python integers."""

  def mix(x):
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
      x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 16)

  words = array.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[array.dtype.itemsize]).ravel()
  places = enumerate(map(int, words))
  return sum(mix((word + mix((place + 0x9E3779B9) % 2**32)) % 2**32) for place, word in places) % 2**32


class SumsTest(parameterized.TestCase):
  @parameterized.parameters(np.float32, np.int32, np.uint8, np.bool_, jnp.bfloat16)
  def test_by_definition(self, dtype):
    array = np.random.default_rng(0).normal(size=(3, 8, 5)).astype(dtype)
    self.assertEqual(sums.look({'a': array}).sums, {'a': by_hand(array)})
    self.assertEqual(sums.look([jnp.array(array[0, 0, 0])]).sums, {'0': by_hand(array[0, 0, :1])})

  def test_on_any_mesh(self):
    array = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    mesh = jax.make_mesh((4, 2), ('a', 'b'))
    for spec in (PartitionSpec('a', 'b'), PartitionSpec('b'), PartitionSpec(None, ('a', 'b'))):
      split = jax.device_put(array, NamedSharding(mesh, spec))
      self.assertEqual(sums.look(split).sums, {'': by_hand(array)})

  def test_changes_that_could_cancel(self):
    array = np.ones((4, 4), np.float32)
    signs = array.copy()
    signs[0, 1] = signs[3, 2] = -1  # two top bits
    found = {sums.look(a).sums[''] for a in (array, signs, signs.T.copy())}
    self.assertLen(found, 3)

  def test_what_is_not_finite_is_named(self):
    tree = {'a': jnp.ones(3), 'b': {'c': jnp.array([0, jnp.nan], jnp.bfloat16)}, 'd': jnp.arange(3)}
    self.assertEqual(sums.look(tree).not_finite, ('b/c',))
    self.assertFalse(sums.all_finite(tree))
    self.assertTrue(sums.all_finite({'a': tree['a'], 'd': tree['d']}))
    self.assertTrue(sums.all_finite({}))


if __name__ == '__main__':
  absltest.main()
