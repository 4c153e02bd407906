"""Sparse activations in the experiments: trained through three phases, evaluated dense, measured layer by layer."""

import functools
import json
from pathlib import Path
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest

from experiments.reports import charts, claims, report
from experiments.reports.page import Html
from experiments.runs import (
  activations,
  build,
  experiment,
  flops,
  method_table,
  methods,
  programs,
  recipes,
  records,
  train,
)
from experiments.runs.checkpoint import Checkpoints
from experiments.runs.checkpoint_errors import CheckpointError
from experiments.runs.progress import SPENT_ON
import sparse24_jax as s24
from tests.experiments.fakes import apply, FakeData, temp_folder

POLICY = {'features': '16:2:8'}
SQUARED_RELU = {'model.mlp': 'relu2'}


def tiny(recipe='neuron_level', kwargs=None, **fields):
  """30 steps of a model of one layer: 6 dense, 18 sparse, 6 dense."""
  config = experiment.load_config('nano', tiny=True)
  with config.unlocked():
    config.model.num_layers = 1
    kwargs = {'policy': POLICY, 'warmup_fraction': 0.2} if kwargs is None else kwargs
    config.recipe.update({'name': recipe, 'kwargs': kwargs})
  config.update({'steps': 30, 'log_every': 2, 'eval_every': 6, 'eval_batches': 2, 'checkpoint_every': 10})
  for key, value in {**SQUARED_RELU, **fields}.items():
    experiment.apply_override(config, f'{key}={value}')
  return config


def parts_of(config):
  return build.make_parts(config, data=FakeData())


@functools.cache
def at_start(layers=1):
  """Parts and initial state of the default run, for tests that change neither."""
  parts = parts_of(tiny(**{'model.num_layers': layers}))
  return parts, programs.init_state(parts)


@functools.cache
def probed(phase, layers=1):
  parts, state = at_start(layers)
  return activations.make_probe(parts, phase)(state)


def oracle(y, mask):
  """The measures, from float64 [tokens, neurons] and the pattern."""
  return {
    activations.ZEROS: (y == 0).mean(),
    activations.KEPT: ((y != 0) & mask).sum() / (y != 0).sum(),
    activations.KEPT_SUM: y[mask].sum() / y.sum(),
  }


