"""Bad numbers stop a run, are skipped or rolled back; no checkpoint has them and no mask is chosen from them."""

import json
from pathlib import Path
import signal
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.runs import bad_numbers, build, experiment, programs, train
from experiments.runs.checkpoint import Checkpoints
from experiments.runs.checkpoint_errors import CheckpointError
import sparse24_jax as s24
from tests.experiments.fakes import FakeData, temp_folder
from tests.experiments.runs.stopping_test import run_and_signal, STE
from tests.experiments.runs.train_test import FFN, final_arrays, losses, RECIPES, run, tiny

EVERY_STEP = {'log_every': 1, 'eval_every': 30, 'checkpoint_every': 1}


def steps_of(folder):
  with Checkpoints(Path(folder, 'checkpoints'), read_only=True) as checkpoints:
    return checkpoints.steps()


def events_of(folder):
  return [json.loads(line) for line in Path(folder, 'events.jsonl').read_text().splitlines()]


class PolicyTest(parameterized.TestCase):
  @parameterized.parameters(
    ('bad_numbers.policy=hope', "bad_numbers.policy is 'hope'; known: stop, skip, roll_back"),
    ('bad_numbers.cap=0', 'bad_numbers.cap is 0; it must be 1 or more'),
    ('bad_numbers.spike=1.0', r'bad_numbers.spike is 1\.0; it must be more than 1, or 0'),
  )
  def test_what_makes_no_sense(self, override, message):
    with self.assertRaisesRegex(ValueError, message):
      bad_numbers.policy_of(experiment.load_config('nano', [override]))

  def test_a_jump_is_measured_by_the_median(self):
    found = bad_numbers.Losses(10.0)
    for step in range(19):
      found.take(step, 3.0 + step % 2, 1.0)
      self.assertEqual(found.limit(), np.inf)
    found.take(19, 30.0, 1.0)  # too few to tell
    self.assertEqual(found.limit(), 35.0)
    with self.assertRaisesRegex(bad_numbers.BadNumbersError, 'the loss jumped to 1e.04 at step 20, above'):
      found.take(20, 1e4, 1.0)
    low = bad_numbers.Losses(10.0, [0.01] * 20)
    low.take(0, 0.9, 1.0)  # of a run that has learnt all there is, below ten times one nat
    self.assertEqual(bad_numbers.Losses(0.0, [1.0] * 50).limit(), np.inf)


class StopTest(absltest.TestCase):
  def test_parameters_are_looked_at_before_they_are_saved(self):
    """The loss of the step is good, and its new parameters are not."""
    folder, step = temp_folder(self), train.Run._step

    def spoil(run, *args):
      metrics = step(run, *args)
      run.state = run.state._replace(params=jax.tree.map(lambda w: w * np.nan, run.state.params))
      return metrics

    spoilt = mock.patch.object(train.Run, '_step', spoil)
    message = r'params/.* are not finite at step 1; training stopped'
    with spoilt, self.assertRaisesRegex(train.TrainingDivergedError, message):
      run(tiny('ste', **EVERY_STEP), folder, programs=STE)
    self.assertEqual(steps_of(folder), [])

  def test_a_run_that_is_told_to_stop_does_not_save_a_jump(self):
    """In the middle of a window of five: its losses are looked at first, or every resume would stop there."""
    folder = temp_folder(self)

    def limit(losses):  # the 23rd loss is a jump
      return 0.0 if len(losses.latest) == 22 else np.inf

    with (
      mock.patch.object(bad_numbers.Losses, 'limit', limit),
      self.assertRaisesRegex(train.TrainingDivergedError, 'jumped to .* at step 23.*go on in this one from step 20'),
    ):
      run_and_signal(tiny('ste'), folder, signal.SIGTERM, 23, STE)
    self.assertEqual(steps_of(folder), [10, 20])

  @pytest.mark.slow
  def test_a_weight_that_is_not_finite_shows_before_a_checkpoint(self):
    """With b2 = 1 the loss of the first step is good, the weights after it are not, nor is their flip rate."""
    with self.assertRaisesRegex(train.TrainingDivergedError, 'flip rate, and so a weight, is nan at step 1'):
      run(tiny('ste', {'path': FFN}, optimizer__b2=1.0, **EVERY_STEP), temp_folder(self))

  @pytest.mark.slow
  def test_the_advice_works(self):
    """Lower the rate in the same folder, from the last good checkpoint."""
    folder, clip = temp_folder(self), {'optimizer__clip': 0.0, **EVERY_STEP, 'eval_every': 5}
    run(tiny(steps=10, **clip), folder)
    with self.assertRaisesRegex(CheckpointError, r'peak_lr: 0.01 in the checkpoint, 1e\+30[\s\S]*--accept-changes'):
      run(tiny(steps=10, optimizer__peak_lr=1e30, **clip), folder)
    changed = tiny(steps=10, optimizer__peak_lr=1e30, **clip)
    with self.assertRaisesRegex(train.TrainingDivergedError, r'another folder.*from step 9 .*--accept-change'):
      train.train(changed, folder, data=FakeData(), quiet=True, from_step=9, accept_changes=True)
    self.assertEqual(steps_of(folder), [9])
    lower = tiny(steps=10, optimizer__peak_lr=1e-3, **clip)
    train.train(lower, folder, data=FakeData(), quiet=True, accept_changes=True)
    self.assertEqual(steps_of(folder), [9, 10])
    self.assertEqual(final_arrays(lower, folder)[1]['identity']['optimizer']['peak_lr'], 1e-3)
    found = events_of(folder)
    changed, resumed = 'settings changed', 'resumed'
    self.assertEqual([event['event'] for event in found], ['went back', changed, resumed, changed, resumed])
    self.assertEqual(found[3]['changed'], {'optimizer.peak_lr': [0.01, 1e-3]})

  @pytest.mark.slow
  def test_other_settings_never_change_within_a_run(self):
    folder = temp_folder(self)
    run(tiny(steps=10), folder)
    with self.assertRaisesRegex(CheckpointError, 'seed: 0 in the checkpoint, 4 in this run') as caught:
      train.train(tiny(steps=10, seed=4), folder, data=FakeData(), quiet=True, accept_changes=True)
    self.assertNotIn('--accept-changes', str(caught.exception))


