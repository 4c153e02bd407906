"""The V:N:M benchmark on small shapes: what its records hold."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
import jax
import pytest

from experiments.bench import neuron_level, trace
from experiments.reports import speed
from pallas_kernels import _records
from pallas_kernels.vnm import api, mosaic_gpu
from pallas_kernels.vnm.format import decompress_operand, verify


class NeuronLevelBenchTest(absltest.TestCase):
  @pytest.mark.slow
  def test_records(self):
    names = [f'{kind}-64x2x8-{size}' for kind, size in (
      ('matmul', '16384x4096x16384'), ('ffn', '16384x4096x16384'),
    )] + [f'pack-64x2x8-{role}-16384x16384' for role in ('residuals', 'tokens_gradient', 'turn', 'columns')]
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()) as out:
      folder = pathlib.Path(name)
      options = ['--tiny', '--rounds', '2', '--steps', '2', '--tune', str(folder / 'tuned')]
      failed = neuron_level.main(['--out', str(folder / 'records.jsonl'), *options, '--select', *names])
      self.assertEqual(failed, 0, out.getvalue())
      records = [json.loads(line) for line in (folder / 'records.jsonl').read_text().splitlines()]
      (tuned,) = (folder / 'tuned').glob(f'*/{api.OP}.json')
      (entry,) = json.loads(tuned.read_text())['entries']
    product, block, forward, tokens, turn, columns = records
    self.assertEqual([r['bench'] for r in records], ['vnm_matmul', 'ffn', *['memory_bound'] * 4])
    for record in records:
      self.assertContainsSubset(('device', 'versions', 'commit', 'command', 'samples_ms', 'pattern', 'recipe'), record)
      self.assertLen(record['samples_ms'], 4)  # every one
      self.assertFalse(record['headline'])
    self.assertLessEqual(product['error'], 4e-3)
    self.assertEqual([*product['baselines']], ['dense', 'dense_without_zeros'])
    ratio = product['baselines']['dense']['median_ms'] / product['median_ms']
    self.assertAlmostEqual(product['speedup'], ratio, places=3)
    self.assertEqual(entry['key']['pattern'], '64:2:8')
    self.assertIn(block['baselines']['dense']['form'], ('dense', 'dense recompute'))
    # x [128, 256] read; a quarter of it twice, 2 bits for each of these, int32 of kept columns and of counts written.
    self.assertEqual(forward['bytes'], 65536 + 2 * 65536 // 4 + 128 * 64 // 4 + 2 * 128 * 4 + 256 * 4)
    # Half of the gradient and the pattern read, values written.
    self.assertEqual(tokens['bytes'], 65536 // 2 + 128 * 64 // 4 + 2 * 128 * 4 + 65536 // 4)
    # An operand of [256, 128] and a flag a column read, an operand of [128, 256] written.
    self.assertEqual(turn['bytes'], 2 * (65536 // 4 + 128 * 64 // 4) + 4 * 64 * 4 + 128 + 2 * 128 * 4)
    # 13 of 256 columns written, [128, 13]; they are in groups of 8, so at most all 4 sectors of a row's 32 groups.
    self.assertBetween(columns['bytes'], 2 * 128 * 13 + 32 * 128, 2 * 128 * 13 + 4 * 32 * 128 + 2 * 512 * 2)

  def test_traces_come_last_and_find_every_record_written(self):
    names = [f'ffn-{pattern}-16384x4096x16384' for pattern in ('64x2x8', '64x2x8-two_of_four_tokens')]
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()) as out:
      file = pathlib.Path(name) / 'records.jsonl'

      def explain(calls, programs, steps, folder):
        written.append(file.read_text().count('\n'))
        jax.block_until_ready([call() for call in calls.values()])
        self.assertContainsSubset(calls, programs)
        return {twin: {'trace': len(written), 'busy_ms': 2.0, 'idle_ms': 0.5} for twin in calls}

      written = []
      with mock.patch.object(trace, 'explain', explain):
        failed = neuron_level.main(
          ['--out', str(file), '--tiny', '--rounds', '1', '--steps', '1', '--explain', '--select', *names]
        )
      self.assertEqual(failed, 0, out.getvalue())
      records = [json.loads(line) for line in file.read_text().splitlines()]
    self.assertEqual(written, [2, 2])
    self.assertEqual([(r['dense_features'], r['token_pattern']) for r in records], [(0.05, None), (0.0, '2:4')])
    patterns = [row.split(' | ')[1] for row in speed.markdown(records).splitlines()[4:]]
    self.assertEqual(patterns, [f'neuron level, bfloat16, 64:2:8{x}' for x in ('', ', 2:4 along tokens')])
    self.assertNotEqual(*map(speed.identity, records))  # neither takes the other's place
    self.assertEqual([r['profile']['sparse']['trace'] for r in records], [1, 2])

  def test_settings_can_be_built(self):
    for v in (64, 128, 256):
      problem = mosaic_gpu.Problem(16384, 4096, 8192, v, 16384, *[jax.numpy.dtype('bfloat16')] * 2, 'mn')
      for config in neuron_level.configs(v):
        mosaic_gpu.check_config(problem, config)

  def test_what_the_records_choose_can_be_built(self):
    paths = sorted(_records.TUNED.glob(f'*/{api.OP}.json'))
    self.assertContainsSubset(('nvidia_h100_80gb_hbm3', 'nvidia_h200'), [path.parent.name for path in paths])
    chosen = 0
    for entry in (entry for path in paths for entry in _records.entries_of(path)):
      key, v = entry['key'], int(entry['key']['pattern'].split(':')[0])
      m = int(entry['key']['pattern'].split(':')[2])
      types = [jax.numpy.dtype(key[name]) for name in ('dtype', 'out_dtype')]
      problem = mosaic_gpu.Problem(key['m'], key['n'], 4 * key['k'] // m, v, key['k'], *types, key['out_layout'])
      for row in entry['candidates']:
        mosaic_gpu.check_config(problem, mosaic_gpu.Config(**row['config']))
      chosen += entry['choice']['implementation'] == 'mosaic_gpu'
    self.assertEqual(chosen, 8 * len(paths))

  def test_the_random_operand_is_legal(self):
    a = neuron_level.operand(128, 64, 64, 8, jax.random.key(0))
    verify(decompress_operand(a), v=64, m=8)


if __name__ == '__main__':
  absltest.main()