class MeasureTest(parameterized.TestCase):
  @parameterized.parameters(s24.VNM(4, 8), s24.TwoOfFour())
  def test_against_enumeration(self, pattern):
    y = np.square(np.maximum(np.random.default_rng(0).normal(size=(4, 16)), 0)).astype(np.float32)
    policy = s24.ActivationPolicy(pattern)
    mask, m = np.zeros(y.shape, bool), pattern.group
    for group in range(0, 16, m):
      columns = group + np.argsort(-y[:, group : group + m].sum(0), kind='stable')[:4]
      for row in range(4):
        mask[row, columns[np.argsort(-y[row, columns], kind='stable')[:2]]] = True
    found = activations.measures(y, policy)
    for name, value in oracle(y.astype(np.float64), mask).items():
      np.testing.assert_allclose(found[name], value, rtol=1e-6)

  def test_no_activation_at_all(self):
    found = activations.measures(np.zeros((16, 8), np.float32), s24.ActivationPolicy(s24.VNM(16, 8)))
    self.assertEqual({name: float(value) for name, value in found.items()},
                     {activations.ZEROS: 1.0, activations.KEPT: 1.0, activations.KEPT_SUM: 1.0})  # fmt: skip

  @parameterized.parameters('dense', 'sparse')
  @pytest.mark.few
  def test_probe_sees_what_the_first_layer_computes(self, phase):
    parts, state = at_start()
    found = probed(phase)
    self.assertEqual(set(found), {activations.ZEROS, activations.KEPT, activations.KEPT_SUM})
    w = s24.project(state.params, state.opt_state, parts.recipe, phase=phase)['h_0']['mlp']['c_fc']['kernel']
    if phase == 'sparse':
      s24.verify24(w)
    see = functools.partial(parts.model.apply, capture_intermediates=lambda m, _: m.name == 'ln_2')
    look = jax.jit(lambda params, tokens: see({'params': params}, tokens))
    expected = []
    for batch in parts.data.validation(2):
      _, kept = look(state.params, batch['inputs'])
      x = np.asarray(kept['intermediates']['h_0']['ln_2']['__call__'][0], np.float64).reshape(-1, 32)
      y = np.square(np.maximum(x @ np.asarray(w, np.float64), 0))
      expected.append(oracle(y, np.asarray(s24.vnm_mask(y.astype(np.float32), v=16, m=8))))
    for name in expected[0]:
      np.testing.assert_allclose(found[name]['h_0/mlp'], np.mean([e[name] for e in expected]), atol=2e-3)

  @pytest.mark.slow
  def test_layers_below_a_pattern_see_its_output(self):
    dense, sparse = probed('dense', layers=2), probed('sparse', layers=2)
    self.assertNotEqual(dense[activations.ZEROS]['h_1/mlp'], sparse[activations.ZEROS]['h_1/mlp'])
    self.assertBetween(dense[activations.ZEROS]['h_1/mlp'], 0.3, 0.7)  # about half at the start

  @parameterized.parameters(
    ({}, True), ({'model.scan_layers': True}, True), ({'model.mlp': 'gelu'}, False),
  )  # fmt: skip
  def test_which_models_have_measures(self, changes, expected):
    self.assertEqual(activations.can_probe(parts_of(tiny('dense', {}, **changes))), expected)

  @pytest.mark.slow
  def test_scanned_layers_are_measured_one_by_one(self):
    looped, scanned = (
      parts_of(tiny('dense', {}, **{'model.scan_layers': scan, 'model.num_layers': 2})) for scan in (False, True)
    )
    state = programs.init_state(looped)
    layers = [state.params[f'h_{i}'] for i in range(2)]
    stacked = {key: value for key, value in state.params.items() if not key.startswith('h_')}
    stacked['h'] = jax.tree.map(lambda *x: np.stack(x), *layers)
    expected = activations.make_probe(looped, 'dense')(state)[activations.ZEROS]
    found = activations.make_probe(scanned, 'dense')(programs.init_state(scanned)._replace(params=stacked))
    self.assertSequenceAlmostEqual(found[activations.ZEROS].values(), expected.values(), places=6)
    self.assertEqual(list(found[activations.ZEROS]), ['h/mlp[0]', 'h/mlp[1]'])


