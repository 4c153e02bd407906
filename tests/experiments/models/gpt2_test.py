"""GPT-2 in linen and nnx: sizes, twins, initialisation, options, bad input."""

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import gpt2, layers, llama
from tests.experiments.fakes import apply, compile_quickly
from tests.experiments.models import gpt2_nnx


def setUpModule():
  compile_quickly()


def _tiny(**overrides):
  return gpt2.make_config('nano', vocab_size=32, **{'embed_dim': 32, 'seq_len': 16, **overrides})


def _init(config, seed=0):
  tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, config.vocab_size)
  return jax.jit(gpt2.GPT2(config).init)(jax.random.key(seed), tokens)['params'], tokens


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
    twin = nnx.eval_shape(lambda: gpt2_nnx.GPT2(config, rngs=nnx.Rngs(0)))
    self.assertEqual(layers.param_count(nnx.to_pure_dict(nnx.state(twin, nnx.Param))), count)

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


class TwinsTest(parameterized.TestCase):
  @parameterized.parameters(
    dict(),
    dict(bias=True),
    dict(mlp='swiglu', ffn_width=0.5),
    dict(mlp='geglu'),
    dict(mlp='relu2'),
    dict(remat=True),
    dict(dtype='bfloat16'),
  )
  @pytest.mark.few(4)
  def test_same_parameters_same_logits(self, **overrides):
    config = _tiny(**overrides)
    params, tokens = _init(config)
    twin = gpt2_nnx.GPT2(config, rngs=nnx.Rngs(3))
    self.assertEqual(_paths(nnx.to_pure_dict(nnx.state(twin, nnx.Param))), _paths(params))
    nnx.update(twin, params)
    logits = apply(gpt2.GPT2(config), {'params': params}, tokens)
    self.assertEqual(logits.dtype, jnp.float32)
    np.testing.assert_array_equal(logits, nnx.jit(lambda model, tokens: model(tokens))(twin, tokens))

  @parameterized.parameters(dict(scan_layers=1), dict(dropout=1), dict(attention_pattern=1), dict(ffn_order='position'))
  def test_what_the_twin_lacks_is_said(self, **options):
    with self.assertRaisesRegex(ValueError, *options):
      gpt2_nnx.GPT2(_tiny(**options), rngs=nnx.Rngs(0))


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
    stacked['h'] = jax.tree.map(lambda *layers: jnp.stack(layers), params['h_0'], params['h_1'])
    scanned = gpt2.GPT2(_tiny(scan_layers=True, remat=remat))
    shapes = jax.eval_shape(scanned.init, jax.random.key(0), tokens)['params']
    self.assertEqual(jax.tree.structure(shapes), jax.tree.structure(stacked))
    np.testing.assert_allclose(
      scanned.apply({'params': stacked}, tokens), gpt2.GPT2(config).apply({'params': params}, tokens), atol=1e-6
    )

  @pytest.mark.slow
  def test_initial_scales(self):
    params, _ = _init(_tiny(embed_dim=128, num_layers=2))
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
    before, after = (gpt2.GPT2(config).apply({'params': params}, t) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    self.assertGreater(float(jnp.abs(before - after)[:, 9:].max()), 0)

  def test_dropout_acts_only_when_asked(self):
    config = _tiny(dropout=0.5)
    params, tokens = _init(config)
    plain = gpt2.GPT2(config).apply({'params': params}, tokens)
    noisy = gpt2.GPT2(config, deterministic=False).apply(
      {'params': params}, tokens, rngs={'dropout': jax.random.key(0)}
    )
    self.assertGreater(float(jnp.abs(plain - noisy).max()), 1e-3)


if __name__ == '__main__':
  absltest.main()
