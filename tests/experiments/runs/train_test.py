"""The loop: every twin learns, a mesh changes nothing, bad input is named."""

import atexit
import functools
import json
from pathlib import Path
import shutil
import tempfile
import types
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import numpy as np
import optax
import pytest

from experiments.runs import bad_numbers, build, experiment, meshes, metrics, programs, progress, recipes, train
from experiments.runs.checkpoint import Checkpoints
from experiments.runs.checkpoint_errors import CheckpointError
from sparse24_jax.optim import sparse_states
from tests.experiments.fakes import fake_data, FakeData, temp_folder

ROOT = Path(__file__).parents[3]
FFN = recipes.FFN


RECIPES = {
  'dense': {},
  'ste': {'path': FFN},
  'sr_ste': {'path': FFN, 'masked_decay': 2e-4},
  'transposable_srste': {'path': FFN, 'masked_decay': 2e-4, 'refresh_every': 4},
  's_ste': {'path': FFN},
  's_ste_fp8': {'path': FFN, 'fp8': True},
  'step': {'path': FFN},
}


def tiny(recipe='dense', kwargs=None, **overrides):
  """A run of 30 steps of one layer; checkpoints every 10."""
  config = experiment.load_config('nano', tiny=True)
  with config.unlocked():
    config.recipe.update({'name': recipe.removesuffix('_fp8'), 'kwargs': kwargs or {}})
    config.model.num_layers = 1
  config.update({'steps': 30, 'log_every': 5, 'eval_every': 10, 'eval_batches': 2, 'checkpoint_every': 10})
  for key, value in overrides.items():
    experiment.apply_override(config, f'{key.replace("__", ".")}={value}')
  return config


# What configurations were compiled to: a run traces nothing that another of this process has traced.
_COMPILED: dict[str, list[programs.Programs]] = {}
_NOT_IN_PROGRAMS = ('seed', 'log_every', 'eval_every', 'checkpoint_every')


def programs_of(config):
  """What runs of a configuration share."""
  fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_IN_PROGRAMS}
  return _COMPILED.setdefault(json.dumps(fields, sort_keys=True), [])


def run(config, folder, data=None, programs=None):
  programs = programs_of(config) if programs is None else programs
  return train.train(config, folder, data=data or FakeData(), quiet=True, programs=programs)


@functools.cache
def whole_run():
  """The folder of an FST run of both phases, which no test changes, and how often the step of each was compiled."""
  folder = tempfile.mkdtemp(prefix='trained-')
  atexit.register(shutil.rmtree, folder)
  config = tiny('transposable_srste', RECIPES['transposable_srste'])
  run(config, folder)
  (found,) = programs_of(config)
  return folder, [found.step(phase, None, None)._cache_size() for phase in ('sparse', 'dense')]


def losses(folder, kind):
  records = map(json.loads, (Path(folder) / 'metrics.jsonl').read_text().splitlines())
  return [record['loss'] for record in records if record['kind'] == kind]


_STATES: dict[str, programs.TrainState] = {}


def final_arrays(config, folder):
  """Every array of the newest checkpoint, by path."""
  key = json.dumps(config.to_dict(), sort_keys=True)
  if key not in _STATES:
    parts = build.make_parts(config, data=FakeData())
    _STATES[key] = jax.eval_shape(lambda: programs.init_state(parts))
  target = _STATES[key]
  with Checkpoints(Path(folder) / 'checkpoints', read_only=True) as checkpoints:
    meta = checkpoints.read_meta()
    found = checkpoints.restore(target.params, target.opt_state, identity=meta['identity'])
  leaves = jax.tree_util.tree_leaves_with_path((found.params, found.opt_state))
  return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}, meta


def distinct_twins():
  """An experiment of each task, model and recipe; a dense one where no sparse one, which ends dense, has its task.

  Not that of `whole_run`, of which fast tests say the same.
  """
  twins = {}
  for name in experiment.known_experiments():
    config = experiment.load_config(name, tiny=True)
    of = config.task, config.model.get('family'), bool(config.model.get('scan_layers'))
    twins.setdefault((*of[: 3 if config.recipe.name != 'dense' else 2], config.recipe.name), name)
  sparse = {key[:2] for key in twins if key[-1] != 'dense'}
  del twins['language_model', None, False, 'transposable_srste']
  return [name for key, name in twins.items() if key[-1] != 'dense' or key[:2] not in sparse]


