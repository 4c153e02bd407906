"""The benchmark on several devices, tiny: it runs, and its checks compare with something."""

import contextlib
import io
import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest

from experiments.bench import mesh
from tests.experiments.fakes import compile_quickly


def setUpModule():
  compile_quickly()


def run(*argv: str):
  """How many cases failed, records and output."""
  with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
    path = pathlib.Path(folder) / 'records.jsonl'
    settings = ['--devices', '2', '--tiny', '--implementation', 'dense', '--rounds', '2', '--steps', '1']
    failed = mesh.main(['--out', str(path), *settings, '--select', *argv])
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  return failed, records, out.getvalue()


class MeshTest(absltest.TestCase):

  def test_sample(self):
    failed, (record,), _ = run('check-sample')
    self.assertEqual((failed, record['bench'], record['mesh']), (0, 'mesh_check', {'data': 2}))
    self.assertEqual(record['error'], {'differ': 0.0, 'kept': 0.5})

  def test_a_block_that_differs_fails(self):
    with mock.patch.object(mesh, 'BLOCK_LIMIT', -1.0):
      failed, records, out = run('check-ffn')
    self.assertEqual((failed, records), (1, []))
    self.assertRegex(out, 'check-ffn: failed: ValueError: errors against one device must be at most -1.0, found .*gelu')

  def test_limits(self):
    mesh._check_limits({'a': 0.0, 'b': 1.0}, 1.0)
    for error in (1.1, float('nan')):
      with self.assertRaisesRegex(ValueError, "at most 1.0, found {'b': "):
        mesh._check_limits({'a': 0.0, 'b': error}, 1.0)


if __name__ == '__main__':
  absltest.main()
