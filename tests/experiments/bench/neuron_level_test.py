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


class NeuronLevelBenchTest(absltest.TestCase):
  @pytest.mark.slow
  def test_records(self):
    names = [f'{kind}-64x2x8-{size}' for kind, size in (
      ('matmul', '16384x4096x16384'), ('ffn', '16384x4096x16384'),
    )] + [f'pack-64x2x8-{role}-16384x16384' for role in ('residuals', 'pull_back', 'transpose', 'columns')]
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()) as out:
      folder = pathlib.Path(name)
      options = ['--tiny', '--rounds', '2', '--steps', '2']
      failed = neuron_level.main(['--out', str(folder / 'records.jsonl'), *options, '--select', *names])
      self.assertEqual(failed, 0, out.getvalue())
      records = [json.loads(line) for line in (folder / 'records.jsonl').read_text().splitlines()]
    product, block, forward, pull_back, transpose, columns = records
    self.assertEqual([r['bench'] for r in records], ['vnm_matmul', 'ffn', *['memory_bound'] * 4])
    for record in records:
      self.assertContainsSubset(('device', 'versions', 'commit', 'command', 'samples_ms', 'pattern', 'recipe'), record)
      self.assertLen(record['samples_ms'], 4)  # every one
      self.assertFalse(record['headline'])
    self.assertLessEqual(product['error'], 4e-3)
    self.assertEqual([*product['baselines']], ['dense', 'dense_without_zeros'])
    ratio = product['baselines']['dense']['median_ms'] / product['median_ms']
    self.assertAlmostEqual(product['speedup'], ratio, places=3)
    self.assertIn(block['baselines']['dense']['form'], ('dense', 'dense recompute'))
    # x [128, 256] read; a quarter of it twice, 2 bits for each of these, int32 of kept columns and of counts written.
    self.assertEqual(forward['bytes'], 65536 + 2 * 65536 // 4 + 128 * 64 // 4 + 2 * 128 * 4 + 256 * 4)
    # The gradient, what was kept of x and the positions read, values written.
    self.assertEqual(pull_back['bytes'], 65536 + 65536 // 4 + 128 * 64 // 4 + 2 * 128 * 4 + 65536 // 4)
    # An operand of [256, 128] and a flag a column read, an operand of [128, 256] written.
    self.assertEqual(transpose['bytes'], 2 * (65536 // 4 + 128 * 64 // 4) + 4 * 64 * 4 + 128 + 2 * 128 * 4)
    # 13 of 256 columns written, [128, 13]; they are in groups of 8, so at most all 4 sectors of a row's 32 groups.
    self.assertBetween(columns['bytes'], 2 * 128 * 13 + 32 * 128, 2 * 128 * 13 + 4 * 32 * 128 + 2 * 512 * 2)

  @pytest.mark.slow
  def test_traces_come_last_and_find_every_record_written(self):
    names = [f'ffn-{pattern}-16384x4096x16384' for pattern in ('64x2x8', '64x2x8-two_of_four_tokens')]
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()) as out:
      file = pathlib.Path(name) / 'records.jsonl'

      def explain(calls, programs, steps):
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


if __name__ == '__main__':
  absltest.main()