# Sizes of axes, the spec of a layer's first weight, and its shard.
OVER_MODEL = (
  ({'data': 2, 'fsdp': 2, 'model': 2}, ('fsdp', 'model'), (16, 64)),
  ({'data': 2, 'fsdp': 2}, (None, 'fsdp'), (32, 64)),
)


def over(axes):
  """The parts of a sparse run on a mesh."""
  changes = {f'mesh__{name}': size for name, size in axes.items()}
  kwargs = {**RECIPES['transposable_srste'], 'dense_fraction': 0.0}
  config = tiny('transposable_srste', kwargs, steps=10, checkpoint_every=0, optimizer__peak_lr=1e-3, **changes)
  return build.make_parts(config, data=FakeData())


def of_steps(folder):
  """Losses and flip rates that a run has logged."""
  records = [json.loads(line) for line in Path(folder, 'metrics.jsonl').read_text().splitlines()]
  return zip(*((r['loss'], r['flip_rates']) for r in records if r['kind'] == 'train'), strict=True)


@functools.cache
def of_one_device():
  """`of_steps` of the run that `over` makes, without a mesh."""
  with tempfile.TemporaryDirectory() as folder:
    train.Run(over({}), folder, quiet=True).train()
    return tuple(of_steps(folder))


def _is_adam(node):
  return isinstance(node, optax.ScaleByAdamState)


