"""What the step benchmarks share: turns, timers, refusals, records."""

import contextlib
import io
import time
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from experiments.bench import attention, ffn, measure, mesh, neuron_level, train_step
from pallas_kernels import _compat


class MeasureTest(parameterized.TestCase):
  def test_every_call_is_made_and_timed(self):
    made = []
    samples = measure.stream_ms(lambda: made.append(0), 5, depth=3)
    self.assertLen(samples, 5)
    self.assertLen(made, 5 + 3)

  def test_a_call_that_returns_when_its_step_is_over_counts_to_the_end(self):
    samples = measure.stream_ms(lambda: time.sleep(4e-3), 4, depth=3)
    self.assertGreaterEqual(min(samples), 4.0)

  def test_order_alternates(self):
    made = []
    twins = {name: (lambda name=name: made.append(name)) for name in 'ab'}
    bursts = measure.interleave(twins, rounds=3, steps=1, depth=1)
    self.assertEqual(''.join(made), 'aabb' + 'bbaa' + 'aabb')
    self.assertEqual({name: list(map(len, b)) for name, b in bursts.items()}, {'a': [1, 1, 1], 'b': [1, 1, 1]})

  def test_functions_are_timed_in_turns_with_their_arguments(self):
    made = []
    calls = {name: (lambda x, name=name: made.append(name + x), (x,)) for name, x in ('a1', 'b2')}
    rows = measure.timed(calls, mock.Mock(rounds=2, steps=1, tiny=True))
    # One call and as many as are kept in flight.
    self.assertEqual(''.join(made), 4 * 'a1' + 8 * 'b2' + 4 * 'a1')
    found = {name: (len(row['samples_ms']), row['clock']) for name, row in rows.items()}
    self.assertEqual(found, dict.fromkeys('ab', (2, 'wall')))

  @parameterized.parameters(('activity records were dropped', 3), ('CUDA error', 1))
  def test_a_burst_that_was_not_recorded_whole_is_repeated(self, message, tries):
    device = mock.Mock(side_effect=[RuntimeError(message)] * 2 + [[1.5]])
    with (
      mock.patch.object(jax, 'default_backend', lambda: 'gpu'),
      mock.patch.object(_compat, 'device_times_ms', device),
      contextlib.redirect_stdout(io.StringIO()),
    ):
      if tries == 3:
        self.assertEqual(measure.timer(jnp.sin, (), 4, detach=False), [1.5])
        device.side_effect = [RuntimeError(message)] * 9
      with self.assertRaisesRegex(RuntimeError, message):
        measure.timer(jnp.sin, (), 4)
    self.assertEqual(device.call_count, 6 if tries == 3 else 1)
    device.assert_called_with(jnp.sin, (), 4, detach=True)

  @parameterized.parameters(attention, ffn, mesh, neuron_level, train_step)
  def test_refused_at_once_without_a_gpu(self, module):
    out = io.StringIO()
    # Nothing else may come first.
    with (
      mock.patch.object(measure, 'environment', side_effect=AssertionError),
      contextlib.redirect_stderr(out),
      self.assertRaises(SystemExit),
    ):
      module.main(['--out', 'none.jsonl'])
    self.assertIn("timed on a GPU, JAX has 'cpu' here; --tiny", out.getvalue())

  def test_commands_hold_no_folders(self):
    head = measure.environment('experiments.bench.ffn', ['--out', '/some/where/x.jsonl', '--tiny'])
    self.assertEqual(head['command'], 'python -m experiments.bench.ffn --out x.jsonl --tiny')


if __name__ == '__main__':
  absltest.main()
