"""The programs of one contender: rate, decay, seed and length are arguments, so that all its trials share them."""

from collections.abc import Callable
import concurrent.futures
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax

from experiments.runs.build import is_matrix, wrapped
from experiments.runs.models.layers import cross_entropy
from experiments.runs.race.contenders import Contender, MANY_STEPS
from experiments.runs.recipes import eval_recipe
import sparse24_jax as s24
from sparse24_jax.projection import is_searched
from sparse24_jax.rules import leaves_by_path, match_rules

B1, B2, EPS, WEIGHT_DECAY, CLIP = 0.9, 0.95, 1e-8, 0.1, 1.0


class State(NamedTuple):
  """The state of training."""

  params: Any
  opt_state: Any
  step: Array


class Numbers(NamedTuple):
  """The settings that a step is given: float32 scalars and the seed; `steps` are those of the run."""

  rate: Any
  decay: Any
  seed: Any
  steps: Any


def scale_by_given_rate() -> optax.GradientTransformationExtraArgs:
  """Minus the rate that `update` is called with."""

  def update(updates: Any, state: Any, params: Any = None, *, rate: Any, **extra: Any):
    del params, extra
    return jax.tree.map(lambda u: -rate * u, updates), state

  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def optimizer(recipe: s24.Recipe, phase: str, rate: Any = 0.0) -> optax.GradientTransformationExtraArgs:
  """Clipping and AdamW with decay on matrices only, in the recipe's wrapper if it has rules.

  The rate is that of decay on weights; steps are given theirs by `update`.
  """
  adamw = optax.chain(
    optax.scale_by_adam(B1, B2, EPS), optax.add_decayed_weights(WEIGHT_DECAY, is_matrix), scale_by_given_rate()
  )
  clip = optax.clip_by_global_norm(CLIP)
  return wrapped(clip, adamw, recipe, phase, rate) if recipe.rules else optax.chain(clip, adamw)


def windows(tokens: Array, starts: Array, length: int) -> tuple[Array, Array]:
  """Inputs and targets, int32 [B, T], of the windows of `tokens` [n] that begin at `starts` [B]."""
  found = tokens[starts[:, None] + jnp.arange(length + 1)[None]].astype(jnp.int32)
  return found[:, :-1], found[:, 1:]


