"""Candidates are verified, timed in turns, and the fastest right one is chosen."""

import dataclasses
import json
import math
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _tuning

_KEY = dict(m=64, n=64, k=64, dtype='bfloat16')
_EXPECTED = jnp.linspace(1.0, 2.0, 64, dtype=jnp.float32)


def _candidate(name, f):
  return _tuning.Candidate(name, {'name': name}, f, (_EXPECTED,))


def _timer(times):
  """A clock that charges each candidate, known by its function's result, a fixed time."""
  def timer(f, args, iterations):
    del args
    return [times[f.__name__]] * iterations
  return timer


def right(x):
  return x


def wrong(x):
  return x * 1.01


def nan(x):
  return x * jnp.nan


class Drifting:
  """Right to rounding, and different on its third call: a race."""

  __name__ = 'drifting'
  calls = 0

  def __call__(self, x):
    self.calls += 1
    return x + (1e-6 if self.calls == 3 else 0.0)


def also_right(x):
  return x


def dense(x):
  return x


def wide(x):
  return x


class VerifyTest(parameterized.TestCase):

  def test_accepts_the_right_answer(self):
    self.assertEqual(_tuning.verify(_candidate('right', right), _EXPECTED), (0.0, None))

  @parameterized.parameters(
    (wrong, 'relative error 1.00e-02'), (nan, 'relative error nan'), (Drifting(), '1 of 20 repeats')
  )
  def test_rejects(self, f, reason):
    self.assertIn(reason, _tuning.verify(_candidate('x', f), _EXPECTED)[1])

  @parameterized.parameters(
    (0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (math.nan, 0.0, math.nan), (0.0, 2.0, 1.0), (3.0, 2.0, 0.5)
  )
  def test_relative_error(self, found, expected, error):
    args = jnp.full(3, found, jnp.bfloat16), jnp.full(3, expected)
    np.testing.assert_allclose(_tuning.relative_error(*args), error, rtol=1e-6)

  @parameterized.parameters(1, 4)
  def test_no_more_than_two_repeats_are_on_the_gpu(self, repeats):
    waiting, most = 0, 0

    def queue(x):
      nonlocal waiting, most
      waiting, most = waiting + 1, max(most, waiting + 1)
      return x

    class Same:
      def __bool__(self):
        nonlocal waiting
        waiting -= 1
        return True

    def same(x, y):
      return Same()

    candidate = _candidate('right', queue)
    with mock.patch.object(_tuning, 'same_bits', same):
      # The run that is compared with is not looked at this way.
      waiting = -1
      self.assertEqual(_tuning.verify(candidate, _EXPECTED, repeats=repeats), (0.0, None))
    self.assertEqual((waiting, most), (0, min(repeats, 2)))

  @parameterized.parameters(2, 3, 21)
  def test_every_repeat_is_looked_at(self, call):
    calls = 0

    def drifting(x):
      nonlocal calls
      calls += 1
      return x + (1e-6 if calls == call else 0.0)

    self.assertIn('1 of 20 repeats', _tuning.verify(_candidate('x', drifting), _EXPECTED)[1])

  def test_negative_zero_is_another_bit_pattern(self):
    self.assertFalse(_tuning.same_bits(jnp.zeros(3), -jnp.zeros(3)))


class TuneTest(parameterized.TestCase):

  def _tune(self, times, candidates, **options):
    quiet = dict(rounds=2, iterations=3, gap_s=0.0)
    return _tuning.tune(
      _KEY, _candidate('dense', dense), candidates, _EXPECTED, _timer(times), quick=quiet, final=quiet, **options
    )

  def test_a_fast_wrong_answer_never_wins(self):
    candidates = [_candidate('wrong', wrong), _candidate('right', right)]
    entry = self._tune(dict(dense=3.0, wrong=0.1, right=2.0), candidates)
    self.assertEqual(entry['choice'], dict(implementation='right', config={'name': 'right'}))
    self.assertIn('relative error', entry['candidates'][0]['rejected'])
    self.assertNotIn('samples_ms', entry['candidates'][0])
    self.assertEqual(entry['candidates'][1]['final_samples_ms'], [2.0, 2.0])

  def test_dense_where_sparse_loses(self):
    entry = self._tune(dict(dense=1.0, right=2.0), [_candidate('right', right)])
    self.assertEqual(entry['choice']['implementation'], 'dense')

  def test_dense_where_nothing_is_right(self):
    entry = self._tune(dict(dense=1.0), [_candidate('wrong', wrong)])
    self.assertEqual(entry['choice']['implementation'], 'dense')

  def test_set_up_is_counted_in_the_choice_and_not_in_the_samples(self):
    costly = dataclasses.replace(_candidate('right', right), setup_ms=2.5)
    entry = self._tune(dict(dense=3.0, right=1.0), [costly])
    self.assertEqual(entry['choice']['implementation'], 'dense')
    self.assertEqual((entry['candidates'][0]['setup_ms'], entry['candidates'][0]['samples_ms']), (2.5, [1.0, 1.0]))

  # With eight matmuls a call 0.05 ms of each are enough.
  @parameterized.parameters(
    (1.0, 2, 1.5, 0.0, 'also_right'), (1.0, 2, 1.1, 0.0, 'dense'), (1.0, 2, 1.5, 0.25, 'right'),
    (0.05, 2, 1.5, 0.0, 'right'), (0.05, 8, 1.5, 0.0, 'also_right'),
  )  # fmt: skip
  def test_loops_decide_unless_calls_are_too_short(self, scale, matmuls_a_call, dense_ms, setup_ms, chosen):
    looped = dict(dense=dense_ms, right=1.4, also_right=1.2, wide=8.0)

    def sustained(calls, *, matmuls):
      self.assertEqual(matmuls, matmuls_a_call)
      return [dict(sustained_ms=looped[f.__name__], clock_mhz=1500.0) for f, _ in calls]

    candidates = [
      _candidate('right', right), dataclasses.replace(_candidate('also_right', also_right), setup_ms=setup_ms),
    ]  # fmt: skip
    with mock.patch.object(_tuning, 'sustained', sustained), mock.patch.object(_tuning, 'sustained_ms'):
      times = dict(dense=3.0 * scale, right=1.0 * scale, also_right=2.0 * scale)
      others = dict(wide=_candidate('wide', wide))
      entry = self._tune(times | dict(wide=9.0), candidates, finalists=2, loops_of=matmuls_a_call, others=others)
    self.assertEqual(entry['choice']['implementation'], chosen)
    rows = [entry['baseline'], *entry['candidates'], entry['others']['wide']]
    judged = scale * matmuls_a_call > 0.2
    self.assertEqual([row.get('sustained_ms') for row in rows], [*looped.values()] if judged else 4 * [None])
    self.assertEqual(entry['candidates'][0]['final_samples_ms'], [scale, scale])

  def test_every_implementation_has_its_finalists(self):
    times = dict(dense=9.0, right=1.0, also_right=5.0)
    candidates = [*(_candidate('a', right) for _ in range(4)), _candidate('b', also_right)]
    entry = self._tune(times, candidates)
    finals = [r['implementation'] for r in entry['candidates'] if 'final_samples_ms' in r]
    self.assertEqual(sorted(finals), ['a', 'a', 'a', 'b'])

  def test_what_fails_to_run_is_rejected_and_the_record_is_json(self):
    def fails(x):
      raise jax.errors.JaxRuntimeError('no such algorithm')

    entry = self._tune(dict(dense=1.0), [_candidate('fails', fails), _candidate('nan', nan)])
    self.assertIn('no such algorithm', entry['candidates'][0]['rejected'])
    json.dumps(entry, allow_nan=False)

  def test_turns_alternate(self):
    seen = []

    def timer(f, args, iterations):
      seen.append(f.__name__)
      return [1.0] * iterations

    _tuning.interleave([_candidate('right', right), _candidate('wrong', wrong)], timer, rounds=3, gap_s=0.0)
    self.assertEqual(seen, ['right', 'wrong', 'wrong', 'right', 'right', 'wrong'])


if __name__ == '__main__':
  absltest.main()
