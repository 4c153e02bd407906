"""The report renders from run folders alone, and its verdicts follow the figures."""

from html.parser import HTMLParser
import json
from pathlib import Path
import re
from unittest import mock
import xml.etree.ElementTree as ET

from absl.testing import absltest, parameterized
import numpy as np
import pytest

from experiments.reports import charts, claims, compare, report, report_curves
from experiments.runs import build, environment, method_table, methods, records
from experiments.runs.experiment import load_config
from tests.experiments.fakes import temp_folder

NAMES = ('h_0/mlp/c_fc/kernel', 'h_0/mlp/c_proj/kernel')


def write_run(
  folder, method, seed, final, *, tail=1e-3, finished=True, second_per_step=0.0, device='1 x H100', **overrides
):
  """A run folder of a given final loss, whose flip rate rises to 0.05 and falls to `tail`; older without a time."""
  config = methods.configure(load_config('nano'), method, seed)
  config.update(overrides)
  folder = Path(folder) / f'{method}-seed{seed}'
  folder.mkdir(parents=True)
  sparse_until = 3000 if method.startswith('fst') else (0 if 'dense' in config.recipe.name else 4000)
  lines, timing, spent = [], [], {}
  for step in range(100, 4001, 100):
    rate = 0.05 * np.exp(-(((step - 600) / 300) ** 2)) + (tail if step > 600 else 0.01)
    loss = final + 2 * np.exp(-step / 500)
    phase = 'sparse' if step <= sparse_until else 'dense'
    lines.append(
      {
        'step': step,
        'kind': 'train',
        'loss': loss,
        'grad_norm': 1.0,
        'learning_rate': 1e-3,
        'phase': phase,
        'flip_rate': rate,
        'flip_rates': dict.fromkeys(NAMES, rate),
      }
    )
    if second_per_step:
      spent = {'spent': {'training': step * second_per_step, 'compiling': 31.0, 'evaluation': 7.0, 'checkpoints': 3.0}}
    timing.append({'step': step, 'kind': 'timing', 'seconds': step / 100, **spent, 'tokens_per_s': 9e4})
    if step % 500 == 0:
      lines.append({'step': step, 'kind': 'validation', 'loss': final if step == 4000 else loss, 'phase': phase})
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  (folder / 'timing.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in timing))
  (folder / 'config.json').write_text(json.dumps(config.to_dict()))
  (folder / 'environment.json').write_text(
    json.dumps({'device': device, 'python': '3.12.1', 'versions': {'jax': '0.11.2'}})
  )
  if finished:
    (folder / 'summary.json').write_text(json.dumps({'seconds': 40.0, 'validation_loss': final, **spent}))
  return folder


class _Page(HTMLParser):
  """Collects what a page would load or run, and its visible text."""

  def __init__(self):
    super().__init__()
    self.tags, self.links, self.text = [], [], []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.links += [value for name, value in attrs if name in ('src', 'href', 'xlink:href')]

  def handle_data(self, data):
    self.text.append(data)


def read_page(path):
  page = _Page()
  page.feed(Path(path).read_text())
  return page


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

  @parameterized.parameters(False, True)
  def test_one_run_is_enough(self, finished):
    folder = write_run(temp_folder(self), 'dense', 0, 1.2, finished=finished)
    text = ' '.join(read_page(report.write_report([folder], folder / 'r.html')).text)
    self.assertIn('speak to none of the claims', text)
    self.assertEqual('Unfinished' in text, not finished)

  @parameterized.parameters(
    ('seed',), ('label',), ('name',), ('model', 'embed_dim'), ('model', 'size'), ('model', 'family'),
    ('data', 'corpus'), ('data', 'tokenizer'), ('recipe', 'kwargs'),
  )  # fmt: skip
  @pytest.mark.few(3)
  def test_a_folder_from_elsewhere_brings_no_script(self, *keys):
    folder, evil = temp_folder(self), '<script>alert(1)</script>'
    file = write_run(folder, 'fst', 0, 1.4) / 'config.json'
    config = json.loads(file.read_text())
    section = config[keys[0]] if len(keys) > 1 else config
    section[keys[-1]] = {'masked_decay': 1e-4, evil: 1} if keys[-1] == 'kwargs' else evil
    file.write_text(json.dumps(config))
    try:
      path = report.write_report([folder], Path(folder, 'r.html'))
    except ValueError as error:
      self.assertIn(evil, str(error))  # refused, on a terminal
    else:
      self.assertNotIn('script', read_page(path).tags)

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
  @pytest.mark.few(2)
  def test_sizes_that_were_given(self, model, text):
    folder = write_run(temp_folder(self), 'dense', 0, 1.2)
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps(config | {'model': config['model'] | model}))
    self.assertIn(text, ''.join(read_page(report.write_report([folder], folder / 'r.html')).text))

  def test_a_cpu_is_not_asked_for_speed(self):
    folder = Path(temp_folder(self))
    for method in ('dense', 'fst'):
      write_run(folder, method, 0, 1.2, second_per_step=0.25, device='2 CPU cores')
    text = ' '.join(read_page(report.write_report([folder], folder / 'r.html')).text)
    self.assertIn('What took time', text)
    self.assertIn('31.0', text)  # to compile
    for absent in ('as fast as dense', 'tokens a second', 'tokens/s', 'seconds of training'):
      self.assertNotIn(absent, text)

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
    # The folder is from before runs stored where they came from.
    self.assertIsNone(record['commit'])
    self.assertEqual(record['command'], environment.command())

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

  def test_loss_against_the_seconds_of_training(self):
    folder = Path(temp_folder(self))
    for seed in range(2):
      write_run(folder, 'dense', seed, 1.2, second_per_step=0.25)
      write_run(folder, 'fst', seed, 1.2, second_per_step=0.125 + 0.125 * seed)
    groups = records.group(records.find_runs([folder]))
    with mock.patch.object(charts, 'line_chart', wraps=charts.line_chart) as drawn:
      section = report_curves.loss_against_seconds(groups, dict.fromkeys(groups, '#000'))
    ends = {line.label: line.x[-1] for line in drawn.call_args.args[0]}
    self.assertEqual(ends, {'dense': 1000.0, 'FST': 750.0})  # of FST's two runs one took 500, the other 1,000
    self.assertIn('<td>FST</td><td class=n>90.0</td><td class=n>1.33</td><td class=n>750.0</td>', section)
    self.assertIn('Loss against time', report.write_report([folder], folder / 'r.html').read_text())
    compare.write_records(records.find_runs([folder]), folder / 'results.jsonl', experiment='mine')
    record = json.loads((folder / 'results.jsonl').read_text().splitlines()[0])
    self.assertEqual(record['spent']['compiling'], 31.0)

  def test_times_are_of_finished_runs_that_were_timed_throughout(self):
    """An unfinished run has fewer seconds for its steps; of one begun by an older program not all are known."""
    folder = Path(temp_folder(self))
    write_run(folder, 'dense', 0, 1.2, second_per_step=0.25)
    write_run(folder, 'fst', 0, 1.2, second_per_step=0.125, finished=False)
    older = write_run(folder, 'dense', 1, 1.2, second_per_step=0.125) / 'timing.jsonl'
    lines = [json.loads(line) for line in older.read_text().splitlines()]
    for line in lines[:3]:
      del line['spent']
    older.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    groups = records.group(records.find_runs([folder]))
    (timed,) = (run for run in groups['dense'] if run.was_timed)
    steps, seconds = timed.training_seconds()
    self.assertEqual((steps[0], seconds[0]), (0, 0.0))  # for what was evaluated before the first of them
    section = report_curves.loss_against_seconds(groups, dict.fromkeys(groups, '#000'))
    self.assertIn('<td>dense</td><td class=n>90.0</td><td class=n>1.00</td><td class=n>1,000.0</td>', section)
    self.assertNotIn('FST', section)

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
  def test_the_first_end_of_a_sparse_phase_is_marked(self, count, text):
    folder = temp_folder(self)
    for method in ('fst', 'fst_no_decay')[:count]:
      write_run(folder, method, 0, 1.25)
    self.assertIn(text, ' '.join(read_page(report.write_report([folder], Path(folder) / 'r.html')).text))