class EvaluationTest(parameterized.TestCase):
  @parameterized.parameters('sequence', 'position')
  @pytest.mark.slow
  def test_blocks_along_a_sequence_see_later_tokens(self, order):
    parts, (_, state) = parts_of(tiny(**{'model.ffn_order': order})), at_start()
    tokens = np.array(parts.data.batch(0, 0)['inputs'])
    changed = np.where(np.arange(16) == 15, (tokens + 7) % 32, tokens)

    def reach(recipe, phase='sparse'):
      """How much the last tokens change what is predicted before them."""
      model = s24.sparsify(parts.model, recipe, phase=phase)
      sparse = s24.sparse_variables(state.params, state.opt_state, parts.recipe, phase=phase)
      a, b = (apply(model, {'params': state.params, 'sparse24': sparse}, t) for t in (tokens, changed))
      return float(np.abs(np.asarray(a) - np.asarray(b))[:, :15].max())

    if order == 'sequence':
      self.assertGreater(reach(parts.recipe), 1e-5)
    else:
      self.assertLess(reach(parts.recipe), 1e-7)
    self.assertLess(reach(recipes.eval_recipe(parts.recipe)), 1e-7)
    self.assertLess(reach(parts.recipe, 'dense'), 1e-7)

  @pytest.mark.slow
  def test_orders_differ_under_a_pattern_only(self):
    models = [parts_of(tiny(**{'model.ffn_order': order})) for order in ('sequence', 'position')]
    _, state = at_start()
    tokens = np.array(models[0].data.batch(0, 0)['inputs'])
    for phase, same in (('dense', True), ('sparse', False)):
      sparse = s24.sparse_variables(state.params, state.opt_state, models[0].recipe, phase=phase)
      a, b = (
        np.asarray(apply(
          s24.sparsify(parts.model, parts.recipe, phase=phase), {'params': state.params, 'sparse24': sparse}, tokens
        ))
        for parts in models
      )  # fmt: skip
      self.assertEqual(np.allclose(a, b, atol=1e-6), same, phase)

  @parameterized.parameters((True, ['sequence', 'position', 'sequence']), (False, ['sequence'] * 3))
  def test_tokens_are_reordered_for_blocks_alone(self, blocks, expected):
    parts = parts_of(tiny(**{'model.ffn_order': 'position'}))
    recipe = parts.recipe if blocks else recipes.eval_recipe(parts.recipe)
    parts = parts._replace(recipe=recipe)
    with mock.patch.object(s24, 'sparsify', wraps=s24.sparsify) as sparsify:
      for phase in ('dense', 'sparse'):
        programs.make_step(parts, phase, None)
      programs.make_eval(parts, 'sparse', num_batches=1)
    self.assertEqual([call.args[0].config.ffn_order for call in sparsify.call_args_list], expected)

  @parameterized.parameters('dense', 'sparse')
  @pytest.mark.few
  def test_activations_are_evaluated_dense(self, phase):
    """Against a plain model with the phase's weights."""
    parts, state = at_start()
    params, by_hand = s24.project(state.params, state.opt_state, parts.recipe, phase=phase), []
    for batch in parts.data.validation(2):
      logits = np.asarray(apply(parts.model, {'params': params}, batch['inputs']), np.float64)
      logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
      by_hand.append(-np.take_along_axis(logits, batch['targets'][..., None], -1).mean())
    found = float(programs.make_eval(parts, phase, num_batches=2)(state)['loss'])
    np.testing.assert_allclose(found, np.mean(by_hand), rtol=1e-5)

  def test_other_recipes_are_evaluated_as_they_are(self):
    recipe = s24.recipes.s_ste('.*')
    self.assertEqual(recipes.eval_recipe(recipe), recipe)


class RecipeTest(absltest.TestCase):
  def test_plain_blocks_are_plain_where_they_are_evaluated_too(self):
    config = tiny(**{'recipe.implementation': 'reference'})
    found = {(rule.activation.implementation, rule.policy.implementation) for rule in recipes.make_recipe(config).rules}
    self.assertEqual(found, {('reference', 'reference')})
    recipe = recipes.with_implementation(recipes.make_recipe(tiny()), 'sparse')
    self.assertEqual({(r.activation.implementation, r.policy.implementation) for r in recipe.rules}, {('sparse', None)})


