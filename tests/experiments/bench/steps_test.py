"""The step benchmarks on tiny shapes: they run, their twins agree, their records hold what the report needs."""

import contextlib
import io
import json
import pathlib
import tempfile
import time
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench_report
from experiments.bench import (
  attention,
  block,
  dense_fp8,
  ffn,
  hlo,
  measure,
  mesh,
  neuron_level,
  trace,
  tracking,
  train_step,
)
from pallas_kernels import _compat
import sparse24_jax as s24
from tests.experiments.fakes import compile_quickly


def setUpModule():
  compile_quickly()


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
  @parameterized.parameters('fst-gelu-16384x4096x16384', 's_ste_fp8-swiglu-16384x4096x16384')
  def test_ffn(self, case):
    (record,), _ = bench(ffn, '--select', case)
    self.assertEqual(record['bench'], 'ffn')
    self.assertEqual(set(record['baselines']), {'dense', 'dense_fp8'} if 'fp8' in case else {'dense'})
    self.assertLen(record['samples_ms'], 4)
    self.assertLen(record['median_ms_by_order'], 2)
    self.assertIn('x', bench_report.title(record))
    for name in ('y', 'dx'):
      self.assertLess(record['error']['exact'][name], 0.12 if 'fp8' in case else 1e-5)
    for ratio in record['error']['unbiased'].values():
      self.assertBetween(ratio, 0.7, 1.4)

  def test_fp8_gradients_are_held_to_a_plain_op_that_rounds(self):
    # Of the kernels' path, multiplied by XLA.
    case = ffn.CASES['s_ste_fp8-gelu-16384x4096x16384']
    error = ffn.gradient_errors(case, (64, 64, 128), 'dense')
    for name, found in error['sampled'].items():
      self.assertGreater(error['yardstick'][name], 0.04)  # without rounding 0.005
      self.assertBetween(found / error['yardstick'][name], 0.7, 1.3)
    self.assertEqual(set(error['decompressed'].values()), {0.0})  # it is that very path

  def test_block(self):
    (record,), _ = bench(block, '--select', 'fst-gpt2')
    self.assertEqual(record['shape'], {'batch': 2, 'length': 32, 'd': 64, 'hidden': 256})
    self.assertGreater(record['speedup']['dense'], 0)

  def test_train_step(self):
    (record,), _ = bench(train_step, '--select', 'llama-3b', '--refreshes', '1', '--explain')
    self.assertEqual(record['model'], 'llama-3b')
    self.assertEqual(record['shape']['layers'], 2)
    self.assertGreater(record['tokens_per_s'], 0)
    (plain,), (search,) = (record['refresh_samples_ms'][kind] for kind in ('plain', 'search'))
    self.assertAlmostEqual(record['amortised_ms'], record['median_ms'] + (search - plain) / 40, places=3)
    gain = record['speedup']['dense']
    self.assertAlmostEqual(record['sparse_share'], 5 / 6, places=3)
    self.assertAlmostEqual(record['run_speedup']['dense'], 1 / (1 / 6 + 5 / 6 / gain), places=3)

  def test_a_burst_must_not_reach_a_mask_search(self):
    with contextlib.redirect_stdout(io.StringIO()) as out, tempfile.TemporaryDirectory() as folder:
      argv = ['--out', f'{folder}/x', '--tiny', '--steps', '39', '--plain-mlp']
      self.assertEqual(train_step.main(argv), 1)
    self.assertIn('shorter than the period of 40', out.getvalue())


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

  def test_both_twins_train_the_same_weights(self):
    options = train_step.measure.parser('x', '', ['a'], ['a']).parse_args(['--out', 'x', '--tiny'])
    vars(options).update(
      recipe='transposable_srste', attention='xla', unroll=False, plain_mlp=True, sparse_only=False, batch=None,
      implementation='auto', layers=None,
    )
    with contextlib.redirect_stdout(io.StringIO()):
      twins = train_step.Twins(train_step.CASES['gpt2-124m'], options, measure.Clock())
    kernel = lambda: np.array(twins.state.params['h']['mlp']['c_fc']['kernel'])  # noqa: E731
    counts = lambda: [int(c) for c in (twins.state.opt_state[1].count, _adam_count(twins.state))]  # noqa: E731
    first = kernel()
    twins.dense()
    second = kernel()
    self.assertEqual(counts(), [0, 1])
    twins.sparse()
    self.assertEqual(counts(), [1, 2])
    self.assertGreater(np.abs(second - first).max(), 0)
    self.assertGreater(np.abs(kernel() - second).max(), 0)
    twins.at(train_step.REFRESH_EVERY - 1)
    twins.sparse()
    self.assertEqual(counts()[0], train_step.REFRESH_EVERY)

  @parameterized.parameters('transposable_srste', 'mixed_sparsity_24', 'mixed_sparsity_transposable')
  def test_parts_of_a_state(self, recipe):
    """Clipping is outside of the wrapper or inside; the dense twin's state is the same."""
    params = {'h': {'mlp': {name: {'kernel': jnp.ones((16, 16))} for name in ('c_fc', 'c_proj')}}}
    params['h']['attn'] = {'c_attn': {'kernel': jnp.ones((16, 16))}}
    recipe = train_step.recipe_of(recipe)
    state = train_step.State(params, train_step.make_optimizer(recipe, 'float32').init(params))
    dense = train_step.dense_part(state)
    alone = train_step.make_optimizer(None, 'float32').init(params)
    self.assertEqual(jax.tree.structure(dense.opt_state), jax.tree.structure(alone))
    trained = jax.tree.map(lambda x: x + 1, dense)
    joined = train_step.at_step(train_step.with_dense_part(state, trained), 7)
    self.assertEqual(jax.tree.structure(joined), jax.tree.structure(state))
    jax.tree.map(np.testing.assert_array_equal, train_step.dense_part(joined), trained)
    (sparse,) = (s for s in jax.tree.leaves(joined.opt_state, is_leaf=_is_sparse) if _is_sparse(s))
    self.assertEqual(int(sparse.count), 7)


