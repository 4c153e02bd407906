"""Training FLOPs of a run, counted from the model's shapes, the recipe's densities and the phases.

The count, in floating-point operations (a multiply and an add are two) of all tokens of all optimizer steps:

- Forward of a linear layer with a weight [in, out] and density d: 2 d in out a token. Its two gradients cost the same
  each. A step on which links grow by gradient takes the weight gradient of all entries; a sampled one, MVUE, takes half
  of the tokens. Sparse activations take part in four of the six matmuls of a feed-forward block, with two of M
  entries; weight gradients have a dense share of neurons.
- Scores and weighted sum of attention: 4 D a pair of query and attended key, three times for forward and backward; a
  token attends to the causal triangle (or the pattern's share of it), in as many query heads as there are.
- The language-model head, 2 D V a token and pass, dense, is counted or not, as told.

Left out: normalisation, activations, softmax, embedding look-up, optimizer, mask search; recomputation under remat.
Sparse matmuls count what they need, whatever the kernel does: unstructured masks make nothing faster. XLA's own count
of a dense step differs in one thing: it computes the whole attention square, for which there is `triangle=False`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict
import numpy as np

from experiments.runs import build
from experiments.runs.build import model_config
from experiments.runs.models import gpt2, llama
from experiments.runs.recipes import LINEAR, make_recipe
from experiments.runs.tasks import language
import sparse24_jax as s24
from sparse24_jax.attention import attended_share
from sparse24_jax.rules import is_weight, leaves_by_path, match_rules

# Output matrix of a model that does not share its embedding with it.
_HEAD = 'lm_head/kernel'
# Tokens of the tokenizers whose names tell.
VOCABULARIES = {'bytes': 256, 'gpt2': 50257}

type ModelConfig = gpt2.GPT2Config | llama.LlamaConfig


@dataclasses.dataclass(frozen=True)
class Count:
  """FLOPs of training, by part.

  Attributes:
    linear: the blocks' linear layers, forward and both gradients.
    attention: scores and weighted sums.
    head: the output matrix.
  """

  linear: float
  attention: float
  head: float

  def total(self, *, head: bool) -> float:
    """All parts, the language-model head counted or not."""
    return self.linear + self.attention + (self.head if head else 0.0)


@dataclasses.dataclass(frozen=True)
class Curve:
  """FLOPs of every optimizer step, float64 [steps] each; the fields of `Count`."""

  linear: np.ndarray
  attention: np.ndarray
  head: np.ndarray

  def sum(self, steps: int | None = None) -> Count:
    """The sums over the first `steps`, or over all of them if None."""
    return Count(*(float(part[:steps].sum()) for part in (self.linear, self.attention, self.head)))

  def cumulative(self, *, head: bool) -> np.ndarray:
    """FLOPs after each step, float64 [steps]."""
    return np.cumsum(self.linear + self.attention + (self.head if head else 0.0))


@functools.cache  # the runs of a report are of few models
def _abstract_params(config: ModelConfig) -> Any:
  tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  # Shapes are the same on a machine without cuDNN.
  make = llama.Llama if isinstance(config, llama.LlamaConfig) else gpt2.GPT2
  model = make(dataclasses.replace(config, attention='xla'))
  return jax.eval_shape(lambda t: model.init(jax.random.key(0), t)['params'], tokens)


def densities(recipe: s24.Recipe, params: Any, steps: int) -> dict[str, np.ndarray]:
  """Kept share of each sparse weight that the forward of each step reads, by path, float64 [steps]; 1 in dense phases.

  A mask drawn after step t, and each `refresh_every` steps, is the one of the steps after it. A recipe that `bind` made
  knows the axes of each weight; by itself it takes them for `[stacked..., in, out]`, as the models here have them.
  """
  stored = {path: p for path, rule in match_rules(params, recipe).items() if (p := rule.policy.projection)}
  leaves = dict(leaves_by_path(params))
  # As [stacked..., in, out], so that weights share out one density however they are stored.
  projections = {path: p.matrix or p for path, p in stored.items()}
  shapes = {path: p.layout_of(leaves[path]).matrix_shape(leaves[path].shape) for path, p in stored.items()}
  at = np.arange(steps)
  drawn, which = np.unique(at - at % recipe.refresh_every, return_inverse=True)
  sparse = _is_sparse(recipe, steps)
  shared: dict[s24.Projection, dict[str, Any]] = {}
  found = {}
  for path, projection in projections.items():
    if isinstance(projection.update, s24.Topology):
      if projection not in shared:
        together = {p: shapes[p] for p, other in projections.items() if other is projection}
        shared[projection] = projection.update.densities(jnp.asarray(drawn), together)
      density = np.broadcast_to(shared[projection][path], drawn.shape)[which].astype(np.float64)
      # Until the first update of a sparse phase the mask is what a dense one leaves: all links, or 2:4.
      for begin in np.flatnonzero(sparse[1:] & ~sparse[:-1]) + 1:
        first_update = (begin // recipe.refresh_every + 1) * recipe.refresh_every
        density[begin:first_update] = 0.5 if projection.update.structure else 1.0
    else:
      density = np.full(steps, _share_of_a_mask(projection, shapes[path][-2:]))
    found[path] = np.where(sparse, density, 1.0)
  return found


@functools.cache
def _share_of_a_mask(projection: s24.Projection, shape: tuple[int, int]) -> float:
  """What the mask of random weights keeps; of a part of them, as every group keeps as much and a search takes time."""
  part = tuple(min(size, 64 * group) for size, group in zip(shape, projection.divisor, strict=True))
  w = jax.random.normal(jax.random.key(0), part)
  return float(jnp.mean(projection.mask(w, projection.init(w))))


def _per_step(recipe: s24.Recipe, steps: int, value: Callable[[s24.Phase], Any]) -> np.ndarray:
  """`value` of the phase of every step, [steps]; phases begin where `phase_at` has them."""
  begins = [round(sum(p.fraction for p in recipe.phases[:i]) * steps) for i in range(len(recipe.phases))] + [steps]
  return np.repeat([value(phase) for phase in recipe.phases], np.diff(begins))


def _is_sparse(recipe: s24.Recipe, steps: int) -> np.ndarray:
  return _per_step(recipe, steps, lambda phase: phase.name == 'sparse')


def _grows_by_gradient(recipe: s24.Recipe, projection: s24.Projection, steps: int) -> np.ndarray:
  """Steps whose weight gradient is dense because links grow by it, bool [steps]."""
  topology = projection.update
  at = np.arange(1, steps + 1)
  if not isinstance(topology, s24.Topology) or topology.random_share >= 1:
    return np.zeros(steps, bool)
  moves = topology.drop_fraction
  zeta = np.asarray(moves(jnp.asarray(at))) if callable(moves) else np.full(steps, moves)
  due = (at % recipe.refresh_every == 0) & _is_sparse(recipe, steps)
  return due & ((zeta > 0) | callable(topology.density))


def count(
  config: ModelConfig, recipe: s24.Recipe, *, steps: int, batch: int, length: int, triangle: bool = True
) -> Curve:
  """FLOPs of every step of a run.

  Args:
    config: the model.
    recipe: what is sparse and when; also one that `bind` made, see `densities`.
    steps: optimizer steps.
    batch: sequences an optimizer step.
    length: tokens a sequence.
    triangle: count only the attended pairs; False counts the whole square, as dense attention computes it, and as it
      is for a model that is not causal.
  """
  params = _abstract_params(config)
  kept = densities(recipe, params, steps)
  rules = match_rules(params, recipe)
  tokens = float(batch * length)
  linear = np.zeros(steps)
  for path, leaf in leaves_by_path(params):
    if is_weight(path, leaf) and path != _HEAD:
      dense = 2.0 * math.prod(leaf.shape) * tokens
      linear += dense * _matmuls(recipe, rules.get(path), kept.get(path, np.ones(steps)))
  pairs = length * (length + 1) / 2 if triangle and getattr(config, 'causal', True) else float(length) ** 2
  attended = _per_step(
    recipe, steps, lambda phase: attended_share(phase.attention or config.attention_pattern, length)
  )
  attention = 3 * 4.0 * config.embed_dim * config.num_layers * batch * pairs * attended
  head = np.full(steps, 3 * 2.0 * config.embed_dim * config.vocab_size * tokens)
  return Curve(linear, attention, head)


def _matmuls(recipe: s24.Recipe, rule: s24.Rule | None, kept: np.ndarray) -> np.ndarray:
  """What is needed of a linear layer's three matmuls, in dense ones, [steps]."""
  if rule is None:
    return np.full(len(kept), 3.0)
  if activation := rule.activation:
    # One of forward and input gradient has the weight as its sparse operand; the other and the weight gradient have
    # the activations, but for a share of the neurons in the latter.
    share = np.where(_is_sparse(recipe, len(kept)), 2 / activation.features.group, 1.0)
    tokens = np.where(_is_sparse(recipe, len(kept)), 2 / activation.tokens.group, 1.0)
    whole = activation.dense_features
    return kept + share + whole + (1 - whole) * tokens
  return kept + _input_gradient(rule, kept) + _weight_gradient(recipe, rule, kept)