class TrainingTest(parameterized.TestCase):
  @pytest.mark.slow
  def test_three_phases_logged_and_resumed_bit_for_bit(self):
    config = tiny(**{'recipe.dense_from': 'projected', 'model.ffn_order': 'position'})
    folders, shared = [Path(temp_folder(self)) for _ in range(2)], []
    train.train(config, folders[0], data=FakeData(), quiet=True, programs=shared)
    run = records.read_run(folders[0])
    self.assertLess(run.train[-1]['loss'], 0.9 * run.train[0]['loss'])
    self.assertEqual([r['phase'] for r in run.train], ['dense'] * 3 + ['sparse'] * 9 + ['dense'] * 3)
    self.assertEqual(run.sparse_steps, 18)
    steps, zeros = run.activation_curve(activations.ZEROS, 'h_0/mlp')
    self.assertEqual(steps.tolist(), [6, 12, 18, 24, 30])
    self.assertTrue(np.all((zeros > 0.2) & (zeros < 1)))
    summary = run.activation_summary()
    self.assertEqual([summary[when]['step'] for when in ('first', 'sparse_end', 'last')], [6, 24, 30])

    class Cut(FakeData):
      def batch(self, *key):
        if key == (0, 18):  # in the sparse phase, past the checkpoint of step 10
          raise KeyboardInterrupt
        return super().batch(*key)

    with self.assertRaises(KeyboardInterrupt):
      train.train(config, folders[1], data=Cut(), quiet=True, programs=shared)
    train.train(config, folders[1], data=FakeData(), quiet=True, programs=shared)
    logs = [(folder / 'metrics.jsonl').read_bytes() for folder in folders]
    self.assertEqual(*logs)

  @pytest.mark.slow
  def test_a_run_of_blocks_of_tokens_does_not_go_on_with_two_of_four(self):
    """Such a run began when blocks of tokens were the default."""
    folder, (_, state) = Path(temp_folder(self)), at_start()
    policy = {**POLICY, 'tokens': '16:2:8', 'dense_features': 0.05}
    published = parts_of(tiny(kwargs={'policy': policy, 'warmup_fraction': 0.2}))
    with Checkpoints(folder / 'checkpoints') as checkpoints:
      checkpoints.save(10, state.params, state.opt_state, {'identity': build.identity(published)})
    with self.assertRaises(CheckpointError) as caught:
      train.train(tiny(), folder, data=FakeData(), quiet=True)
    for rule in (0, 1):
      for field, were, now in (('dense_features', 0.05, 0.0), ('tokens', '16:2:8', '2:4')):
        line = f'recipe.rules.{rule}.activation.{field}: {were!r} in the checkpoint, {now!r} in this run'
        self.assertIn(line, str(caught.exception))

  @parameterized.parameters('weights', 'projected')
  def test_what_a_dense_tail_starts_from(self, dense_from):
    parts = parts_of(tiny(**{'recipe.dense_from': dense_from}))
    state = programs.init_state(parts)
    entered = {step: build.enter_phase(parts, step, state.params, state.opt_state) for step in (0, 6, 23, 24, 25)}
    for step, params in entered.items():
      w = params['h_0']['mlp']['c_proj']['kernel']
      if step == 24 and dense_from == 'projected':
        s24.verify24(w, axis=-1)
        project = s24.project(state.params, state.opt_state, parts.recipe, phase='sparse')
        jax.tree.map(np.testing.assert_array_equal, params, project)
      else:
        self.assertIs(w, state.params['h_0']['mlp']['c_proj']['kernel'])
    same = build.identity(parts) == build.identity(parts_of(tiny()))
    self.assertEqual(same, dense_from == 'weights')

  @parameterized.parameters(
    ({'policy': {'V': 16}}, 'recipe.kwargs of neuron_level'),
    ({'policy': {'features': '1:4'}}, "features='1:4' of a policy must be"),
    ({'path': '.*'}, 'recipe.kwargs of neuron_level'),
  )  # fmt: skip
  def test_bad_arguments_are_named(self, kwargs, message):
    with self.assertRaisesRegex(ValueError, message):
      recipes.make_recipe(tiny(kwargs=kwargs))

  def test_bad_settings_are_named(self):
    with self.assertRaisesRegex(ValueError, "recipe.dense_from is 'masks'"):
      parts_of(tiny(**{'recipe.dense_from': 'masks'}))
    with self.assertRaisesRegex(ValueError, "ffn_order is 'batch'"):
      parts_of(tiny(**{'model.ffn_order': 'batch'}))


