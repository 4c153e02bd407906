"""The benchmark of sparse attention on small shapes: what its records hold."""

import contextlib
import io
import json
import pathlib
import tempfile

from absl.testing import absltest
import pytest

from pallas_kernels import __main__ as command


class BenchTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.out = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / 'records.jsonl'

  def bench(self, *options):
    """Exit status, and what is printed."""
    options = ['--tiny', '--rounds', '2', '--steps', '2', *options, '--out', str(self.out)]
    with contextlib.redirect_stdout(io.StringIO()) as said:
      return command.main(['bench', 'sparse_attention', *options]), said.getvalue()

  def test_records(self):
    status, said = self.bench('--select', 'fixed-4k', 'local-16k')
    self.assertEqual(status, 0, said)
    fixed, local = (json.loads(line) for line in self.out.read_text().splitlines())
    self.assertEqual((fixed['pattern'], local['pattern']), ('fixed', 'local'))
    for record in (fixed, local):
      self.assertContainsSubset(('device', 'versions', 'commit', 'command', 'when'), record)
      self.assertEqual(
        (record['bench'], record['op'], record['mode']), ('attention', 'sparse_attention', 'forward_and_vjp')
      )
      # Triton has no CPU, so that the block form stands for it.
      self.assertEqual((record['implementation'], [*record['refused']]), ('blocks', ['triton']))
      self.assertEqual(record['shape'], dict(batch=2, length=64, heads=2, head_size=8))
      self.assertLen(record['samples_ms'], 4)
      self.assertEqual([*record['baselines']], ['full'])
      ratio = record['baselines']['full']['median_ms'] / record['median_ms']
      self.assertAlmostEqual(record['speedup']['full'], ratio, places=3)
      self.assertEqual([*record['error']['blocks']], ['y', 'dq', 'dk', 'dv'])
      self.assertLess(max(record['error']['blocks'].values()), 1e-5)
    # 8 x 16 scores of a block of 8 positions, of 64 x 64.
    self.assertEqual(local['computed_share'], 0.25)

  @pytest.mark.slow
  def test_no_case_is_begun_that_would_end_too_late(self):
    status, said = self.bench('--select', 'local-4k', 'strided-4k', '--seconds', '0.001')
    self.assertEqual(status, 1)
    self.assertIn('strided-4k: failed: ValueError: left out, it would end after 0.001 s', said)
    (record,) = map(json.loads, self.out.read_text().splitlines())
    self.assertEqual(record['pattern'], 'local')


if __name__ == '__main__':
  absltest.main()
