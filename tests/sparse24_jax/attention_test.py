from absl.testing import absltest, parameterized
import numpy as np

import sparse24_jax as s24


def attends(kind, query, key, c):
  """By the words of the definition, for one pair."""
  if key > query:
    return False
  local, strided = query - key < c, (query - key) % c == 0
  fixed = query // c == key // c or key % c == c - 1
  return {'local': local, 'strided': strided, 'combined': local or strided, 'fixed': fixed}[kind]


class AttentionPatternTest(parameterized.TestCase):
  @parameterized.product(kind=('local', 'strided', 'combined', 'fixed'), window=(1, 4, 5, 40))
  def test_pair_by_pair(self, kind, window):
    wanted = [[attends(kind, q, k, window) for k in range(18)] for q in range(18)]
    pattern = s24.AttentionPattern(kind, window)
    np.testing.assert_array_equal(pattern.mask(18), wanted)
    self.assertAlmostEqual(pattern.share(18), np.sum(wanted) / (18 * 19 / 2))

  def test_refuses(self):
    with self.assertRaisesRegex(ValueError, 'kind'):
      s24.AttentionPattern('global')
    with self.assertRaisesRegex(ValueError, 'window'):
      s24.AttentionPattern('local', 0)


if __name__ == '__main__':
  absltest.main()
