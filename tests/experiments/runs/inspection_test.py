"""A checkpoint is looked into wherever it was written, also while its run goes on."""

import json
from pathlib import Path
import shutil
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np
import pytest

from experiments.runs import build, checkpoint, inspection, programs
from tests.experiments.cli_test import call
from tests.experiments.fakes import FakeData, temp_folder
from tests.experiments.reports.run_folders import read_page
from tests.experiments.runs.train_test import run, tiny, whole_run


class InspectionTest(absltest.TestCase):
  @pytest.mark.slow
  def test_a_checkpoint_of_a_mesh_on_one_device(self):
    folder = temp_folder(self)
    summary = run(tiny('ste', steps=20, mesh__fsdp=8), folder)
    loaded = inspection.load(folder, data=FakeData())
    self.assertEqual({leaf.sharding for leaf in jax.tree.leaves(loaded.state[1:])},
                     {jax.sharding.SingleDeviceSharding(jax.devices()[0])})  # fmt: skip
    found = inspection.evaluate(loaded)['loss']
    np.testing.assert_allclose(found, summary['validation_loss'], rtol=1e-5)
    self.assertEqual({row.density for row in inspection.weight_table(loaded)}, {0.5})

  @pytest.mark.slow
  def test_the_newest_is_read_while_its_run_removes_it(self):
    folder = Path(temp_folder(self), 'run')
    shutil.copytree(whole_run()[0], folder)
    look, reads = checkpoint.sums.look, []

    def look_and_remove(tree):
      """The trainer removes step 30 while it is read, and has step 40 by then."""
      reads.append(tree)
      if len(reads) == 1:
        shutil.rmtree(folder / 'checkpoints' / '30')
        return look(jax.tree.map(lambda x: np.zeros_like(x) if isinstance(x, jax.Array) else x, tree))
      return look(tree)

    with mock.patch.object(checkpoint.sums, 'look', look_and_remove):
      self.assertEqual(int(inspection.load(folder, data=FakeData()).state.step), 20)
    with self.assertRaisesRegex(checkpoint.CheckpointError, 'no checkpoint of step 30'):
      inspection.load(folder, data=FakeData(), step=30)

  def test_axes_of_scanned_layers_are_those_of_the_states(self):
    """`project` takes them of the model, the run's own states from a recipe that has seen none."""
    parts = build.make_parts(tiny('ste', model__scan_layers=True), data=FakeData())
    bound = build.bound_recipe(parts, jax.eval_shape(programs.make_init(parts), 0).params)
    self.assertEqual({w.path: w.layout.describe() for w in bound.weights}, {
      f'h/mlp/{name}/kernel': 'stacked 0, in 1, out 2' for name in ('c_fc', 'c_proj')
    })  # fmt: skip
    self.assertEqual(bound.layouts, parts.recipe.layouts)

  @pytest.mark.slow
  def test_commands(self):
    folder, _ = whole_run()
    status, out, _ = call('inspect', folder, '--step', '20')
    self.assertEqual(status, 0)
    self.assertRegex(out, r'step 20, sparse phase, recipe transposable_srste')
    self.assertRegex(out, r'h_0/mlp/c_fc/kernel +32 x 128 +0\.5000 .* yes')
    summary = json.loads(Path(folder, 'summary.json').read_text())
    self.assertIn(f'loss {summary["validation_loss"]:.4f}', call('eval', folder)[1])
    report = Path(temp_folder(self), 'report.html')
    self.assertEqual(call('report', folder, '--out', str(report))[0], 0)
    self.assertIn('svg', read_page(report).tags)


if __name__ == '__main__':
  absltest.main()