class MethodsTest(parameterized.TestCase):
  def test_groups(self):
    self.assertEqual(method_table.expand(['activations']), list(method_table.WITH_ACTIVATIONS))
    self.assertEqual(method_table.expand(['ste', 'activations', 'ste'])[:2], ['ste', 'dense_relu2'])
    self.assertContainsSubset([m for group in method_table.GROUPS.values() for m in group], method_table.METHODS)

  @parameterized.parameters(
    ('neuron_level', 0.5, 0.25), ('neuron_level_24', 0.5, 0.5), ('activations_24', 1.0, 0.5)
  )  # fmt: skip
  def test_flops_by_hand(self, method, by_weight, by_activations):
    """One matmul with the weight, one with the activations, and one with these and 5% of the neurons whole."""
    config = methods.configure(experiment.load_config('nano'), method, 0)
    config.recipe.kwargs.update({'warmup_fraction': 0.25, 'dense_fraction': 0.25})
    curve = flops.of_experiment(config, recipes.make_recipe(config), vocab_size=256)
    tokens, ffn, attn = 16 * 64, 2 * 2 * 64 * 256, 2 * 4 * 64 * 64
    dense = 3 * 2 * tokens * (ffn + attn)
    sparse = 2 * tokens * (ffn * (by_weight + by_activations + 0.05 + 0.95 * by_activations) + 3 * attn)
    np.testing.assert_allclose(curve.linear[[0, 999, 1000, 2999, 3000]], [dense, dense, sparse, sparse, dense])

  def test_report_and_claims(self):
    folder = Path(temp_folder(self))
    finals = {'dense_relu2': 1.5, 'neuron_level': 1.505, 'neuron_level_along': 1.55, 'neuron_level_24': 1.56,
              'neuron_level_24_unprojected': 1.58, 'activations_24': 1.6, 'dense': 1.7}  # fmt: skip
    for method, final in finals.items():
      for seed in range(2):
        write_run(folder / f'{method}-{seed}', method, seed, final + 0.001 * seed)
    found = {run.label: run.method for run in records.find_runs([folder])}
    self.assertLen(found, len(finals))
    for label, method in found.items():
      self.assertEqual(method_table.METHODS[method].label, label)
    groups = records.group(records.find_runs([folder]))
    rows = {row[0]: row[4] for row in report.table_rows(groups)}
    self.assertEqual(
      rows,
      {'dense, squared ReLU': '', 'dense': '', 'neuron level, 16:2:8': '+0.0050',
       'neuron level, 16:2:8 along sequences': '+0.0500', 'neuron level, 2:4': '+0.0600',
       'neuron level, 2:4, tail from unprojected weights': '+0.0800', '2:4 activations, dense weights': '+0.1000'},
    )  # fmt: skip
    verdicts = {f.claim.split(' activ')[0]: f.verdict for f in claims.findings(records.find_runs([folder]))}
    self.assertEqual(
      verdicts, {'2:4 weights with V:N:M': 'agrees', '2:4 weights with 2:4': 'disagrees', '2:4': 'disagrees'}
    )
    with mock.patch.multiple(charts, line_chart=(drawn := mock.Mock(return_value=Html('<svg/>'))), dot_plot=drawn):
      page = report.write_report([folder], folder / 'report.html').read_text() + str(drawn.mock_calls)
    self.assertIn('neuron level, 16:2:8: share of the sum that the pattern keeps', page)
    self.assertIn('neuron level, 16:2:8 along sequences: share of the sum that the pattern keeps', page)
    self.assertIn('dense, squared ReLU: share of zeros', page)
    self.assertNotIn('dense: share of zeros', page)


def write_run(folder, method, seed, final):
  """A finished run folder of 4,000 steps with the measures of one layer."""
  config = methods.configure(experiment.load_config('nano'), method, seed)
  folder.mkdir()
  lines = []
  for step in range(500, 4001, 500):
    phase = 'sparse' if 'neuron' in method and 500 < step < 3500 else 'dense'
    measured = {'loss': final, 'grad_norm': 1.0, 'learning_rate': 1e-3, 'flip_rate': 0.0, 'flip_rates': {}}
    lines.append({'step': step, 'kind': 'train', 'phase': phase, **measured})
    line = {'step': step, 'kind': 'validation', 'loss': final, 'phase': phase}
    if method != 'dense':
      line[activations.ZEROS] = {'h_0/mlp': 0.5 + step / 8000}
    # As with clusters, whose order a dense phase does not know.
    if 'neuron' in method and (phase == 'sparse' or method != 'neuron_level_along'):
      line[activations.KEPT_SUM] = {'h_0/mlp': 0.9}
    lines.append(line)
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  (folder / 'config.json').write_text(json.dumps(config.to_dict()))
  environment = {'device': 'CPU', 'python': '3.12', 'versions': {'jax': '0'}, 'commit': None, 'command': ''}
  (folder / 'environment.json').write_text(json.dumps(environment))
  summary = {'seconds': 40.0, 'spent': dict.fromkeys(SPENT_ON, 10.0), 'validation_loss': final}
  (folder / 'summary.json').write_text(json.dumps(summary))


if __name__ == '__main__':
  absltest.main()
