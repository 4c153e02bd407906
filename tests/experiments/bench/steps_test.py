"""The step benchmarks on tiny shapes: they run, their twins agree, their records hold what the report needs."""

import argparse
import contextlib
import dataclasses
import io
import json
import pathlib
import re
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.bench import ffn, train_step, twins
from experiments.reports import speed
from experiments.runs import recipes
from pallas_kernels import _bench
import sparse24_jax as s24


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

  @pytest.mark.slow
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

  def test_of_a_whole_run_with_a_dense_end_in_fp8_nothing_is_known(self):
    for name, faster in (('transposable_srste', 1.5), ('transposable_srste_fp8', None), ('s_ste_fp8', 5 / 3)):
      found = train_step.run_speedup(twins.recipe_of(name), 60.0, {'dense': {'median_ms': 100.0}})
      self.assertEqual(found, {'dense': round(faster, 4)} if faster else {})

  # Of a group of M = 8 tokens, or of four, the weight gradients' operands have four.
  @parameterized.parameters(('', 0.05, 2, ''), ('_two_of_four_tokens', 0.0, 1, ', 2:4 along tokens'))
  @pytest.mark.slow
  def test_train_step_with_sparse_activations(self, setting, dense_features, packed, what):
    orders, make_step = [], twins.make_step

    def note(model, recipe, moment, *refresh):
      orders.append((model.config.ffn_order, model.config.mlp, recipe and recipe.name))
      return make_step(model, recipe, moment, *refresh)

    with (
      mock.patch.object(twins, 'make_step', note),
      mock.patch.object(train_step.hlo, 'sparse_calls', wraps=train_step.hlo.sparse_calls) as calls,
    ):
      argv = ['--select', 'gpt2-124m-relu2', '--recipe', f'neuron_level_64x2x8{setting}', '--refreshes', '0']
      (record,), _ = bench(train_step, *argv)
    self.assertEqual(calls.call_args.kwargs, dict(tokens=64 * 16 // packed))
    # Only a block that may not see what follows its tokens needs their order changed.
    self.assertEqual(orders, [('position', 'relu2', 'neuron_level'), ('sequence', 'relu2', None)])
    self.assertEqual(record['shape']['batch'], 64)  # a block at every position
    self.assertEqual((record['sparse_share'], record['dense_features']), (0.7, dense_features))
    self.assertEqual((record['search_ms'], record['refresh_samples_ms']['search']), (0.0, []))
    self.assertEqual(record['amortised_ms'], record['median_ms'])
    row = speed.markdown([record]).splitlines()[-1]
    self.assertIn(f'training step, gpt2-124m-relu2, 64 x 16 | neuron level, bfloat16, 64:2:8{what} |', row)

  def test_blocks_of_tokens_are_whole(self):
    case = dataclasses.replace(twins.CASES['gpt2-124m-relu2'], batch=192)
    with self.assertRaisesRegex(ValueError, '192 sequences a step: neuron_level takes multiples of V = 128'):
      twins.Twins(case, _options(recipe='neuron_level_128x2x8', tiny=False), _bench.Clock())

  def test_a_named_implementation_reaches_what_chooses(self):
    for name, of in (('neuron_level_128x2x8_dense_neurons', 'activation'), ('s_ste', 'policy')):
      rules = recipes.with_implementation(twins.recipe_of(name), 'reference').rules
      self.assertEqual({getattr(rule, of).implementation for rule in rules}, {'reference'})

  def test_steps_by_their_dense_neurons(self):
    names = ('neuron_level_128x2x8', 'neuron_level_128x2x8_dense_neurons')
    policies = [twins.activations(twins.recipe_of(name)) for name in names]
    self.assertEqual([policy.dense_features for policy in policies], [0.05, 0.2])
    self.assertEqual([policy.tokens for policy in policies], [s24.VNM(128, 8)] * 2)
    known = {'bench': 'train_step', 'pattern': '128:2:8'}
    self.assertNotEqual(*(speed.identity(known | {'dense_features': share}) for share in (0.05, 0.2)))
    known = {'bench': 'memory_bound', 'op': 'vnm_pack', 'pattern': '64:2:8'}
    self.assertNotEqual(*(speed.identity(known | {'role': role}) for role in ('transpose_24', 'transpose')))

  @parameterized.parameters(('transposable_srste', 39, 40), ('mixed_sparsity_24', 99, 100))
  def test_a_burst_must_not_reach_a_mask_search(self, recipe, steps, period):
    with contextlib.redirect_stdout(io.StringIO()) as out, tempfile.TemporaryDirectory() as folder:
      argv = ['--out', f'{folder}/x', '--tiny', '--steps', str(steps), '--recipe', recipe]
      self.assertEqual(train_step.main(argv), 1)
    self.assertIn(f'shorter than the period of {period}', out.getvalue())

  def test_mixed_sparsity_alone_takes_attention(self):
    for name in twins.OF_ONE_PATH:
      paths = [rule.path for rule in twins.recipe_of(name).rules]
      taken = {part: any(re.fullmatch(path, f'h/{part}/c_proj/kernel') for path in paths) for part in ('attn', 'mlp')}
      self.assertEqual(taken, {'attn': name.startswith('mixed_sparsity'), 'mlp': True}, name)


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
    with contextlib.redirect_stdout(io.StringIO()):
      pair = twins.Twins(twins.CASES['gpt2-124m'], _options(), _bench.Clock())
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
    pair.at(pair.recipe.refresh_every - 1)
    pair.sparse()
    self.assertEqual(counts()[0], pair.recipe.refresh_every)

  @parameterized.parameters('transposable_srste', 'mixed_sparsity_24', 'mixed_sparsity_transposable')
  @pytest.mark.few
  def test_parts_of_a_state(self, recipe):
    """Clipping is outside of the wrapper or inside; the dense twin's state is the same."""
    params = {'h': {'mlp': {name: {'kernel': jnp.ones((16, 16))} for name in ('c_fc', 'c_proj')}}}
    params['h']['attn'] = {'c_attn': {'kernel': jnp.ones((16, 16))}}
    recipe = twins.recipe_of(recipe)
    state = twins.State(params, twins.make_optimizer(recipe, 'float32').init(params))
    dense = twins.dense_part(state)
    alone = twins.make_optimizer(None, 'float32').init(params)
    self.assertEqual(jax.tree.structure(dense.opt_state), jax.tree.structure(alone))
    trained = jax.tree.map(lambda x: x + 1, dense)
    joined = twins.at_step(twins.with_dense_part(state, trained), 7)
    self.assertEqual(jax.tree.structure(joined), jax.tree.structure(state))
    jax.tree.map(np.testing.assert_array_equal, twins.dense_part(joined), trained)
    (sparse,) = (s for s in jax.tree.leaves(joined.opt_state, is_leaf=_is_sparse) if _is_sparse(s))
    self.assertEqual(int(sparse.count), 7)


def _options(**changes):
  fields = dict(
    recipe='transposable_srste', batch=None, implementation='auto', tiny=True,
  )  # fmt: skip
  return argparse.Namespace(**fields | changes)


def _is_sparse(node):
  return isinstance(node, s24.SparseTrainingState)


def _adam_count(state):
  return next(s.count for s in jax.tree.leaves(
    state.opt_state[1].inner_state, is_leaf=lambda s: hasattr(s, 'mu')) if hasattr(s, 'mu'))  # fmt: skip


if __name__ == '__main__':
  absltest.main()
