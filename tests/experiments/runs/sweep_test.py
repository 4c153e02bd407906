"""Methods side by side: every run finishes, or is stopped, and what was measured is kept either way."""

import io
import multiprocessing
import os
from pathlib import Path
import signal
import time
from unittest import mock

from absl.testing import absltest, parameterized
import pytest

from experiments.reports import compare
from experiments.runs import methods, sweep, train
from pallas_kernels import _processes
from tests.experiments.fakes import temp_folder

TEXT = 'the quick brown fox jumps over the lazy dog. ' * 200


def data_folder(case):
  """A data folder with a prepared corpus, so that nothing has to be read to prepare one."""
  from experiments.runs.data import packing, pipeline, tokenizer

  root = Path(temp_folder(case))
  _, key = pipeline._corpus_key(pipeline.DataConfig(corpus='stdlib'), root)
  chosen = tokenizer.load('bytes', root / 'tokenizers', key, lambda: [])
  documents = {split: [TEXT] for split in ('train', 'validation')}
  (root / 'tokens').mkdir()
  packing.write(root / 'tokens' / f'{key}-{chosen.fingerprint}', documents, chosen)
  return root


def overrides(root):
  return ['data.corpus=stdlib', f'data.data_dir={root}', 'steps=20', 'log_every=2', 'eval_every=2']


def run(case, folder, root=None, **changes):
  given = overrides(root or data_folder(case))
  settings = dict(experiment='small', names=['static'], seeds=(0, 1), tiny=True, overrides=given) | changes
  with mock.patch('sys.stdout', io.StringIO()) as out:
    return sweep.sweep(folder, **settings), out.getvalue()


