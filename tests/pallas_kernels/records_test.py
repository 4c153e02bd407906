"""Records of a GPU: what is found near a problem, what a new run replaces, and what is shipped."""

import functools
import json
import logging
import pathlib
import statistics
import tempfile

from absl.testing import absltest
import numpy as np

from pallas_kernels import _records, _tuning, costs
from tests import targets

H100 = 'nvidia_h100_80gb_hbm3'
_KEY = dict(m=64, n=64, k=64, dtype='bfloat16')


class RecordsTest(absltest.TestCase):

  def _save(self, *entries):
    temporary = tempfile.TemporaryDirectory()
    self.addCleanup(temporary.cleanup)
    folder = pathlib.Path(temporary.name)
    _records.save(folder / 'gpu' / 'op.json', {'op': 'op'}, entries)
    return folder

  def _entry(self, key, choice):
    row = dict(implementation='mosaic_gpu', rejected=None)
    rows = [row | dict(config={'stages': s}, samples_ms=[float(s)]) for s in (5, 4)]
    return dict(key=key, baseline={}, candidates=rows, choice=dict(implementation=choice, config=None))

  def test_nearest_problem_wins_and_strings_must_match(self):
    big = _KEY | {'m': 256}
    folder = self._save(self._entry(_KEY, 'dense'), self._entry(big, 'mosaic_gpu'))
    found = _records.lookup('gpu', 'op', _KEY | {'m': 200}, folder=folder)
    self.assertEqual((found.implementation, found.key), ('mosaic_gpu', big))
    self.assertIsNone(_records.lookup('gpu', 'op', _KEY | {'m': 1024}, folder=folder))
    self.assertIsNone(_records.lookup('gpu', 'op', _KEY | {'dtype': 'float32'}, folder=folder))
    self.assertIsNone(_records.lookup('other', 'op', _KEY, folder=folder))

  def test_what_is_no_record_is_named(self):
    entries = '3', '[{}]', '[{"key": 1, "choice": {}}]'
    for text in ('', '[]', '[' * 10**5, *(f'{{"entries": {each}}}' for each in entries)):
      path = self._save(self._entry(_KEY, 'dense')) / 'gpu' / 'op.json'
      path.write_text(text)
      with self.assertRaisesRegex(ValueError, f'{path} is no record of tuning.*put back a copy'):
        _records.lookup('gpu', 'op', _KEY, folder=path.parents[1])

  def test_sizes_that_are_none_are_near_nothing(self):
    folder = self._save(*(self._entry(_KEY | {'m': m}, 'mosaic_gpu') for m in (0, -64, '64')))
    self.assertIsNone(_records.lookup('gpu', 'op', _KEY, folder=folder))

  def test_float16_takes_what_was_measured_in_bfloat16(self):
    bf16, fp16, wide = (
      _KEY | {'dtype': a, 'out_dtype': b}
      for a, b in (('bfloat16', 'bfloat16'), ('float16', 'float16'), ('float16', 'float32'))
    )
    folder = self._save(self._entry(bf16, 'mosaic_gpu'))
    lookup = functools.partial(_records.lookup, 'gpu', 'op', folder=folder)
    with self.assertLogs('pallas_kernels', logging.INFO) as logs:
      for key in (fp16, fp16 | {'m': 90}):
        self.assertEqual(lookup(key).key, bf16)
        self.assertEqual(lookup(key, implementation='mosaic_gpu').config, {'stages': 4})
    self.assertLen(logs.output, 1)
    self.assertRegex(logs.output[0], 'op: on gpu nothing .* was measured in float16; records of bfloat16 serve')
    self.assertIsNone(lookup(fp16 | {'m': 1024}))
    self.assertIsNone(lookup(wide))
    self.assertIsNone(lookup(bf16 | {'dtype': 'float32', 'out_dtype': 'float32'}))
    self.assertIsNone(_records.entry_of(folder / 'gpu' / 'op.json', fp16))

  def test_gradients_in_e4m3_take_what_was_measured_in_e5m2(self):
    e5m2, e4m3 = (_KEY | {'dtype': name, 'out_dtype': 'bfloat16'} for name in ('float8_e5m2', 'float8_e4m3fn'))
    folder = self._save(self._entry(e5m2, 'mosaic_gpu'), self._entry(e4m3 | {'m': 1024}, 'dense'))
    lookup = functools.partial(_records.lookup, 'gpu', 'op', folder=folder)
    with self.assertLogs('pallas_kernels', logging.INFO) as logs:
      self.assertEqual(lookup(e4m3).key, e5m2)
    self.assertRegex(logs.output[0], 'was measured in float8_e4m3fn; records of float8_e5m2 serve')
    self.assertEqual(lookup(e4m3 | {'m': 900}).implementation, 'dense')
    self.assertIsNone(lookup(e5m2 | {'m': 1024}))

  def test_a_record_of_float16_wins_where_there_is_one(self):
    bf16, own = (_KEY | {'dtype': name, 'out_dtype': name} for name in ('bfloat16', 'float16'))
    own |= {'m': 96}
    folder = self._save(self._entry(bf16, 'mosaic_gpu'), self._entry(own, 'dense'))
    lookup = functools.partial(_records.lookup, 'gpu', 'op', folder=folder)
    with self.assertNoLogs('pallas_kernels', logging.INFO):
      for m in (64, 96):  # at 64 bfloat16 is nearer
        self.assertEqual(lookup(own | {'m': m}).key, own)
    self.assertEqual(lookup(own | {'m': 40}).key, bf16)
    self.assertEqual(lookup(bf16 | {'m': 96}).key, bf16)

  def test_on_an_h100_float16_runs_as_bfloat16_does(self):
    gpu = targets.target_device('sm_90a')
    for op in ('sparse_matmul', 'vnm_matmul'):
      for entry in _records.entries_of(_records.path_of(_records.TUNED, gpu.slug, op)):
        if entry['key']['dtype'] == 'bfloat16':
          fp16 = {name: 'float16' if value == 'bfloat16' else value for name, value in entry['key'].items()}
          self.assertEqual(*(_records.lookup(gpu.slug, op, key) for key in (fp16, entry['key'])))
          self.assertEqual(*(_records.expected_ms(gpu.slug, op, key) for key in (fp16, entry['key'])))
          self.assertIn('dense', _records.expected_ms(gpu.slug, op, fp16))

  def test_of_equally_near_problems_the_one_that_is_near_in_all_sizes(self):
    """Twice or half as many tokens are as far; then the layer's own width decides, and not the order of the file."""
    own, other = _KEY | {'n': 128}, _KEY | {'n': 128, 'm': 48, 'k': 48}
    for entries in ((own, other), (other, own)):
      folder = self._save(*(self._entry(key, 'dense') for key in entries))
      self.assertEqual(_records.lookup('gpu', 'op', _KEY, folder=folder).key, own)

  def test_what_is_not_measured_on_a_gpu_is_taken_from_its_chip(self):
    key = dict(m=3072, n=2048, k=768, dtype='bfloat16', out_dtype='bfloat16', b_layout='nk', out_layout='nm')
    self.assertIsNone(_records.lookup('nvidia_a100_sxm4_80gb', 'sparse_matmul', key))
    found = _records.lookup('nvidia_h200', 'sparse_matmul', key)
    self.assertEqual(found, _records.lookup(H100, 'sparse_matmul', key))
    self.assertGreater(costs.expected_ms('nvidia_h200', 'transposable_pack', 2**26), 0)
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      for gpu, m in ((H100, 64), ('nvidia_h200', 128)):
        entry = self._entry(_KEY | {'m': m}, 'dense')
        _records.save(folder / gpu / 'sparse_matmul.json', {'op': 'sparse_matmul'}, [entry])
      _records.save(folder / H100 / 'vnm_matmul.json', {'op': 'vnm_matmul'}, [self._entry(_KEY, 'dense')])
      lookup = functools.partial(_records.lookup, 'nvidia_h200', 'sparse_matmul', folder=folder)
      # The problem itself, whichever has it; what is near in its own record; elsewhere the other's.
      self.assertEqual([lookup(_KEY | {'m': m}).key['m'] for m in (64, 72, 256, 32)], [64, 128, 128, 64])
      self.assertEqual(_records.lookup('nvidia_h200', 'vnm_matmul', _KEY, folder=folder).key['m'], 64)

  def test_best_settings_of_a_back_end_that_lost(self):
    folder = self._save(self._entry(_KEY, 'dense'))
    found = _records.lookup('gpu', 'op', _KEY, implementation='mosaic_gpu', folder=folder)
    self.assertEqual(found.config, {'stages': 4})

  def test_saving_replaces_the_same_problem(self):
    folder = self._save(self._entry(_KEY, 'dense'))
    _records.save(folder / 'gpu' / 'op.json', {'op': 'op'}, [self._entry(_KEY, 'mosaic_gpu')])
    self.assertLen(json.loads((folder / 'gpu' / 'op.json').read_text())['entries'], 1)
    self.assertEqual(_records.lookup('gpu', 'op', _KEY, folder=folder).implementation, 'mosaic_gpu')

  def test_entries_say_which_run_made_them(self):
    first, second = (
      {'op': 'op', 'command': f'run {i}', 'commit': i, 'when': 'now', 'driver': '1.2'} for i in ('a', 'b')
    )
    keys = [_KEY | {'m': m} for m in (8, 64, 512)]
    folder = self._save(self._entry(keys[0], 'dense'))  # as before there was such a note
    path = folder / 'gpu' / 'op.json'
    _records.save(path, first, [self._entry(key, 'dense') for key in keys[1:]])
    _records.save(path, second, [self._entry(keys[1], 'mosaic_gpu')])
    found = json.loads(path.read_text())
    self.assertEqual(found['command'], 'run b')
    by = {entry['key']['m']: entry.get('by', {}) for entry in found['entries']}
    self.assertEqual({m: each.get('command') for m, each in by.items()}, {8: None, 64: 'run b', 512: 'run a'})
    self.assertEqual(by[512], {'command': 'run a', 'commit': 'a', 'when': 'now'})
    self.assertEqual(_records.lookup('gpu', 'op', keys[1], folder=folder).implementation, 'mosaic_gpu')

  def test_older_rows_stay_when_only_some_settings_are_timed_again(self):
    old = self._entry(_KEY, 'dense')
    old['candidates'][0] |= dict(final_samples_ms=[5.0], sustained_ms=5.5, power_w=700.0)
    again = old['candidates'][1] | dict(samples_ms=[4.5])
    other = again | dict(implementation='cusparselt')
    rows = _records.merged([again, other], old)
    self.assertEqual(rows[:2], [again, other])
    self.assertEqual([r['config'] for r in rows[2:]], [{'stages': 5}])
    self.assertEqual(rows[2]['earlier_final_samples_ms'], [5.0])
    self.assertEqual((rows[2]['earlier_sustained_ms'], rows[2]['earlier_power_w']), (5.5, 700.0))
    self.assertNoCommonElements(('final_samples_ms', 'sustained_ms', 'power_w'), rows[2])
    self.assertEqual(_records.merged([again], None), [again])

  def test_the_longest_heat_judges(self):
    rows = [dict(implementation='a', config=i, rejected=None, samples_ms=[1.0]) for i in range(4)]
    rows[1] |= dict(final_samples_ms=[3.0])
    rows[2] |= dict(final_samples_ms=[3.5], sustained_ms=4.0)
    rows[3] |= dict(final_samples_ms=[3.6], sustained_ms=3.9)
    for count, best in ((1, 0), (2, 1), (3, 2), (4, 3)):
      self.assertEqual(_records.best_of(dict(candidates=rows[:count]), 'a')['config'], best)
    rows[3] |= dict(setup_ms=0.2)
    self.assertEqual(_records.best_of(dict(candidates=rows), 'a')['config'], 2)

  def test_times_are_those_by_which_the_choice_was_made(self):
    row = dict(implementation='a', config=0, rejected=None, samples_ms=[1.1], final_samples_ms=[1.05])
    other = row | dict(implementation='b', samples_ms=[0.1])
    wide = dict(samples_ms=[4.0])
    bursts = dict(baseline=dict(samples_ms=[1.0]), candidates=[row, other], others=dict(wide=wide))
    self.assertEqual(_records.times_ms(bursts), dict(dense=1.0, a=1.05, b=1.05, wide=4.0))
    # What was not looped is not compared with what was.
    loops = dict(
      baseline=dict(samples_ms=[1.0], sustained_ms=1.5), others=dict(wide=wide | dict(sustained_ms=5.0)),
      candidates=[row | dict(sustained_ms=1.25, setup_ms=0.25), other],
    )  # fmt: skip
    self.assertEqual(_records.times_ms(loops), dict(dense=1.5, a=1.5, wide=5.0))

  def test_every_shipped_choice_is_the_fastest_verified_one(self):
    paths = list(_records.TUNED.glob('*/*_matmul.json'))
    self.assertContainsSubset({'sparse_matmul.json', 'vnm_matmul.json'}, {path.name for path in paths})
    for path in paths:
      record = json.loads(path.read_text())
      for entry in record['entries']:
        verified = [r for r in entry['candidates'] if r['rejected'] is None and 'final_samples_ms' in r]
        if 'sustained_ms' in entry['baseline']:  # judged by loops
          dense, ms = entry['baseline']['sustained_ms'], [r['sustained_ms'] for r in verified]
        else:
          dense = statistics.median(entry['baseline']['samples_ms'])
          ms = [statistics.median(r['final_samples_ms']) for r in verified]
        cost = [each + r.get('setup_ms', 0) for each, r in zip(ms, verified, strict=True)]
        fastest, sparse_wins = verified[int(np.argmin(cost))], min(cost) < dense
        self.assertEqual(entry['choice']['implementation'], fastest['implementation'] if sparse_wins else 'dense')
        if sparse_wins:
          self.assertEqual(entry['choice']['config'], fastest['config'])
        for row in entry['candidates']:
          if row['rejected'] is None:
            self.assertLessEqual(row['error'], _tuning.TOLERANCE)
            self.assertTrue(np.all(np.asarray(row['samples_ms']) > 0))


if __name__ == '__main__':
  absltest.main()
