"""The programs of examples/ do what they say."""

import importlib.util
from pathlib import Path
import re
import tempfile

from absl.testing import absltest
import jax
import numpy as np
import pytest

import sparse24_jax as s24

FOLDER = Path(__file__).resolve().parents[2] / 'examples'


def example(name):
  spec = importlib.util.spec_from_file_location(name, FOLDER / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class ExamplesTest(absltest.TestCase):

  @pytest.mark.slow
  def test_linen_loop_goes_on_with_the_same_bits(self):
    """Cut in the sparse phase, between two searches for masks, and gone on with through the dense one."""
    program, folder = example('linen_loop'), self.enterContext(tempfile.TemporaryDirectory())
    loss, params, served = program.main(f'{folder}/whole')
    self.assertLess(loss, 0.05)
    s24.verify24(served['block_1']['down']['kernel'])
    program.main(f'{folder}/cut', steps=70)
    again, found, _ = program.main(f'{folder}/cut')
    self.assertEqual(again, loss)
    jax.tree.map(np.testing.assert_array_equal, found, params)

  @pytest.mark.slow
  def test_nnx_fsdp_divides_weights_moments_and_masks(self):
    losses, model, optimizer = example('nnx_fsdp').main(steps=30)
    self.assertLess(losses[-1], 0.6 * losses[0])
    state = optimizer.opt_state[1]
    divided = (model.blocks[0].up.kernel, state.projections['blocks'][0]['up']['kernel'])
    for variable in divided:
      self.assertEqual(variable.get_value().sharding.spec, jax.P(None, 'fsdp'))
    # Step 30 renewed the masks: the model has them, to be evaluated as it is.
    mask = state.projections['blocks'][0]['up']['kernel'].get_value()
    np.testing.assert_array_equal(model.sparse24.read()['blocks/0/up/kernel'], mask)

  @pytest.mark.slow
  def test_nnx_fsdp_moves_weights_and_no_activations(self):
    program = example('nnx_fsdp')
    mesh = jax.make_mesh((jax.device_count(),), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
      x = jax.device_put(jax.numpy.ones((program.BATCH, program.FEATURES)), jax.NamedSharding(mesh, jax.P('fsdp')))
      text = program.train_step.lower(*program.create(), x).compile().as_text()
    moved = re.findall(r' = (.*) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(', text)
    shapes = {tuple(map(int, sizes.split(','))) for found in moved for sizes in re.findall(r'\w\[([\d,]+)\]', found)}
    self.assertContainsSubset({(program.FEATURES, program.HIDDEN), (program.HIDDEN, program.FEATURES)}, shapes)
    self.assertEmpty([shape for shape in shapes if program.BATCH in shape], 'whole activations')


if __name__ == '__main__':
  absltest.main()
