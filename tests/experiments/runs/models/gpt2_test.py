"""GPT-2: sizes, the forward pass, initialisation, options, bad input."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.runs.models import gpt2, layers, llama
from tests import oracles
from tests.experiments.fakes import apply, parameters


def _tiny(**overrides):
  return gpt2.make_config('nano', vocab_size=32, **{'embed_dim': 32, 'seq_len': 16, **overrides})


@functools.cache
def _init(config):
  tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (2, 16), np.int32))
  return parameters(gpt2.GPT2(config), tokens), tokens


def _paths(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  }


class SizesTest(parameterized.TestCase):
  # OpenAI's released checkpoints: with biases, vocabulary 50,257, output matrix tied.
  @parameterized.parameters(
    ('124m', 124_439_808), ('350m', 354_823_168), ('774m', 774_030_080), ('1558m', 1_557_611_200)
  )
  @pytest.mark.few
  def test_counts_of_the_released_models(self, size, count):
    config = gpt2.make_config(size, vocab_size=50257, bias=True)
    shapes = jax.eval_shape(gpt2.GPT2(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))['params']
    self.assertEqual(layers.param_count(shapes), count)

  def test_paths_are_what_the_recipes_match(self):
    params, _ = _init(_tiny())
    self.assertContainsSubset(
      {'h_0/mlp/c_fc/kernel', 'h_1/mlp/c_proj/kernel', 'h_0/attn/c_attn/kernel', 'wte/embedding'}, _paths(params)
    )

  @parameterized.parameters(
    (dict(size='huge'), 'known: nano'),
    (dict(num_heads=5), 'num_heads 5'),
    (dict(mlp='tanh'), "mlp is 'tanh'"),
    (dict(ffn_width=0.3), 'ffn_width 0.3'),
  )
  def test_bad_sizes(self, overrides, message):
    with self.assertRaisesRegex(ValueError, message):
      gpt2.make_config(**{'size': 'nano', 'vocab_size': 32, **overrides})

  def test_too_many_positions(self):
    config = _tiny()
    with self.assertRaisesRegex(ValueError, '17 positions on axis -1; the model takes at most 16'):
      gpt2.GPT2(config).init(jax.random.key(0), jnp.zeros((1, 17), jnp.int32))


def _written(config, params, tokens):
  """Logits in float64, from the definitions."""
  p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

  def linear(name, x):
    return x @ name['kernel'] + name.get('bias', 0.0)

  def norm(name, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * name['scale'] + name.get('bias', 0.0)

  length, width = tokens.shape[1], config.embed_dim // config.num_heads
  x = p['wte']['embedding'][tokens] + p['wpe']['embedding'][:length]
  for i in range(config.num_layers):
    block = p[f'h_{i}']
    qkv = linear(block['attn']['c_attn'], norm(block['ln_1'], x)).reshape(len(x), length, 3, config.num_heads, width)
    scores = np.einsum('bqhk,bshk->bhqs', qkv[:, :, 0], qkv[:, :, 1]) / np.sqrt(width)
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * np.tril(np.ones((length, length)))
    y = np.einsum('bhqs,bshk->bqhk', weights / weights.sum(-1, keepdims=True), qkv[:, :, 2])
    x = x + linear(block['attn']['c_proj'], y.reshape(x.shape))
    mlp, h = block['mlp'], norm(block['ln_2'], x)
    name = {'relu2': 'squared_relu', 'geglu': 'gelu', 'swiglu': 'silu'}.get(config.mlp, config.mlp)
    up = linear(mlp['c_fc'], h)
    gate = linear(mlp['c_gate'], h) if 'c_gate' in mlp else up
    value, _ = oracles.activation_and_slope(name, gate)
    x = x + linear(mlp['c_proj'], value * up if 'c_gate' in mlp else value)
  return norm(p['ln_f'], x) @ p['wte']['embedding'].T


class ForwardTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(bias=True), 1e-5), (dict(mlp='swiglu', ffn_width=0.5), 1e-5), (dict(mlp='relu2'), 1e-5),
    (dict(mlp='geglu'), 1e-5), (dict(remat=True), 1e-5), (dict(dtype='bfloat16'), 2e-2),
  )  # fmt: skip
  @pytest.mark.few(2)
  def test_against_numpy(self, overrides, tolerance):
    config = _tiny(**overrides)
    params, tokens = _init(config)
    # Biases start at zero, and embeddings so small that a block hardly counts.
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: np.asarray(a) + 0.1 * rng.standard_normal(a.shape, np.float32), params)
    logits = apply(gpt2.GPT2(config), {'params': params}, tokens)
    self.assertEqual(logits.dtype, jnp.float32)
    expected = _written(config, params, np.asarray(tokens))
    self.assertLess(np.linalg.norm(logits - expected) / np.linalg.norm(expected), tolerance)


class EmbeddingTest(parameterized.TestCase):
  @parameterized.parameters((gpt2, gpt2.GPT2), (llama, llama.Llama))
  @pytest.mark.slow
  def test_gradients_of_a_frequent_token_add_up_in_bfloat16(self, family, make):
    # Of 512 addends alike, a sum in bfloat16 would keep half.
    tokens, found = jnp.full((32, 16), 3), {}
    for dtype in ('float32', 'bfloat16'):
      model = make(family.make_config('nano', vocab_size=32, num_layers=1, dtype=dtype))
      params = jax.jit(model.init)(jax.random.key(0), tokens)['params']

      def first_logit(table, model=model, params=params):
        return model.apply({'params': {**params, 'wte': {'embedding': table}}}, tokens)[..., 0].sum()

      found[dtype] = jax.jit(jax.grad(first_logit))(params['wte']['embedding'])[3]
    np.testing.assert_allclose(
      found['bfloat16'], found['float32'], atol=0.05 * float(jnp.abs(found['float32']).max())
    )


class OptionsTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_scan_equals_the_loop(self, remat):
    config = _tiny()
    params, tokens = _init(config)
    stacked = {key: value for key, value in params.items() if not key.startswith('h_')}
    stacked['h'] = jax.tree.map(lambda *layers: np.stack(layers), params['h_0'], params['h_1'])
    scanned = gpt2.GPT2(_tiny(scan_layers=True, remat=remat))
    shapes = jax.eval_shape(scanned.init, jax.random.key(0), tokens)['params']
    self.assertEqual(jax.tree.structure(shapes), jax.tree.structure(stacked))
    np.testing.assert_allclose(
      apply(scanned, {'params': stacked}, tokens), apply(gpt2.GPT2(config), {'params': params}, tokens), atol=1e-6
    )

  @pytest.mark.slow
  def test_initial_scales(self):
    model = gpt2.GPT2(_tiny(embed_dim=128, num_layers=2))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))['params']
    self.assertAlmostEqual(float(params['h_0']['mlp']['c_fc']['kernel'].std()), 0.02, delta=5e-4)
    self.assertAlmostEqual(float(params['h_0']['mlp']['c_proj']['kernel'].std()), 0.01, delta=5e-4)
    self.assertAlmostEqual(float(params['h_1']['attn']['c_proj']['kernel'].std()), 0.01, delta=5e-4)

  def test_half_width_and_gated_shapes(self):
    params, _ = _init(_tiny(ffn_width=0.5, mlp='swiglu'))
    self.assertEqual(params['h_0']['mlp']['c_fc']['kernel'].shape, (32, 64))
    self.assertEqual(params['h_0']['mlp']['c_gate']['kernel'].shape, (32, 64))

  def test_logits_are_causal(self):
    config = _tiny()
    params, tokens = _init(config)
    changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % 32)
    before, after = (apply(gpt2.GPT2(config), {'params': params}, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    self.assertGreater(float(jnp.abs(before - after)[:, 9:].max()), 0)

  def test_dropout_acts_only_when_asked(self):
    config = _tiny(dropout=0.5, num_layers=1)
    params, tokens = _init(config)
    plain = apply(gpt2.GPT2(config), {'params': params}, tokens)
    noisy = jax.jit(gpt2.GPT2(config, deterministic=False).apply)(
      {'params': params}, tokens, rngs={'dropout': jax.random.key(0)}
    )
    self.assertGreater(float(jnp.abs(plain - noisy).max()), 1e-3)


if __name__ == '__main__':
  absltest.main()
