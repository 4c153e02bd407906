from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.two_of_four import philox
from tests import oracles

philox4x32 = jax.jit(philox.philox4x32)
group_uniforms = jax.jit(philox.group_uniforms, static_argnames=('shape', 'stream'))
SEED = (np.uint32(0x12345678), np.uint32(0x9ABCDEF0))


def words(*values: int) -> tuple[np.uint32, ...]:
  return tuple(np.uint32(value) for value in values)


class PhiloxTest(parameterized.TestCase):
  @parameterized.named_parameters(
    # The known answers published with Random123.
    ('zeros', (0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ('ones', (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
      'digits_of_pi',
      (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
      (0xA4093822, 0x299F31D0),
      (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
  )
  def test_known_answers(self, counter, key, expected):
    self.assertEqual(oracles.philox(counter, key), expected)
    self.assertEqual(tuple(int(w) for w in philox4x32(words(*counter), words(*key))), expected)

  def test_many_counters(self):
    counters = np.random.default_rng(0).integers(0, 2**32, (200, 4), np.uint32)
    found = np.stack(philox4x32(tuple(counters.T), SEED), -1)
    expected = [oracles.philox(tuple(map(int, counter)), tuple(map(int, SEED))) for counter in counters]
    np.testing.assert_array_equal(found, expected)

  @parameterized.parameters(0xD2511F53, 0xCD9E8D57, 0, 1, 0xFFFF, 0x10000, 0xFFFF0000, 0xFFFFFFFF)
  def test_multiply_high(self, constant):
    edges = [0, 1, 2, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0x80000000, 0xFFFF0000, 0xFFFFFFFF]
    x = np.array(edges + np.random.default_rng(1).integers(0, 2**32, 1000).tolist(), np.uint32)
    found = philox.multiply_high(jnp.asarray(x), constant)
    self.assertEqual(found.dtype, jnp.uint32)
    self.assertEqual(found.tolist(), [int(value) * constant >> 32 for value in x])


class SeedTest(absltest.TestCase):
  def test_any_key(self):
    threefry, raw = jax.random.key(3), jax.random.PRNGKey(3)
    self.assertEqual(*(tuple(map(int, philox.seed_words(key))) for key in (threefry, raw)))
    seeds = {tuple(map(int, philox.seed_words(key))) for key in jax.random.split(threefry, 50)}
    self.assertLen(seeds, 50)
    # The words of the key itself: hashing them anew was 130 instructions of XLA's in every sample.
    self.assertEqual(tuple(map(int, philox.seed_words(threefry))), tuple(jax.random.key_data(threefry).tolist()))
    for word in philox.seed_words(jax.random.key(3, impl='rbg')):
      self.assertEqual((word.shape, word.dtype), ((), jnp.uint32))

  def test_two_keys_of_one_draw_independently(self):
    for impl in ('threefry2x32', 'rbg'):
      typed, raw = jax.random.key(3, impl=impl), jax.random.key_data(jax.random.key(3, impl=impl))
      three = [typed, *philox.two_keys(typed)]
      u = np.stack([philox.group_uniforms(philox.seed_words(key), (1, 32, 512)).ravel() for key in three])
      correlation = np.corrcoef(u) - np.eye(3)
      np.testing.assert_array_less(np.abs(correlation), 4 / np.sqrt(u.shape[1]))
      for of_raw, key in zip(philox.two_keys(raw), three[1:], strict=True):
        np.testing.assert_array_equal(of_raw, jax.random.key_data(key))


class GroupUniformsTest(parameterized.TestCase):
  @parameterized.parameters((0, (0, 0, 0)), (1, (0, 0, 0)), (2, (7, 3, 8)))
  def test_bits(self, stream, origin):
    shape = (2, 3, 10)
    found = group_uniforms(SEED, shape, stream=stream, origin=origin)
    self.assertEqual(found.dtype, jnp.float32)
    for b, g, c in np.ndindex(shape):
      batch, group, column = b + origin[0], g + origin[1], c + origin[2]
      word = oracles.philox((column // 4, group, batch, stream), tuple(map(int, SEED)))[column % 4]
      self.assertEqual(float(found[b, g, c]), (word >> 8) * 2.0**-24)

  def test_origin_cuts_a_part_out_of_the_whole(self):
    whole = group_uniforms(SEED, (3, 8, 24))
    for batch, group, column in ((0, 0, 0), (1, 5, 4), (2, 7, 20), (1, 2, 12)):
      part = group_uniforms(SEED, (1, 1, 4), origin=(batch, group, column))
      np.testing.assert_array_equal(part, whole[batch : batch + 1, group : group + 1, column : column + 4])

  def test_uniform(self):
    u = np.asarray(group_uniforms(SEED, (4, 256, 256))).ravel()
    self.assertTrue((u >= 0).all() and (u < 1).all())
    counts = np.histogram(u, 256, (0, 1))[0]
    expected = u.size / 256
    # Chi-squared with 255 degrees of freedom: mean 255, standard deviation 22.6; four of them either way.
    self.assertBetween(((counts - expected) ** 2 / expected).sum(), 255 - 4 * 22.6, 255 + 4 * 22.6)

  def test_neighbours_are_uncorrelated(self):
    """Groups, columns, tiles, batches, streams and keys next to each other: |r| below four standard errors."""
    shape, seeds = (4, 512, 512), [philox.seed_words(jax.random.fold_in(jax.random.key(0), i)) for i in range(2)]
    u = np.asarray(group_uniforms(seeds[0], shape)) - 0.5
    pairs = {
      'stream': (u, np.asarray(group_uniforms(seeds[0], shape, stream=1)) - 0.5),
      'key': (u, np.asarray(group_uniforms(seeds[1], shape)) - 0.5),
      'batch': (u[:-1], u[1:]),
    }
    lags = ((0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (0, 4), (0, 16), (16, 0), (0, 64), (64, 64), (128, 0), (0, 128))
    for lag in lags:
      groups, columns = lag
      pairs[f'lag {lag}'] = (u[:, : 512 - groups, : 512 - columns], u[:, groups:, columns:])
    for name, (left, right) in pairs.items():
      correlation = (left * right).mean() * 12
      self.assertLess(abs(correlation), 4 / np.sqrt(left.size), name)


if __name__ == '__main__':
  absltest.main()