class LearnsTest(parameterized.TestCase):
  @parameterized.parameters(*distinct_twins())
  @pytest.mark.slow
  def test_tiny_twin_reduces_the_loss(self, name):
    config = experiment.load_config(name, tiny=True)
    if not config.model.get('scan_layers'):  # one layer compiles in half of the time
      experiment.apply_override(config, 'model.num_layers=1')
    if config.task == 'masked_lm':  # a sixth of the tokens teach it
      config.steps *= 2
    folder = temp_folder(self)
    summary = run(config, folder, fake_data(config))
    found = losses(folder, 'train')
    share = 0.8 if config.task == 'masked_lm' else 0.6
    self.assertLess(found[-1], share * found[0])
    self.assertLess(summary['validation_loss'], share * found[0])
    # What is finished is not run again.
    log = (Path(folder) / 'metrics.jsonl').read_bytes()
    self.assertEqual(run(config, folder, fake_data(config)), summary)
    self.assertEqual((Path(folder) / 'metrics.jsonl').read_bytes(), log)

  @pytest.mark.slow
  def test_accumulation_equals_the_large_batch(self):
    folders = [temp_folder(self) for _ in range(2)]
    for accumulate, folder in zip((1, 4), folders, strict=True):
      run(tiny(steps=10, accumulate=accumulate, optimizer__peak_lr=1e-3), folder)
    np.testing.assert_allclose(losses(folders[0], 'train'), losses(folders[1], 'train'), rtol=1e-5)

  @pytest.mark.slow
  def test_rates_of_links_that_move_are_means_over_the_steps_of_a_window(self):
    """Links move at steps 4 and 8: neither ends a window of five, and each is one step of its window."""
    kwargs, found = {'path': FFN, 'density': 0.3, 'refresh_every': 4, 'stop': 1.0}, {}
    for mode in ('refresh', 'step'):
      folder = temp_folder(self)
      run(tiny('rigl', kwargs, steps=10, eval_every=10, eval_batches=1, recipe__flip_rate=mode), folder)
      lines = map(json.loads, (Path(folder) / 'metrics.jsonl').read_text().splitlines())
      found[mode] = [(r['flip_rate'], *r['flip_rates'].values()) for r in lines if r['kind'] == 'train']
    self.assertTrue(np.all(np.array(found['refresh']) > 0))
    np.testing.assert_allclose(found['step'], np.array(found['refresh']) / 5, rtol=1e-6)

  @parameterized.parameters(('static', {'path': FFN, 'density': 0.3}, True), ('sr_ste', RECIPES['sr_ste'], False))
  @pytest.mark.slow
  def test_where_links_move_theirs_are_the_gradients_that_are_clipped(self, recipe, kwargs, same):
    config = tiny(recipe, kwargs)
    parts = build.make_parts(config, data=FakeData())
    state = programs.init_state(parts)
    update = jax.jit(build.make_optimizer(config, parts.recipe, 'sparse').update)
    dense = jax.tree.map(lambda w: np.full(w.shape, 3.0, np.float32), state.params)
    links = jax.tree.map(np.copy, dense)
    masks = {}
    for name, mask in sparse_states(state.opt_state).items():
      layer = name.split('/')[-2]
      masks[layer] = np.asarray(mask)
      links['h_0']['mlp'][layer]['kernel'] *= masks[layer]
    found = []
    for gradients in (dense, links):
      _, opt_state = update(gradients, state.opt_state, state.params)
      (adam,) = [s for s in jax.tree.leaves(opt_state, is_leaf=_is_adam) if _is_adam(s)]
      found.append({layer: adam.mu['h_0']['mlp'][layer]['kernel'][mask] for layer, mask in masks.items()})
    for layer in masks:
      self.assertEqual(np.allclose(found[0][layer], found[1][layer], rtol=1e-5), same)

  @parameterized.parameters(*OVER_MODEL)
  @pytest.mark.few
  def test_neurons_lie_over_the_axis_model(self, mesh, of_up, shard):
    parts = over(mesh)
    shapes = jax.eval_shape(programs.make_init(parts), parts.config.seed)
    found = jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
      shapes, meshes.state_sharding(parts.mesh, shapes),
    )  # fmt: skip
    rows = meshes.weight_rows(found.params, parts.recipe)
    specs = [', '.join(axis or '-' for axis in spec) for spec in (of_up, of_up[::-1])]
    self.assertEqual([row.spec for row in rows], specs)
    self.assertEqual([row.shard for row in rows], [shard, shard[::-1]])
    adam = found.opt_state[1].inner_state[0]
    for tree in (adam.mu, adam.nu, found.opt_state[1].projections):
      self.assertEqual(tree['h_0']['mlp']['c_proj']['kernel'].sharding.spec, jax.P(*of_up[::-1]))

  @parameterized.parameters(*OVER_MODEL)
  @pytest.mark.slow
  def test_neurons_over_the_axis_model_give_the_losses_of_one_device(self, mesh, of_up, shard):
    folder = temp_folder(self)
    found = train.Run(over(mesh), folder, quiet=True)
    up = found.state.params['h_0']['mlp']['c_fc']['kernel']
    self.assertEqual((up.sharding.spec, up.sharding.shard_shape(up.shape)), (jax.P(*of_up), shard))
    found.train()
    (found, flips), (expected, expected_flips) = of_steps(folder), of_one_device()
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    self.assertEqual(flips, expected_flips)

  def test_neurons_that_do_not_split_into_groups(self):
    with self.assertRaisesRegex(ValueError, r'c_fc/kernel has 12 neurons, which mesh.model 2 .* multiples of 8'):
      meshes.state_sharding(
        jax.make_mesh((1, 1, 2), ('data', 'fsdp', 'model'), devices=jax.devices()[:2]),
        {'mlp': {'c_fc': {'kernel': np.zeros((8, 12))}}},
      )

  @pytest.mark.slow
  def test_on_a_gpu_steps_without_a_search_are_a_program_of_their_own(self):
    config, ends, made = tiny('transposable_srste', RECIPES['transposable_srste']), [], []
    for backend in ('cpu', 'gpu'):
      folder = temp_folder(self)
      with (
        mock.patch.object(build.jax, 'default_backend', lambda backend=backend: backend),
        mock.patch.object(programs, 'make_step', side_effect=programs.make_step) as make,
      ):
        run(config, folder, programs=[])
      ends.append(final_arrays(config, folder)[0])
      made.append([(call.args[1], *call.args[4:]) for call in make.mock_calls])
    jax.tree.map(np.testing.assert_array_equal, *ends)
    self.assertEqual(made[0], [('sparse', None), ('dense', None)])
    self.assertEqual(made[1], [('sparse', False), ('sparse', True), ('dense', False), ('dense', True)])

  def test_who_says_which_steps_choose_masks(self):
    fst, kwargs = 'transposable_srste', RECIPES['transposable_srste']
    configs = [tiny(fst, kwargs), tiny('dense'), tiny(fst, kwargs, bad_numbers__policy='skip')]
    for backend, found in (('gpu', [[False, True], [None, None], [None, None]]), ('cpu', [[None, None]] * 3)):
      made = [build.make_parts(config, data=FakeData()) for config in configs]
      with mock.patch.object(build.jax, 'default_backend', lambda backend=backend: backend):
        self.assertEqual([[build.refresh_of(parts, step) for step in (2, 3)] for parts in made], found)


