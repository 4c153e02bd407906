"""A checkpoint is looked into wherever it was written, also while its run goes on."""

from pathlib import Path
import shutil
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np
import pytest

from experiments.runs import checkpoint, inspection
from tests.experiments.fakes import compile_quickly, FakeData, temp_folder
from tests.experiments.runs.train_test import run, tiny


def setUpModule():
  compile_quickly()


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

  def test_the_newest_is_read_while_its_run_removes_it(self):
    folder = temp_folder(self)
    run(tiny(steps=20), folder)
    look, reads = checkpoint.sums.look, []

    def look_and_remove(tree):
      """The trainer removes step 20 while it is read, and has step 30 by then."""
      reads.append(tree)
      if len(reads) == 1:
        shutil.rmtree(Path(folder, 'checkpoints', '20'))
        return look(jax.tree.map(lambda x: x * 0, tree))
      return look(tree)

    with mock.patch.object(checkpoint.sums, 'look', look_and_remove):
      self.assertEqual(int(inspection.load(folder, data=FakeData()).state.step), 10)
    with self.assertRaisesRegex(checkpoint.CheckpointError, 'no checkpoint of step 20'):
      inspection.load(folder, data=FakeData(), step=20)


if __name__ == '__main__':
  absltest.main()
