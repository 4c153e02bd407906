import dataclasses
import json
import math
import pathlib
import statistics
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _tuning
from pallas_kernels.pack import costs

H100 = 'nvidia_h100_80gb_hbm3'
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
  def test_no_more_than_two_repeats_are_on_the_card(self, repeats):
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
    with mock.patch.object(_tuning, '_same_bits', same):
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
    self.assertFalse(_tuning._same_bits(jnp.zeros(3), -jnp.zeros(3)))


class TuneTest(absltest.TestCase):

  def _tune(self, times, candidates):
    quiet = dict(rounds=2, iterations=3, gap_s=0.0)
    return _tuning.tune(
      _KEY, _candidate('dense', dense), candidates, _EXPECTED, _timer(times), quick=quiet, final=quiet
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


class RecordTest(absltest.TestCase):

  def _save(self, *entries):
    temporary = tempfile.TemporaryDirectory()
    self.addCleanup(temporary.cleanup)
    folder = pathlib.Path(temporary.name)
    _tuning.save(folder / 'card' / 'op.json', {'op': 'op'}, entries)
    return folder

  def _entry(self, key, choice):
    row = dict(implementation='mosaic_gpu', rejected=None)
    rows = [row | dict(config={'stages': s}, samples_ms=[float(s)]) for s in (5, 4)]
    return dict(key=key, baseline={}, candidates=rows, choice=dict(implementation=choice, config=None))

  def test_nearest_problem_wins_and_strings_must_match(self):
    big = _KEY | {'m': 256}
    folder = self._save(self._entry(_KEY, 'dense'), self._entry(big, 'mosaic_gpu'))
    found = _tuning.lookup('card', 'op', _KEY | {'m': 200}, folder=folder)
    self.assertEqual((found.implementation, found.key), ('mosaic_gpu', big))
    self.assertIsNone(_tuning.lookup('card', 'op', _KEY | {'m': 1024}, folder=folder))
    self.assertIsNone(_tuning.lookup('card', 'op', _KEY | {'dtype': 'float16'}, folder=folder))
    self.assertIsNone(_tuning.lookup('other', 'op', _KEY, folder=folder))

  def test_a_card_without_records_takes_those_of_its_chip_until_it_is_tuned(self):
    key = next(e['key'] for e in json.loads((_tuning.TUNED / H100 / 'sparse_matmul.json').read_text())['entries'])
    self.assertIsNone(_tuning.lookup('nvidia_a100_sxm4_80gb', 'sparse_matmul', key))
    found = _tuning.lookup('nvidia_h200', 'sparse_matmul', key)
    self.assertEqual(found, _tuning.lookup(H100, 'sparse_matmul', key))
    self.assertGreater(costs.expected_ms('nvidia_h200', 'transposable_pack', 2**26), 0)
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      for card, m in ((H100, 64), ('nvidia_h200', 128)):
        entry = self._entry(_KEY | {'m': m}, 'dense')
        _tuning.save(folder / card / 'sparse_matmul.json', {'op': 'sparse_matmul'}, [entry])
      _tuning.save(folder / H100 / 'vnm_matmul.json', {'op': 'vnm_matmul'}, [self._entry(_KEY, 'dense')])
      self.assertEqual(_tuning.lookup('nvidia_h200', 'sparse_matmul', _KEY, folder=folder).key['m'], 128)
      self.assertEqual(_tuning.lookup('nvidia_h200', 'vnm_matmul', _KEY, folder=folder).key['m'], 64)

  def test_best_settings_of_a_back_end_that_lost(self):
    folder = self._save(self._entry(_KEY, 'dense'))
    found = _tuning.lookup('card', 'op', _KEY, implementation='mosaic_gpu', folder=folder)
    self.assertEqual(found.config, {'stages': 4})

  def test_saving_replaces_the_same_problem(self):
    folder = self._save(self._entry(_KEY, 'dense'))
    _tuning.save(folder / 'card' / 'op.json', {'op': 'op'}, [self._entry(_KEY, 'mosaic_gpu')])
    self.assertLen(json.loads((folder / 'card' / 'op.json').read_text())['entries'], 1)
    self.assertEqual(_tuning.lookup('card', 'op', _KEY, folder=folder).implementation, 'mosaic_gpu')

  def test_entries_say_which_run_made_them(self):
    first, second = (
      {'op': 'op', 'command': f'run {i}', 'commit': i, 'when': 'now', 'driver': '1.2'} for i in ('a', 'b')
    )
    keys = [_KEY | {'m': m} for m in (8, 64, 512)]
    folder = self._save(self._entry(keys[0], 'dense'))  # as before there was such a note
    path = folder / 'card' / 'op.json'
    _tuning.save(path, first, [self._entry(key, 'dense') for key in keys[1:]])
    _tuning.save(path, second, [self._entry(keys[1], 'mosaic_gpu')])
    found = json.loads(path.read_text())
    self.assertEqual(found['command'], 'run b')
    by = {entry['key']['m']: entry.get('by', {}) for entry in found['entries']}
    self.assertEqual({m: each.get('command') for m, each in by.items()}, {8: None, 64: 'run b', 512: 'run a'})
    self.assertEqual(by[512], {'command': 'run a', 'commit': 'a', 'when': 'now'})
    self.assertEqual(_tuning.lookup('card', 'op', keys[1], folder=folder).implementation, 'mosaic_gpu')

  def test_older_rows_stay_when_only_some_settings_are_timed_again(self):
    old = self._entry(_KEY, 'dense')
    old['candidates'][0]['final_samples_ms'] = [5.0]
    again = old['candidates'][1] | dict(samples_ms=[4.5])
    other = again | dict(implementation='cusparselt')
    rows = _tuning.merged([again, other], old)
    self.assertEqual(rows[:2], [again, other])
    self.assertEqual([r['config'] for r in rows[2:]], [{'stages': 5}])
    self.assertEqual(rows[2]['earlier_final_samples_ms'], [5.0])
    self.assertNotIn('final_samples_ms', rows[2])
    self.assertEqual(_tuning.merged([again], None), [again])

  def test_every_shipped_choice_is_the_fastest_verified_one(self):
    paths = list(_tuning.TUNED.glob('*/*_matmul.json'))
    self.assertContainsSubset({'sparse_matmul.json', 'vnm_matmul.json'}, {path.name for path in paths})
    for path in paths:
      record = json.loads(path.read_text())
      for entry in record['entries']:
        verified = [r for r in entry['candidates'] if r['rejected'] is None and 'final_samples_ms' in r]
        cost = {i: statistics.median(r['final_samples_ms']) + r.get('setup_ms', 0) for i, r in enumerate(verified)}
        fastest = verified[min(cost, key=lambda i: cost[i])]
        sparse_wins = min(cost.values()) < statistics.median(entry['baseline']['samples_ms'])
        self.assertEqual(entry['choice']['implementation'], fastest['implementation'] if sparse_wins else 'dense')
        if sparse_wins:
          self.assertEqual(entry['choice']['config'], fastest['config'])
        for row in entry['candidates']:
          if row['rejected'] is None:
            self.assertLessEqual(row['error'], _tuning.TOLERANCE)
            self.assertTrue(np.all(np.asarray(row['samples_ms']) > 0))


if __name__ == '__main__':
  absltest.main()
