"""The step benchmarks on tiny shapes: they run, their twins agree, their records hold what the report needs."""

import argparse
import contextlib
import functools
import io
import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import ffn, meshes, step_cases, twins
from experiments.bench import mesh as mesh_bench
from experiments.reports import speed
from pallas_kernels import _bench


def bench(module, *argv):
  """Records that a benchmark's main appends, and what it printed."""
  with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
    path = pathlib.Path(folder) / 'new' / 'records.jsonl'
    failed = module.main(['--out', str(path), '--tiny', '--rounds', '2', '--steps', '2', *argv])
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
  if failed:
    raise AssertionError(out.getvalue())
  return records, out.getvalue()


class RecordsTest(parameterized.TestCase):

  @parameterized.parameters(
    'fst-gelu-16384x4096x16384', 's_ste_fp8-swiglu-16384x4096x16384', 'fst_fp8-gelu-16384x4096x16384'
  )
  @pytest.mark.slow
  def test_ffn(self, case):
    (record,), _ = bench(ffn, '--select', case)
    self.assertEqual(record['bench'], 'ffn')
    self.assertEqual(set(record['baselines']), {'dense', 'dense_fp8'} if 'fp8' in case else {'dense'})
    self.assertLen(record['samples_ms'], 4)
    self.assertLen(record['median_ms_by_order'], 2)
    for name in ('y', 'dx'):
      self.assertLess(record['error']['exact'][name], 0.12 if 'fp8' in case else 1e-5)
    for ratio in record['error']['unbiased'].values():
      self.assertBetween(ratio, 0.7, 1.4)

  @pytest.mark.slow
  def test_fp8_gradients_are_held_to_a_plain_op_that_rounds(self):
    # Of the kernels' path, multiplied by XLA.
    case = ffn.CASES['s_ste_fp8-gelu-16384x4096x16384']
    error = ffn.gradient_errors(case, (64, 64, 128), 'dense')
    for name, found in error['sampled'].items():
      self.assertGreater(error['yardstick'][name], 0.04)  # without rounding 0.005
      self.assertBetween(found / error['yardstick'][name], 0.7, 1.3)
    self.assertEqual(set(error['decompressed'].values()), {0.0})  # it is that very path

  def test_records_are_told_apart_by_their_patterns(self):
    known = {'bench': 'ffn', 'pattern': '128:2:8'}
    self.assertNotEqual(*(speed.identity(known | {'dense_features': share}) for share in (0.05, 0.2)))
    known = {'bench': 'memory_bound', 'op': 'vnm_pack', 'pattern': '64:2:8'}
    self.assertNotEqual(*(speed.identity(known | {'role': role}) for role in ('transpose_24', 'transpose')))


class TwinsTest(parameterized.TestCase):
  @parameterized.product(form=ffn.DENSE_FORMS, activation=('gelu', 'silu'))
  def test_dense_forms_agree(self, form, activation):
    case = ffn.Case('fst', activation, ffn.TINY)
    args = ffn.inputs(case, ffn.TINY, jnp.float32)
    expected = jax.jit(ffn.dense_step(ffn.dense_block(case)))(*args)
    found = jax.jit(ffn.dense_step(ffn.dense_block(case, form)))(*args)
    self.assertEqual(jax.tree.structure(found), jax.tree.structure(expected))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-4)

  @pytest.mark.slow
  def test_both_twins_train_the_same_weights(self):
    mesh = meshes.make_mesh(2)
    options = argparse.Namespace(batch=None, implementation='auto', tiny=True)
    with contextlib.redirect_stdout(io.StringIO()):
      pair = twins.Twins(
        mesh_bench.STEP_CASES['gpt2-774m'], options, _bench.Clock(), mesh,
        shardings=functools.partial(meshes.state_shardings, mesh, 'whole'),
      )  # fmt: skip
    kernel = lambda: np.array(pair.state.params['h']['mlp']['c_fc']['kernel'])  # noqa: E731
    counts = lambda: [int(c) for c in (pair.state.opt_state[1].count, _adam_count(pair.state))]  # noqa: E731
    first = kernel()
    pair.dense()
    second = kernel()
    self.assertEqual(counts(), [0, 1])
    pair.sparse()
    self.assertEqual(counts(), [1, 2])
    self.assertGreater(np.abs(second - first).max(), 0)
    self.assertGreater(np.abs(kernel() - second).max(), 0)

  @parameterized.parameters('fst', 'mst', 'mst_24')
  @pytest.mark.few
  def test_parts_of_a_state(self, method):
    """Clipping is outside of the wrapper or inside; the dense twin's state is the same."""
    params = {'h': {'mlp': {name: {'kernel': jnp.ones((16, 16))} for name in ('c_fc', 'c_proj')}}}
    params['h']['attn'] = {'c_attn': {'kernel': jnp.ones((16, 16))}}
    recipe = step_cases.METHODS[method].make(6e-5, 10_000)
    state = twins.State(params, twins.make_optimizer(recipe, 'float32').init(params))
    dense = twins.dense_part(state)
    alone = twins.make_optimizer(None, 'float32').init(params)
    self.assertEqual(jax.tree.structure(dense.opt_state), jax.tree.structure(alone))
    trained = jax.tree.map(lambda x: x + 1, dense)
    joined = twins.with_dense_part(state, trained)
    self.assertEqual(jax.tree.structure(joined), jax.tree.structure(state))
    jax.tree.map(np.testing.assert_array_equal, twins.dense_part(joined), trained)


def _adam_count(state):
  return next(s.count for s in jax.tree.leaves(
    state.opt_state[1].inner_state, is_leaf=lambda s: hasattr(s, 'mu')) if hasattr(s, 'mu'))  # fmt: skip


if __name__ == '__main__':
  absltest.main()