def _input_gradient(rule: s24.Rule, kept: np.ndarray) -> np.ndarray:
  """Share of the input-gradient matmul that is needed, [steps]: 2:4 along the other axis does not help it."""
  policy = rule.policy
  saves = policy.input_grad == 'sparse' or (policy.projection is not None and policy.projection.update is not None)
  return kept if saves else np.ones_like(kept)


def _weight_gradient(recipe: s24.Recipe, rule: s24.Rule, kept: np.ndarray) -> np.ndarray:
  """Share of the weight-gradient matmul that is needed, [steps].

  Moving topologies need it at their links, and everywhere where some grow by it; a sample has half of the tokens.
  """
  policy, steps = rule.policy, len(kept)
  moves = policy.projection is not None and policy.projection.update is not None
  entries = np.where(_grows_by_gradient(recipe, policy.projection, steps), 1.0, kept) if moves else np.ones(steps)
  return entries * np.where(_is_sparse(recipe, steps) & (policy.weight_grad != 'dense'), 0.5, 1.0)


def is_counted(config: Any) -> bool:
  """Whether FLOPs are counted for the task of a configuration: those of language models, masked ones included."""
  return build.task_of(config) in (language.NEXT_TOKEN, language.MASKED)


def of_experiment(config: Any, recipe: s24.Recipe, *, vocab_size: int) -> Curve:
  """`count` for a configuration of `experiments.runs.experiment`; ValueError for a model that is not known."""
  if not is_counted(config):
    raise ValueError(f'training FLOPs are counted for language models; task {config.task!r} is none')
  sizes = {'causal': False} if config.task == 'masked_lm' else {}
  try:
    made = model_config(config, {'vocab_size': vocab_size, **sizes})
    hash(made)
  except TypeError as error:  # a field of another version
    raise ValueError(f'model section: {error}') from error
  return count(made, recipe, steps=config.steps, batch=config.data.batch_size, length=config.data.seq_len)


