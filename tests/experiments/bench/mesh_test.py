"""The benchmark on several devices, tiny: it runs, and its checks compare with something."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
import pytest

from experiments.bench import mesh, mesh_checks, meshes
from experiments.runs.models import gpt2


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


class AttentionTest(absltest.TestCase):

  def test_queries_keys_and_values_are_split_alike(self):
    """Else cuDNN refuses them. Like JAX's rule for it, that of the stand-in ties no keys to queries."""
    on, seen = meshes.make_mesh(2), []

    def partition(mesh, arguments, result):
      seen.extend(x.sharding for x in arguments)
      return mesh, lambda q, k, v: q, result.sharding, tuple(x.sharding for x in arguments)

    attention = custom_partitioning(lambda q, k, v: q)
    attention.def_partition(partition, sharding_rule='b t h d, w x y z, m n o p -> b t h d')
    layer = gpt2.Attention(gpt2.make_config('nano', vocab_size=32))
    x = jax.ShapeDtypeStruct((4, 16, 64), 'float32', sharding=NamedSharding(on, meshes.TOKENS))
    shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
    held = meshes.state_shardings(on, 'fsdp', shapes)
    variables = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, held)
    with mock.patch.object(jax.nn, 'dot_product_attention', lambda q, k, v, **_: attention(q, k, v)):
      jax.jit(meshes.keep_tokens_divided(on, layer.apply)).lower(variables, x).compile()
    self.assertLen(seen, 3)
    for sharding in seen:
      self.assertTrue(sharding.is_equivalent_to(NamedSharding(on, meshes.TOKENS), 4), sharding)


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
