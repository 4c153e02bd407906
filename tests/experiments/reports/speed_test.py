"""The figures of benchmark records, and the tables and the picture that are made of them."""

import json
import pathlib
import statistics
import tempfile
import xml.etree.ElementTree as ET

from absl.testing import absltest, parameterized

from experiments.reports import charts, provenance, speed

KINDS = {'GEMM sparse': 2.0, 'GEMM dense': 1.0, 'other': 0.0}
RECORD = {
  'bench': 'ffn', 'device': 'GPU <1>', 'versions': {'jax': '1'}, 'command': 'python x', 'op': 'ffn',
  'recipe': 'transposable_srste', 'activation': 'gelu', 'shape': {'tokens': 8, 'd': 4, 'hidden': 16},
  'median_ms': 2.0, 'baselines': {'dense': {'median_ms': 3.0}}, 'tflops': 10.0, 'headline': True,
  'sparse_calls': {'forward': 2, 'input_grad': 2, 'weight_grad': 2},
  'profile': {'sparse': {'by_kind_ms': KINDS, 'busy_ms': 3.0, 'idle_ms': 0.5, 'top': []}, 'dense': None},
}  # fmt: skip


def write(folder, *records):
  path = pathlib.Path(folder) / 'records.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return path


class SpeedTest(parameterized.TestCase):

  def test_the_lower_of_bursts_and_trace_is_shown(self):
    """A committed H200 block has 2.08 in bursts and 1.89 traced; a block that was not traced is not shown."""
    records = speed.load(provenance.RESULTS.glob('*.jsonl'))
    for change, count in (({}, 1), ({'profile': None}, 0)):
      changed = [r | change if r.get('pattern') == '128:2:8' and r['bench'] == 'ffn' else r for r in records]
      blocks = dict(speed.figure_rows(changed, {})['Feed-forward block, 16384 x 4096 x 16384, forward and backward'])
      self.assertEqual([times for what, times in blocks.items() if '128:2:8' in what], [1.89] * count)

  def test_the_picture_tells_what_loses_from_what_gains(self):
    profile = {'sparse': {**RECORD['profile']['sparse'], 'busy_ms': 2.5}, 'dense': RECORD['profile']['sparse']}
    block = RECORD | {'shape': {'tokens': 16384, 'd': 4096, 'hidden': 16384}, 'profile': profile}
    steps = {'Training step': [('m', 0.75)]}
    picture = speed.figure([block, RECORD], steps)
    texts = [text.strip() for text in ET.fromstring(picture).itertext()]
    self.assertIn('1.17', texts)  # traced: 3.5 for 3.0
    self.assertIn('0.75', texts)
    for kind in ('faster', 'slower'):
      self.assertIn(f'fill: {charts.COLOURS[kind]}', picture)
    other = block | {'device': 'another', 'median_ms': 1.0}
    self.assertEqual(speed.figure([block, RECORD, other], steps), picture)
    # Rows of another device name it.
    head, _, *rows = speed.markdown([other, block, RECORD]).splitlines()
    self.assertEqual(head, f'On one {RECORD["device"]}, where a row names no other:')
    self.assertEqual(['another' in row for row in rows[2:]], [False, False, True])
    with self.assertRaisesRegex(ValueError, 'no record of a traced block'):
      speed.figure([RECORD], steps)

  def test_committed_medians_and_speedups_follow_from_the_samples(self):
    for path in provenance.RESULTS.glob('*.jsonl'):
      for record in map(json.loads, path.read_text().splitlines()):
        rows = [record, *record.get('baselines', {}).values()]
        for row in (row for row in rows if 'samples_ms' in row):
          median = statistics.median(row['samples_ms'])
          # Written to a tenth of a microsecond.
          delta = 1e-3 * median + 5e-5
          self.assertAlmostEqual(row['median_ms'], median, delta=delta, msg=f'{path.name}: {record["op"]}')
        if record.get('bench') == 'ffn':
          for name, speedup in record['speedup'].items():
            self.assertAlmostEqual(speedup, speed.ratios(record)[name], delta=1e-3, msg=path.name)

  def test_the_last_of_equal_records_counts_and_tiny_ones_do_not(self):
    other = RECORD | {'median_ms': 2.5}
    tiny = RECORD | {'command': 'python x --tiny', 'activation': 'swiglu'}
    with tempfile.TemporaryDirectory() as folder:
      found = speed.load([write(folder, RECORD, tiny, other, {'bench': 'unknown'})])
    self.assertEqual([record['median_ms'] for record in found], [2.5])

  def test_a_broken_line_is_named(self):
    with tempfile.TemporaryDirectory() as folder:
      path = write(folder, RECORD)
      path.write_text(path.read_text() + '\n{"bench": ')
      with self.assertRaisesRegex(ValueError, 'records.jsonl, line 2'):
        speed.load([path])


if __name__ == '__main__':
  absltest.main()
