"""Figures on paper by hand; and that searching for masks and packing exchange nothing, on eight simulated devices."""

from absl.testing import absltest, parameterized
import jax
import numpy as np
import pytest

from experiments.bench.scale import formula, simulate
from experiments.reports import provenance
from sparse24_jax.optim._left import SUMS

_NANO = {'num_layers': 1, 'num_heads': 4, 'num_kv_heads': 2, 'embed_dim': 64, 'hidden_dim': 256}


class FormulaTest(absltest.TestCase):
  def test_sizes_of_llama_3(self):
    found = {model.name: round((model.ffn + model.rest) / 1e9, 2) for model in formula.MODELS}
    self.assertEqual(found, {'8B': 8.03, '70B': 70.55})

  def test_rings(self):
    links = formula.Links(gpus=4, nvlink=100.0, network=10.0)
    self.assertEqual(links.gather(400, 4), 3.0)  # each receives three quarters by NVLink
    self.assertEqual(links.gather(400, 8), 200 / 40 + 3.0)  # half comes from the other machine, by four ports

  def test_a_row_by_hand(self):
    one, *_ = [r for r in formula.rows(formula.Compute(1e-14, 4e-15), gpus=[64]) if r.layout == 'fsdp']
    parameters, ffn, tokens = 8_030_000_000, 5_637_144_576, 65536
    self.assertAlmostEqual(one.compute[0], 1e-14 * parameters * tokens, delta=0.01)
    self.assertAlmostEqual(one.compute[0] - one.compute[1], 4e-15 * ffn * tokens, places=6)
    # Eight micro-batches, each of which gathers weights twice and reduces gradients; 3 bytes are gathered for 4.
    self.assertAlmostEqual(one.dense_traffic, 8 * 63 / 64 * 8 * parameters / 1e9, delta=0.1)
    self.assertAlmostEqual(one.dense_traffic - one.sparse_traffic, 8 * 63 / 64 * ffn / 1e9, places=3)

  def test_records_have_every_layout_and_exchange_no_masks(self):
    records = provenance.read('scale.jsonl')
    self.assertLen(records, 18)
    for each in records:
      self.assertEqual((each['mask refresh'], each['packing']), ({}, {}))


class SimulatedTest(parameterized.TestCase):
  @parameterized.parameters(((1, 2, 4),), ((1, 8, 1),))
  @pytest.mark.slow
  def test_search_and_packing_exchange_nothing(self, layout):
    found = simulate.search_and_pack(layout, _NANO)
    self.assertEqual(found, {'mask refresh': {}, 'packing': {}})

  def test_groups_that_straddle_devices_are_seen(self):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))
    x = jax.ShapeDtypeStruct((16, 4), 'float32', sharding=split)
    text = jax.jit(simulate.s24.magnitude_mask).lower(x).compile().as_text()
    self.assertTrue(simulate.communication(text or ''))

  @pytest.mark.slow
  def test_a_loop_over_layers_moves_weights_and_no_activations(self):
    found = simulate.step((1, 8, 1), 'dense', {**_NANO, **simulate.WAYS['in a loop']})
    self.assertLess(found['bytes'], 1.3e6)  # of 64 x 64 activations of 64 float32 alone 1e6

  @parameterized.parameters(('recomputed', 2), ('in a loop', 0))
  @pytest.mark.slow
  def test_a_sparse_step_gathers_transposes_and_no_masks(self, way, more):
    dense, sparse = (simulate.step((1, 8, 1), twin, {**_NANO, **simulate.WAYS[way]}) for twin in simulate.RECIPES)
    self.assertGreater(dense['bytes'], 0)
    # Of gate and up; a loop gathers each twice anyway. Without recomputation: mesh_on_hopper_test.
    flip_rates = 3 * 4 if way == 'in a loop' else 0  # one a layer of each; scalars do not count
    sums = 3 * 4 * (2 * SUMS + 1)  # of three weights, as a step is given and leaves them
    self.assertEqual(sparse['bytes'] - dense['bytes'] - flip_rates - sums, more * 4 * 64 * 256)

  @pytest.mark.slow
  def test_a_sparse_step_that_divides_tokens_exchanges_what_a_dense_one_does(self):
    dense, sparse = (simulate.step((8, 1, 1), twin, _NANO) for twin in simulate.RECIPES)
    self.assertEqual(sparse, dense)


if __name__ == '__main__':
  absltest.main()
