"""What a configuration compiles to: initial state, training step, evaluation."""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from experiments.runs import activations, bad_numbers, build, meshes, sums
from experiments.runs.build import Parts
from experiments.runs.recipes import eval_recipe
import sparse24_jax as s24
from sparse24_jax.attention import Attention


class TrainState(NamedTuple):
  """What a step carries: int32 `step` (optimizer steps done), parameters, optimizer state."""

  step: jax.Array
  params: Any
  opt_state: Any


class StepMetrics(NamedTuple):
  """What a step reports, still on the device: float32 scalars, `flip_rates` [number of sparse weights], and `good`.

  Flip rates are those of the state: below 0 before the first comparison, NaN where a weight is not finite.
  `good` is whether loss and gradient are finite; with the policy 'skip' also whether the loss is no jump and the new
  state is finite, and if not the step changed nothing.
  """

  loss: jax.Array
  grad_norm: jax.Array
  learning_rate: jax.Array
  flip_rate: jax.Array
  flip_rates: jax.Array
  good: jax.Array | bool = True


def init_state(parts: Parts) -> TrainState:
  """Initial state, already in its shards; depends on `config.seed` only."""
  return make_init(parts)(parts.config.seed)


def make_init(parts: Parts) -> Callable[[int], TrainState]:
  """Compiles to one program: seed -> initial state, already in its shards."""
  example = build.family_of(parts.config).example(parts.model.config)
  tx = build.make_optimizer(parts.config, parts.recipe, s24.phase_at(parts.recipe, 0, parts.config.steps))

  def init(seed: int) -> TrainState:
    params = parts.model.init(jax.random.key(seed), *example)['params']
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))

  if parts.mesh is None:
    return jax.jit(init, out_shardings=first_device())
  return jax.jit(init, out_shardings=meshes.state_sharding(parts.mesh, jax.eval_shape(init, parts.config.seed)))


def make_restart(parts: Parts, sharding: Any) -> Callable[[Any], TrainState]:
  """Compiles to one program: parameters -> the state of a run that begins with them."""
  tx = build.make_optimizer(parts.config, parts.recipe, s24.phase_at(parts.recipe, 0, parts.config.steps))
  sharding = sharding or first_device()
  return jax.jit(lambda p: TrainState(jnp.zeros((), jnp.int32), p, tx.init(p)), out_shardings=sharding)


def first_device() -> jax.sharding.Sharding:
  """Said of a first state as of one from a checkpoint: for what is left to JAX each program is compiled once more."""
  return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def outputs_of(
  model: Any, params: Any, sparse: Any, inputs: Sequence[jax.Array], key: jax.Array, mesh: Mesh | None = None
) -> jax.Array:
  """What the model makes of its inputs; with a mesh these are a batch that it splits."""
  key_mvue, key_dropout = jax.random.split(key)
  rngs = {'mvue': key_mvue, 'dropout': key_dropout}
  with meshes.rows_stay_split(mesh):
    return model.apply({'params': params, 'sparse24': sparse}, *inputs, rngs=rngs)


class Told(NamedTuple):
  """What a step may be told that its configuration says too, so that runs which differ in it share a program.

  Attributes:
    times: learning rates, as a multiple of those of the configuration.
    decay: the recipe's masked decay; None is its own.
  """

  times: Any = 1
  decay: Any = None


def make_step(
  parts: Parts, phase: str, shardings: Any, attention: Attention = None, refresh: bool | None = None
) -> Callable[..., tuple[TrainState, StepMetrics]]:
  """Compiles to one program a phase: see `step_of` for what it takes; the state is given away."""
  return jax.jit(step_of(parts, phase, attention, refresh), donate_argnums=0, out_shardings=shardings)


