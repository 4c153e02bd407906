"""From a Hugging Face checkpoint to one with 2:4 weights: a Llama, Qwen 2, Qwen 3 or Gemma, trained on a text.

    pip install -e '.[hf]'
    python examples/finetune_hf.py --checkpoint Llama-3.2-1B --text book.txt --out Llama-3.2-1B-2of4

The maps of attention and feed-forward layers become 2:4 along their inputs, the last axis of `[out, in]`, and are
trained; every other tensor stays as it is. The folder written has the same files, names and dtypes, so that
`transformers` loads it, and whatever packs 2:4 weights can pack them.

The model is a function of the checkpoint's own tensors, by their own names: `bind` finds which axis is which.
"""

import argparse
import functools
import json
from pathlib import Path
import re
import shutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors
from safetensors.numpy import save_file
import tokenizers

import sparse24_jax as s24

WEIGHTS = r'model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight'
RECIPES = {
  # Sparse to the end: what the last sixth of FST, dense, would train cannot be packed.
  'transposable_srste': functools.partial(s24.recipes.transposable_srste, masked_decay=6e-5, dense_fraction=0),
  's_ste': s24.recipes.s_ste,
}
ACTIVATIONS = {'silu': jax.nn.silu, 'gelu_pytorch_tanh': jax.nn.gelu}


# The model.


def logits(tensors, tokens, config):
  """The logits of tokens `[batch, time]`, as `transformers` computes them."""
  embedding = tensors['model.embed_tokens.weight']
  x = jnp.take(embedding, tokens, axis=0)
  if config['model_type'] == 'gemma':
    x = x * jnp.asarray(config['hidden_size'] ** 0.5, x.dtype)
  for i in range(config['num_hidden_layers']):
    prefix = f'model.layers.{i}.'
    own = {name.removeprefix(prefix): w for name, w in tensors.items() if name.startswith(prefix)}
    x = jax.checkpoint(functools.partial(layer, config=config))(own, x)
  x = rms_norm(tensors['model.norm.weight'], x, config)
  return x @ tensors.get('lm_head.weight', embedding).T.astype(x.dtype)


def layer(tensors, x, config):
  """Attention and feed-forward block, with the tensors of one layer."""

  def linear(name, x):
    y = x @ tensors[f'{name}.weight'].T.astype(x.dtype)
    bias = tensors.get(f'{name}.bias')
    return y if bias is None else y + bias[None, None].astype(y.dtype)

  def heads(name, norm):
    y = linear(f'self_attn.{name}', x_normed).reshape(*x.shape[:2], -1, head_dim)
    scale = tensors.get(f'self_attn.{norm}.weight')  # Qwen 3
    return y if scale is None else rms_norm(scale, y, config)

  head_dim = config.get('head_dim') or config['hidden_size'] // config['num_attention_heads']
  x_normed = rms_norm(tensors['input_layernorm.weight'], x, config)
  q, k, v = heads('q_proj', 'q_norm'), heads('k_proj', 'k_norm'), heads('v_proj', None)
  mixed = jax.nn.dot_product_attention(rotate(q, config), rotate(k, config), v, is_causal=True)
  x = x + linear('self_attn.o_proj', mixed.reshape(*x.shape[:2], -1))
  x_normed = rms_norm(tensors['post_attention_layernorm.weight'], x, config)
  activation = ACTIVATIONS[activation_of(config)]
  return x + linear('mlp.down_proj', activation(linear('mlp.gate_proj', x_normed)) * linear('mlp.up_proj', x_normed))


def rms_norm(scale, x, config):
  wide = x.astype(jnp.float32)
  wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + config['rms_norm_eps'])
  scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
  if config['model_type'] == 'gemma':
    return (wide * (1 + scale.astype(jnp.float32))).astype(x.dtype)
  return wide.astype(x.dtype) * scale.astype(x.dtype)


