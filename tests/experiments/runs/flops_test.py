"""The count against XLA's own, against the masks of a run, and the figures that are stated."""

import dataclasses
import math

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.reports import report
from experiments.runs import flops, method_table, methods, recipes
from experiments.runs.experiment import load_config
from experiments.runs.models import gpt2, llama
import sparse24_jax as s24
from sparse24_jax import activation_sparsity
from sparse24_jax.activation_patterns import feature_mask, token_mask
from sparse24_jax.optim import sparse_states
from tests.experiments.fakes import temp_folder
from tests.experiments.reports.run_folders import read_page, write_run
from tests.quick import jit

NANO = gpt2.make_config('nano', vocab_size=256)
GPT2 = gpt2.make_config('124m', vocab_size=50304)


def total(config, recipe, steps, *, head=False, batch=1, length=None):
  curve = flops.count(config, recipe, steps=steps, batch=batch, length=length or config.seq_len)
  return curve.sum().total(head=head)


def compiled_flops(config, batch):
  """What XLA counts for a dense step of full sequences."""
  make = llama.Llama if isinstance(config, llama.LlamaConfig) else gpt2.GPT2
  model, tokens = make(config), jnp.zeros((batch, config.seq_len), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']

  def loss(params, tokens):
    logits = model.apply({'params': params}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

  return jax.jit(jax.grad(loss)).lower(params, tokens).cost_analysis()['flops']


class AgainstXlaTest(parameterized.TestCase):
  @parameterized.parameters(
    gpt2.GPT2Config(num_layers=1, num_heads=2, embed_dim=64, vocab_size=512, seq_len=64),
    gpt2.GPT2Config(num_layers=3, num_heads=4, embed_dim=128, vocab_size=96, seq_len=64, mlp='swiglu'),
    llama.LlamaConfig(
      num_layers=2, num_heads=4, num_kv_heads=1, embed_dim=128, hidden_dim=192, vocab_size=256, seq_len=64
    ),
  )
  @pytest.mark.few
  def test_a_dense_step_costs_what_the_compiler_says(self, config):
    """Within the few percent of norms, activations and softmax, which the count leaves out.

    What a second vocabulary adds is the head's; without it the count has no head.
    """
    batch = 4
    twice = dataclasses.replace(config, vocab_size=2 * config.vocab_size)
    cost = compiled_flops(config, batch)
    head = compiled_flops(twice, batch) - cost
    counted = flops.count(config, s24.recipes.dense(), steps=1, batch=batch, length=64, triangle=False).sum()
    parts = (counted.total(head=True), counted.total(head=False), counted.head)
    for found, part in zip((cost, cost - head, head), parts, strict=True):
      self.assertGreater(found, part)
      self.assertLess(found, 1.1 * part)


def _neuron_level(*patterns, **fields):
  policy = s24.ActivationPolicy(*patterns, **fields)
  return s24.recipes.neuron_level(
    recipes.FFN_UP, recipes.FFN_DOWN, policy=policy, warmup_fraction=0.0, dense_fraction=0.0
  )


def _transposable(mvue_path):
  """Dense for 500 steps, then moving masks that keep a half for 10 and a fifth for 490."""
  return s24.recipes.mixed_sparsity(
    recipes.FFN, total_steps=1000, density=0.2, warm_up=0.5, restoration=0.0, refresh_every=10, distribution='uniform',
    structure='transposable', mvue_path=mvue_path,
  )  # fmt: skip


class CountTest(parameterized.TestCase):
  def test_by_hand(self):
    curve = flops.count(GPT2, s24.recipes.dense(), steps=2, batch=3, length=1024)
    tokens = 3 * 1024
    np.testing.assert_allclose(curve.linear, 3 * 2 * 12 * 12 * 768**2 * tokens)
    np.testing.assert_allclose(curve.attention, 3 * 12 * 4 * 768 * 3 * 1024 * 1025 / 2)
    np.testing.assert_allclose(curve.head, 3 * 2 * 768 * 50304 * tokens)
    np.testing.assert_allclose(curve.cumulative(head=True)[-1], curve.sum().total(head=True))

  def test_a_llama_by_hand(self):
    """Two matrices from D to the heads and back, two to a third as many key-value heads, three of the feed-forward."""
    config = llama.make_config('3b', vocab_size=128_256, scan_layers=True)
    tokens, d, f, layers = 3 * 2048, 3072, 8192, 28
    curve = flops.count(config, s24.recipes.dense(), steps=1, batch=3, length=2048)
    np.testing.assert_allclose(curve.linear, 3 * 2 * tokens * layers * (2 * d * d + 2 * d * d // 3 + 3 * d * f))
    np.testing.assert_allclose(curve.attention, 3 * layers * 4 * d * 3 * 2048 * 2049 / 2)
    np.testing.assert_allclose(curve.head, 3 * 2 * tokens * d * 128_256)
    sparse = flops.count(config, s24.recipes.ste(recipes.FFN), steps=1, batch=3, length=2048)
    np.testing.assert_allclose(curve.linear - sparse.linear, 0.5 * 2 * tokens * layers * 3 * d * f)

  def test_an_experiment_of_a_llama(self):
    config = load_config('llama_3b', ['steps=600'])
    curve = flops.of_experiment(config, recipes.make_recipe(config), vocab_size=50257)
    self.assertLen(curve.linear, 600)
    np.testing.assert_allclose(curve.head[0], 3 * 2 * 512 * 2048 * 3072 * 50304)  # to a multiple of 64
    ffn = 3 * 3072 * 8192 / (2 * 3072**2 + 2 * 3072**2 / 3 + 3 * 3072 * 8192)  # of a block's weights
    np.testing.assert_allclose(curve.linear[0] / curve.linear[-1], 1 - ffn / 2)

  @parameterized.parameters(
    (s24.VNM(4, 8), s24.VNM(4, 8), 0.25), (s24.VNM(4, 16), s24.VNM(4, 16), 0.2), (s24.VNM(4, 8),),
    (s24.VNM(4, 8), s24.TwoOfFour(), 0.25), (s24.TwoOfFour(), s24.TwoOfFour(), 0.05),
  )
  @pytest.mark.few
  def test_shares_of_activations_are_those_of_their_patterns(self, *fields):
    policy = s24.ActivationPolicy(*fields, sparse_weights=False)
    y = np.random.default_rng(0).uniform(1, 2, (32, 80)).astype(np.float32)  # nothing is zero by itself

    @jit
    def masks(y):
      whole = jnp.zeros(80, bool).at[activation_sparsity.densest(jnp.arange(80), policy)].set(True)
      over_tokens = token_mask(jnp.where(whole[None], 0, y), policy) | whole[None]
      return feature_mask(y, policy), over_tokens

    over_neurons, over_tokens = map(np.asarray, masks(y))
    recipe = s24.recipes.neuron_level(
      recipes.FFN_UP, recipes.FFN_DOWN, policy=policy, warmup_fraction=0.5, dense_fraction=0.0
    )
    dense, sparse = flops.count(NANO, recipe, steps=2, batch=1, length=64).linear
    ffn = 2 * 64 * NANO.num_layers * 8 * 64**2
    expected = 2 - over_neurons.mean() - over_tokens.mean()
    np.testing.assert_allclose((dense - sparse) / ffn, expected, rtol=1e-6)

  @parameterized.parameters(
    (s24.recipes.ste(recipes.FFN), (0.5 + 1 + 1) / 3),
    (s24.recipes.s_ste(recipes.FFN), (0.5 + 1 + 0.5) / 3),
    (s24.recipes.transposable_srste(recipes.FFN, masked_decay=1e-4, dense_fraction=0), 0.5),
    (s24.recipes.transposable_srste(recipes.FFN, masked_decay=1e-4, dense_fraction=0.25), 0.75 * 0.5 + 0.25),
    (s24.recipes.static(recipes.FFN, density=0.2, distribution='uniform'), 0.2),
    (s24.recipes.set_(recipes.FFN, density=0.2, distribution='uniform'), 0.2),
    (s24.recipes.rigl(recipes.FFN, density=0.2, total_steps=1000, distribution='uniform', stop=1.0, refresh_every=10),
     0.2 + 0.8 / 3 * 0.099),  # a dense weight gradient every tenth step but the last, at which nothing moves any more
    # By weight, by activations, and by these with 5% or 20% of the neurons whole.
    (_neuron_level(s24.VNM(16, 8), s24.VNM(16, 8), dense_features=0.05), (0.5 + 0.25 + 0.2875) / 3),
    (_neuron_level(s24.VNM(16, 16), s24.VNM(16, 16), dense_features=0.2), (0.5 + 0.125 + 0.3) / 3),
    (_neuron_level(s24.VNM(16, 8), s24.VNM(16, 8), sparse_weights=False), (1 + 0.25 + 0.25) / 3),
    (_neuron_level(s24.TwoOfFour(), dense_features=0.05), (0.5 + 0.5 + 0.525) / 3),
    (_neuron_level(s24.VNM(16, 8)), (0.5 + 0.25 + 0.5) / 3),
    # In the sparse half masks keep 0.206; weight gradients are those of links, in one step of ten of all entries, and
    # samples have half of the tokens.
    (_transposable(mvue_path=None), 0.5 + 0.5 * (2 * 0.206 + 0.9 * 0.206 + 0.1) / 3),
    (_transposable(mvue_path=recipes.FFN), 0.5 + 0.5 * (2 * 0.206 + 0.5 * (0.9 * 0.206 + 0.1)) / 3),
    (_transposable(mvue_path=recipes.FFN_UP), 0.5 + 0.5 * (2 * 0.206 + 0.75 * (0.9 * 0.206 + 0.1)) / 3),
  )  # fmt: skip
  def test_share_of_the_sparse_layers(self, recipe, share):
    dense, sparse = (
      flops.count(NANO, r, steps=1000, batch=1, length=64).sum() for r in (s24.recipes.dense(), recipe)
    )
    ffn = dense.linear * 8 / 12  # of 12 D^2 weights a block, 8 are the feed-forward layers'
    np.testing.assert_allclose(sparse.linear, dense.linear - ffn * (1 - share), rtol=1e-3)
    self.assertEqual((sparse.attention, sparse.head), (dense.attention, dense.head))

  def test_attention_patterns_of_phases(self):
    local = s24.AttentionPattern('local', 16)
    recipe = s24.Recipe('two', phases=(s24.Phase('sparse', 0.75, local), s24.Phase('sparse', 0.25)))
    curve = flops.count(NANO, recipe, steps=8, batch=1, length=64)
    np.testing.assert_allclose(curve.attention[:6] / curve.attention[-1], local.share(64))
    np.testing.assert_allclose(curve.attention[6:], curve.attention[-1])
    # One of two layers, by a phase and by a model that has a pattern of its own.
    heads = s24.Recipe('heads', phases=(s24.Phase('sparse', 1.0, (None, (local,) * 4)),))
    of_model = dataclasses.replace(NANO, attention_pattern=(None, local))
    for config, recipe in ((NANO, heads), (of_model, s24.recipes.dense())):
      found = flops.count(config, recipe, steps=1, batch=1, length=64).attention[0]
      np.testing.assert_allclose(found / curve.attention[-1], (1 + local.share(64)) / 2)

  @parameterized.parameters(None, '2:4', 'transposable')
  @pytest.mark.slow
  def test_densities_are_those_of_the_masks(self, structure):
    steps, config = 20, gpt2.GPT2Config(vocab_size=32, seq_len=8, num_layers=1, num_heads=1, embed_dim=16)
    recipe = s24.recipes.mixed_sparsity(
      recipes.FFN, total_steps=steps, density=0.2, warm_up=0.3, restoration=0.2, refresh_every=2, structure=structure
    )
    shapes = jax.eval_shape(gpt2.GPT2(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))['params']
    shapes = {'h_0': {'mlp': {name: {'kernel': shapes['h_0']['mlp'][name]['kernel']} for name in ('c_fc', 'c_proj')}}}
    params = jax.tree.map(lambda w: np.random.default_rng(w.size).standard_normal(w.shape, np.float32), shapes)
    wanted = flops.densities(recipe, params, steps)
    build_tx = {p: s24.sparse_training(optax.sgd(0.1), recipe, phase=p) for p in ('dense', 'sparse')}

    def step_of(tx):
      def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

      return jit(step)

    update = {phase: step_of(tx) for phase, tx in build_tx.items()}
    state = jit(build_tx['dense'].init)(params)
    for step in range(steps):
      phase = s24.phase_at(recipe, step, steps)
      for path, mask in sparse_states(state).items():
        share = np.asarray(mask).mean() if phase == 'sparse' else 1.0
        self.assertAlmostEqual(share, wanted[path][step], delta=1 / mask.size, msg=f'{path} at step {step}')
      grads = jax.tree.map(lambda w, i=step: np.random.default_rng(i).standard_normal(w.shape, np.float32), params)
      params, state = update[phase](grads, state, params)

  def test_axes_are_those_of_a_bound_recipe(self):
    shapes = {'query': (8, 4, 16), 'w': (12, 8)}
    params = {name: jax.ShapeDtypeStruct(shape, 'float32') for name, shape in shapes.items()}

    def two_maps(p, x):
      return jnp.einsum('td,dhk->thk', x, p['query']), x @ p['w'].T

    rigl = s24.recipes.rigl('.*', density=0.3, total_steps=1000, distribution='erdos_renyi')
    by_hand = s24.layer_densities(0.3, {'query': (8, 64), 'w': (8, 12)}, 'erdos_renyi')
    for recipe, expected in ((s24.recipes.ste('.*'), dict.fromkeys(shapes, 0.5)), (rigl, by_hand)):
      bound = s24.bind(recipe, two_maps, params, jax.ShapeDtypeStruct((4, 8), 'float32'))
      for name, shares in flops.densities(bound, params, 2).items():
        np.testing.assert_allclose(shares, expected[name], rtol=1e-6, err_msg=name)


class StatedFiguresTest(parameterized.TestCase):
  @pytest.mark.slow
  def test_mixed_sparsity_of_gpt2_takes_a_quarter(self):
    """4.0x fewer: all matmuls of the blocks, forward and backward, causal attention, LM head not counted."""
    config = load_config('gpt2_124m_mst')
    recipe = recipes.make_recipe(config)
    sparse = flops.of_experiment(config, recipe, vocab_size=50257).sum()
    dense = flops.of_experiment(config, s24.recipes.dense(), vocab_size=50257).sum()
    self.assertAlmostEqual(dense.total(head=False) / sparse.total(head=False), 4.0, delta=0.05)
    self.assertGreaterEqual(dense.total(head=False) / sparse.total(head=False), 4.0)
    # With the dense head counted the same run saves 2.1x: the head alone is 29% of the dense run.
    self.assertAlmostEqual(dense.total(head=True) / sparse.total(head=True), 2.14, delta=0.03)

  def test_methods_at_equal_flops(self):
    base = load_config('nano', ['steps=2000'])
    found = {}
    for method in method_table.AT_EQUAL_FLOPS:
      config = methods.configure(base, method, 0)
      found[method] = flops.of_experiment(config, recipes.make_recipe(config), vocab_size=256).sum().total(head=False)
    dense = found.pop('dense')
    # Sampled weight gradients need half; what that saves is not put into links.
    shares = {'mixed_sparsity_transposable': 0.95}
    for method, number in found.items():
      self.assertAlmostEqual(number / found['mixed_sparsity'], shares.get(method, 1.0), delta=0.01, msg=method)
    self.assertGreater(dense / found['mixed_sparsity'], 4.0)

  def test_table(self):
    curves = [
      flops.count(NANO, r, steps=10, batch=1, length=64)
      for r in (s24.recipes.static(recipes.LINEAR, density=0.25, distribution='uniform'), s24.recipes.dense())
    ]
    rows = {part: ratio for part, _, _, ratio in flops.table(*curves)}
    self.assertAlmostEqual(rows['linear'], 4.0, places=5)
    self.assertEqual((rows['attention'], rows['head']), (1.0, 1.0))
    self.assertLess(rows['total, head counted'], rows['total, head not counted'])
    self.assertTrue(all(math.isfinite(ratio) for ratio in rows.values()))


class ReportTest(parameterized.TestCase):
  @pytest.mark.slow
  def test_the_plot_has_every_run_or_says_which_not(self):
    folder = temp_folder(self)
    for name, changes in {
      'dense': {'data': {'tokenizer': 'bpe:512'}},  # the plot is without the head, so without the vocabulary
      'fst': {'base': 'llama_nano'},
      'ste': {'recipe': {'kwargs': {'epsilon': 0.1}}},  # of another version
    }.items():
      write_run(folder, name, 0, 1.2, **changes)
    page = report.write_report([folder], f'{folder}/report.html')
    chart = page.read_text().split('Loss against FLOPs</h2>')[1].split('</figure>')[0]
    self.assertRegex(chart, r'>FST</text>[\s\S]*>dense</text>|>dense</text>[\s\S]*>FST</text>')
    self.assertNotIn('>plain STE</text>', chart)
    message = 'Without plain STE, whose FLOPs are not known: recipe.kwargs of ste.*epsilon'
    self.assertRegex(chart, message)
    self.assertIn('Llama nano', ' '.join(read_page(report.write_report([f'{folder}/fst-seed0'], page)).text))
    alone = report.write_report([f'{folder}/ste-seed0'], f'{folder}/alone.html')
    self.assertRegex(' '.join(read_page(alone).text), rf'Loss against FLOPs\s+{message}')

  @parameterized.parameters(
    (dict(recipe={'kwargs': {'epsilon': 0.1}}), 'recipe.kwargs of transposable_srste.*epsilon'),
    (dict(model={'heads': 3}), 'model section: .*heads'),
  )
  @pytest.mark.few
  def test_a_run_of_another_version_costs_the_others_nothing(self, changes, reason):
    folder = temp_folder(self)
    write_run(folder, 'dense', 0, 1.2)
    write_run(folder, 'fst', 0, 1.2, **changes)  # whose flip rates a claim would compare
    page = report.write_report([folder], f'{folder}/report.html')
    self.assertRegex(' '.join(read_page(page).text), f'Without FST, whose FLOPs are not known: {reason}')

  def test_a_vocabulary_is_asked_for_with_the_head_alone(self):
    stored = load_config('nano', ['data.tokenizer=bpe:512']).to_dict()
    self.assertIsNone(flops.of_run(stored))
    without = flops.of_run(stored, head=False)
    expected = flops.of_run(load_config('nano').to_dict())
    np.testing.assert_array_equal(without.linear + without.attention, expected.linear + expected.attention)
    self.assertEqual(without.head.max(), 0)


if __name__ == '__main__':
  absltest.main()
