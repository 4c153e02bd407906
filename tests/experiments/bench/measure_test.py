"""What the step benchmarks share: refusals, heads of records."""

import contextlib
import io
from unittest import mock

from absl.testing import absltest, parameterized

from experiments.bench import ffn, measure, mesh, neuron_level


class MeasureTest(parameterized.TestCase):
  @parameterized.parameters(ffn, mesh, neuron_level)
  def test_refused_at_once_without_a_gpu(self, module):
    out = io.StringIO()
    # Nothing else may come first.
    with (
      mock.patch.object(measure, 'environment', side_effect=AssertionError),
      contextlib.redirect_stderr(out),
      self.assertRaises(SystemExit),
    ):
      module.main(['--out', 'none.jsonl'])
    self.assertIn("timed on a GPU, JAX has 'cpu' here; --tiny", out.getvalue())

  def test_commands_hold_no_folders(self):
    head = measure.environment('experiments.bench.ffn', ['--out', '/some/where/x.jsonl', '--tiny'])
    self.assertEqual(head['command'], 'python -m experiments.bench.ffn --out x.jsonl --tiny')


if __name__ == '__main__':
  absltest.main()