class TimesTest(absltest.TestCase):
  @pytest.mark.slow
  def test_seconds_go_to_what_they_were_spent_on_over_all_attempts(self):
    now = 0.0

    def taking(seconds, function, stops_at=None):
      calls = 0

      def slow(*args, **kwargs):
        nonlocal now, calls
        calls += 1
        if calls == stops_at:
          raise KeyboardInterrupt
        result = function(*args, **kwargs)
        now += seconds
        return result

      return slow

    def train_slowly(stops_at=None):
      with (
        mock.patch.object(progress, 'time', types.SimpleNamespace(monotonic=lambda: now)),
        mock.patch.object(build, 'shard_batch', taking(1, build.shard_batch, stops_at)),
        mock.patch.object(train.Run, '_validate', taking(5, train.Run._validate)),
        mock.patch.object(train.Run, '_save', taking(3, train.Run._save)),
      ):
        return run(tiny('transposable_srste', RECIPES['transposable_srste']), folder, programs=[])

    folder = temp_folder(self)
    with self.assertRaises(KeyboardInterrupt):
      train_slowly(stops_at=23)
    summary = train_slowly()
    # 25 sparse steps and 5 dense ones; the first of each program, after resuming too, is taken for its compiling. A
    # checkpoint cannot hold how long it takes itself, nor the steps after it that were lost.
    self.assertEqual(summary['spent'], {'training': 27, 'compiling': 3, 'evaluation': 15, 'checkpoints': 6})
    self.assertEqual(summary['seconds'], 51)
    timing = [json.loads(line) for line in Path(folder, 'timing.jsonl').read_text().splitlines()]
    self.assertEqual([record['step'] for record in timing], [5, 10, 15, 20, 25, 30])
    self.assertEqual(timing[4]['spent']['compiling'], 3)
    self.assertEqual(timing[5]['spent'], {**summary['spent'], 'evaluation': 10, 'checkpoints': 3})


class WholeRunTest(parameterized.TestCase):
  """What a run of two phases compiles, and what does not go on in its folder."""

  def test_reduces_the_loss_and_is_not_run_again(self):
    folder, _ = whole_run()
    found, log = losses(folder, 'train'), Path(folder, 'metrics.jsonl')
    summary, lines = json.loads(Path(folder, 'summary.json').read_text()), log.read_bytes()
    self.assertLess(found[-1], 0.6 * found[0])
    self.assertLess(summary['validation_loss'], 0.6 * found[0])
    config = tiny('transposable_srste', RECIPES['transposable_srste'])
    self.assertEqual(run(config, folder), summary)
    self.assertEqual(log.read_bytes(), lines)

  def test_one_compilation_a_phase(self):
    self.assertEqual(whole_run()[1], [1, 1])

  @parameterized.parameters(
    ('recipe', ('sr_ste', RECIPES['sr_ste']), {}, 'recipe.name'),
    ('decay', ('transposable_srste', {'path': FFN, 'masked_decay': 1e-3, 'refresh_every': 4}), {},
     'masked_decay: 0.0002 in the checkpoint, 0.001 in this run'),
    ('learning rate', None, {'optimizer__peak_lr': 0.5}, 'optimizer.peak_lr: 0.01 in the checkpoint, 0.5 in this run'),
    ('seed', None, {'seed': 4}, 'seed: 0 in the checkpoint, 4 in this run'),
    ('data', None, {}, "data.fingerprint: 'fake-1' in the checkpoint, 'fake-2'"),
  )  # fmt: skip
  def test_another_run_does_not_resume(self, what, recipe, overrides, message):
    data = FakeData(fingerprint='fake-2') if what == 'data' else None
    name, kwargs = recipe or ('transposable_srste', RECIPES['transposable_srste'])
    with self.assertRaisesRegex(CheckpointError, message):
      run(tiny(name, kwargs, **overrides), whole_run()[0], data)