def _is_sparse(node):
  return isinstance(node, s24.SparseTrainingState)


def _adam_count(state):
  return next(s.count for s in jax.tree.leaves(
    state.opt_state[1].inner_state, is_leaf=lambda s: hasattr(s, 'mu')) if hasattr(s, 'mu'))  # fmt: skip


class DenseFp8Test(parameterized.TestCase):
  def test_quantised_both_ways(self):
    x = jax.random.normal(jax.random.key(0), (8, 12)) * 7
    plain, turned, factor = dense_fp8.both_ways(x, dense_fp8.E4M3)
    np.testing.assert_array_equal(plain.astype(jnp.float32).T, turned.astype(jnp.float32))
    self.assertEqual(float(jnp.abs(plain.astype(jnp.float32)).max()), 448.0)
    np.testing.assert_allclose(plain.astype(jnp.float32) * factor, x, rtol=1 / 16, atol=1e-3)

  def test_product_and_gradients_are_near(self):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, dz = (jax.random.normal(k, s) for k, s in zip(keys, ((64, 32), (32, 48), (64, 48)), strict=True))
    found = jax.vjp(dense_fp8.fp8_dot, x, w)
    expected = jax.vjp(jnp.dot, x, w)
    self.assertBetween(measure.relative_error(found[0], expected[0]), 0.005, 0.05)
    for a, b in zip(found[1](dz), expected[1](dz), strict=True):
      self.assertBetween(measure.relative_error(a, b), 0.005, 0.1)