def rotate(x, config):
  """Rotary positions of heads `[batch, time, heads, head_dim]`, halves of a head paired."""
  rope, half = rope_of(config), x.shape[-1] // 2
  rates = rope['rope_theta'] ** (-np.arange(half) / half)
  if rope['rope_type'] == 'llama3':  # slow turns are slowed down, fast ones are not, and between them some
    turns = rope['original_max_position_embeddings'] * rates / (2 * np.pi)
    low, high = rope['low_freq_factor'], rope['high_freq_factor']
    kept = np.clip((turns - low) / (high - low), 0, 1)
    rates = rates * (kept + (1 - kept) / rope['factor'])
  angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * jnp.asarray(rates, jnp.float32)[None]
  cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rope_of(config):
  """Settings of the rotary positions: under one name since `transformers` 5, under two before."""
  found = config.get('rope_parameters') or {
    'rope_theta': config.get('rope_theta', 10_000.0), **(config.get('rope_scaling') or {})
  }
  return {'rope_type': found.get('type', 'default'), **found}


def activation_of(config):
  # The first Gemma files say 'gelu', and mean its approximation.
  return 'gelu_pytorch_tanh' if config['model_type'] == 'gemma' else config.get('hidden_act', 'silu')


def check_config(config):
  """Refuses what `logits` does not compute."""
  accepted = {
    'model_type': (config['model_type'], ('llama', 'qwen2', 'qwen3', 'gemma')),
    'hidden_act': (activation_of(config), tuple(ACTIVATIONS)),
    'rope_type': (rope_of(config)['rope_type'], ('default', 'llama3')),
    'use_sliding_window': (config.get('use_sliding_window', False), (False,)),
    'quantization_config': (config.get('quantization_config'), (None,)),
  }
  for name, (found, known) in accepted.items():
    if found not in known:
      raise ValueError(f'config.json: {name} is {found!r}, and this program knows {", ".join(map(repr, known))}')


# Files.


def read(folder):
  """The configuration, and all tensors by name."""
  config = json.loads((folder / 'config.json').read_text())
  check_config(config)
  tensors = {}
  for path in files(folder):
    with safetensors.safe_open(path, 'np') as file:
      tensors.update(file.get_tensors())
  if config.get('tie_word_embeddings', config['model_type'] == 'gemma'):
    tensors.pop('lm_head.weight', None)  # the same array, where it was written
  return config, tensors


def write(folder, source, trained):
  """The files of another folder, with some of the tensors new."""
  folder.mkdir(parents=True)
  for path in source.iterdir():
    if path.is_file() and path.suffix != '.safetensors':
      shutil.copy(path, folder)
  for path in files(source):
    with safetensors.safe_open(path, 'np') as file:
      tensors, about = file.get_tensors(), file.metadata()
    new = {name: np.asarray(trained[name]).astype(w.dtype) for name, w in tensors.items() if name in trained}
    save_file({**tensors, **new}, folder / path.name, about)


def files(folder):
  found = sorted(folder.glob('*.safetensors'))
  if not found:
    raise ValueError(f'{folder}: found no *.safetensors')
  return found


