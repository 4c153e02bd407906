"""What benchmarks share: turns, timers, refusals."""

import contextlib
import io
import pathlib
import tempfile
import time
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _bench, _compat


class BenchTest(parameterized.TestCase):
  def test_every_call_is_made_and_timed(self):
    made = []
    samples = _bench.stream_ms(lambda: made.append(0), 5, depth=3)
    self.assertLen(samples, 5)
    self.assertLen(made, 5 + 3)

  def test_a_call_that_returns_when_its_step_is_over_counts_to_the_end(self):
    samples = _bench.stream_ms(lambda: time.sleep(4e-3), 4, depth=3)
    self.assertGreaterEqual(min(samples), 4.0)

  def test_order_alternates(self):
    made = []
    rows = _bench.in_turns('ab', 3, lambda name: made.append(name) or [float(len(made)), 8.0])
    self.assertEqual(''.join(made), 'ab' + 'ba' + 'ab')
    self.assertEqual(rows['a']['samples_ms'], [1.0, 8.0, 4.0, 8.0, 5.0, 8.0])
    self.assertEqual(rows['a']['median_ms_by_order'], [6.5, 6.0])

  def test_functions_are_timed_in_turns_with_their_arguments(self):
    made = []
    calls = {name: (lambda x, name=name: made.append(name + x), (x,)) for name, x in ('a1', 'b2')}
    rows = _bench.timed(calls, mock.Mock(rounds=2, steps=1, tiny=True))
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
        self.assertEqual(_bench.timer(jnp.sin, (), 4, detach=False), [1.5])
        device.side_effect = [RuntimeError(message)] * 9
      with self.assertRaisesRegex(RuntimeError, message):
        _bench.timer(jnp.sin, (), 4)
    self.assertEqual(device.call_count, 6 if tries == 3 else 1)
    device.assert_called_with(jnp.sin, (), 4, detach=True)

  def test_a_plan_whose_function_is_refused_costs_the_others_nothing(self):
    def refused(x):
      raise NotImplementedError('not this one')

    plans = {
      name: _bench.Plan({'f': (f, (jnp.zeros(3),))}, lambda made: {'sum': float(made['f'](jnp.ones(3)))})
      for name, f in (('bad', refused), ('good', jnp.sum))
    }
    out = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / 'new' / 'records.jsonl'
    with contextlib.redirect_stdout(io.StringIO()) as said:
      self.assertEqual(_bench.run_plans(plans, out, lambda record: f'sum {record["sum"]}'), 1)
    self.assertEqual(out.read_text(), '{"sum": 3.0}\n')
    for line in ('bad: f does not compile: not this one', "bad: failed: ValueError: 'f' was not compiled", 'sum 3.0'):
      self.assertIn(line, said.getvalue())

  def test_of_a_long_message_the_end_is_shown(self):
    def refused(*_):
      raise RuntimeError(f'INTERNAL: custom_partitioner{"x" * 20_000}ValueError: not alike')

    with contextlib.redirect_stdout(io.StringIO()) as said:
      self.assertEqual(_bench.run_each(['case'], refused, pathlib.Path('records.jsonl'), str), 1)
      self.assertEqual(_bench.compile_all({'f': (jax.jit(refused), (1.0,))}), {})
    case, function = said.getvalue().splitlines()
    self.assertStartsWith(case, 'case: failed: RuntimeError: INTERNAL: custom_partitioner')
    self.assertStartsWith(function, '  f does not compile: INTERNAL: custom_partitioner')
    for line, length in ((case, 6100), (function, 700)):
      self.assertEndsWith(line, 'xValueError: not alike')
      self.assertLess(len(line), length)

  def test_a_plan_that_looks_up_what_is_not_there_is_an_error_of_the_program(self):
    plan = _bench.Plan({'f': (jnp.sum, (jnp.zeros(3),))}, lambda made: {'sum': {}['f'], 'of': made})
    with contextlib.redirect_stdout(io.StringIO()), self.assertRaises(KeyError):
      _bench.run_plans({'case': plan}, pathlib.Path('records.jsonl'), str)


if __name__ == '__main__':
  absltest.main()
