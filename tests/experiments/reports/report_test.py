"""The report renders from run folders alone, and its verdicts follow the figures."""

import json
from pathlib import Path
import re
from unittest import mock
import xml.etree.ElementTree as ET

from absl.testing import absltest, parameterized
import numpy as np
import pytest

from experiments.reports import charts, claims, compare, page, papers, report, report_curves
from experiments.runs import records
from tests.experiments.fakes import temp_folder
from tests.experiments.reports.run_folders import read_page, write_run

drawn = mock.Mock(return_value=page.Html('<svg/>'))
# Drawing is most of the time of a page; for tests of its words and figures alone.
without_pictures = mock.patch.multiple(charts, line_chart=drawn, dot_plot=drawn)


class ReportTest(parameterized.TestCase):
  def test_one_page_with_everything_in_it(self):
    folder = temp_folder(self)
    for seed in range(3):
      write_run(folder, 'dense', seed, 1.22 + 0.01 * seed, tail=5e-3)
      write_run(folder, 'fst', seed, 1.25 + 0.01 * seed)
      write_run(folder, 'ste', seed, 1.30 + 0.01 * seed)
    path = report.write_report([folder], Path(folder) / 'out' / 'report.html', title='A <title>')
    page = read_page(path)
    self.assertNotIn('script', page.tags)
    self.assertEqual([link for link in page.links if not link.startswith(('data:', '#'))], [])
    self.assertNotRegex(path.read_text(), r'url\(\s*[\'"]?http|@import')
    text = ' '.join(' '.join(page.text).split())
    for expected in (
      'A <title>',
      '9',
      'FST',
      'plain STE',
      '+0.0300',
      '± 0.0100',
      'h_0/mlp/c_fc',
      'FST turns dense',
      'Loss against FLOPs',
      'training FLOPs, 1e12',
      'seed 2',
      'jax 0.11.2',
    ):
      self.assertIn(expected, text)
    for picture in re.findall(r'<svg.*?</svg>', path.read_text(), re.DOTALL):
      ET.fromstring(picture)
    self.assertNotRegex(path.read_text(), r'(?<![a-z])nan(?![a-z])')

  @without_pictures
  def test_a_run_without_a_method_is_compared_with_no_other(self):
    """However dense its settings look; nor is it one of the runs of `--method dense`."""
    folder = Path(temp_folder(self))
    for seed in range(2):
      write_run(folder, 'fst', seed, 1.25 + 0.01 * seed)
      file = write_run(folder, 'dense', seed, 1.22 + 0.01 * seed) / 'config.json'
      file.write_text(json.dumps(json.loads(file.read_text()) | {'method': '', 'label': ''}))
    found = records.find_runs([folder])
    shown = {row[0]: row[4] for row in report.table_rows(records.group(found))}
    self.assertEqual(shown, {'dense, no method': '', 'FST': ''})
    without = 'No run here is the dense one of another'
    self.assertIn(without, report.write_report([folder], folder / 'report.html').read_text())
    self.assertEmpty(claims.findings(found))
    write_run(folder / 'said', 'dense', 0, 1.2)
    shown = {row[0]: row[4] for row in report.table_rows(records.group(records.find_runs([folder])))}
    self.assertEqual(shown, {'dense': '', 'dense, no method': '', 'FST': '+0.0500'})
    self.assertNotIn(without, report.write_report([folder], folder / 'report.html').read_text())

  @parameterized.parameters(False, True)
  @without_pictures
  def test_one_run_is_enough(self, finished):
    folder = write_run(temp_folder(self), 'dense', 0, 1.2, finished=finished)
    text = ' '.join(read_page(report.write_report([folder], folder / 'r.html')).text)
    self.assertIn('speak to none of the claims', text)
    self.assertIn('1 run of 1 method 4,000 optimizer steps', ' '.join(text.split()))
    self.assertEqual('Unfinished' in text, not finished)

  @parameterized.parameters(
    ('seed',), ('label',), ('name',), ('model', 'embed_dim'), ('model', 'size'), ('model', 'family'),
    ('data', 'corpus'), ('data', 'tokenizer'), ('recipe', 'kwargs'),
  )  # fmt: skip
  @pytest.mark.few(1)
  def test_a_folder_from_elsewhere_brings_no_script(self, *keys):
    folder, evil = temp_folder(self), '<script>alert(1)</script>'
    file = write_run(folder, 'fst', 0, 1.4) / 'config.json'
    config = json.loads(file.read_text())
    *section, key = keys
    (config[section[0]] if section else config)[key] = {'masked_decay': 1e-4, evil: 1} if key == 'kwargs' else evil
    file.write_text(json.dumps(config))
    try:
      path = report.write_report([folder], Path(folder, 'r.html'))
    except ValueError as error:
      self.assertIn(evil, str(error))  # refused, on a terminal
    else:
      self.assertNotIn('script', read_page(path).tags)

  @without_pictures
  def test_events_are_told(self):
    folder = temp_folder(self)
    one = write_run(folder, 'fst', 0, 1.4)
    self.assertNotIn('on the way', report.write_report([one], Path(folder, 'r.html')).read_text())
    skipped = {'step': 17, 'event': 'skipped', 'what': 'step 17 was skipped: its loss is <nan>'}
    resumed = {'step': 20, 'event': 'resumed', 'what': 'checkpoint /home/me/runs/fst/30 cannot be read; from step 20'}
    (one / 'events.jsonl').write_text(''.join(json.dumps(e) + '\n' for e in (skipped, skipped, resumed)) + '{"step"')
    text = report.write_report([one], Path(folder, 'r.html')).read_text()
    self.assertRegex(text, r'<th>run</th><th class=n>skipped</th><th class=n>resumed</th>')
    self.assertRegex(text, r'<td>fst-seed0</td><td class=n>2</td><td class=n>1</td>')
    self.assertIn('step 17: step 17 was skipped: its loss is &lt;nan&gt;', text)
    self.assertIn('step 20: checkpoint 30 cannot be read', text)
    (one / 'events.jsonl').write_text('\0\n' + json.dumps(resumed) + '\n')
    with self.assertRaisesRegex(ValueError, r'events.jsonl, line 1 is no record'):
      report.write_report([one], Path(folder, 'r.html'))

  @without_pictures
  def test_differing_settings_are_pointed_out(self):
    folder = temp_folder(self)
    write_run(folder, 'dense', 0, 1.2)
    write_run(folder, 'fst', 0, 1.2, steps=8000)
    text = ' '.join(read_page(report.write_report([folder], Path(folder) / 'r.html')).text)
    self.assertIn('steps: 4000, 8000', text)

  @parameterized.parameters(
    ({'embed_dim': 96}, 'GPT-2 nano, width 96, on'), ({'num_layers': 3}, 'GPT-2 nano, 3 layers, on'),
    ({'embed_dim': '<b>'}, 'GPT-2 nano, width <b>, on'), ({}, 'GPT-2 nano, on'),
  )  # fmt: skip
  @pytest.mark.few(1)
  @without_pictures
  def test_sizes_that_were_given(self, model, text):
    folder = write_run(temp_folder(self), 'dense', 0, 1.2)
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | {'model': config['model'] | model}))
    self.assertIn(text, ''.join(read_page(report.write_report([folder], folder / 'r.html')).text))

  @without_pictures
  def test_a_cpu_is_not_asked_for_speed(self):
    folder = Path(temp_folder(self))
    drawn.reset_mock()
    for method in ('dense', 'fst'):
      write_run(folder, method, 0, 1.2, second_per_step=0.25, device='2 CPU cores')
    text = ' '.join(read_page(report.write_report([folder], folder / 'r.html')).text)
    self.assertIn('What took time', text)
    self.assertIn('31.0', text)  # to compile
    for absent in ('as fast as dense', 'tokens a second', 'tokens/s', 'seconds of training'):
      self.assertNotIn(absent, text + str(drawn.mock_calls))

  def test_folders_without_runs_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'holds no run'):
      report.write_report([temp_folder(self)], 'never.html')

  def test_records_are_replaced_not_doubled(self):
    folder = Path(temp_folder(self))
    write_run(folder, 'fst', 0, 1.25)
    for _ in range(2):
      compare.write_records(records.find_runs([folder]), folder / 'results.jsonl', experiment='nano')
    (record,) = map(json.loads, (folder / 'results.jsonl').read_text().splitlines())
    self.assertEqual((record['method'], record['recipe']), ('fst', 'transposable_srste'))
    self.assertEqual(record['validation_loss'], 1.25)
    self.assertEqual(record['flip_rate']['peak_step'], 600)
    # One at another rate is another run, which a table would average with the first.
    config = json.loads((folder / 'fst-seed0' / 'config.json').read_text())
    config['optimizer']['peak_lr'] *= 2
    (folder / 'fst-seed0' / 'config.json').write_text(json.dumps(config))
    with self.assertRaisesRegex(ValueError, 'holds a run of FST, seed 0, with another optimizer: give another file'):
      compare.write_records(records.find_runs([folder]), folder / 'results.jsonl', experiment='nano')
    self.assertLen((folder / 'results.jsonl').read_text().splitlines(), 1)

  def test_flip_rates_of_all_records_end_at_the_same_step(self):
    folder = Path(temp_folder(self))
    for method in ('dense', 'fst'):
      write_run(folder, method, 0, 1.25)
    compare.write_records(records.find_runs([folder]), folder / 'results.jsonl', experiment='nano')
    dense, fst = (papers.run_of(json.loads(line)) for line in (folder / 'results.jsonl').read_text().splitlines())
    # FST is sparse until step 3,000, where the rate of both is the same.
    self.assertEqual((dense.flip_summary()['end'], fst.flip_summary()['end']), (3000, 3000))
    self.assertEqual(dense.flip_summary()['tail'], fst.flip_summary()['tail'])
    self.assertIn('before step 3,000; dense', claims.flips_in_short([fst], [dense]))

  def test_records_tell_where_the_run_came_from(self):
    folder = Path(temp_folder(self))
    origin = {'commit': 'abc-dirty', 'command': 'python -m experiments compare --seeds 0'}
    for index, decay in enumerate((6e-3, 6e-5)):
      path = write_run(folder / str(index), 'fst', 0, 1.25)
      config = json.loads((path / 'config.json').read_text())
      config['recipe']['kwargs']['masked_decay'] = decay
      (path / 'config.json').write_text(json.dumps(config))
      old = json.loads((path / 'environment.json').read_text())
      (path / 'environment.json').write_text(json.dumps(old | origin))
    compare.write_records(records.find_runs([folder]), folder / 'results.jsonl', experiment='mine')
    written = list(map(json.loads, (folder / 'results.jsonl').read_text().splitlines()))
    self.assertEqual([record['recipe_kwargs']['masked_decay'] for record in written], [6e-3, 6e-5])
    for record in written:
      self.assertEqual(record, record | origin | {'experiment': 'mine'})

  @without_pictures
  def test_folders_of_a_machine_stay_there(self):
    folder = Path(temp_folder(self))
    path = write_run(folder, 'fst', 0, 1.25)
    command = 'python -m experiments sweep --folder /home/me/runs --set steps=9'
    old = json.loads((path / 'environment.json').read_text())
    (path / 'environment.json').write_text(json.dumps(old | {'command': command}))
    compare.write_records(records.find_runs([folder]), folder / 'results.jsonl', experiment='mine')
    page = report.write_report([folder], folder / 'r.html').read_text()
    for text in ((folder / 'results.jsonl').read_text(), page):
      self.assertIn('--folder runs --set steps=9', text)
      self.assertNotIn('/home/me', text)
    self.assertIn('say nothing about speed', page)

  @without_pictures
  def test_loss_against_the_seconds_of_training(self):
    folder = Path(temp_folder(self))
    for seed in range(2):
      write_run(folder, 'dense', seed, 1.2, second_per_step=0.25)
      write_run(folder, 'fst', seed, 1.2, second_per_step=0.125 + 0.125 * seed)
    groups = records.group(records.find_runs([folder]))
    section = report_curves.loss_against_seconds(groups, dict.fromkeys(groups, '#000'))
    ends = {line.label: line.x[-1] for line in drawn.call_args.args[0]}
    self.assertEqual(ends, {'dense': 1000.0, 'FST': 750.0})  # of FST's two runs one took 500, the other 1,000
    self.assertIn('<td>FST</td><td class=n>90.0</td><td class=n>1.33</td><td class=n>750.0</td>', section)
    page = report.write_report([folder], folder / 'r.html').read_text()
    self.assertIn('Loss against time', page)
    # FST's two runs are at dense's final loss at their ends, after 0.5 and 1 of its time: 0.75, deviation 0.3536.
    self.assertIn("<b>0.75 ± 3.18</b><span>of dense&#x27;s seconds of training until FST is at", page)
    compare.write_records(records.find_runs([folder]), folder / 'results.jsonl', experiment='mine')
    record = json.loads((folder / 'results.jsonl').read_text().splitlines()[0])
    self.assertEqual(record['spent']['compiling'], 31.0)

  def test_a_method_that_never_reaches_the_loss_of_dense_is_behind(self):
    folder = Path(temp_folder(self))
    write_run(folder, 'dense', 0, 1.2, second_per_step=0.25)
    write_run(folder, 'fst', 0, 1.25, second_per_step=0.2)
    write_run(folder, 'half_ffn', 0, 1.19, second_per_step=0.2)
    found = report_curves.time_to_dense(records.group(records.find_runs([folder])))
    behind = ('+0.050', 'nats: FST minus dense at their ends, after 0.80 of its time', True)
    # Half width is at 1.2035 after 2,500 steps, at 1.1950 after 3,000: at 1.2 after 541 of 1,000 seconds.
    ahead = ('0.54', "of dense's seconds of training until dense, FFN half as wide is at dense's final loss", False)
    self.assertCountEqual(found, [behind, ahead])
    for file in folder.glob('*/environment.json'):
      file.write_text(file.read_text().replace('1 x H100', '2 CPU cores'))
    self.assertEqual(report_curves.time_to_dense(records.group(records.find_runs([folder]))), [])

  def test_times_are_of_finished_runs(self):
    """An unfinished run has fewer seconds for its steps."""
    folder = Path(temp_folder(self))
    write_run(folder, 'dense', 0, 1.2, second_per_step=0.25)
    write_run(folder, 'fst', 0, 1.2, second_per_step=0.125, finished=False)
    groups = records.group(records.find_runs([folder]))
    (timed,) = (run for run in groups['dense'] if run.was_timed)
    steps, seconds = timed.training_seconds()
    self.assertEqual((steps[0], seconds[0]), (0, 0.0))  # for what was evaluated before the first of them
    section = report_curves.loss_against_seconds(groups, dict.fromkeys(groups, '#000'))
    self.assertIn('<td>dense</td><td class=n>90.0</td><td class=n>1.00</td><td class=n>1,000.0</td>', section)
    self.assertNotIn('FST', section)

  @without_pictures
  def test_times_of_different_devices_are_not_compared(self):
    folder = Path(temp_folder(self))
    path = write_run(folder, 'dense', 0, 1.2, second_per_step=0.25)
    environment_file = path / 'environment.json'
    old = json.loads(environment_file.read_text())
    for change in ({'device': 'another'}, {'command': 'python -m experiments sweep --config small'}, None):
      environment_file.write_text(json.dumps(old | (change or {})))
      write_run(folder / str(change), 'fst', 0, 1.2, second_per_step=0.125)
      page = report.write_report([folder], folder / 'r.html').read_text()
      self.assertEqual('Loss against time' in page, change is None)

  @parameterized.parameters((1, 'FST turns dense'), (2, '2 methods turn dense'))
  @pytest.mark.few
  def test_the_first_end_of_a_sparse_phase_is_marked(self, count, text):
    folder = temp_folder(self)
    for method in ('fst', 'fst_no_decay')[:count]:
      write_run(folder, method, 0, 1.25)
    self.assertIn(text, ' '.join(read_page(report.write_report([folder], Path(folder) / 'r.html')).text))


class ChartsTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_zeros_and_single_points_draw(self, log):
    lines = [
      charts.Line('a & <b>', '#000', np.array([10, 20, 30]), np.array([0.0, 1e-3, 0.0])),
      charts.Line('', '#000', np.array([10]), np.array([1e-3])),
    ]
    picture = charts.line_chart(lines, title='t "u"', y_label='y', log=log)
    self.assertIn('a & <b>', ''.join(ET.fromstring(picture).itertext()))
    self.assertEqual(ET.fromstring(picture).get('aria-label'), 't "u"')
    self.assertEqual(charts.line_chart(lines, title='t "u"', y_label='y', log=log), picture)

  def test_figures_are_written_in_full(self):
    picture = charts.dot_plot([('a', '#000', [1.23456, 1.23456])], title='t', x_label='x')
    self.assertIn('1.2346', ''.join(ET.fromstring(picture).itertext()))


if __name__ == '__main__':
  absltest.main()