class MeasureTest(parameterized.TestCase):
  def test_every_call_is_made_and_timed(self):
    made = []
    samples = measure.stream_ms(lambda: made.append(0), 5, depth=3)
    self.assertLen(samples, 5)
    self.assertLen(made, 5 + 3)

  def test_a_call_that_returns_when_its_step_is_over_counts_to_the_end(self):
    samples = measure.stream_ms(lambda: time.sleep(4e-3), 4, depth=3)
    self.assertGreaterEqual(min(samples), 4.0)

  def test_order_alternates(self):
    made = []
    twins = {name: (lambda name=name: made.append(name)) for name in 'ab'}
    bursts = measure.interleave(twins, rounds=3, steps=1, depth=1)
    self.assertEqual(''.join(made), 'aabb' + 'bbaa' + 'aabb')
    self.assertEqual({name: list(map(len, b)) for name, b in bursts.items()}, {'a': [1, 1, 1], 'b': [1, 1, 1]})

  def test_functions_are_timed_in_turns_with_their_arguments(self):
    made = []
    calls = {name: (lambda x, name=name: made.append(name + x), (x,)) for name, x in ('a1', 'b2')}
    rows = measure.timed(calls, mock.Mock(rounds=2, steps=1, tiny=True))
    # One call and as many as are kept in flight.
    self.assertEqual(''.join(made), 4 * 'a1' + 8 * 'b2' + 4 * 'a1')
    found = {name: (len(row['samples_ms']), row['clock']) for name, row in rows.items()}
    self.assertEqual(found, dict.fromkeys('ab', (2, 'wall')))

  @parameterized.parameters(('activity records were dropped', 3), ('CUDA error', 1))
  def test_a_burst_that_was_not_recorded_whole_is_repeated(self, message, tries):
    device = mock.Mock(side_effect=[RuntimeError(message)] * 2 + [[1.5]])
    with (
      mock.patch.object(jax, 'default_backend', lambda: 'gpu'),
      mock.patch.object(_compat, 'device_times_ms', device),
      contextlib.redirect_stdout(io.StringIO()),
    ):
      if tries == 3:
        self.assertEqual(measure.timer(jnp.sin, (), 4, detach=False), [1.5])
        device.side_effect = [RuntimeError(message)] * 9
      with self.assertRaisesRegex(RuntimeError, message):
        measure.timer(jnp.sin, (), 4)
    self.assertEqual(device.call_count, 6 if tries == 3 else 1)
    device.assert_called_with(jnp.sin, (), 4, detach=True)

  @parameterized.parameters(attention, block, ffn, mesh, neuron_level, tracking, train_step)
  def test_refused_at_once_without_a_card(self, module):
    out, tokens = io.StringIO(), ['--tokens', 'none.npy'] if module is tracking else []
    # Nothing else may come first.
    with (
      mock.patch.object(measure, 'environment', side_effect=AssertionError),
      contextlib.redirect_stderr(out),
      self.assertRaises(SystemExit),
    ):
      module.main(['--out', 'none.jsonl', *tokens])
    self.assertIn("timed on a GPU, JAX has 'cpu' here; --tiny", out.getvalue())

  def test_commands_hold_no_folders(self):
    head = measure.environment('experiments.bench.ffn', ['--out', '/some/where/x.jsonl', '--tiny'])
    self.assertEqual(head['command'], 'python -m experiments.bench.ffn --out x.jsonl --tiny')

  def test_relative_error(self):
    self.assertEqual(measure.relative_error(jnp.array([3.0, 4.0]), jnp.array([0.0, 4.0])), 0.75)
    self.assertEqual(measure.relative_error(jnp.ones(2), jnp.zeros(2)), float('inf'))


CALL = (
  '  %mpmd_map.{i} = bf16[512,256]{{1,0}} custom-call(%a, %b, %c), custom_call_target="{target}",'
  ' operand_layout_constraints={{bf16[256,{kept}]{{1,0}}, u32[4,4,128]{{2,1,0}}}}, metadata={{op_name="{name}"}}'
)


def program(*calls):
  return '\n'.join(
    CALL.format(i=i, target=target, kept=kept, name=name) for i, (target, kept, name) in enumerate(calls)
  )


