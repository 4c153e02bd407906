"""Checkpoints: everything back bit for bit, and a clear error with the last good one intact for whatever goes wrong."""

import contextlib
import functools
import gc
import io
import json
from pathlib import Path
import resource
import shutil
import signal
import tempfile
from typing import Any, NamedTuple
from unittest import mock

from absl.testing import absltest, parameterized
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from experiments.runs import checkpoint, checkpoint_items
from experiments.runs.checkpoint import Checkpoints
from experiments.runs.checkpoint_errors import (
  CheckpointError,
  differences,
  NotFiniteError,
  RemovedError,
  UnreadableError,
)
from tests.draws import gaussian
from tests.experiments.fakes import temp_folder


class _State(NamedTuple):
  mask: jax.Array
  inner: Any
  key: jax.Array


@functools.cache
def _trees(seed=0, size=64):
  params = {'h_0': {'mlp': {'kernel': gaussian(seed, (size, size))}}}
  inner = optax.adamw(1e-3).init(params)
  return params, _State(params['h_0']['mlp']['kernel'] > 0, inner, jax.random.key(seed + 1))


def _meta(**identity):
  return {'identity': identity, 'data_state': {'position': {'next_index': 3}}}


def _equal(case, a, b):
  case.assertEqual(jax.tree.structure(a), jax.tree.structure(b))

  def plain(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

  a, b = jax.tree.map(plain, (a, b))
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    case.assertEqual((x.dtype, np.asarray(x).tobytes()), (y.dtype, np.asarray(y).tobytes()))


class RoundTripTest(parameterized.TestCase):
  def test_everything_comes_back(self):
    params, opt_state = _trees()
    with Checkpoints(temp_folder(self)) as checkpoints:
      checkpoints.save(7, params, opt_state, _meta(recipe='ste'))
      found = checkpoints.restore(*jax.tree.map(jnp.zeros_like, (params, opt_state)), identity={'recipe': 'ste'})
    _equal(self, (found.params, found.opt_state), (params, opt_state))
    self.assertEqual((found.meta['step'], found.meta['data_state']), (7, {'position': {'next_index': 3}}))

  def test_the_newest_are_kept(self):
    folder = temp_folder(self)
    with Checkpoints(folder, keep=2) as checkpoints:
      for step in (1, 2, 3):
        checkpoints.save(step, *_trees(step), _meta())
      self.assertEqual(checkpoints.latest(), 3)
      with self.assertRaisesRegex(CheckpointError, r'no checkpoint of step 1 \(there are: \[2, 3\]\)'):
        checkpoints.read_meta(1)

  def test_parameters_load_without_this_library(self):
    folder, (params, opt_state) = temp_folder(self), _trees()
    with Checkpoints(folder) as checkpoints:
      checkpoints.save(1, params, opt_state, _meta())
    with ocp.StandardCheckpointer() as plain:
      _equal(self, plain.restore(Path(folder) / '1' / 'params', params), params)

  def test_onto_another_sharding(self):
    folder, (params, opt_state) = temp_folder(self), _trees()
    mesh = jax.make_mesh((4,), ('fsdp',), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('fsdp'))
    with Checkpoints(folder) as checkpoints:
      checkpoints.save(1, params, opt_state, _meta())
      target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), params)
      found = checkpoints.restore(target, opt_state, identity={})
    self.assertEqual(found.params['h_0']['mlp']['kernel'].sharding, sharding)
    _equal(self, found.params, params)


class AsynchronousTest(absltest.TestCase):
  def test_steps_may_go_on_while_it_is_written(self):
    folder, bump = temp_folder(self), jax.jit(lambda x: x * 1.5 + 1, donate_argnums=0)
    with Checkpoints(folder, keep=3, asynchronous=True) as checkpoints:
      x, expected = jnp.arange(1 << 22, dtype=jnp.float32), []
      for step in range(3):
        expected.append(np.array(x))
        checkpoints.save(step, {'w': x}, {'count': jnp.int32(step)}, _meta())
        for _ in range(3):
          x = bump(x)
    with Checkpoints(folder, read_only=True) as checkpoints:
      for step, array in enumerate(expected):
        shapes = jax.eval_shape(lambda: ({'w': x}, {'count': jnp.int32(0)}))
        found = checkpoints.restore(*shapes, identity={}, step=step)
        np.testing.assert_array_equal(found.params['w'], array)


