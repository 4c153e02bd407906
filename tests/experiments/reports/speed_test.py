"""The page about benchmark records."""

import html.parser
import json
import pathlib
import re
import statistics
import tempfile
import xml.etree.ElementTree as ET

from absl.testing import absltest, parameterized

from experiments.reports import charts, speed

KINDS = {'GEMM sparse': 2.0, 'GEMM dense': 1.0, 'other': 0.0}
RECORD = {
  'bench': 'ffn', 'device': 'Card <1>', 'versions': {'jax': '1'}, 'command': 'python x', 'op': 'ffn',
  'recipe': 'transposable_srste', 'activation': 'gelu', 'shape': {'tokens': 8, 'd': 4, 'hidden': 16},
  'median_ms': 2.0, 'baselines': {'dense': {'median_ms': 3.0}}, 'tflops': 10.0, 'headline': True,
  'sparse_calls': {'forward': 2, 'input_grad': 2, 'weight_grad': 2},
  'profile': {'sparse': {'by_kind_ms': KINDS, 'busy_ms': 3.0, 'idle_ms': 0.5, 'top': []}, 'dense': None},
}  # fmt: skip


class Balanced(html.parser.HTMLParser):
  """Fails on a tag that is closed out of order."""

  def __init__(self):
    super().__init__()
    self.open = []

  def handle_starttag(self, tag, attrs):
    if tag not in ('meta', 'link', 'rect', 'br', 'path', 'use'):
      self.open.append(tag)

  def handle_endtag(self, tag):
    if tag not in ('rect', 'path', 'use'):
      assert self.open.pop() == tag, tag


def write(folder, *records):
  path = pathlib.Path(folder) / 'records.jsonl'
  path.write_text('\n'.join(json.dumps(record) for record in records))
  return path