class VerdictTest(parameterized.TestCase):
  def _verdicts(self, **finals):
    folder = temp_folder(self)
    tails = {'dense': 5e-3}
    for method, losses in finals.items():
      for seed, loss in enumerate(losses):
        write_run(folder, method, seed, loss, tail=tails.get(method, 1e-3))
    return {finding.claim: finding for finding in claims.findings(records.find_runs([folder]))}

  @parameterized.parameters(
    ((1.26, 1.27, 1.28), 'disagrees', r'\+0\.060'),
    ((1.19, 1.20, 1.21), 'agrees', 'below dense'),
    ((1.201, 1.209, 1.221), 'agrees', 'less than 1% of the loss'),
    # Surely higher, and surely by less than one percent.
    ((1.203, 1.213, 1.2231), 'agrees', 'less than 1% of the loss'),
    ((1.21, 1.19, 1.24), 'open', 'too wide to tell'),
    ((1.26,), 'open', 'one seed'),
  )
  def test_fst_against_dense(self, fst, verdict, evidence):
    finding = self._verdicts(dense=(1.20, 1.21, 1.22), fst=fst)['FST reaches the quality of dense training.']
    self.assertEqual(finding.verdict, verdict)
    self.assertRegex(finding.evidence, evidence)

  def test_a_strict_claim_stays_open_within_the_spread(self):
    found = self._verdicts(fst=(1.21, 1.19, 1.24), ste=(1.20, 1.21, 1.22))
    self.assertEqual(found['FST beats plain straight-through training.'].verdict, 'open')

  def test_no_setting_of_a_method_is_picked(self):
    folder = Path(temp_folder(self))
    for method, decays in (('fst', (6e-3, 6e-5)), ('sr_ste', (3.0,)), ('sr_ste_published', (2e-4,))):
      for decay in decays:
        for seed in range(3):
          final = {6e-3: 1.20, 6e-5: 1.25, 3.0: 1.19, 2e-4: 1.30}[decay] + 0.01 * seed
          path = write_run(folder / str(decay), method, seed, final)
          config = json.loads((path / 'config.json').read_text())
          config['label'] += f'; masked_decay={decay}'
          (path / 'config.json').write_text(json.dumps(config))
    found = [f for f in claims.findings(records.find_runs([folder])) if f.claim.startswith('With Adam')]
    self.assertEqual([f.verdict for f in found], ['disagrees', 'disagrees', 'agrees', 'agrees'])
    for finding, (ours, theirs) in zip(
      found, (('0.006', '3.0'), ('6e-05', '3.0'), ('0.006', '0.0002'), ('6e-05', '0.0002')), strict=True
    ):
      self.assertRegex(finding.evidence, f'FST; masked_decay={ours} ends .* SR-STE, .*masked_decay={theirs}')

  def test_a_changed_pattern_is_no_verdict_on_the_paper(self):
    folder = Path(temp_folder(self))
    write_run(folder, 'dense_relu2', 0, 1.2)
    path = write_run(folder, 'neuron_level', 0, 1.2)
    config = json.loads((path / 'config.json').read_text())
    for change, count in (({}, 1), ({'dense_features': 0.5}, 0), ({'tokens': '2:4'}, 0)):
      changed = config | {'recipe': config['recipe'] | {'kwargs': {'policy': {
        **config['recipe']['kwargs']['policy'], **change,
      }}}}  # fmt: skip
      (path / 'config.json').write_text(json.dumps(changed))
      self.assertLen(claims.findings(records.find_runs([folder])), count)

  def test_our_own_pattern_is_no_verdict_on_the_paper(self):
    found = self._verdicts(
      dense_relu2=(1.20, 1.21, 1.22), neuron_level=(1.30, 1.31, 1.32),
      neuron_level_two_of_four_tokens=(1.201, 1.211, 1.22),
    )  # fmt: skip
    verdicts = {(f.source == claims.NEURON_LEVEL, f.verdict) for f in found.values()}
    self.assertEqual(verdicts, {(True, 'disagrees'), (False, 'agrees')})

  def test_attention_is_full_in_both_or_sparse_in_both(self):
    found = self._verdicts(
      mixed_sparsity=(1.98, 1.99, 2.0), static=(1.88, 1.89, 1.9), static_attention=(1.76, 1.77, 1.78),
    )  # fmt: skip
    (finding,) = found.values()
    self.assertIn('MST ends 0.100 nats above static mask (', finding.evidence)

  @parameterized.parameters((4, 3.182), (12, 2.201), (41, 2.021))
  def test_intervals_are_students(self, n, quantile):
    """Quantiles of a printed table, 0.975 at n - 1 degrees of freedom."""
    values = np.linspace(0, 1, n)
    expected = quantile * values.std(ddof=1) / n**0.5
    np.testing.assert_allclose(claims.half_width(values.tolist()), expected, rtol=1e-3)

  def test_flip_rates(self):
    found = self._verdicts(dense=(1.2,), fst=(1.2,), fst_no_decay=(1.2,))
    settle = next(f for claim, f in found.items() if claim.startswith('With masked decay'))
    stay = next(f for claim, f in found.items() if claim.startswith('Without decay'))
    self.assertEqual((settle.verdict, stay.verdict), ('agrees', 'disagrees'))
    self.assertIn('peak 6.', settle.evidence)

  @parameterized.parameters(
    ({'masked_decay': 6e-3}, {'refresh_every': 40}, 1),
    ({'masked_decay': 6e-3}, {}, 0),
    ({'masked_decay': 6e-3, 'refresh_every': 1}, {}, 1),
  )
  def test_flip_rates_compare_at_equal_intervals(self, fst, dense, pairs):
    folder = temp_folder(self)
    for method, kwargs in (('fst', fst), ('dense', {'path': build.FFN, 'watch': 'transposable', **dense})):
      name = method_table.METHODS[method].recipe
      path = write_run(folder, method, 0, 1.2)
      config = json.loads((path / 'config.json').read_text())
      config['recipe'] = {'name': name, 'kwargs': kwargs, 'flip_rate': 'refresh'}
      (path / 'config.json').write_text(json.dumps(config))
    groups = {run.method: [run] for run in records.find_runs([folder])}
    self.assertLen(claims.comparable_flips(groups['fst'], groups['dense']), pairs)


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
