"""The benchmark of blocks with V:N:M activations on small shapes: what its records hold."""

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
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()) as out:
      file = pathlib.Path(name) / 'records.jsonl'
      options = ['--tiny', '--rounds', '2', '--steps', '2', '--select', 'ffn-64x2x8-16384x4096x16384']
      self.assertEqual(neuron_level.main(['--out', str(file), *options]), 0, out.getvalue())
      (record,) = map(json.loads, file.read_text().splitlines())
    self.assertContainsSubset(('device', 'versions', 'commit', 'command'), record)
    self.assertEqual((record['bench'], record['pattern'], record['recipe']), ('ffn', '64:2:8', 'neuron_level'))
    self.assertLen(record['samples_ms'], 4)  # every one
    self.assertFalse(record['headline'])
    self.assertIn(record['baselines']['dense']['form'], ('dense', 'dense recompute'))

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
