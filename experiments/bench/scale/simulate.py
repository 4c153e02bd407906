"""Counts what devices exchange: a small Llama's step, mask refresh and packing, compiled for many simulated devices."""

from collections.abc import Mapping
import json
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.meshes import communication
from experiments.runs import build, experiment, meshes, programs
from experiments.runs.experiment import Config
import sparse24_jax as s24

# Whole groups of four, and whole bytes of metadata, on each of 64 devices.
_MODEL = {'num_layers': 2, 'num_heads': 4, 'num_kv_heads': 2, 'embed_dim': 512, 'hidden_dim': 2048}
# How layers are run.
WAYS = {'one by one': {}, 'recomputed': {'remat': True}, 'in a loop': {'scan_layers': True}}
RECIPES = {'dense': ('dense', {}), 'sparse': ('transposable_srste', {'masked_decay': 2e-4, 'refresh_every': 4})}
# More tokens than neurons, as in training: of fewer XLA moves the tokens and not the weights.
_ROWS = 64
# Devices -> (data, fsdp, model)
LAYOUTS = {8: ((8, 1, 1), (1, 8, 1), (1, 2, 4)), 64: ((64, 1, 1), (1, 64, 1), (1, 8, 8))}
_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's32': 4, 'u32': 4, 'f32': 4}
_EXCHANGE = re.compile(r' = (.*?) (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(')


class _Tokens:
  """Stands for a corpus: only shapes are compiled."""

  vocab_size, tokenizer, fingerprint = 512, None, 'none'

  def train(self) -> None:
    """No batches."""


def config_of(layout: tuple[int, int, int], twin: str, model: Mapping[str, Any] = _MODEL) -> Config:
  """A Llama of `model` on a mesh of (data, fsdp, model)."""
  data, fsdp, tensor = layout
  size = [f'model.{key}={value}' for key, value in model.items()]
  mesh = [f'mesh.data={data}', f'mesh.fsdp={fsdp}', f'mesh.model={tensor}', f'data.batch_size={_ROWS}']
  config = experiment.load_config('llama_nano', [*size, *mesh, 'recipe.flip_rate=refresh'])
  name, kwargs = RECIPES[twin]
  with config.unlocked():
    config.recipe.update({'name': name, 'kwargs': kwargs})
  return config


def traffic(text: str) -> int:
  """Bytes that the exchanges of a compiled program leave on a device, scalars left out; in a loop's body once.

  >>> traffic('%a = f32[2,3]{1,0} all-reduce(%b)\\n%c = f32[] all-reduce(%d)')
  24
  """
  total = 0
  for result in _EXCHANGE.findall(text):
    for kind, sizes in re.findall(r'(\w+)\[([\d,]+)\]', result):
      total += _BYTES[kind] * math.prod(map(int, sizes.split(',')))
  return total


def step(layout: tuple[int, int, int], twin: str, model: Mapping[str, Any] = _MODEL) -> dict[str, Any]:
  """The collectives of the training step."""
  parts = build.make_parts(config_of(layout, twin, model), data=_Tokens())
  made = programs.Programs(parts)
  state, batches = _shapes(parts, made)
  text = made.step(*build.phase_of(parts, 0)).lower(state, batches, 0, math.inf).compile().as_text()
  return {'exchanges': communication(text), 'bytes': traffic(text)}


def _shapes(parts: build.Parts, made: programs.Programs) -> tuple[Any, Any]:
  shapes = jax.eval_shape(made.init, 0)
  shardings = meshes.state_sharding(parts.mesh, shapes)
  state = jax.tree.map(lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, shardings)
  config = parts.config.data
  split = jax.sharding.NamedSharding(parts.mesh, jax.sharding.PartitionSpec(None, meshes.BATCH))
  tokens = jax.ShapeDtypeStruct((1, config.batch_size, config.seq_len), jnp.int32, sharding=split)
  return state, {'inputs': tokens, 'targets': tokens}


def search_and_pack(layout: tuple[int, int, int], model: Mapping[str, Any] = _MODEL) -> dict[str, dict[str, int]]:
  """Exchanges of a search for masks, and of packing along both axes, of all sparse weights in their shards."""
  parts = build.make_parts(config_of(layout, 'sparse', model), data=_Tokens())
  state, _ = _shapes(parts, programs.Programs(parts))
  weights = [w for path, w in jax.tree_util.tree_leaves_with_path(state.params) if 'mlp' in jax.tree_util.keystr(path)]
  masks = [jax.ShapeDtypeStruct(w.shape, jnp.bool_, sharding=w.sharding) for w in weights]
  projection = s24.transposable()

  def search(weights: Any, masks: Any) -> Any:
    return [projection.refresh(w, mask) for w, mask in zip(weights, masks, strict=True)]

  def pack(weights: Any, masks: Any) -> Any:
    return [[s24.compress(w, m, axis=axis) for axis in (-2, -1)] for w, m in zip(weights, masks, strict=True)]

  found = {}
  for name, f in (('mask refresh', search), ('packing', pack)):
    found[name] = communication(jax.jit(f).lower(weights, masks).compile().as_text() or '')
  return found


def main(devices: int) -> None:
  """Prints a line of JSON for each layout; the process must have been started with so many simulated devices."""
  assert np.size(jax.devices()) == devices
  for layout in LAYOUTS[devices]:
    exchanges = search_and_pack(layout)
    for way, fields in WAYS.items():
      twins = {twin: step(layout, twin, {**_MODEL, **fields}) for twin in RECIPES}
      print(json.dumps({'devices': devices, 'layout': layout, 'layers': way, **twins, **exchanges}), flush=True)