class PageTest(parameterized.TestCase):
  def test_shows_the_committed_records(self):
    """One of each benchmark; pages_test makes the page of all."""
    records = speed.load(speed.RESULTS.glob('*.jsonl'))
    self.assertNotEmpty(records)
    text = speed.page([*{record['bench']: record for record in records}.values()])
    self.assertIn('Sparse matmul', text)
    parser = Balanced()
    parser.feed(text)
    self.assertEqual(parser.open, [])

  def test_the_lower_of_bursts_and_trace_is_shown(self):
    """Of a committed H200 block: 2.16 in bursts and 1.99 traced; a block that was not traced is not shown."""
    records = speed.load(speed.RESULTS.glob('*.jsonl'))
    for change, count in (({}, 1), ({'profile': None}, 0)):
      changed = [r | change if r.get('pattern') == '128:2:8' and r['bench'] == 'ffn' else r for r in records]
      blocks = dict(speed.figure_rows(changed)['Feed-forward block, 16384 x 4096 x 16384, forward and backward'])
      self.assertEqual([times for what, times in blocks.items() if '128:2:8' in what], [1.99] * count)

  def test_the_picture_tells_what_loses_from_what_gains(self):
    slow = RECORD | {'bench': 'train_step', 'model': 'm', 'median_ms': 4.0, 'shape': {'batch': 2, 'length': 4}}
    slow = slow | {'profile': None}
    profile = {'sparse': {**RECORD['profile']['sparse'], 'busy_ms': 2.5}, 'dense': RECORD['profile']['sparse']}
    block = RECORD | {'shape': {'tokens': 16384, 'd': 4096, 'hidden': 16384}, 'profile': profile}
    picture = speed.figure([block, slow])
    texts = [text.strip() for text in ET.fromstring(picture).itertext()]
    self.assertIn('1.17', texts)  # traced: 3.5 for 3.0
    self.assertIn('0.75', texts)
    for role in ('sparse', 'cusparselt'):
      self.assertIn(f'fill: {charts.COLOURS[role]}', picture)
    other = block | {'device': 'another', 'median_ms': 1.0}
    self.assertEqual(speed.figure([block, slow, other]), picture)
    # A table for each device.
    tables = [speed.markdown([block, slow]), speed.markdown([other])]
    self.assertEqual(speed.markdown([other, block, slow]), '\n\n'.join(tables))
    with self.assertRaisesRegex(ValueError, 'no record of a training step'):
      speed.figure([RECORD])

  def test_committed_medians_and_speedups_follow_from_the_samples(self):
    for path in speed.RESULTS.glob('*.jsonl'):
      for record in map(json.loads, path.read_text().splitlines()):
        rows = [record, *record.get('baselines', {}).values()]
        for row in (row for row in rows if 'samples_ms' in row):
          median = statistics.median(row['samples_ms'])
          # Written to a tenth of a microsecond.
          delta = 1e-3 * median + 5e-5
          self.assertAlmostEqual(row['median_ms'], median, delta=delta, msg=f'{path.name}: {record["op"]}')
        if record.get('bench') in ('ffn', 'block', 'train_step'):
          for name, speedup in record['speedup'].items():
            self.assertAlmostEqual(speedup, speed.ratios(record)[name], delta=1e-3, msg=path.name)

  def test_every_kind_of_product_is_drawn(self):
    row = RECORD | {'shape': {'tokens': 8, 'd_in': 4, 'd_out': 16}, 'role': 'forward', 'dtype': 'float8'}
    row['baselines'] = {'dense_fp8': {'median_ms': 3.0, 'sustained_ms': 8.0}, 'cusparselt': {'median_ms': 2.5}}
    row |= {'sustained_ms': 4.0, 'note': 'read <with> care'}
    for bench in ('sparse_matmul', 'float8_products', 'cusparselt', 'epilogue'):
      text = speed.page([row | {'bench': bench}])
      for wanted in ('1.500 dense fp8', '1.250 cusparselt', '2.000 dense fp8', 'forward float8 8 x 4 x 16', 'read &lt'):
        self.assertIn(wanted, text)

  def test_devices_are_told_apart(self):
    other = RECORD | {'device': 'another', 'median_ms': 1.0, 'headline': True}
    text = speed.page([RECORD, other, RECORD | {'recipe': 'other'}])
    here, there = text.split('<h1 class=part>another</h1>')
    self.assertEqual((here.count('3.00x'), there.count('3.00x')), (0, 1))
    self.assertIn('<h1 class=part>Card &lt;1&gt;</h1>', here)
    self.assertNotIn('class=part', speed.page([other]))

  def test_ratios_profile_and_escaping(self):
    text = speed.page([RECORD])
    for wanted in ('1.50x', '1.500 dense', '2 / 2 / 2', 'Where the time goes', 'GEMM sparse', 'Card &lt;1&gt;'):
      self.assertIn(wanted, text)
    self.assertNotIn('http', re.sub(r'http://www\.w3\.org/(2000/svg|1999/xlink)', '', text))

  def test_several_devices_are_told_from_one(self):
    block = RECORD | {'bench': 'mesh', 'op': 'ffn', 'mesh': {'data': 2}, 'profile': None, 'device': 'Card'}
    check = RECORD | {'bench': 'mesh_check', 'op': 'check-ffn', 'mesh': {'data': 2}, 'error': {'gelu': {'dx': 1.5e-3}}}
    text = speed.page([RECORD, block, check])
    for wanted in ('gelu 8 x 4 x 16 on 2 Card', 'Several GPUs beside one', 'gelu / dx', '1.5e-03'):
      self.assertIn(wanted, text)

  def test_attention_shows_each_back_end(self):
    row = RECORD | {'bench': 'attention', 'pattern': 'local', 'window': 8, 'shape': {'batch': 2, 'length': 64},
                    'implementation': 'blocks', 'computed_share': 0.125, 'error': {'blocks': {'y': 1e-3, 'dq': 2e-3}},
                    'baselines': {'full': {'median_ms': 7.125}}}  # fmt: skip
    text = speed.page([row])
    for wanted in ('local, window 8, 2 x 64', '7.125', '12%', '2.0e-03', 'ms by the wall clock'):
      self.assertIn(wanted, text)
    self.assertIn('ms of its kernels', speed.page([row | {'clock': 'device'}]))

  def test_a_step_counts_its_searches(self):
    step = RECORD | {'bench': 'train_step', 'model': 'm', 'shape': {'batch': 2, 'length': 3}, 'amortised_ms': 2.4,
                     'tokens_per_s': 1234.0, 'profile': None}  # fmt: skip
    self.assertEqual(speed.ratios(step), {'dense': 1.25})
    step |= {'sparse_share': 0.7, 'run_speedup': {'dense': 1.163}}
    text = speed.page([step])
    for wanted in ('1,234 tokens/s', '1.250 dense; of a whole run, 70% of it sparse, 1.163'):
      self.assertIn(wanted, text)

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