def rows_of(text, checkpoint, length):
  """Rows of `length + 1` tokens: those to train on, and the last tenth, to evaluate."""
  encoded = tokenizers.Tokenizer.from_file(str(checkpoint / 'tokenizer.json')).encode(text.read_text())
  rows = np.asarray(encoded.ids[: len(encoded.ids) // (length + 1) * (length + 1)], np.int32).reshape(-1, length + 1)
  held_out = len(rows) // 10
  if not held_out:
    raise ValueError(f'{text}: {len(encoded.ids)} tokens are too few, give at least {10 * (length + 1)}')
  return rows[:-held_out], rows[-held_out:]


# Training.


def loss_fn(weights, others, rows, *, config):
  """Mean cross-entropy of the next tokens."""
  z = logits({**others, **weights}, rows[:, :-1], config).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(z, rows[:, 1:]).mean()


class Trained(NamedTuple):
  """Dense weights, the optimizer state, which has their masks, and losses on held-out text."""

  weights: dict
  opt_state: Any
  bound: s24.Bound
  losses: dict


def train(config, tensors, train_rows, held_out, *, recipe, steps, batch, learning_rate):
  """Trains the matched weights; the other tensors stay as they are."""
  # Steps of fine-tuning are lost in bfloat16: weights are float32, and computed with in the dtype of the checkpoint.
  weights = {name: jnp.asarray(w, jnp.float32) for name, w in tensors.items() if re.fullmatch(WEIGHTS, name)}
  others = {name: jnp.asarray(w) for name, w in tensors.items() if name not in weights}
  dense_loss = functools.partial(loss_fn, config=config)
  bound = s24.bind(RECIPES[recipe](WEIGHTS), dense_loss, weights, others, train_rows[:batch])
  sparse_loss = s24.sparsify(dense_loss, bound)
  adam = optax.adamw(optax.cosine_decay_schedule(learning_rate, steps))
  tx = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(adam, bound))
  opt_state = tx.init(weights)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(weights, opt_state, others, rows, key):
    variables = s24.sparse_variables(weights, opt_state, bound)
    loss, grads = jax.value_and_grad(sparse_loss)(weights, variables, key, others, rows)
    updates, opt_state = tx.update(grads, opt_state, weights)
    return optax.apply_updates(weights, updates), opt_state, loss

  @jax.jit
  def evaluate_dense(weights, others, rows):
    return jnp.mean(jax.lax.map(lambda row: dense_loss(weights, others, row[None]), rows))

  @jax.jit
  def evaluate_sparse(weights, opt_state, others, rows):
    variables = s24.sparse_variables(weights, opt_state, bound)
    return jnp.mean(jax.lax.map(lambda row: sparse_loss(weights, variables, None, others, row[None]), rows))

  losses = {
    'dense, before': float(evaluate_dense(weights, others, held_out)),
    '2:4, before': float(evaluate_sparse(weights, opt_state, others, held_out)),
  }
  rng = np.random.default_rng(0)
  for i in range(steps):
    rows = train_rows[rng.choice(len(train_rows), batch, replace=False)]
    weights, opt_state, loss = step(weights, opt_state, others, rows, jax.random.fold_in(jax.random.key(0), i))
    if (i + 1) % 100 == 0:
      print(f'step {i + 1}: loss {float(loss):.4f}', flush=True)
  losses['2:4, after'] = float(evaluate_sparse(weights, opt_state, others, held_out))
  return Trained(weights, opt_state, bound, losses)


def main(checkpoint, text, out, *, length=1024, **settings):
  """Reads, trains, evaluates and writes."""
  checkpoint, text, out = Path(checkpoint), Path(text), Path(out)
  if out.exists():
    raise ValueError(f'{out} exists: name a new folder')
  config, tensors = read(checkpoint)
  trained = train(config, tensors, *rows_of(text, checkpoint, length), **settings)
  for name, loss in trained.losses.items():
    print(f'held-out loss, {name}: {loss:.4f}')
  write(out, checkpoint, s24.project(trained.weights, trained.opt_state, trained.bound))
  return trained


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--checkpoint', required=True, help='folder with config.json, tokenizer.json and *.safetensors')
  parser.add_argument('--text', required=True, help='file to train on; its last tenth is held out')
  parser.add_argument('--out', required=True, help='folder to write')
  parser.add_argument('--recipe', choices=RECIPES, default='transposable_srste')
  parser.add_argument('--steps', type=int, default=1000)
  parser.add_argument('--batch', type=int, default=8, help='rows in a step')
  parser.add_argument('--length', type=int, default=1024, help='tokens in a row')
  parser.add_argument('--learning-rate', type=float, default=2e-5)
  main(**vars(parser.parse_args()))