def deaf(experiment, method, seeds, folder, tiny, overrides):
  """Stands in for training: heeds no signal but the one that cannot be caught."""
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  written = Path(folder) / 'environment.new'
  written.write_text(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE', 'unset'))
  written.rename(Path(folder) / 'environment')
  time.sleep(60)


class SweepTest(parameterized.TestCase):
  @pytest.mark.slow
  def test_runs_finish_and_are_compared(self):
    folder = Path(temp_folder(self))
    root = data_folder(self)
    failed, text = run(self, folder, root)
    self.assertEqual(failed, 0, text)
    self.assertRegex(text, r'static-seed1: validation loss \d\.\d{4} after 20 steps')
    # The same comparison only reads.
    with mock.patch.object(train, 'Run', side_effect=AssertionError('trained again')):
      settings = dict(tiny=True, overrides=overrides(root), results=folder / 'records.jsonl')
      with mock.patch('sys.stdout', io.StringIO()):
        compare.compare(folder, experiment='small', names=['static'], seeds=(0, 1), **settings)
    self.assertLen((folder / 'records.jsonl').read_text().splitlines(), 2)

  def test_time_is_up(self):
    folder = Path(temp_folder(self))
    failed, text = run(self, folder, minutes=1e-6, names=['static', 'dense'])
    self.assertEqual(failed, 2)
    self.assertIn('stopped', text)

  @pytest.mark.slow
  def test_a_process_that_does_not_heed_the_signal_is_ended(self):
    folder = Path(temp_folder(self))
    # The clock jumps when the process is there.
    clock = mock.Mock(monotonic=lambda: 1e9 * (folder / 'environment').exists(), sleep=time.sleep)
    self.enter_context(mock.patch.object(sweep, 'time', clock))
    self.enter_context(mock.patch.object(_processes, '_STOP_SECONDS', 0.2))
    self.enter_context(mock.patch.object(sweep, '_train', deaf))
    self.enter_context(mock.patch.dict('os.environ'))
    os.environ.pop('XLA_PYTHON_CLIENT_PREALLOCATE', None)
    failed, text = run(self, folder, minutes=1.0)
    self.assertEqual(failed, 1)
    self.assertIn('static: not finished', text)
    self.assertEmpty(multiprocessing.active_children())
    self.assertEqual((folder / 'environment').read_text(), 'false')

  @pytest.mark.slow
  def test_a_failure_is_told(self):
    folder = Path(temp_folder(self))
    failed, text = run(self, folder, overrides=['data.data_dir=/does/not/exist'])
    self.assertEqual(failed, 1)
    self.assertIn('data_dir is not an existing folder', text)

  def test_settings_that_a_method_refuses_start_nothing(self):
    folder = Path(temp_folder(self)) / 'runs'
    short = ['steps=900', 'methods.mixed_sparsity.refresh_every=50']
    with self.assertRaisesRegex(ValueError, r'mixed_sparsity with 900 steps: a stage .* than refresh_every=50'):
      # Static masks take the FLOPs of mixed sparsity training.
      run(self, folder, names=['dense', 'static'], tiny=False, overrides=short)
    with self.assertRaisesRegex(ValueError, "method is 'magic'"):
      run(self, folder, names=['dense', 'magic'])
    with self.assertRaisesRegex(ValueError, 'no effect here'):
      run(self, folder, overrides=['seed=1'])
    self.assertFalse(folder.exists())


class RefusalsTest(parameterized.TestCase):
  @parameterized.parameters(20, 300, 900, 2000)
  def test_small_takes_any_number_of_steps(self, steps):
    config = methods.load_config('small', [f'steps={steps}'])
    methods.check(config, ['equal-flops', 'sparse-activations'])
    found = methods.configure(config, 'mixed_sparsity', 0).recipe.kwargs
    self.assertEqual(found.refresh_every, max(1, round(steps / 40)))

  def test_all_that_is_refused_is_told(self):
    config = methods.load_config('nano', ['steps=400'])
    with self.assertRaises(ValueError) as caught:
      methods.check(config, ['equal-flops'])
    for method in (
      'mixed_sparsity', 'mixed_sparsity_keep_moments', 'mixed_sparsity_24', 'mixed_sparsity_transposable',
    ):  # fmt: skip
      self.assertIn(f'{method} with 400 steps: ', str(caught.exception))
    self.assertNotIn('rigl', str(caught.exception))

  def test_no_flops_are_counted(self):
    with mock.patch.object(methods, '_flops', side_effect=AssertionError('counted')):
      methods.check(methods.load_config('small'), ['equal-flops'])

  def test_nothing_is_trained_before(self):
    folder = Path(temp_folder(self))
    trains = mock.patch.object(train, 'train', side_effect=AssertionError('trained'))
    with trains, self.assertRaisesRegex(ValueError, 'is shorter than refresh_every'):
      methods.run_all('nano', ['dense', 'mixed_sparsity'], [0], folder, overrides=['steps=400'])

  def test_a_label_says_what_was_changed(self):
    changed = 'methods={"neuron_level_128": {"policy": {"features": "128:2:8", "dense_features": 0.5}}}'
    with mock.patch.object(train, 'train') as trained:
      methods.run_all('nano', ['dense', 'neuron_level_128'], [0, 1], temp_folder(self), overrides=[changed])
    labels = [call.args[0].label for call in trained.call_args_list]
    self.assertEqual(labels, 2 * ['dense', 'neuron level, 128:2:8, half of the steps; policy.dense_features=0.5'])

  def test_what_a_change_of_a_policy_does_not_name_stays(self):
    changed = 'methods={"neuron_level_128": {"policy": {"dense_features": 0.5}}}'
    config = methods.configure(methods.load_config('nano', [changed]), 'neuron_level_128', 0)
    policy = {'features': '128:2:8', 'tokens': '128:2:8', 'dense_features': 0.5}
    self.assertEqual(config.recipe.kwargs.policy.to_dict(), policy)
    self.assertEqual(config.recipe.kwargs.dense_fraction, 0.4)

  def test_what_an_experiment_names_of_a_policy_is_no_change(self):
    experiment = methods.load_checked('gpt2_124m_bytes', ['dense'], tiny=True)
    method = 'neuron_level_128_two_of_four_tokens'
    policy = methods.configure(experiment, method, 0).recipe.kwargs.policy.to_dict()
    two_of_four = {'features': '128:2:8', 'tokens': '2:4', 'dense_features': 0.0}
    self.assertEqual(policy, {**two_of_four, 'implementation': 'sparse'})
    self.assertEmpty(methods._changes(experiment, experiment, method))

  def test_what_an_experiment_sets_is_no_change(self):
    with mock.patch.object(train, 'train') as trained:
      methods.run_all('gpt2_124m_bytes', ['fst'], [0], temp_folder(self), tiny=True)
    self.assertEqual(trained.call_args.args[0].label, 'FST')


class EqualFlopsTest(parameterized.TestCase):
  @parameterized.parameters(
    'rigl', 'static', 'mixed_sparsity_24', 'mixed_sparsity_transposable', 'dense_small', 'dense_short'
  )
  def test_small_takes_as_many_flops_with_each(self, method):
    base = methods.load_config('small', ['steps=1500'])
    wanted = methods._flops(methods.configure(base, 'mixed_sparsity', 0))
    found = methods._flops(methods.configure(base, method, 0))
    self.assertAlmostEqual(found / wanted, 1, delta=3e-3)

  def test_mixed_sparsity_takes_a_quarter_of_dense(self):
    base = methods.load_config('small')
    dense, mixed = (methods._flops(methods.configure(base, method, 0)) for method in ('dense', 'mixed_sparsity'))
    self.assertAlmostEqual(dense / mixed, 4, delta=0.1)


if __name__ == '__main__':
  absltest.main()