class BadBatch(FakeData):
  """Tokens of one batch that are not in the vocabulary, whose loss is NaN."""

  def __init__(self, *at):
    super().__init__()
    self.at = at

  def batch(self, *key):
    found = super().batch(*key)
    return {k: x * 0 - 10**6 if key[0] == 0 and key[1] in self.at else x for k, x in found.items()}


class GoOnTest(absltest.TestCase):
  def test_a_bad_step_is_skipped_and_leaves_no_trace(self):
    config = tiny('ste', RECIPES['ste'], bad_numbers__policy='skip')
    parts = build.make_parts(config, data=FakeData())
    step = programs.make_step(parts, 'sparse', None)
    state, batches = programs.init_state(parts), parts.data.train()
    state, metrics = step(state, build.shard_batch(parts, next(batches)), config.seed, np.inf)
    self.assertTrue(metrics.good)
    before = jax.tree.map(np.array, state)
    good = build.shard_batch(parts, next(batches))
    for batch, limit in ((jax.tree.map(lambda x: x * 0 - 10**6, good), np.inf), (good, 0.5)):
      state, metrics = step(state, batch, config.seed, limit)
      self.assertFalse(metrics.good)
      jax.tree.map(np.testing.assert_array_equal, state[1:], before[1:])
    self.assertEqual((int(state.step), step._cache_size()), (3, 1))

  @pytest.mark.slow
  def test_skipped_steps_are_counted_and_capped(self):
    folder, policy = temp_folder(self), {'bad_numbers__policy': 'skip', 'bad_numbers__cap': 2}
    data = BadBatch(4, 12, 13)
    summary = run(tiny(**policy), folder, data)
    self.assertTrue(np.isfinite(summary['validation_loss']))
    self.assertLen(losses(folder, 'train'), 6)
    self.assertEqual([(e['step'], e['event']) for e in events_of(folder)], [(s, 'skipped') for s in (4, 12, 13)])
    with self.assertRaisesRegex(train.TrainingDivergedError, 'step 14 was skipped.*cap allows 2 in a row'):
      run(tiny(**policy), temp_folder(self), BadBatch(12, 13, 14))

  def test_rolled_back_to_the_last_checkpoint_and_on_with_other_batches(self):
    folder = temp_folder(self)
    run(tiny('ste', bad_numbers__policy='roll_back'), folder, BadBatch(17), STE)
    self.assertEqual(STE[0].step('sparse', None, None)._cache_size(), 1)  # what is read back is stepped by that program
    (event,) = events_of(folder)
    self.assertEqual((event['step'], event['event']), (10, 'rolled back'))
    self.assertRegex(event['what'], r'the loss is nan at step 17; rolled back to step 10')
    records = [json.loads(line) for line in Path(folder, 'metrics.jsonl').read_text().splitlines()]
    self.assertEqual([r['step'] for r in records if r['kind'] == 'train'], [5, 10, 15, 20, 25, 30])
    # 20 batches or 21 were taken by then, and 20 steps follow.
    _, meta = final_arrays(tiny('ste'), folder)
    self.assertIn(meta['data_state']['position'], (40, 41))
    self.assertEqual(meta['rolled_back'], 1)
    with self.assertRaisesRegex(train.TrainingDivergedError, 'loss is nan at step 3.*there is no checkpoint'):
      run(tiny('ste', bad_numbers__policy='roll_back'), temp_folder(self), BadBatch(3), STE)


class MasksTest(absltest.TestCase):
  def test_no_mask_is_chosen_from_a_bad_gradient_inside_apply_if_finite(self):
    params = {'w': jax.random.normal(jax.random.key(0), (8, 8))}
    recipe = s24.recipes.ste('w')
    tx = optax.apply_if_finite(s24.sparse_training(optax.sgd(1.0), recipe), max_consecutive_errors=3)
    state = tx.init(params)
    before = s24.sparse_variables(params, state, recipe)
    updates, state = tx.update({'w': jnp.full((8, 8), jnp.nan)}, state, params)
    self.assertFalse(jnp.any(updates['w']))
    jax.tree.map(np.testing.assert_array_equal, s24.sparse_variables(params, state, recipe), before)


if __name__ == '__main__':
  absltest.main()