class HloTest(absltest.TestCase):
  def test_roles_by_scope_then_by_shape(self):
    text = program(
      ('mosaic_gpu_v2', 128, 'jit(f)/jvp(mlp)/forward/kernel'),
      ('mosaic_gpu_v2', 128, 'jit(f)/transpose(jvp(mlp))/input_grad/kernel'),
      ('sparse24_cusparselt', 512, 'jit(f)/transpose(jvp(mlp))/weight_grad/kernel'),
      ('mosaic_gpu_v2', 128, 'jit(f)/jvp(mlp)/kernel'),
      ('mosaic_gpu_v2', 128, 'jit(f)/transpose(jvp(mlp))/rematted_computation/kernel'),
      ('mosaic_gpu_v2', 512, 'jit(f)/transpose(jvp(mlp))/kernel'),
      ('mosaic_gpu_v2', 128, 'jit(f)/transpose(jvp(mlp))/kernel'),
      ('triton_kernel_call', 128, 'jit(f)/transpose(jvp(mlp))/weight_grad/pack'),
    )
    self.assertEqual(
      hlo.sparse_calls(text, tokens=1024), {'forward': 3, 'input_grad': 2, 'weight_grad': 2, 'other': 0}
    )
    self.assertEqual(hlo.sparse_calls(text)['other'], 2)
    hlo.assert_sparse(text, {'forward': 3, 'weight_grad': 2}, tokens=1024)
    with self.assertRaisesRegex(ValueError, 'input_grad has 2, expected 3'):
      hlo.assert_sparse(text, {'forward': 3, 'input_grad': 3}, tokens=1024)

  def test_names_of_a_real_program(self):
    def f(x):
      with jax.named_scope('optimizer'):
        return jnp.tanh(x @ x).sum()

    names = hlo.op_names(jax.jit(f).lower(jnp.ones((8, 8))).compile().as_text())
    self.assertTrue(any('optimizer' in name for name in names.values()))


class TraceTest(parameterized.TestCase):
  @parameterized.parameters(
    ('kernel_mosaic_gpu_kernel', '', 'GEMM sparse'),
    ('nvjet_hsh_192x192_64x4_2x1_v_bz_coopA_TNT', 'jit(step)/optimizer', 'GEMM dense'),
    ('gemm_fusion_dot_general_1', '', 'GEMM dense'),
    ('cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma', '', 'attention'),
    ('masked_kernel', '', 'pack'),
    ('mvue_kernel', '', 'pack'),
    ('backward_kernel', 'jit(step)/transpose(jvp(mlp))', 'activation'),
    ('loop_multiply_fusion_7', 'jit(step)/optimizer/mul', 'optimizer'),
    ('loop_multiply_fusion_7', 'jit(step)/jvp(GPT2)/h/mlp/mul', 'activation'),
    ('input_reduce_fusion_2', 'jit(step)/jvp(GPT2)/h/ln_1/reduce_sum', 'normalisation'),
    ('input_reduce_fusion_3', 'jit(step)/jvp(loss)/reduce_max', 'loss'),
    ('MemcpyD2D', '', 'copy'),
    ('loop_add_fusion', '', 'other'),
  )
  def test_kinds(self, kernel, scopes, kind):
    self.assertEqual(trace.classify(kernel, scopes), kind)

  def test_sums_a_step_and_counts_overlap_once(self):
    kernels = [
      trace.Kernel('kernel_mosaic_gpu_kernel', '', 0, 2e6),
      trace.Kernel('nvjet', '', 1e6, 2e6),
      trace.Kernel('nvjet', '', 4e6, 2e6),
    ]
    summary = trace.summarize(kernels, 2)
    self.assertEqual(summary['by_kind_ms'] | {'GEMM sparse': 0, 'GEMM dense': 0}, dict.fromkeys(trace.KINDS, 0))
    self.assertEqual((summary['by_kind_ms']['GEMM sparse'], summary['by_kind_ms']['GEMM dense']), (1.0, 2.0))
    self.assertEqual((summary['busy_ms'], summary['idle_ms']), (2.5, 0.5))
    self.assertEqual(summary['top'][0], {'kernel': 'nvjet', 'kind': 'GEMM dense', 'calls': 1.0, 'ms': 2.0})
    self.assertIn('GEMM sparse', trace.table({'sparse': summary, 'dense': summary}))

  def test_a_trace_without_a_gpu_holds_no_kernels(self):
    f = jax.jit(lambda x: x + 1)
    self.assertEqual(trace.capture(lambda: f(jnp.ones(3)), 1, {}), [])
    self.assertIsNone(trace.summarize([], 1))


if __name__ == '__main__':
  absltest.main()
