"""Custom calls, fusions and copies of whole training steps for an H100: to show that a change leaves them as they were.

No GPU is needed, only the CUDA plug-ins (the kernels' environment). Before the change and after it, a minute each:

    JAX_PLATFORMS=cpu python -m tests.sparse24_jax.hlo_fingerprint --out before.json
    JAX_PLATFORMS=cpu python -m tests.sparse24_jax.hlo_fingerprint --out after.json --compare before.json

Steps of GPT-2 and Llama, two layers of width 1024, with their masks, packing, gradients and AdamW. Custom calls are
compared in order, with the shapes of their results; of fusions and copies the number.
"""

import argparse
from collections.abc import Mapping
import json
import pathlib
import re
import sys
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax

import sparse24_jax as s24
from tests.sparse24_jax.hopper import BF16, compiled, struct

D, HEADS, LENGTH, VOCABULARY, LAYERS = 1024, 8, 1024, 4096, 2


class Block(nn.Module):
  """GPT-2's, or with a gate, Llama's feed-forward part."""

  gated: bool

  @nn.compact
  def __call__(self, x):
    y = nn.LayerNorm(dtype=BF16)(x)
    q, k, v = jnp.split(nn.Dense(3 * D, use_bias=False, dtype=BF16, name='qkv')(y), 3, axis=-1)
    q, k, v = (a.reshape(*a.shape[:-1], HEADS, D // HEADS) for a in (q, k, v))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
    x = x + nn.Dense(D, use_bias=False, dtype=BF16, name='proj')(y)
    y = nn.LayerNorm(dtype=BF16)(x)
    up = nn.Dense(4 * D, use_bias=not self.gated, dtype=BF16, name='mlp_up')
    if self.gated:
      y = nn.silu(nn.Dense(4 * D, use_bias=False, dtype=BF16, name='mlp_gate')(y)) * up(y)
    else:
      y = nn.gelu(up(y))
    return x + nn.Dense(D, dtype=BF16, use_bias=not self.gated, name='mlp_down')(y)


class LM(nn.Module):
  gated: bool

  @nn.compact
  def __call__(self, tokens):
    embedding = nn.Embed(VOCABULARY, D, name='embedding')
    x = embedding(tokens).astype(BF16)
    for i in range(LAYERS):
      x = Block(self.gated, name=f'h_{i}')(x)
    return embedding.attend(nn.LayerNorm(dtype=BF16)(x).astype(jnp.float32))


FST = s24.recipes.transposable_srste('.*/mlp_.*kernel', masked_decay=6e-5)
STEPS = {
  'gpt2 fst': (False, FST), 'llama fst': (True, FST),
  'gpt2 s_ste fp8': (False, s24.recipes.s_ste('.*/mlp_.*kernel', fp8=True)),
  'llama fst fp8': (True, s24.recipes.transposable_srste('.*/mlp_.*kernel', masked_decay=6e-5, fp8=True)),
}  # fmt: skip


def optimised(gated: bool, recipe: s24.Recipe) -> str:
  """The HLO that XLA makes of a step."""
  model, tokens = LM(gated), struct(8, LENGTH, dtype=jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
  sparse = s24.sparsify(model, recipe, phase='sparse')
  optimizer = s24.sparse_training(optax.adamw(3e-4), recipe, phase='sparse')
  tx = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
  state = jax.eval_shape(tx.init, params)

  def step(params, state, tokens, key):
    variables = s24.sparse_variables(params, state, recipe, phase='sparse')

    def loss(params):
      rngs = {'mvue': jax.random.wrap_key_data(key)}
      y = sparse.apply({'params': params, 'sparse24': variables}, tokens, rngs=rngs)
      return optax.softmax_cross_entropy_with_integer_labels(y[:, :-1], tokens[:, 1:]).mean()

    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  return compiled(step, params, state, tokens, struct(2, dtype=jnp.uint32))


def fingerprint(hlo: str) -> dict[str, Any]:
  """What is compared of a program."""
  calls = re.findall(r'= (.*?) custom-call\(.*custom_call_target="([^"]+)"', hlo)
  return dict(
    calls=[[target, re.sub(r'\{[^}]*\}', '', shapes)] for shapes, target in calls],
    fusions=hlo.count(' fusion('), copies=hlo.count(' copy('),
  )


def compared(before: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
  """A line a case, those that only one of the two has included."""
  lines = []
  for name, now in found.items():
    said = 'as before' if now == before.get(name) else f'before {before.get(name, "not there")}, now {now}'
    lines.append(f'{name}: {len(now["calls"])} custom calls, {now["fusions"]} fusions, {now["copies"]} copies; {said}')
  return [*lines, *(f'{name}: before alone' for name in before if name not in found)]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--compare', type=pathlib.Path, help='the file of an earlier run; differences are an error')
  args = parser.parse_args()
  found = {name: fingerprint(optimised(*step)) for name, step in STEPS.items()}
  args.out.write_text(json.dumps(found, indent=0) + '\n')
  before = json.loads(args.compare.read_text()) if args.compare else found
  print('\n'.join(compared(before, found)))
  sys.exit(found != before)


if __name__ == '__main__':
  main()
