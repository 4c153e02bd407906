"""Options that both models share: the fused feed-forward layer and attention patterns."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.runs.models import gpt2, layers, llama
import sparse24_jax as s24
from tests.experiments.fakes import apply, parameters

NANO = dict(vocab_size=32, embed_dim=32, seq_len=16, num_layers=1)
LOCAL, FIXED = s24.AttentionPattern('local', 4), s24.AttentionPattern('fixed', 4)


def make(family, **overrides):
  sizes = NANO | overrides
  if family == 'gpt2':
    return gpt2.GPT2(gpt2.make_config('nano', **sizes))
  return llama.Llama(llama.make_config('nano', hidden_dim=64, **sizes))


@functools.cache
def params_of(family, **overrides):
  return parameters(make(family, **overrides), tokens())


def tokens():
  return jnp.asarray(np.random.default_rng(1).integers(0, 32, (2, 16), np.int32))


def stacked(params):
  blocks = [value for key, value in params.items() if key.startswith('h_')]
  rest = {key: value for key, value in params.items() if not key.startswith('h_')}
  return rest | {'h': jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)}


class StepOptionsTest(parameterized.TestCase):
  """What may be chosen for speed or stability."""

  @parameterized.parameters((jnp.float32, 1e-6), (jnp.bfloat16, 4e-3))
  @pytest.mark.few
  def test_cross_entropy_is_that_of_optax(self, dtype, tolerance):
    rng = np.random.default_rng(0)
    logits = (3 * rng.standard_normal((2, 5, 32))).astype(dtype)
    targets = rng.integers(0, 32, (2, 5), np.int32)
    weights = np.arange(10, dtype=np.float32).reshape(2, 5)

    def of(f):
      return jax.jit(jax.value_and_grad(lambda x: (weights * f(x, targets)).sum()))

    expected = of(optax.softmax_cross_entropy_with_integer_labels)(logits.astype(np.float32))
    found = of(layers.cross_entropy)(logits)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], atol=9 * tolerance)
    self.assertEqual((found[0].dtype, found[1].dtype), (jnp.float32, dtype))

  @pytest.mark.slow
  def test_dots_are_kept_and_the_gradient_is_the_same(self):
    def gradient(remat):
      model = make('gpt2', remat=remat)
      return jax.grad(lambda p: apply(model, {'params': p}, tokens()).var())

    params = params_of('gpt2')
    expected, found = gradient(False)(params), gradient('dots')(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
    matmuls = [str(jax.make_jaxpr(gradient(remat))(params)).count('dot_general') for remat in (False, 'dots', True)]
    self.assertLess(matmuls[0], matmuls[2])
    # Attention's two matmuls have batches, and are cheap to make again.
    self.assertLess(matmuls[1], matmuls[2])

  def test_normalised_queries_and_keys_do_not_grow_with_their_weights(self):
    model = make('gpt2', qk_norm=True, residual_dtype='float32')
    params = parameters(model, tokens())
    self.assertEqual(params['h_0']['attn']['q_norm']['scale'].shape, (8,))
    larger = jax.tree_util.tree_map_with_path(
      lambda path, p: p.at[:, :64].multiply(100.0) if path[-2].key == 'c_attn' else p, params
    )
    expected, found = (apply(model, {'params': p}, tokens()) for p in (params, larger))
    np.testing.assert_allclose(found, expected, atol=2e-2)
    expected, found = (apply(make('gpt2'), {'params': p}, tokens()) for p in (params, larger))
    self.assertGreater(np.abs(found - expected).max(), 0.1)

  def test_rotary_positions_tell_order_by_distance(self):
    model = make('gpt2', positions='rotary')
    params = parameters(model, tokens())
    self.assertNotIn('wpe', params)
    found = apply(model, {'params': params}, jnp.array([[1, 2, 3], [2, 1, 3], [1, 1, 1]]))
    self.assertGreater(np.abs(found[0, 2] - found[1, 2]).max(), 1e-5)  # the same tokens in another order
    np.testing.assert_allclose(found[2, 0], found[2, 2], atol=1e-6)  # nothing but distance is known
    with self.assertRaisesRegex(ValueError, "positions is 'sine'"):
      make('gpt2', positions='sine')

  @pytest.mark.slow
  def test_scaled_embeddings_and_an_output_matrix_that_starts_at_zero(self):
    model = make('gpt2', tied=False, scale_embeddings=True)
    params = jax.jit(model.init)(jax.random.key(0), tokens())['params']
    self.assertEqual(float(jnp.abs(apply(model, {'params': params}, tokens())).max()), 0.0)
    # With the head of a tied model it is one whose embeddings are that much larger.
    params['head'] = params['wte']
    larger = params | {name: jax.tree.map(lambda x: 32**0.5 * x, params[name]) for name in ('wte', 'wpe')}
    expected = apply(make('gpt2', tied=False), {'params': larger}, tokens())
    np.testing.assert_allclose(apply(model, {'params': params}, tokens()), expected, atol=1e-5)

  def test_logits_in_bfloat16_stay_near(self):
    expected = apply(make('gpt2'), {'params': params_of('gpt2')}, tokens())
    found = apply(make('gpt2', logits_dtype='bfloat16'), {'params': params_of('gpt2')}, tokens())
    error = np.linalg.norm(found.astype(jnp.float32) - expected) / np.linalg.norm(expected)
    self.assertBetween(error, 1e-5, 0.1)


class AttentionPatternTest(parameterized.TestCase):
  @parameterized.parameters('gpt2', 'llama')
  def test_tokens_outside_the_pattern_do_not_matter(self, family):
    model = make(family, attention_pattern=LOCAL, num_layers=2)
    logits = functools.partial(apply, model, {'params': params_of(family, num_layers=2)})
    # Two layers of the last four positions: position 15 sees 9 and later.
    changed = {i: tokens().at[:, i].set((tokens()[:, i] + 1) % 32) for i in (8, 9)}
    difference = {i: np.abs(logits(tokens()) - logits(t))[:, -1].max() for i, t in changed.items()}
    self.assertEqual(difference[8], 0)
    self.assertGreater(difference[9], 0)

  @parameterized.parameters('gpt2', 'llama')
  @pytest.mark.few
  def test_a_window_over_everything_is_full_attention(self, family):
    variables = {'params': params_of(family)}
    found = apply(make(family, attention_pattern=s24.AttentionPattern('local', 16)), variables, tokens())
    np.testing.assert_allclose(found, apply(make(family), variables, tokens()), atol=1e-5)

  @pytest.mark.slow
  def test_a_pattern_a_layer_and_head(self):
    def logits(pattern):
      return apply(make('gpt2', attention_pattern=pattern, num_layers=2), variables, tokens())

    variables = {'params': params_of('gpt2', num_layers=2)}
    found = logits(((LOCAL,) * 4, LOCAL))
    np.testing.assert_allclose(found, logits(LOCAL), atol=1e-6)
    self.assertGreater(np.abs(logits(((LOCAL, LOCAL, FIXED, LOCAL), LOCAL)) - found).max(), 1e-5)

  def test_scan_takes_one_for_all(self):
    params, two = params_of('gpt2', num_layers=2), dict(attention_pattern=FIXED, num_layers=2)
    np.testing.assert_allclose(
      apply(make('gpt2', **two, scan_layers=True), {'params': stacked(params)}, tokens()),
      apply(make('gpt2', **two), {'params': params}, tokens()),
      atol=1e-6,
    )

  @parameterized.parameters(
    (dict(attention_pattern=(LOCAL, LOCAL)), 'one a layer, 1'),
    (dict(attention_pattern=(LOCAL, FIXED), scan_layers=True, num_layers=2), 'scan_layers'),
  )
  def test_refuses(self, fields, message):
    for family in ('gpt2', 'llama'):
      with self.assertRaisesRegex(ValueError, message):
        make(family, **fields)


if __name__ == '__main__':
  absltest.main()