def of_run(stored: Mapping[str, Any], *, head: bool = True) -> Curve | None:
  """`of_experiment` for the stored configuration of a run.

  Args:
    stored: the configuration.
    head: whether the head is asked for, which takes the vocabulary; else it is zero.

  Returns:
    None where a vocabulary that it takes is not known, and for tasks that are not counted.

  Raises:
    ValueError: a model or recipe that is not known, or not with these arguments: one of another version.
  """
  config: Any = ConfigDict(stored)
  vocab = VOCABULARIES.get(config.data.tokenizer)
  if (vocab is None and head) or not is_counted(config):
    return None
  curve = of_experiment(config, make_recipe(config), vocab_size=vocab or 1)
  return curve if head else dataclasses.replace(curve, head=np.zeros_like(curve.head))


def named_recipe(name: str) -> ConfigDict:
  """The recipe section of a configuration for a recipe with its defaults; dynamic sparse training on all linear layers.

  RigL, SET and static masks get density 0.2.
  """
  kwargs = {'path': LINEAR} if name in ('mixed_sparsity', 'rigl', 'set_', 'static') else {}
  if name in ('rigl', 'set_', 'static'):
    kwargs['density'] = 0.2  # the 80% sparsity of the baselines of arXiv 2408.11746
  return ConfigDict({'name': name, 'kwargs': kwargs, 'flip_rate': 'refresh'})


def table(curve: Curve, dense: Curve) -> list[tuple[str, float, float, float]]:
  """Rows of part, dense FLOPs, FLOPs, and dense over the recipe's; of parts and both totals."""
  ours, theirs = curve.sum(), dense.sum()
  rows = [(part, getattr(theirs, part), getattr(ours, part)) for part in ('linear', 'attention', 'head')]
  rows += [
    ('total, head not counted', theirs.total(head=False), ours.total(head=False)),
    ('total, head counted', theirs.total(head=True), ours.total(head=True)),
  ]
  return [(part, a, b, a / b) for part, a, b in rows]
