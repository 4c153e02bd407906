"""The Llama-like model: sizes, rotary positions, shared heads, options, bad input."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.runs.models import layers, llama
from tests.draws import gaussian
from tests.experiments.fakes import apply, parameters


def _tiny(**overrides):
  return llama.make_config('nano', vocab_size=32, **{'embed_dim': 32, 'hidden_dim': 48, 'seq_len': 16, **overrides})


@functools.cache
def _init(config):
  tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (2, 16), np.int32))
  return parameters(llama.Llama(config), tokens), tokens


def _shapes(params):
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): leaf.shape
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  }


class SizesTest(parameterized.TestCase):
  # Llama 3.2's released sizes, vocabulary 128,256; they count the embedding once, which is the output matrix too.
  @parameterized.parameters(('1b', 1_235_814_400), ('3b', 3_212_749_824))
  @pytest.mark.few
  def test_counts_of_the_released_models(self, size, count):
    config = llama.make_config(size, vocab_size=128_256)
    shapes = jax.eval_shape(llama.Llama(config).init, jax.random.key(0), jnp.zeros((1, 8), jnp.int32))['params']
    self.assertEqual(layers.param_count(shapes) - 128_256 * config.embed_dim, count)

  def test_paths_and_shapes(self):
    params, _ = _init(_tiny())
    wanted = {
      'wte/embedding': (32, 32), 'lm_head/kernel': (32, 32), 'ln_f/scale': (32,), 'h_1/ln_2/scale': (32,),
      'h_0/attn/q_proj/kernel': (32, 32), 'h_0/attn/k_proj/kernel': (32, 16), 'h_0/attn/v_proj/kernel': (32, 16),
      'h_0/attn/o_proj/kernel': (32, 32), 'h_0/mlp/c_gate/kernel': (32, 48), 'h_0/mlp/c_fc/kernel': (32, 48),
      'h_1/mlp/c_proj/kernel': (48, 32),
    }  # fmt: skip
    found = _shapes(params)
    self.assertEqual({path: found.get(path) for path in wanted}, wanted)
    self.assertLen(found, 3 + 2 * 9)

  @parameterized.parameters(
    (dict(size='huge'), 'known: nano'),
    (dict(num_heads=5), 'num_heads 5'),
    (dict(num_heads=64), 'even head size'),
    (dict(num_kv_heads=3), 'num_kv_heads 3'),
  )
  def test_bad_sizes(self, overrides, message):
    with self.assertRaisesRegex(ValueError, message):
      llama.make_config(**{'size': 'nano', 'vocab_size': 32, **overrides})

  def test_too_many_positions(self):
    with self.assertRaisesRegex(ValueError, '17 positions on axis -1; the model takes at most 16'):
      llama.Llama(_tiny()).init(jax.random.key(0), jnp.zeros((1, 17), jnp.int32))


class RotaryTest(absltest.TestCase):
  def test_turns_complex_numbers(self):
    x = gaussian(0, (2, 7, 3, 8))
    wide = np.asarray(x, np.float64)
    turn = np.exp(1j * np.arange(7)[:, None] * 100.0 ** (-np.arange(4) / 4))
    expected = (wide[..., :4] + 1j * wide[..., 4:]) * turn[None, :, None]
    found = llama.rotate(x, 100.0)
    np.testing.assert_allclose(found, np.concatenate([expected.real, expected.imag], -1), atol=1e-5)

  def test_scores_depend_on_distance(self):
    q, k = gaussian(0, (2, 16))
    turned_q, turned_k = (llama.rotate(jnp.tile(v, (1, 9, 1, 1)), 10_000.0)[0, :, 0] for v in (q, k))
    scores = np.asarray(turned_q @ turned_k.T)
    for distance in range(-8, 9):
      diagonal = np.diagonal(scores, distance)
      np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    self.assertGreater(np.ptp(scores[0]), 0.1)


class OptionsTest(parameterized.TestCase):
  @parameterized.parameters(False, True)
  def test_scan_equals_the_loop(self, remat):
    params, tokens = _init(_tiny())
    stacked = {key: value for key, value in params.items() if not key.startswith('h_')}
    stacked['h'] = jax.tree.map(lambda *layers: np.stack(layers), params['h_0'], params['h_1'])
    scanned = llama.Llama(_tiny(scan_layers=True, remat=remat))
    shapes = jax.eval_shape(scanned.init, jax.random.key(0), tokens)['params']
    self.assertEqual(jax.tree.structure(shapes), jax.tree.structure(stacked))
    np.testing.assert_allclose(
      apply(scanned, {'params': stacked}, tokens), apply(llama.Llama(_tiny()), {'params': params}, tokens), atol=1e-6
    )

  def test_shared_heads_equal_copied_ones(self):
    params, tokens = _init(_tiny(num_kv_heads=2, num_layers=1))
    full = jax.tree.map(lambda x: x, params)
    for name in ('k_proj', 'v_proj'):
      kernel = params['h_0']['attn'][name]['kernel'].reshape(32, 2, 8)
      full['h_0']['attn'][name] = {'kernel': jnp.repeat(kernel, 2, axis=1).reshape(32, 32)}
    np.testing.assert_allclose(
      apply(llama.Llama(_tiny(num_kv_heads=2, num_layers=1)), {'params': params}, tokens),
      apply(llama.Llama(_tiny(num_kv_heads=4, num_layers=1)), {'params': full}, tokens),
      atol=1e-6,
    )

  def test_initial_scales(self):
    model, tokens = llama.Llama(_tiny(embed_dim=128, hidden_dim=256)), jnp.zeros((1, 8), jnp.int32)
    mlp = jax.jit(lambda key: model.init(key, tokens)['params']['h_0']['mlp'])(jax.random.key(0))
    self.assertAlmostEqual(float(mlp['c_gate']['kernel'].std()), 0.02, delta=5e-4)
    self.assertAlmostEqual(float(mlp['c_proj']['kernel'].std()), 0.01, delta=5e-4)

  def test_logits_are_causal_float32_and_know_positions(self):
    config = _tiny(dtype='bfloat16', num_layers=1)
    params, tokens = _init(config)
    changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % 32)
    before, after = (apply(llama.Llama(config), {'params': params}, t) for t in (tokens, changed))
    self.assertEqual(before.dtype, jnp.float32)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    self.assertGreater(float(jnp.abs(before - after)[:, 9:].max()), 0)
    # Tokens 0 and 1 swapped: without positions the last logits would not notice.
    swapped = apply(llama.Llama(config), {'params': params}, tokens[:, jnp.array([1, 0, *range(2, 16)])])
    self.assertGreater(float(jnp.abs(before - swapped)[:, -1].max()), 0)


if __name__ == '__main__':
  absltest.main()
