"""Penzai: its Llama-like transformer, whose weights are arrays with named axes."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse24_jax as s24
from tests.models.training import check_training, package, random_like

package('penzai')
pytestmark = pytest.mark.slow


class PenzaiTest(absltest.TestCase):

  def test_transformer(self):
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as llama

    config = llama.LlamalikeTransformerConfig(
      num_kv_heads=2, query_head_multiplier=1, embedding_dim=16, projection_dim=8, mlp_hidden_dim=32,
      num_decoder_blocks=1, vocab_size=32, mlp_variant='swiglu', rope_wavelength=10000, tie_embedder_and_logits=False,
      attention_type=llama.AttentionTypeGlobalCausal(), rms_norm_eps=1e-6, use_layer_stack=False,
      parameter_dtype=jnp.float32, activation_dtype=jnp.float32,
    )  # fmt: skip
    unbound, variables = pz.unbind_params(llama.build_llamalike_transformer(config, init_base_rng=jax.random.key(0)))
    frozen = [variable.freeze() for variable in variables]
    params = random_like({variable.label: variable.value for variable in frozen})
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 32, (2, 8)))

    def loss(params, tokens):
      model = pz.bind_variables(unbound, [v.__class__(v.label, params[v.label], v.metadata) for v in frozen])
      logits = model(pz.nx.wrap(tokens).tag('batch', 'seq')).unwrap('batch', 'seq', 'vocabulary')
      scores = jax.nn.log_softmax(logits[:, :-1])
      return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))

    bound = s24.bind(s24.recipes.ste('.*(attention|mlp).*weights.*'), loss, params, tokens)
    layouts = {f'attention/{name}': 'in 0, out 1 2' for name in ('key', 'query', 'value')}
    layouts |= {f'mlp/{name}_linear': 'in 0, out 1' for name in ('gating', 'out', 'value')}
    layouts['attention/output'] = 'in 0 1, out 2'
    expected = {f'transformer/block_0/{name}.weights/data_array': text for name, text in layouts.items()}
    self.assertEqual({weight.uses[0].block for weight in bound.weights if '/mlp/' in weight.path}, {'silu'})
    check_training(bound, loss, params, tokens, expected=expected)


if __name__ == '__main__':
  absltest.main()
