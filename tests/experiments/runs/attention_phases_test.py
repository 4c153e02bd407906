"""A recipe whose phases name attention patterns: training and evaluation run under the pattern of the phase."""

import json
import pathlib

from absl.testing import absltest, parameterized
from ml_collections import ConfigDict
import pytest

from experiments.runs import build, experiment, programs, train
import sparse24_jax as s24
from tests.experiments.fakes import FakeData, temp_folder

LOCAL, FIXED = {'kind': 'local', 'window': 4}, {'kind': 'fixed', 'window': 4}


def config(attention=LOCAL, **model):
  found = experiment.load_config('nano', tiny=True)
  with found.unlocked():
    kwargs = {'attention': attention, 'refresh_every': 1, 'warm_up': 0.5, 'restoration': 0.25}
    found.recipe.update({'name': 'mixed_sparsity', 'kwargs': kwargs})
    found.model.update({'num_layers': 1} | model)
  found.update({'steps': 8, 'log_every': 4, 'eval_every': 4, 'eval_batches': 2, 'checkpoint_every': 8})
  return found


class AttentionPhasesTest(parameterized.TestCase):
  @pytest.mark.slow
  def test_phases_and_their_models(self):
    parts = build.make_parts(config(), data=FakeData())
    local = s24.AttentionPattern('local', 4)
    found = [build.phase_of(parts, step)[1] for step in range(8)]
    self.assertEqual(found, [None] * 4 + [local] * 2 + [None] * 2)
    self.assertIsNone(build.model_for(parts, None).config.attention_pattern)
    self.assertEqual(build.model_for(parts, local).config.attention_pattern, local)
    state = programs.init_state(parts)
    full, near = (float(programs.make_eval(parts, 'sparse', a, num_batches=2)(state)['loss']) for a in (None, local))
    self.assertGreater(abs(full - near), 1e-4)

  @pytest.mark.slow
  def test_trains_through_all_phases(self):
    folder = temp_folder(self)
    summary = train.train(config(), folder, data=FakeData(), quiet=True)
    self.assertEqual(summary['steps'], 8)
    self.assertTrue((pathlib.Path(folder) / 'summary.json').exists())

  @pytest.mark.slow
  def test_a_pattern_a_layer_and_head_in_one_phase(self):
    made = config(attention=[None, [LOCAL, FIXED]], num_layers=2)
    made = ConfigDict(json.loads(json.dumps(made.to_dict())))  # as the folder of a run keeps it
    parts = build.make_parts(made, data=FakeData())
    near, far = s24.AttentionPattern('local', 4), s24.AttentionPattern('fixed', 4)
    wanted = (None, (near, far))
    self.assertEqual(build.phase_of(parts, 5)[1], wanted)
    state = programs.init_state(parts)
    each, split, same = (
      float(programs.make_eval(parts, 'sparse', attention, num_batches=2)(state)['loss'])
      for attention in (wanted, (None, (near, near)), (None, near))
    )
    self.assertGreater(abs(each - same), 1e-5)
    self.assertAlmostEqual(split, same, places=5)

  def test_a_phase_without_a_pattern_keeps_that_of_the_model(self):
    parts = build.make_parts(config(attention_pattern={'kind': 'fixed', 'window': 2}), data=FakeData())
    kinds = [build.model_for(parts, build.phase_of(parts, step)[1]).config.attention_pattern.kind for step in (0, 4)]
    self.assertEqual(kinds, ['fixed', 'local'])

  @parameterized.parameters(([None, None], 'one a layer, 1'), ([[{'kind': 'local'}] * 3], 'layer 0 has 3 entries'))
  def test_refuses_before_training(self, attention, message):
    with self.assertRaisesRegex(ValueError, message):
      build.make_parts(config(attention=attention), data=FakeData())


if __name__ == '__main__':
  absltest.main()