class RefusedTest(parameterized.TestCase):
  def test_a_loss_that_is_not_finite_stops_the_run(self):
    folder = temp_folder(self)
    with self.assertRaisesRegex(train.TrainingDivergedError, r'the loss is nan at step \d+; .*peak_lr'):
      run(tiny(optimizer__peak_lr=1e30, optimizer__warmup_steps=0, optimizer__clip=0.0), folder)
    with Checkpoints(Path(folder, 'checkpoints'), read_only=True) as checkpoints:
      self.assertIsNone(checkpoints.latest())

  def test_a_run_that_diverges_between_two_logs_saves_nothing(self):
    folder, always = temp_folder(self), {'log_every': 1, 'eval_every': 1, 'checkpoint_every': 1}
    with self.assertRaisesRegex(train.TrainingDivergedError, r'the validation loss is nan at step 1; .*peak_lr'):
      run(tiny(optimizer__peak_lr=1e30, optimizer__warmup_steps=0, optimizer__clip=0.0, **always), folder)
    with Checkpoints(Path(folder, 'checkpoints'), read_only=True) as checkpoints:
      self.assertIsNone(checkpoints.latest())
    self.assertNotIn('NaN', Path(folder, 'metrics.jsonl').read_text())

  def test_a_gradient_that_is_not_finite_stops_the_run(self):
    found = train.Run(build.make_parts(tiny(), data=FakeData()), temp_folder(self), quiet=True)
    window = [programs.StepMetrics(*map(np.float32, (1.0, norm, 0.1, 0.0, 0.0))) for norm in (2.0, np.inf, np.nan)]
    with self.assertRaisesRegex(bad_numbers.BadNumbersError, 'the norm of the gradient is inf at step 9'):
      found.windows.write(10, 'dense', window, found.watch, None, None)

  def test_metrics_hold_numbers_only(self):
    with metrics.MetricsWriter(temp_folder(self)) as writer, self.assertRaisesRegex(ValueError, 'JSON'):
      writer.write('train', 1, {'loss': float('nan')})

  @pytest.mark.slow
  def test_runs_that_share_programs_train_as_alone(self):
    shared, folder = [], temp_folder(self)
    alone = run(tiny('transposable_srste', RECIPES['transposable_srste'], seed=1), temp_folder(self), programs=[])
    for seed in (0, 1):
      config = tiny('transposable_srste', RECIPES['transposable_srste'], seed=seed)
      with mock.patch.object(programs, 'make_step', side_effect=programs.make_step) as made:
        found = train.train(config, Path(folder, str(seed)), data=FakeData(), quiet=True, programs=shared)
      self.assertEqual(made.call_count, 0 if seed else 2)  # a sparse and a dense phase
    self.assertEqual(found['validation_loss'], alone['validation_loss'])

  @pytest.mark.slow
  def test_random_masks_follow_the_seed_of_the_run(self):
    shared, masks = [], []
    for seed in (0, 1):
      config = tiny('static', {'density': 0.5}, seed=seed, steps=10)
      folder = temp_folder(self)
      train.train(config, folder, data=FakeData(), quiet=True, programs=shared)
      arrays, _ = final_arrays(config, folder)
      masks.append({path: array for path, array in arrays.items() if 'projections' in path and array.size > 1})
    self.assertNotEmpty(masks[0])
    for path, mask in masks[0].items():
      self.assertFalse(np.array_equal(mask, masks[1][path]), path)
    kept = recipes.make_recipe(tiny('static', {'density': 0.5, 'seed': 0}, seed=1))
    self.assertEqual(kept, recipes.make_recipe(tiny('static', {'density': 0.5})))


if __name__ == '__main__':
  absltest.main()