# Orbax leaves coroutines of the reads that failed to the garbage collector, which complains about their exceptions.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
class BadCheckpointTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.saved = cls.enterClassContext(tempfile.TemporaryDirectory())
    with Checkpoints(cls.saved) as checkpoints:
      for step in (10, 20):
        checkpoints.save(step, *_trees(step), _meta(recipe='ste'))

    # Looking for garbage takes half a second where many tests ran before, of whose objects none is to be looked at.
    gc.freeze()
    cls.addClassCleanup(gc.unfreeze)

  def setUp(self):
    super().setUp()
    self.addCleanup(gc.collect)

  def _two(self):
    """A folder of its own with the checkpoints that were saved once."""
    return Path(shutil.copytree(self.saved, temp_folder(self), dirs_exist_ok=True))

  def _refused(self, folder, message, step=None, **identity):
    before = sorted(str(path) for path in folder.rglob('*'))
    with Checkpoints(folder) as checkpoints, self.assertRaisesRegex(CheckpointError, message):
      checkpoints.restore(*_trees(), identity=identity or {'recipe': 'ste'}, step=step)
    self.assertEqual(sorted(str(path) for path in folder.rglob('*')), before)

  def test_differing_fields_are_named(self):
    self._refused(self._two(), "recipe: 'ste' in the checkpoint, 's_ste' in this run", recipe='s_ste')

  @parameterized.parameters('flip', 'cut', 'remove')
  def test_corrupted(self, how):
    folder = self._two()
    data = max((p for p in (folder / '20' / 'params').rglob('*') if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    if how == 'flip':
      content[len(content) // 2] ^= 0xFF
    data.write_bytes(content[: len(content) // 2] if how == 'cut' else content)
    if how == 'remove':
      shutil.rmtree(folder / '20' / 'params')
    self._refused(folder, r'20 cannot be read \(corrupted.*there are also those of steps \[10\]')
    self._refused(folder, '20 cannot be read(?!.*(remove|delete))')
    with Checkpoints(folder) as checkpoints:
      found = checkpoints.restore(*_trees(), identity={'recipe': 'ste'}, step=10)
    _equal(self, (found.params, found.opt_state), _trees(10))

  def test_a_changed_value_fails_its_checksum(self):
    folder = self._two()
    params = jax.tree.map(lambda w: w.at[0, 0].set(5.0), _trees(20)[0])
    shutil.rmtree(folder / '20' / 'params')
    with ocp.StandardCheckpointer() as plain:
      plain.save(folder / '20' / 'params', params)
    self._refused(folder, 'checksums differ at params/h_0/mlp/kernel')

  @parameterized.parameters(('next_index', 3, 2), ('step', 20, 4), ('recipe', 'ste', 'sti'))
  def test_a_changed_bit_of_meta_fails_its_checksum(self, key, old, new):
    folder = self._two()
    file = folder / '20' / 'meta' / 'metadata'
    content = file.read_text()
    changed = content.replace(f'"{key}": {json.dumps(old)}', f'"{key}": {json.dumps(new)}')
    self.assertNotEqual(changed, content)
    file.write_text(changed)
    self._refused(folder, 'the checksum of its meta item differs')

  def test_the_newest_that_can_be_read(self):
    folder, told = self._two(), []
    (folder / '20' / 'meta' / 'metadata').write_text('')
    with Checkpoints(folder) as checkpoints:
      found = checkpoints.restore_newest(*_trees(), identity={'recipe': 'ste'}, tell=told.append)
      self.assertEqual(checkpoints.steps(), [10])
      checkpoints.save(20, *_trees(20), _meta(recipe='ste'))
    _equal(self, (found.params, found.opt_state), _trees(10))
    self.assertLen(told, 2)
    self.assertRegex(told[0], r'20 cannot be read .* moved to .*-set-aside\.')
    self.assertIn('going on from the checkpoint of step 10', told[1])
    self.assertTrue((folder.with_name(f'{folder.name}-set-aside') / '20' / 'params').is_dir())
    shutil.rmtree(folder.with_name(f'{folder.name}-set-aside'))

  @parameterized.parameters(
    (jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.'), jax.errors.JaxRuntimeError),
    (MemoryError(), MemoryError),
    (PermissionError(13, 'Permission denied'), PermissionError),
    (OSError(5, 'Input/output error'), OSError),
    (ValueError('UNKNOWN: Error reading local file "d/7" [OS error 5: Input/output error EIO]'), CheckpointError),
    (ValueError('PERMISSION_DENIED: Error opening local file'), CheckpointError),
  )
  def test_what_says_nothing_about_the_content_is_raised_and_nothing_moved(self, error, kind):
    folder = self._two()
    before = sorted(folder.rglob('*'))
    with Checkpoints(folder) as checkpoints:
      with (
        mock.patch.object(checkpoints._manager, 'restore', side_effect=error),
        self.assertRaises(kind) as caught,
      ):
        checkpoints.restore_newest(*_trees(), identity={'recipe': 'ste'}, tell=self.fail)
      self.assertNotIsInstance(caught.exception, UnreadableError)
    self.assertEqual(sorted(folder.rglob('*')), before)

  def test_an_older_format_is_refused_and_not_moved(self):
    folder = self._two()
    file = folder / '20' / 'meta' / 'metadata'
    meta = json.loads(file.read_text()) | {'format': 3}  # before states had `identity`
    file.write_text(json.dumps(meta | {'checksum': checkpoint_items.checksum(meta)}))
    before = sorted(folder.rglob('*'))
    with Checkpoints(folder) as checkpoints, self.assertRaisesRegex(CheckpointError, 'format 3, .*reads 4') as caught:
      checkpoints.restore_newest(*_trees(), identity={'recipe': 'ste'}, tell=self.fail)
    self.assertNotIsInstance(caught.exception, UnreadableError)
    self.assertEqual(sorted(folder.rglob('*')), before)

  def test_a_tree_of_other_fields_is_no_damage(self):
    folder, (params, opt_state) = self._two(), _trees()
    with Checkpoints(folder) as checkpoints, self.assertRaisesRegex(CheckpointError, 'do not match') as caught:
      more = {'state': opt_state, 'left': params}
      checkpoints.restore_newest(params, more, identity={'recipe': 'ste'}, tell=self.fail)
    self.assertNotIsInstance(caught.exception, UnreadableError)

  def test_one_of_several_processes_reads_alone_and_says_what_failed(self):
    folder, told = self._two(), io.StringIO()
    with (
      mock.patch.object(jax, 'process_count', return_value=2),
      mock.patch.object(multihost_utils, 'process_allgather', side_effect=AssertionError('a collective')),
    ):
      reader = checkpoint._reader_of_one(folder)
      meta = reader.restore(20, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))['meta']
      self.assertEqual(meta['step'], 20)
      checkpoints = mock.Mock(directory=folder, _reader=mock.Mock())
      checkpoints._reader.restore.side_effect = PermissionError(13, 'no permission here')
      checkpoints._judged = lambda step, error: error
      with contextlib.redirect_stderr(told), self.assertRaises(PermissionError) as caught:
        Checkpoints._read(checkpoints, 20, None)
    self.assertIsNone(caught.exception.__cause__)
    self.assertRegex(told.getvalue(), 'process 0 of 2 could not read .*/20: PermissionError: .*no permission here')

  def test_a_checksum_that_is_not_there(self):
    folder = self._two()
    file = folder / '20' / 'meta' / 'metadata'
    meta = json.loads(file.read_text())
    del meta['checksums']['params/h_0/mlp/kernel']
    file.write_text(json.dumps(meta | {'checksum': checkpoint_items.checksum(meta)}))
    self._refused(folder, 'not of the same names: params/h_0/mlp/kernel')

  @parameterized.parameters(3, [['params/h_0/mlp/kernel', 1]], None)
  def test_checksums_that_are_none(self, checksums):
    folder = self._two()
    file = folder / '20' / 'meta' / 'metadata'
    meta = json.loads(file.read_text()) | {'checksums': checksums}
    file.write_text(json.dumps(meta | {'checksum': checkpoint_items.checksum(meta)}))
    self._refused(folder, 'its meta item was not written by this program')

  def test_meta_that_is_nested_without_end_is_damage(self):
    folder = self._two()
    (folder / '20' / 'meta' / 'metadata').write_text('[' * 10**5)
    self._refused(folder, r'20 cannot be read \(corrupted')

  def test_when_none_can_be_read_none_is_moved(self):
    folder = self._two()
    for step in ('10', '20'):
      (folder / step / 'meta' / 'metadata').write_text('')
    before = sorted(folder.rglob('*'))
    with Checkpoints(folder) as checkpoints, self.assertRaisesRegex(UnreadableError, '20 cannot be read'):
      checkpoints.restore_newest(*_trees(), identity={'recipe': 'ste'}, tell=self.fail)
    self.assertEqual(sorted(folder.rglob('*')), before)

  def test_bad_numbers_are_not_saved(self):
    folder, (params, opt_state) = self._two(), _trees(30)
    adam = opt_state.inner[0]
    nu = jax.tree.map(lambda x: x.at[3, 5].set(jnp.inf), adam.nu)
    bad = opt_state._replace(inner=(adam._replace(nu=nu), *opt_state.inner[1:]))
    with Checkpoints(folder) as checkpoints:
      with self.assertRaisesRegex(NotFiniteError, r'opt_state/inner/0/nu/h_0/mlp/kernel \(1 of \d+.* at step 30'):
        checkpoints.save(30, params, bad, _meta(recipe='ste'))
      self.assertEqual(checkpoints.steps(), [10, 20])

  def test_a_reader_whose_checkpoint_is_removed(self):
    folder = self._two()
    with Checkpoints(folder, read_only=True) as reader:
      shutil.rmtree(folder / '10')
      with self.assertRaisesRegex(RemovedError, 'was removed while it was read'):
        reader.read_meta(10)

  def test_foreign(self):
    folder = Path(temp_folder(self))
    with ocp.CheckpointManager(folder) as manager:
      manager.save(5, args=ocp.args.StandardSave({'weights': jnp.ones(3)}))
    self._refused(folder, '5 cannot be read .*not of this program')

  def test_other_shapes(self):
    folder = self._two()
    with Checkpoints(folder) as checkpoints, self.assertRaisesRegex(CheckpointError, '20 cannot be read'):
      checkpoints.restore(*_trees(size=32), identity={'recipe': 'ste'})

  def test_nothing_there(self):
    self._refused(Path(temp_folder(self)), 'has no checkpoint')
    with self.assertRaisesRegex(CheckpointError, 'does not exist; give the folder of a run'):
      Checkpoints('/nonexistent/run', read_only=True)

  @parameterized.parameters(1, 2)
  def test_full_disk(self, keep):
    """A limit on file sizes makes the kernel refuse the write half-way, as a full disk does."""
    folder = Path(temp_folder(self))
    with Checkpoints(folder, keep=keep) as checkpoints:
      checkpoints.save(10, *_trees(10), _meta(recipe='ste'))
      limits = resource.getrlimit(resource.RLIMIT_FSIZE)
      handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
      resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
      try:
        with self.assertRaisesRegex(CheckpointError, 'could not save step 20 .*step 10 is intact'):
          checkpoints.save(20, *_trees(20), _meta(recipe='ste'))
      finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    with Checkpoints(folder, keep=keep) as checkpoints:
      self.assertEqual(checkpoints.latest(), 10)
      _equal(self, checkpoints.restore(*_trees(), identity={'recipe': 'ste'}).params, _trees(10)[0])
      checkpoints.save(20, *_trees(20), _meta(recipe='ste'))
      self.assertEqual(checkpoints.latest(), 20)


class DifferencesTest(absltest.TestCase):
  def test_fields_that_may_differ(self):
    folder = Path(temp_folder(self))
    with Checkpoints(folder) as checkpoints:
      checkpoints.save(1, *_trees(), _meta(optimizer={'peak_lr': 1, 'b1': 2}, seed=3))
      found = checkpoints.restore(
        *_trees(), identity={'optimizer': {'peak_lr': 0.5, 'b1': 2}, 'seed': 3},
        may_differ=lambda field: field.startswith('optimizer.'),
      )  # fmt: skip
      self.assertEqual(found.changed, {'optimizer.peak_lr': (1, 0.5)})
      with self.assertRaisesRegex(CheckpointError, 'seed: 3 in the checkpoint, 4 in this run'):
        checkpoints.restore(*_trees(), identity={'optimizer': {'peak_lr': 1, 'b1': 2}, 'seed': 4})

  def test_nested_and_missing_fields(self):
    self.assertEqual(
      differences({'a': {'b': 1, 'c': 2}}, {'a': {'b': 1}, 'd': 3}),
      ['a.c: 2 in the checkpoint, None in this run', 'd: None in the checkpoint, 3 in this run'],
    )

  def test_rules_one_by_one(self):
    one, other = {'path': 'up', 'axis': 0}, {'path': 'down', 'axis': 0}
    changed = differences({'rules': [one, other]}, {'rules': [one, other | {'axis': 1}]})
    self.assertEqual(changed, ['rules.1.axis: 0 in the checkpoint, 1 in this run'])
    for a, b in (([one], [one, other]), ([['dense', 0.1]], [['dense', 0.2]])):
      self.assertEqual(differences({'a': a}, {'a': b}), [f'a: {a!r} in the checkpoint, {b!r} in this run'])
    self.assertEqual(differences({'rules': [one]}, {'rules': [dict(one)]}), [])


if __name__ == '__main__':
  absltest.main()
