import json

from absl.testing import absltest, parameterized
import numpy as np

import sparse24_jax as s24
from sparse24_jax import attention


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
    for kind in ('global', 'full'):
      with self.assertRaisesRegex(ValueError, f"kind='{kind}': known are .'local', 'strided', 'combined', 'fixed'.$"):
        s24.AttentionPattern(kind)
    for window in (0, True, 2.0):
      with self.assertRaisesRegex(ValueError, 'window'):
        s24.AttentionPattern('local', window)

  def test_takes_whole_numbers_of_numpy(self):
    pattern = s24.AttentionPattern('local', np.int64(4))
    found = json.dumps(attention.describe_attention((None, (pattern,))))
    self.assertEqual(found, '[null, [{"kind": "local", "window": 4}]]')


class AttentionTest(parameterized.TestCase):
  def test_share_of_layers_and_heads(self):
    local, fixed = s24.AttentionPattern('local', 2), s24.AttentionPattern('fixed', 4)
    wanted = (1 + (local.share(9) + 2 * fixed.share(9)) / 3 + local.share(9)) / 3
    self.assertAlmostEqual(attention.attended_share((None, (local, fixed, fixed), local), 9), wanted)

  @parameterized.parameters('local', ((),), (['local'],), (('local',),), (((),),), (((None,),),))
  def test_refuses(self, value):
    with self.assertRaisesRegex(ValueError, 'a phase must be an AttentionPattern.*one entry a layer'):
      attention.check_attention('a phase', value)


if __name__ == '__main__':
  absltest.main()