class Programs:
  """The compiled programs of a contender, made ahead of time; call `lower`, then `compile`, once, from any thread.

  Args:
    model: linen model.
    contender: whose recipe it is.
    batch: sequences a step.
    tokens: shape and dtype of the training text, which lies on the device.
    held_out: starts of the windows that are evaluated, [batches, B].

  Raises:
    ValueError: so few sequences that a block of sparse activations would hold tokens of several positions.
  """

  def __init__(self, model: Any, contender: Contender, batch: int, tokens: Any, held_out: Array):
    self.model, self.recipe, self.batch, self.tokens, self.held_out = model, contender.make, batch, tokens, held_out
    self.from_pruned = contender.dense_from == 'projected'
    self.length = model.config.seq_len
    self.described = self.recipe(0.0, MANY_STEPS)
    for rule in self.described.rules:
      if rule.activation and batch % (block := rule.activation.features.block):
        raise ValueError(
          f'--batch {batch}: a block of {rule.activation.features} activations is the tokens of one position in {block}'
          f' sequences, so a step takes {block} sequences or a multiple, as --batch {max(128, block)} of a size with'
          ' short ones (124m_short, wide2048_3_short); or leave this contender out'
        )
    # Shares of the steps, in the order of the phases.
    self.phases = [(p.name, p.fraction) for p in self.described.phases]

  @functools.cached_property
  def shapes(self) -> State:
    """The shapes of a state."""
    return jax.eval_shape(self._init, jnp.int32(0))

  def lower(self) -> None:
    """Traces the initial state, and the steps and an evaluation of each phase.

    Kernels without a record are checked meanwhile, for which nothing else may run on the GPU.
    """
    seed = jax.ShapeDtypeStruct((), jnp.int32)
    held_out = jax.ShapeDtypeStruct(self.held_out.shape, self.held_out.dtype)
    jobs = {'init': (jax.jit(self._init), (seed,))}
    for phase in dict(self.phases):
      jobs |= {(phase, refresh): self.step_of(phase, refresh) for refresh in self.refreshes}
      evaluate = jax.jit(functools.partial(self._evaluate, phase))
      jobs[phase] = evaluate, (self.shapes, self.tokens, held_out)
    if self.from_pruned:
      jobs['prune'] = jax.jit(self._prune, donate_argnums=0), (self.shapes,)
    self._lowered = {name: f.lower(*arguments) for name, (f, arguments) in jobs.items()}

  def compile(self) -> None:
    """Compiles what was traced, side by side."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
      made = {name: pool.submit(lowered.compile) for name, lowered in self._lowered.items()}
    self._made = {name: compiled.result() for name, compiled in made.items()}
    self.init = self._made['init']

  def enter(self, phase: str, state: State) -> State:
    """The state that the first step of a phase starts from; `state` may be given away."""
    return self._made['prune'](state) if self.from_pruned and phase == 'dense' else state

  @functools.cached_property
  def refreshes(self) -> tuple[bool | None, ...]:
    """Values of `refresh` to compile for: if the search were part of every step, each would wait for its loop.

    Where nothing is searched, one program serves all steps: a race reads no flip rates.
    """
    if self.described.refresh_every == 1:
      return (None,)
    rules, leaves = match_rules(self.shapes.params, self.described), dict(leaves_by_path(self.shapes.params))
    found = [(rule.policy.projection, leaves[path]) for path, rule in rules.items()]
    return (False, True) if any(p and is_searched(p, w.shape, w.dtype) for p, w in found) else (False,)

  def step(self, phase: str, step: int) -> Any:
    """The compiled step of a phase, for a step with or without a mask search."""
    return self._made[phase, self.refreshes[-1] and s24.refresh_at(self.described, step)]

  def evaluate(self, phase: str) -> Any:
    """The compiled evaluation of a phase."""
    return self._made[phase]

  def memory_gb(self, phase: str) -> float | None:
    """Temporaries of most steps of a phase; None where XLA does not tell."""
    found = self._made[phase, self.refreshes[0]].memory_analysis()
    return None if found is None else round(found.temp_size_in_bytes / 1e9, 2)

  def step_of(self, phase: str, refresh: bool | None = None) -> tuple[Any, tuple[Any, ...]]:
    """The jitted step of a phase and the shapes of its arguments."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    starts = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
    numbers = Numbers(scalar, scalar, jax.ShapeDtypeStruct((), jnp.int32), scalar)
    step = jax.jit(functools.partial(self._step, phase, refresh), donate_argnums=0)
    return step, (self.shapes, self.tokens, starts, numbers)

  def _init(self, seed: Array) -> State:
    params = self.model.init(jax.random.key(seed), jnp.zeros((1, self.length), jnp.int32))['params']
    return State(params, optimizer(self.described, self.phases[0][0]).init(params), jnp.zeros((), jnp.int32))

  def _prune(self, state: State) -> State:
    return state._replace(params=s24.project(state.params, state.opt_state, self.described, phase='sparse'))

  def _loss(
    self, phase: str, params: Any, opt_state: Any, recipe: Any, *, trains: bool
  ) -> Callable[..., Array]:
    """(params, inputs, targets, key) -> mean loss, with the weights packed once; activations are evaluated dense."""
    model, sparse = self.model, {}
    if phase == 'dense' or not trains:  # there are no blocks of tokens, and to reorder them takes time
      model = model.clone(config=dataclasses.replace(model.config, ffn_order='sequence'))
    if recipe.rules:
      model = s24.sparsify(model, recipe if trains else eval_recipe(recipe), phase=phase)
      sparse = s24.sparse_variables(params, opt_state, recipe, phase=phase)

    def loss(params: Any, inputs: Array, targets: Array, key: Array) -> Array:
      logits = model.apply({'params': params, 'sparse24': sparse}, inputs, rngs={'mvue': key})
      return cross_entropy(logits, targets).mean()

    return loss

  def _step(
    self, phase: str, refresh: bool | None, state: State, tokens: Array, starts: Array, numbers: Numbers
  ) -> tuple[State, tuple[Array, Array]]:
    """One step; returns the loss and the norm of the gradient before it is clipped."""
    recipe = self.recipe(numbers.decay, numbers.steps)
    key = jax.random.fold_in(jax.random.key(numbers.seed + 1), state.step)
    inputs, targets = windows(tokens, starts, self.length)
    loss_of = self._loss(phase, state.params, state.opt_state, recipe, trains=True)
    loss, grads = jax.value_and_grad(loss_of)(state.params, inputs, targets, key)
    updates, opt_state = optimizer(recipe, phase, numbers.rate).update(
      grads, state.opt_state, state.params, rate=numbers.rate, refresh=refresh
    )
    params = optax.apply_updates(state.params, updates)
    return State(params, opt_state, state.step + 1), (loss, optax.tree.norm(grads))

  def _evaluate(self, phase: str, state: State, tokens: Array, held_out: Array) -> Array:
    """Mean loss of windows [batches, B]; weights as in training, activations dense."""
    loss_of = self._loss(phase, state.params, state.opt_state, self.described, trains=False)

    def one(starts: Array) -> Array:
      return loss_of(state.params, *windows(tokens, starts, self.length), jax.random.key(0))

    return jax.lax.map(one, held_out).mean()
