"""What `tracking` trains: a byte-level GPT-2 by one recipe with one implementation, and the bytes it reads."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import measure
from experiments.models import gpt2
import sparse24_jax as s24

FFN = r'.*/mlp/.*'
RECIPES = {
  'dense': None,
  'transposable_srste': s24.recipes.transposable_srste(FFN, masked_decay=6e-3, refresh_every=40),
  's_ste_fp8': s24.recipes.s_ste(FFN, fp8=True),
}
# Steps of one compiled call, and of one point of a curve.
STRIDE = 10
# One byte in so many is held out, at the end of the file.
HELD_OUT = 16


@dataclasses.dataclass(frozen=True)
class Scale:
  """Sizes of a run.

  Attributes:
    width: of the model; its feed-forward layers are four times as wide.
    layers: blocks.
    length: positions of a sequence.
    batch: sequences a step.
    evaluated: batches of the last evaluation.
    attention: of the model.
  """

  width: int = 512
  layers: int = 4
  length: int = 512
  batch: int = 16
  evaluated: int = 16
  attention: str = 'cudnn'


TINY = Scale(width=32, layers=2, length=32, batch=4, evaluated=2, attention='xla')


class State(NamedTuple):
  """What a step carries."""

  params: Any
  opt_state: Any
  step: Array


class Method:
  """One recipe with one implementation: its compiled programs, for any seed.

  Args:
    recipe: a key of `RECIPES`.
    implementation: of the policies: a back end, or 'reference'.
    scale: sizes.
    steps: of the run, for the learning rate.
  """

  def __init__(self, recipe: str, implementation: str, scale: Scale, steps: int):
    self.recipe_name, self.implementation, self.scale = recipe, implementation, scale
    found = RECIPES[recipe]
    self.recipe = None if found is None else measure.with_implementation(found, implementation)
    self.plain = None if found is None else measure.with_implementation(found, 'reference')
    self.model = gpt2.GPT2(gpt2.GPT2Config(
      vocab_size=256, seq_len=scale.length, num_layers=scale.layers, num_heads=max(scale.width // 64, 2),
      embed_dim=scale.width, dtype='bfloat16', scan_layers=True, attention=scale.attention,
    ))  # fmt: skip
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, max(steps // 10, 1), steps, 1e-4)
    inner = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1)
    wrapped = inner if self.recipe is None else s24.sparse_training(inner, self.recipe)
    self.tx = optax.chain(optax.clip_by_global_norm(1.0), wrapped)

  @property
  def name(self) -> str:
    """Of its curve."""
    return self.recipe_name if self.recipe is None else f'{self.recipe_name} {self.implementation}'

  def init(self, seed: Array) -> State:
    """Weights and optimizer state: the same for every method of a seed, but for the masks."""
    params = self.model.init(jax.random.key(seed), jnp.zeros((1, self.scale.length), jnp.int32))['params']
    return State(params, self.tx.init(params), jnp.zeros((), jnp.int32))

  def loss(self, params: Any, opt_state: Any, text: Array, key: Array | None, *, recipe: s24.Recipe | None) -> Array:
    """Nats a byte of `text` [batch, length + 1]."""
    net, variables = self.model, {'params': params}
    if recipe is not None:
      net = s24.sparsify(self.model, recipe)
      variables['sparse24'] = s24.sparse_variables(params, opt_state, recipe)
    tokens = text.astype(jnp.int32)
    logits = net.apply(variables, tokens[:, :-1], rngs={} if key is None else {'mvue': key})
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

  def train(self, state: State, data: Array, starts: Array, seed: Array) -> tuple[State, Array]:
    """`STRIDE` steps; their mean loss. `starts` [STRIDE, batch] are offsets into `data`."""

    def step(state: State, starts: Array) -> tuple[State, Array]:
      key = jax.random.fold_in(jax.random.key(seed + 1000), state.step)
      of = functools.partial(self.loss, recipe=self.recipe)
      loss, grads = jax.value_and_grad(of)(state.params, state.opt_state, self._cut(data, starts), key)
      updates, opt_state = self.tx.update(grads, state.opt_state, state.params)
      return State(optax.apply_updates(state.params, updates), opt_state, state.step + 1), loss

    state, losses = jax.lax.scan(step, state, starts)
    return state, losses.mean()

  def evaluate(self, state: State, data: Array, starts: Array) -> Array:
    """Mean loss of the sequences at `starts` [batches, batch], by the plain op."""
    plain = functools.partial(self.loss, state.params, state.opt_state, key=None, recipe=self.plain)
    return jax.lax.map(lambda row: plain(self._cut(data, row)), starts).mean()

  def _cut(self, data: Array, starts: Array) -> Array:
    return jax.vmap(lambda start: jax.lax.dynamic_slice(data, (start,), (self.scale.length + 1,)))(starts)


def offsets(size: int, scale: Scale, steps: int) -> tuple[np.ndarray, np.ndarray]:
  """Where the sequences of every step start, [steps, batch], and those of the evaluation, in the part held out.

  Raises:
    ValueError: the file is too small.
  """
  kept, span = size - size // HELD_OUT, scale.length + 1
  if size - kept < span * 2 or kept < span * 2:
    raise ValueError(f'a token file of {size} bytes is too small for sequences of {scale.length}')
  draw = np.random.default_rng(0)
  train = draw.integers(0, kept - span, (steps, scale.batch), dtype=np.int32)
  return train, draw.integers(kept, size - span, (scale.evaluated, scale.batch), dtype=np.int32)


def prepare(file: Path, size: int = 4 << 20) -> None:
  """Writes bytes of the default corpus, documents in random order: what is held out is other documents."""
  from experiments.data import corpora  # needs the package of the corpus

  texts = [text for _, text in corpora.read('aws_docs')['train']]
  order = np.random.default_rng(0).permutation(len(texts))
  joined, length = [], 0
  for i in order:
    joined.append(texts[i].encode() + b'\n\n')
    length += len(joined[-1])
    if length >= size:
      break
  file.parent.mkdir(parents=True, exist_ok=True)
  np.save(file, np.frombuffer(b''.join(joined)[:size], np.uint8))
