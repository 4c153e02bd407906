"""The benchmark on several devices, tiny: it runs, and its checks compare with something."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
from jax.sharding import PartitionSpec
import pytest

from experiments.bench import mesh, mesh_checks, meshes


def run(*argv: str):
  """How many cases failed, records and output."""
  with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
    path = pathlib.Path(folder) / 'records.jsonl'
    settings = ['--devices', '2', '--tiny', '--implementation', 'dense', '--rounds', '2', '--steps', '1']
    failed = mesh.main(['--out', str(path), *settings, '--select', *argv])
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  return failed, records, out.getvalue()


class ShardingsTest(parameterized.TestCase):

  @parameterized.parameters(
    ((3, 128, 512), (None, None, 'data')),
    ((3, 512, 128), (None, 'data')),
    ((3, 128, 192), (None, 'data')),  # the longer side has three tiles of 64
    ((3, 100, 200), (None, None, 'data')),  # no side has whole tiles for two
    ((3, 101, 201), ()),
    ((4,), ()),
  )
  def test_matrices_are_divided(self, shape, expected):
    a = jax.ShapeDtypeStruct(shape, float)
    on = meshes.make_mesh(2)
    for sharding, spec in (('fsdp', expected), ('whole', ())):
      found = meshes.state_shardings(on, sharding, {'up': {'kernel': a, 'scale': a}})
      self.assertEqual(found['up']['kernel'].spec, PartitionSpec(*spec))
      self.assertEqual(found['up']['scale'].spec, PartitionSpec())


class MeshTest(absltest.TestCase):

  @pytest.mark.slow
  def test_sample(self):
    failed, (record,), _ = run('check-sample')
    self.assertEqual((failed, record['bench'], record['mesh']), (0, 'mesh_check', {'data': 2}))
    self.assertEqual(record['error'], {'differ': 0.0, 'kept': 0.5})

  @pytest.mark.slow
  def test_a_block_that_differs_fails(self):
    with mock.patch.object(mesh_checks, 'BLOCK_LIMIT', -1.0):
      failed, records, out = run('check-ffn')
    self.assertEqual((failed, records), (1, []))
    self.assertRegex(out, 'check-ffn: failed: ValueError: errors against one device must be at most -1.0, found .*gelu')

  @pytest.mark.slow
  def test_divided_state(self):
    """Weights are gathered and activations are not; masks are searched where they lie."""
    with mock.patch.object(mesh_checks, 'MODEL_LIMIT', 0.03):  # on one device the tiny model is 0.02 from float32
      failed, (record,), out = run('check-fsdp')
    self.assertEqual(failed, 0, out)
    found = record['error']
    self.assertEqual(set(found['unsampled']['communication']), {'all-gather', 'all-reduce'})
    # One of the flip rates, one of the sums by which the next step sees whether it is given these weights.
    self.assertEqual((found['search']['masks_differ'], found['search']['communication']), (0.0, {'all-reduce': 2}))
    self.assertGreater(found['search']['flipped'], 0.1)

  def test_limits(self):
    mesh_checks._check_limits({'a': 0.0, 'b': 1.0}, 1.0)
    for error in (1.1, float('nan')):
      with self.assertRaisesRegex(ValueError, "at most 1.0, found {'b': "):
        mesh_checks._check_limits({'a': 0.0, 'b': error}, 1.0)


if __name__ == '__main__':
  absltest.main()