def step_of(
  parts: Parts, phase: str, attention: Attention = None, refresh: bool | None = None
) -> Callable[..., tuple[TrainState, StepMetrics]]:
  """(state, micro-batches [accumulate, B, ...], seed, limit, told) -> (state, metrics), to be compiled.

  With `refresh` False it is one of steps that choose no masks, see `build.refresh_of`.

  The seed, for sampling, is that of the configuration unless given: runs that differ in it share the program. A loss
  above `limit` is a bad one, for the policy 'skip'.
  """
  config, task = parts.config, parts.task
  skips = bad_numbers.policy_of(config).name == 'skip'
  deterministic = not parts.model.config.dropout
  blocks = phase == 'sparse' and any(rule.activation for rule in parts.recipe.rules)
  model = build.model_for(parts, attention, blocks=blocks, deterministic=deterministic)
  model = s24.sparsify(model, parts.recipe, phase=phase)

  def step(
    state: TrainState, batches: dict[str, jax.Array], seed: int = config.seed, limit: float = math.inf,
    told: Told | None = None,
  ) -> tuple[TrainState, StepMetrics]:  # fmt: skip
    told = told or Told()
    recipe = parts.recipe if told.decay is None else dataclasses.replace(parts.recipe, masked_decay=told.decay)
    tx = build.make_optimizer(config, recipe, phase, told.times)
    # Every step's key comes from its number, so a resumed run draws what the interrupted one would have drawn.
    key = jax.random.fold_in(jax.random.key(seed + 1), state.step)
    # Masks of this optimizer step, for all micro-batches: read from the optimizer state, searched by its update.
    sparse = s24.sparse_variables(state.params, state.opt_state, recipe, phase=phase)

    def loss_fn(params: Any, sparse: Any, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
      inputs = [batch[name] for name in task.inputs]
      return task.loss(outputs_of(model, params, sparse, inputs, key, parts.mesh), batch)

    value_and_grad = jax.value_and_grad(loss_fn)

    def micro_step(total: Any, indexed: Any) -> tuple[Any, None]:
      index, batch = indexed
      new = value_and_grad(state.params, sparse, batch, jax.random.fold_in(key, index))
      return jax.tree.map(jnp.add, total, new), None

    if config.accumulate == 1:
      loss, grads = value_and_grad(state.params, sparse, jax.tree.map(lambda x: x[0], batches), key)
    else:
      zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params))
      total, _ = jax.lax.scan(micro_step, zero, (jnp.arange(config.accumulate), batches))
      loss, grads = jax.tree.map(lambda x: x / config.accumulate, total)
    updates, opt_state = tx.update(grads, state.opt_state, state.params, refresh=refresh)
    params = optax.apply_updates(state.params, updates)
    norm, learning_rate = optax.tree.norm(grads), build.learning_rate(config, told.times)(state.step)
    good = jnp.isfinite(loss) & jnp.isfinite(norm)
    if skips:
      good &= (loss <= limit) & sums.all_finite((params, opt_state))
      old = (state.params, state.opt_state)
      params, opt_state = jax.tree.map(lambda new, old: jnp.where(good, new, old), (params, opt_state), old)
    flips = optax.tree.get(opt_state, 'flip_rate')
    rates = [jnp.ravel(rate) for rate in jax.tree.leaves(flips.per_weight)] or [jnp.zeros(0)]
    metrics = StepMetrics(loss, norm, jnp.asarray(learning_rate), flips.overall, jnp.concatenate(rates), good)
    return TrainState(state.step + 1, params, opt_state), metrics

  return step


def evaluated_model(parts: Parts, phase: str, attention: Attention = None) -> Any:
  """The model that is evaluated: activations are dense, whatever the recipe, see `eval_recipe`."""
  model = build.model_for(parts, attention, blocks=False)
  return s24.sparsify(model, eval_recipe(parts.recipe), phase=phase)


def make_eval(
  parts: Parts, phase: str, attention: Attention = None, *, num_batches: int
) -> Callable[[TrainState], dict[str, jax.Array]]:
  """Compiles to one program: state -> mean loss and measures, over the same validation batches every time."""
  model, task = evaluated_model(parts, phase, attention), parts.task
  stacked = build.validation_batches(parts, num_batches)

  @jax.jit
  def evaluate(params: Any, opt_state: Any, batches: dict[str, jax.Array]) -> dict[str, jax.Array]:
    sparse = s24.sparse_variables(params, opt_state, parts.recipe, phase=phase)

    def of(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
      inputs = [batch[name] for name in task.inputs]
      outputs = outputs_of(model, params, sparse, inputs, jax.random.key(0), parts.mesh)
      return {'loss': task.loss(outputs, batch), **task.measures(outputs, batch)}

    return jax.tree.map(jnp.mean, jax.lax.map(of, batches))

  return lambda state: evaluate(state.params, state.opt_state, stacked)


def make_predict(
  parts: Parts, phase: str, attention: Attention, state: TrainState
) -> Callable[..., jax.Array]:
  """The model of a state as a function of its inputs alone, one program a shape."""
  model = evaluated_model(parts, phase, attention)
  prepare = jax.jit(lambda params, opt_state: s24.sparse_variables(params, opt_state, parts.recipe, phase=phase))
  sparse = prepare(state.params, state.opt_state)
  predict = jax.jit(lambda params, sparse, *inputs: outputs_of(model, params, sparse, inputs, jax.random.key(0)))
  return functools.partial(predict, state.params, sparse)


def flip_rate_names(opt_state: Any) -> list[str]:
  """Names of the entries of `StepMetrics.flip_rates`; stacked layers get an index: 'h/mlp/c_fc/kernel[3]'."""
  shapes = jax.eval_shape(lambda state: s24.get_flip_rate(state).per_weight, opt_state)
  return [
    path if not leaf.shape else f'{path}[{i}]' for path, leaf in shapes.items() for i in range(math.prod(leaf.shape))
  ]


class Programs:
  """What a configuration compiles to, each program when first asked for; the same for runs that differ in seeds only.

  Args:
    parts: from `build.make_parts`, with any seed.

  Attributes:
    recipe: that of the runs.
    init: see `make_init`.
    restart: see `make_restart`.
    step: phase, attention, refresh -> see `make_step`.
    evaluate: phase, attention -> see `make_eval`.
    probe: phase, attention -> see `activations.make_probe`.
  """

  def __init__(self, parts: Parts):
    self.recipe = parts.recipe
    self.init = make_init(parts)
    shardings = None
    if parts.mesh:
      # Every process reads the metrics, so every one has them whole.
      whole = jax.sharding.NamedSharding(parts.mesh, jax.sharding.PartitionSpec())
      shardings = (meshes.state_sharding(parts.mesh, jax.eval_shape(self.init, parts.config.seed)), whole)
    self.restart = make_restart(parts, shardings and shardings[0])
    self.step = functools.cache(lambda phase, *how: make_step(parts, phase, shardings, *how))
    count = parts.config.eval_batches
    self.evaluate = functools.cache(lambda phase, attention: make_eval(parts, phase, attention, num_batches=count))
    self.probe = functools.cache(functools.partial(activations.make_probe, parts))
