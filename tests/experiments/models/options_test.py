"""Options that both models share: the fused feed-forward layer and attention patterns."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.models import gpt2, llama
import sparse24_jax as s24
from tests.experiments.fakes import compile_quickly

NANO = dict(vocab_size=32, embed_dim=32, seq_len=16)
LOCAL, FIXED = s24.AttentionPattern('local', 4), s24.AttentionPattern('fixed', 4)


def setUpModule():
  compile_quickly()


def make(family, **overrides):
  if family == 'gpt2':
    return gpt2.GPT2(gpt2.make_config('nano', **NANO, **overrides))
  return llama.Llama(llama.make_config('nano', **NANO, hidden_dim=64, **overrides))


@functools.cache
def params_of(family):
  return jax.jit(make(family).init)(jax.random.key(0), tokens())['params']


def tokens():
  return jax.random.randint(jax.random.key(1), (2, 16), 0, 32)


def stacked(params):
  layers = [value for key, value in params.items() if key.startswith('h_')]
  rest = {key: value for key, value in params.items() if not key.startswith('h_')}
  return rest | {'h': jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


class FusedMlpTest(parameterized.TestCase):
  @parameterized.product(family=('gpt2', 'llama'), scan=(False, True))
  def test_same_parameters_same_logits(self, family, scan):
    params = stacked(params_of(family)) if scan else params_of(family)
    plain, fused = (make(family, scan_layers=scan, fused_mlp=f) for f in (False, True))
    shapes = jax.eval_shape(fused.init, jax.random.key(0), tokens())['params']
    self.assertEqual(jax.tree.map(jnp.shape, shapes), jax.tree.map(jnp.shape, params))
    np.testing.assert_allclose(
      fused.apply({'params': params}, tokens()), plain.apply({'params': params}, tokens()), atol=1e-6
    )

  @parameterized.parameters('gelu', 'relu2', 'geglu', 'swiglu')
  def test_every_kind_is_the_plain_one(self, mlp):
    plain, fused = (make('gpt2', mlp=mlp, bias=True, fused_mlp=f) for f in (False, True))
    params = jax.jit(plain.init)(jax.random.key(0), tokens())['params']
    # Biases start at zero, where a wrong one would not show.
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(jax.random.key(p.size), p.shape), params)
    np.testing.assert_allclose(
      fused.apply({'params': params}, tokens()), plain.apply({'params': params}, tokens()), atol=1e-4
    )

  @parameterized.parameters('gpt2', 'llama')
  def test_sparsify_reaches_it(self, family):
    recipe = s24.recipes.ste('.*/mlp/.*')
    params = params_of(family)
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    variables = {'params': params, 'sparse24': s24.sparse_variables(params, state, recipe)}
    found = s24.sparsify(make(family, fused_mlp=True), recipe).apply(variables, tokens())
    expected = s24.sparsify(make(family), recipe).apply(variables, tokens())
    np.testing.assert_allclose(found, expected, atol=1e-5)
    self.assertGreater(np.abs(found - make(family).apply({'params': params}, tokens())).max(), 1e-3)


class AttentionPatternTest(parameterized.TestCase):
  @parameterized.parameters('gpt2', 'llama')
  def test_tokens_outside_the_pattern_do_not_matter(self, family):
    model = make(family, attention_pattern=LOCAL)
    logits = functools.partial(model.apply, {'params': params_of(family)})
    # Two layers of the last four positions: position 15 sees 9 and later.
    changed = {i: tokens().at[:, i].set((tokens()[:, i] + 1) % 32) for i in (8, 9)}
    difference = {i: np.abs(logits(tokens()) - logits(t))[:, -1].max() for i, t in changed.items()}
    self.assertEqual(difference[8], 0)
    self.assertGreater(difference[9], 0)

  @parameterized.parameters('gpt2', 'llama')
  def test_a_window_over_everything_is_full_attention(self, family):
    variables = {'params': params_of(family)}
    found = make(family, attention_pattern=s24.AttentionPattern('local', 16)).apply(variables, tokens())
    np.testing.assert_allclose(found, make(family).apply(variables, tokens()), atol=1e-5)

  def test_a_pattern_a_layer_and_head(self):
    mixed = make('gpt2', attention_pattern=(None, (LOCAL, LOCAL, FIXED, LOCAL)))
    variables = {'params': params_of('gpt2')}
    same = make('gpt2', attention_pattern=(None, (LOCAL,) * 4))
    self.assertGreater(np.abs(mixed.apply(variables, tokens()) - same.apply(variables, tokens())).max(), 1e-5)
    np.testing.assert_allclose(
      make('gpt2', attention_pattern=((LOCAL,) * 4,) * 2).apply(variables, tokens()),
      make('gpt2', attention_pattern=LOCAL).apply(variables, tokens()),
      atol=1e-6,
    )

  def test_scan_takes_one_for_all(self):
    params = params_of('gpt2')
    np.testing.assert_allclose(
      make('gpt2', attention_pattern=FIXED, scan_layers=True).apply({'params': stacked(params)}, tokens()),
      make('gpt2', attention_pattern=FIXED).apply({'params': params}, tokens()),
      atol=1e-6,
    )

  @parameterized.parameters(
    (dict(attention_pattern=(LOCAL,)), 'one a layer, 2'),
    (dict(attention_pattern=(LOCAL, FIXED), scan_layers=True), 'scan_layers'),
  )
  def test_refuses(self, fields, message):
    for family in ('gpt2', 'llama'):
      with self.assertRaisesRegex(ValueError, message):
        make(family, **fields)


if __name__ == '__main__':
  absltest.main()
