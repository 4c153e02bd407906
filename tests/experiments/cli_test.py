"""The command line end to end on a tiny model, and its errors."""

import contextlib
import io
import json
from pathlib import Path
from unittest import mock

from absl.testing import absltest, parameterized
import pytest

from experiments import __main__ as cli
from experiments.runs import train, tune_decay
from tests.experiments.fakes import FakeData, temp_folder
from tests.experiments.reports.run_folders import read_page

# The steps of `tiny` in `runs/train_test.py`, which the dense program then is: compiled once for both.
EXAMPLE = '--set recipe.name=ste --set steps=500'
FAST = (
  '--set',
  'model.num_layers=1',
  '--set',
  'steps=30',
  '--set',
  'log_every=5',
  '--set',
  'eval_every=10',
  '--set',
  'checkpoint_every=10',
  '--set',
  'eval_batches=2',
)


def call(*arguments):
  """Returns (status, standard output, standard error) of one command, on fake data."""
  out, err = io.StringIO(), io.StringIO()
  with (
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
    mock.patch('experiments.runs.data.pipeline.load', lambda **_: FakeData()),
  ):
    status = cli.main(arguments)
  return status, out.getvalue(), err.getvalue()


class CommandTest(parameterized.TestCase):
  @parameterized.parameters(
    (('bench', 'run', '--select', 'packers'), 'experiments bench run: error: .* required: --out'),
    (('train', '--config', 'nano', '--select', 'x'), 'experiments: error: unrecognized arguments: --select x'),
    (('compare', '--seeds', '0', '1', '0'), 'argument --seeds: 0 given twice'),
    (('grid', '--rates', '1e-3', '1e-3', '--results', 'x'), 'argument --rates: 0.001 given twice'),
  )
  def test_programs_have_arguments_of_their_own(self, arguments, message):
    with contextlib.redirect_stderr(io.StringIO()) as err, self.assertRaises(SystemExit):
      cli.main(arguments)
    self.assertRegex(err.getvalue(), message)

  @pytest.mark.slow
  def test_main_job_inspect_eval_report(self):
    folder = temp_folder(self)
    status, out, err = call('main-job', '--tiny', '--folder', folder, *FAST)
    self.assertEqual((status, err), (0, ''))
    self.assertIn(f'report: {Path(folder).resolve() / "report.html"}', out)
    for label in ('dense', 'plain STE', 'FST'):
      self.assertIn(label, out)
    self.assertIn('svg', read_page(Path(folder) / 'report.html').tags)

    status, out, _ = call('inspect', f'{folder}/fst-seed0', '--step', '20')
    self.assertEqual(status, 0)
    self.assertRegex(out, r'step 20, sparse phase, recipe transposable_srste')
    self.assertRegex(out, r'h_0/mlp/c_fc/kernel +32 x 128 +0\.5000 .* yes')
    self.assertRegex(call('inspect', f'{folder}/fst-seed0')[1], r'step 30, dense phase[\s\S]*1\.0000 .* no')

    summary = json.loads((Path(folder) / 'fst-seed0' / 'summary.json').read_text())
    # As if it had been trained on a GPU.
    config_file = Path(folder, 'fst-seed0', 'config.json')
    config = json.loads(config_file.read_text())
    config['model']['attention'] = 'cudnn'
    config_file.write_text(json.dumps(config))
    self.assertIn(f'loss {summary["validation_loss"]:.4f}', call('eval', f'{folder}/fst-seed0')[1])
    status, _, err = call('eval', f'{folder}/fst-seed0', '--batches', '0')
    self.assertEqual((status, err), (1, 'error: validation takes 1 batch or more, found 0\n'))
    self.assertEqual(call('report', folder, '--out', f'{folder}/other.html')[0], 0)

  @pytest.mark.slow
  def test_train_and_tune(self):
    folder = Path(temp_folder(self))
    train = ('train', '--config', 'nano', '--tiny', '--method', 'ste', '--folder', str(folder / 'run'), *FAST)
    status, out, _ = call(*train)
    self.assertEqual(status, 0)
    self.assertRegex(out, r'run: validation loss \d\.\d+ after 30 steps')
    self.assertRegex(out, r'step 30/30  loss \d\.\d+ +[\d.]+ k tokens/s +flip rate [\d.]+\n')
    self.assertEqual(json.loads((folder / 'run' / 'config.json').read_text())['method'], 'ste')
    self.assertRegex(call(*train)[1], r'run: finished before, validation loss \d\.\d+ after 30 steps')
    status, out, _ = call(
      'tune-decay',
      '--by',
      'flips',
      '--tiny',
      '--folder',
      str(folder),
      '--candidates',
      '0',
      '1e-2',
      '--steps',
      '15',
      '--set',
      'model.num_layers=1',
    )
    self.assertEqual(status, 0)
    record = json.loads((folder / 'tune_decay.json').read_text())
    self.assertLess(record['trials'][1]['ratio'], record['trials'][0]['ratio'])
    self.assertIn('<svg', (folder / 'tune_decay.svg').read_text())

  @parameterized.parameters(
    (('train', '--config', 'nope'), 'no experiment .nope.; known: bert, bert_nano'),
    (('train', '--config', 'nano', '--set', 'stepz=1'), "no field 'stepz'"),
    (('train', '--config', 'nano', '--method', 'magic'), "method is 'magic'; known: dense"),
    (('train', '--config', 'nano', '--method', 'FST'), "method is 'FST'; did you mean 'fst'"),
    (('train', '--config', 'nano', '--set', 'steps=40', '--folder', '/dev/null/no'), 'set optimizer.warmup_steps=8'),
    (('train', '--config', 'nano', '--method', 'fst', '--set', 'recipe.name=ste'), 'train without --method'),
    (('train', '--config', 'nano', '--set', 'method=fst'), 'train --method fst'),
    (('inspect', '/nonexistent'), 'is not the folder of a run'),
    (('inspect', '/no\x1b[2J'), r'/no\\x1b\[2J is not the folder'),
    (('report', '/nonexistent'), 'holds no run'),
    (('compare', '--methods', 'magic'), "method is 'magic'; known: dense.*groups: .*activations"),
    (('tune-decay', '--set', 'recipe.name=ste'), 'takes no masked_decay'),
    (('tune-decay', '--set', 'recipe.kwargs.masked_decay=1'), 'no effect here: .*--candidates'),
    (('tune-decay', '--set', 'recipe.flip_rate=refresh'), 'no effect here: .*train'),
    (('tune-decay', '--set', 'recipe.kwargs.refresh_every=9'), 'no effect here: .*set recipe.name=transposable_srste'),
    (('tune-decay', '--set', 'data.seed=3'), 'no effect here: .*--set seed'),
    (('compare', '--set', 'recipe.name=ste'), 'no effect here: .*--methods, or train'),
    (('compare', '--set', 'recipe={}'), 'no effect here: .*--methods, or train'),
    (('compare', '--set', 'label=x'), 'no effect here: .*--methods, or train'),
    (('compare', '--set', 'seed=3'), 'no effect here: .*--seeds'),
    (('main-job', '--set', 'data.seed=3'), 'no effect here: .*--seed'),
    (('main-job', '--set', 'recipe.flip_rate=refresh'), 'no effect here: .*--methods, or train'),
    (('train', '--config', 'nano', '--processes', '2', '--process', '1'),
     '--processes and --process without --coordinator or --distributed: this process would train .* by itself'),
    (('flops', '--config', 'nano', '--recipe', 'static', '--set', 'recipe.name=rigl'), 'no effect here: --recipe'),
    (('tune-decay', '--steps', '3'), '--steps: no effect with --by loss'),
    (('tune-decay', '--by', 'flips', '--share', '1', '--seeds', '1'), '--share, --seeds: no effect with --by flips'),
  )  # fmt: skip
  def test_errors_are_one_line_and_a_status(self, arguments, message):
    status, _, err = call(*arguments)
    self.assertEqual(status, 1)
    self.assertRegex(err, f'error: .*{message}')
    self.assertNotIn('Traceback', err)

  @pytest.mark.slow
  def test_flops(self):
    status, out, _ = call('flops', '--config', 'gpt2_124m_mst', '--set', 'steps=6000')
    self.assertEqual(status, 0)
    self.assertRegex(out, r'total, head not counted +1\.670e\+18 +4\.\d+e\+17 +3\.90')
    static = ('flops', '--config', 'nano', '--recipe', 'static')
    self.assertRegex(call(*static)[1], r'linear .* 5\.00')
    self.assertRegex(call(*static, '--set', 'recipe.kwargs.density=0.1')[1], r'linear .* 10\.00')
    # Counting takes no GPU.
    self.assertRegex(call('flops', '--config', 'gpt2_124m_bytes')[1], r'head +3\.092e\+13 .* 1\.00')
    self.assertIn("recipe.name is 'magic'", call('flops', '--config', 'nano', '--recipe', 'magic')[2])

  @parameterized.parameters(
    ((), True), (('--method', 'fst'), False), (('--method', 'dense'), False), (('--set', 'recipe.name=ste'), False),
    (('--set', 'recipe.name=dense'), False),
  )  # fmt: skip
  def test_who_trains_dense_without_having_said_so_is_told(self, arguments, told):
    summary = {'validation_loss': 1.0, 'steps': 30, 'seconds': 1.0}
    with mock.patch.object(train, 'train', return_value=summary):
      status, out, _ = call('train', '--config', 'nano', '--tiny', '--folder', temp_folder(self), *arguments)
    self.assertEqual(status, 0)
    self.assertEqual('nano-tiny trains dense: its recipe is dense, and no --method was given' in out, told)

  def test_a_command_of_the_library_is_pointed_to(self):
    for given, meant in (
      (['where-it-pays', '--tokens', '9'], 'python -m sparse24_jax where-it-pays'),
      (['chek'], 'python -m sparse24_jax check'), (['trian'], "'train'"),
    ):  # fmt: skip
      with contextlib.redirect_stderr(io.StringIO()) as err, self.assertRaises(SystemExit):
        cli.main(given)
      self.assertEndsWith(err.getvalue(), f'; did you mean {meant}?\n')

  def test_it_is_not_where_an_option_takes_no_such_value(self):
    with contextlib.redirect_stderr(io.StringIO()) as err, self.assertRaises(SystemExit):
      cli.main(['tune-decay', '--by', 'check'])
    self.assertRegex(err.getvalue(), r"error: argument --by: invalid choice: 'check' \(choose from .*\)\n$")

  def test_the_example_of_the_help_is_taken(self):
    help_text = io.StringIO()
    with contextlib.redirect_stdout(help_text), self.assertRaises(SystemExit):
      cli.main(['train', '--help'])
    self.assertIn(EXAMPLE, ' '.join(help_text.getvalue().split()))
    summary = {'validation_loss': 1.0, 'steps': 500, 'seconds': 1.0}
    with mock.patch.object(train, 'train', return_value=summary) as trained:
      call('train', '--config', 'nano', '--tiny', '--folder', temp_folder(self), *EXAMPLE.split())
    config = trained.call_args.args[0]
    self.assertEqual((config.recipe.name, config.steps), ('ste', 500))

  @pytest.mark.slow
  def test_the_example_of_the_help_trains(self):
    folder = temp_folder(self)
    # The example first, so that FAST shortens it.
    self.assertEqual(call('train', '--config', 'nano', '--tiny', '--folder', folder, *EXAMPLE.split(), *FAST)[0], 0)
    self.assertRegex(call('inspect', folder)[1], r'recipe ste\n[\s\S]*h_0/mlp/c_fc/kernel .* 0\.5000 .* yes')

  @parameterized.parameters(('train', True), ('main-job', True), ('compare', True), ('tune-decay', False))
  def test_only_what_resumes_promises_to(self, command, resumes):
    arguments = [command, *(('--config', 'nano') if command == 'train' else ())]
    with mock.patch.dict(cli.COMMANDS, {command: mock.Mock(side_effect=KeyboardInterrupt)}):
      status, _, err = call(*arguments)
    self.assertEqual(status, 130)
    self.assertEqual('the same command resumes' in err, resumes)

  def test_a_decay_choice_that_tells_little_says_so(self):
    folder = temp_folder(self)
    rates = mock.patch.object(
      tune_decay, 'warmup_flip_rate', lambda _, decay, **__: {None: 0.1, 0.0: 0.09, 1e-3: 0.07}[decay]
    )
    with rates:
      status, out, _ = call(
        'tune-decay', '--by', 'flips', '--tiny', '--folder', folder, '--candidates', '0', '1e-3', '--steps', '4'
      )
    self.assertEqual(status, 0)
    for text in (out.splitlines()[-1], json.loads(Path(folder, 'tune_decay.json').read_text())['reason']):
      self.assertIn('the largest tried', text)
      self.assertIn('no decay is feasible too', text)

  def test_no_command_is_the_main_job(self):
    with mock.patch.dict(cli.COMMANDS, {'main-job': mock.Mock(return_value=None)}) as commands:
      self.assertEqual(cli.main([]), 0)
      commands['main-job'].assert_called_once()

  def test_a_plot_without_a_feasible_choice(self):
    choice = tune_decay.s24.tune_masked_decay(lambda decay: 1.0, [0.0, 1e-4])
    path = Path(temp_folder(self)) / 'plot.svg'
    tune_decay.plot(choice, path)
    self.assertGreater(path.stat().st_size, 1000)


if __name__ == '__main__':
  absltest.main()
