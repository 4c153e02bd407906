"""Settings that do not fit are named, and a run keeps its own and where it came from."""

import json
from pathlib import Path
import sys
from unittest import mock

from absl.testing import absltest, parameterized
import jax

from experiments.runs import environment, experiment, recipes, train
from experiments.runs.race import contenders
from sparse24_jax.rules import match_rules
from tests.experiments.fakes import temp_folder
from tests.experiments.runs.train_test import FFN, ROOT, run, tiny


class SettingsTest(parameterized.TestCase):
  @parameterized.parameters('steps', 'accumulate', 'log_every', 'eval_every', 'eval_batches')
  def test_counts_are_one_or_more(self, key):
    with self.assertRaisesRegex(ValueError, f'{key} is 0; it must be 1 or more'):
      run(tiny(**{key: 0}), temp_folder(self))

  @parameterized.parameters(
    ('recipe.name=magic', "recipe.name is 'magic'; known: dense"),
    ("recipe.kwargs={'paht': '.*'}", 'recipe.kwargs of ste.*path'),
    ("recipe.kwargs={'path': 'nothing'}", "'nothing'.*decides for no weight"),
    ('checkpoint_every=7', 'checkpoint_every 7 is not a multiple of log_every'),
    ('accumulate=3', 'data.batch_size 16 is not divisible by accumulate 3'),
    ('mesh.data=16', 'needs 16 devices, there are 8'),
    ('model.width=3', 'model section: .*width'),
    ('model.dtype=bf16', 'model section: .*bf16'),
    ('model.attention=cudnn', 'cudnn.* needs an NVIDIA GPU; set model.attention=xla'),
    ('optimizer.warmup_steps=1000', r'optimizer\.warmup_steps is 1000; it must be less than steps, \d+'),
    ('mesh.fsdp=0', 'mesh.fsdp is 0; it must be 1 or more'),
    ('vocab_multiple=0', 'vocab_multiple is 0; it must be 1 or more'),
    ('model.num_heads=0', 'model section: .*zero'),
    ("model={'num_layers': 1}", "model section: it has no 'size'; known: .*nano, .*124m"),
    ('model.seq_len=8', 'data.seq_len 16 is longer than the model takes, 8'),
  )
  def test_bad_settings(self, override, message):
    config = experiment.load_config('nano', ['recipe.name=ste', f"recipe.kwargs={{'path': '{FFN}'}}"], tiny=True)
    experiment.apply_override(config, override)
    with self.assertRaisesRegex(ValueError, message):
      run(config, temp_folder(self))

  @parameterized.parameters(
    ('steps', 'not of the form key=value'),
    ('stepz=3', "no field 'stepz'; known: accumulate"),
    ('optimizer.beta=3', "no field 'beta'; known: b1"),
    ('optimiser.b1=3', "no section 'optimiser'"),
    ('steps=many', 'steps=many: it takes int, found str'),
    ('optimizer=3', 'optimizer=3: it takes a section, found int'),
    ('optimizer=None', 'optimizer=None: it takes a section, found NoneType'),
    ('steps=None', 'steps=None: it takes int, found NoneType'),
    ('name=None', 'name=None: it takes str, found NoneType'),
    ('recipe.kwargsx=1', "no field 'kwargsx'; known: dense_from, flip_rate"),
  )
  def test_bad_overrides(self, override, message):
    with self.assertRaisesRegex(ValueError, message):
      experiment.load_config('nano', [override])

  @parameterized.parameters('ste', 'step', 's_ste')
  def test_a_recipe_takes_the_feed_forward_layers_unless_told(self, name):
    self.assertEqual(recipes.make_recipe(tiny(name)), recipes.make_recipe(tiny(name, {'path': FFN})))

  def test_some_gradients_are_exact(self):
    layer = {'mlp': {name: {'kernel': jax.ShapeDtypeStruct((8, 8), 'float32')} for name in ('c_fc', 'c_proj')}}
    recipe = recipes.make_recipe(tiny('s_ste', {'exact': recipes.FFN_DOWN}))
    kinds = [rule.policy.weight_grad for rule in match_rules({'h_0': layer}, recipe).values()]
    self.assertEqual(kinds, ['mvue', 'dense'])
    (rule,) = contenders.make_contender('s_ste_fp8_all_exact_down').make(0.0, 10).rules
    self.assertEqual((rule.exact, rule.policy.weight_grad), ((recipes.FFN_DOWN,), 'mvue'))

  def test_dense_watches_nothing_unless_told(self):
    self.assertEqual(recipes.make_recipe(tiny()).rules, ())

  def test_a_run_keeps_where_it_came_from(self):
    folder = temp_folder(self)
    with (
      mock.patch.object(environment.subprocess, 'run') as git,
      mock.patch.object(sys, 'argv', ['/x/experiments/__main__.py', 'train', '--set', 'steps=10']),
      mock.patch.object(train.Run, '_loop', return_value={'loss': 0.0}),
    ):
      git.return_value.stdout = 'abc-dirty\n'
      run(tiny(), folder)
    found = json.loads(Path(folder, 'environment.json').read_text())
    self.assertEqual(found['commit'], 'abc-dirty')
    self.assertEqual(found['command'], 'python -m experiments train --set steps=10')

  def test_the_commit_is_that_of_git(self):
    with mock.patch.object(environment.subprocess, 'run', side_effect=OSError):
      self.assertIsNone(environment.commit())
    if (ROOT / '.git').exists():
      self.assertRegex(environment.commit() or '', r'^[0-9a-f]{40}(-dirty)?$')


if __name__ == '__main__':
  absltest.main()
