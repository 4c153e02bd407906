from absl.testing import absltest, parameterized
import jax
import numpy as np

import sparse24_jax as s24

STAGES = (s24.Stage(0.1, 0.2, 'cubic'), s24.Stage(0.6, 0.2), s24.Stage(0.2, 0.6, 'linear'), s24.Stage(0.1, 1.0))


def expected(step, total):
  """Stage by stage, by hand."""
  if step < 0.1 * total:
    return 0.2 + 0.8 * (1 - step / (0.1 * total)) ** 3
  if step < 0.7 * total:
    return 0.2
  if step < 0.9 * total:
    return 0.2 + 0.4 * (step - 0.7 * total) / (0.2 * total)
  return 1.0


class DensityScheduleTest(parameterized.TestCase):
  def test_of_every_step(self):
    schedule = s24.DensitySchedule(STAGES, 1000)
    steps = np.arange(1000)
    np.testing.assert_allclose(schedule(steps), [expected(s, 1000) for s in steps], atol=1e-6)

  def test_begins_where_it_is_told_and_stays_at_its_end(self):
    schedule = s24.DensitySchedule((s24.Stage(1.0, 0.5, 'linear'),), 10, start=0.25)
    np.testing.assert_allclose(schedule(np.array([0, 2, 10, 99])), [0.25, 0.3, 0.5, 0.5], rtol=1e-6)

  def test_is_traced_once(self):
    traces = []

    @jax.jit
    def at(step):
      traces.append(step)
      return s24.DensitySchedule(STAGES, 1000)(step)

    self.assertEqual([round(float(at(step)), 3) for step in (0, 300, 800, 950)], [1.0, 0.2, 0.4, 1.0])
    self.assertLen(traces, 1)

  @parameterized.parameters(
    (lambda: s24.Stage(0.0, 0.5), 'fraction'),
    (lambda: s24.Stage(0.5, 1.5), 'density'),
    (lambda: s24.Stage(0.5, 0.0), 'density'),
    (lambda: s24.Stage(0.5, 0.5, 'steep'), 'ramp'),
    (lambda: s24.DensitySchedule((s24.Stage(0.5, 0.5),), 10), 'add up to 0.5'),
    (lambda: s24.DensitySchedule([s24.Stage(1.0, 0.5)], 10), 'tuple of Stage'),
    (lambda: s24.DensitySchedule((s24.Stage(1.0, 0.5),), 0), 'total_steps'),
    (lambda: s24.CosineDecay(1.5, 10), 'initial'),
    (lambda: s24.CosineDecay(0.5, 0), 'steps'),
  )
  def test_refuses(self, make, message):
    with self.assertRaisesRegex(ValueError, message):
      make()


class CosineDecayTest(absltest.TestCase):
  def test_against_the_formula(self):
    steps = np.arange(0, 150)
    wanted = np.where(steps < 100, 0.15 * (1 + np.cos(np.pi * steps / 100)), 0)
    np.testing.assert_allclose(s24.CosineDecay(0.3, 100)(steps), wanted, atol=1e-7)


if __name__ == '__main__':
  absltest.main()
