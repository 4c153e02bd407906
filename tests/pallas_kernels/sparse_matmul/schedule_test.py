import collections

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels.sparse_matmul import _schedule


def _all_items(schedule):
  return [(c, schedule.item(c, t)) for t in range(schedule.turns) for c in range(schedule.clusters)]


def _longest(schedule):
  """K steps of the busiest cluster."""
  return max(sum(schedule.item(c, t).steps for t in range(schedule.turns)) for c in range(schedule.clusters))


class ScheduleTest(parameterized.TestCase):

  @parameterized.product(
    tiles=(1, 5, 66, 67, 98, 131), clusters=(1, 3, 66), k_steps=(2, 64), split=(1, 2, 4, 64)
  )
  def test_every_step_of_every_tile_is_done_once(self, tiles, clusters, k_steps, split):
    schedule = _schedule.Schedule(tiles, k_steps, clusters, split=split)
    done, finished = collections.Counter(), collections.Counter()
    helped = {}
    for cluster, item in _all_items(schedule):
      self.assertGreaterEqual(item.steps, 0)
      self.assertEqual(item.steps % 2, 0)
      for k in range(item.start, item.start + item.steps):
        done[item.tile, k] += 1
      if item.steps and item.helps:
        self.assertNotIn(cluster, helped, 'a cluster has one slot for partial sums')
        helped[cluster] = item
      elif item.steps:
        finished[item.tile] += 1
    self.assertEqual(done, {(t, k): 1 for t in range(tiles) for k in range(k_steps)})
    self.assertEqual(finished, dict.fromkeys(range(tiles), 1))
    for cluster, item in _all_items(schedule):
      if item.steps and not item.helps:
        expected = [c for c, h in helped.items() if h.tile == item.tile]
        self.assertEqual(list(range(item.first_helper, cluster)), sorted(expected))

  def test_split_shortens_the_last_wave(self):
    whole = _schedule.Schedule(688, 128, 66)
    split = _schedule.Schedule(688, 128, 66, split=4)
    self.assertEqual(_longest(whole), 11 * 128)
    self.assertLessEqual(_longest(split), 688 * 128 / 66 + 2)

  def test_traced_equals_python(self):
    schedule = _schedule.Schedule(94, 64, 66, split=4)
    f = jax.jit(lambda c, t: vars(schedule.item(c, t)))
    for c in (0, 1, 27, 28, 55, 56, 65):
      for t in range(schedule.turns):
        found = {k: int(v) for k, v in f(jnp.int32(c), jnp.int32(t)).items()}
        expected = vars(schedule.item(c, t))
        if expected['steps']:
          self.assertEqual(found, {k: int(v) for k, v in expected.items()})
        else:
          self.assertEqual(found['steps'], 0)


if __name__ == '__main__':
  absltest.main()
