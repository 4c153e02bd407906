"""The training loop: any configuration, any recipe, resumable bit for bit.

A run folder holds ``config.json``, ``environment.json``, ``metrics.jsonl``, ``timing.jsonl``, ``tensorboard/``,
``checkpoints/`` and, once finished, ``summary.json``. Starting the same command again resumes or does nothing.
"""

from collections.abc import Callable
import functools
import json
import math
from pathlib import Path
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import activations, build
from experiments import metrics as metrics_lib
from experiments.build import Parts
from experiments.checkpoint import Checkpoints
from experiments.environment import environment
from experiments.experiment import Config
from experiments.progress import Progress
import sparse24_jax as s24
from sparse24_jax.attention import Attention


class TrainingDivergedError(RuntimeError):
  """A loss or the norm of the gradient is not finite any more."""


class TrainState(NamedTuple):
  """What a step carries: int32 `step` (optimizer steps done), parameters, optimizer state."""

  step: jax.Array
  params: Any
  opt_state: Any


class StepMetrics(NamedTuple):
  """What a step reports, still on the device: float32 scalars, and `flip_rates` [number of sparse weights]."""

  loss: jax.Array
  grad_norm: jax.Array
  learning_rate: jax.Array
  flip_rate: jax.Array
  flip_rates: jax.Array


def init_state(parts: Parts) -> TrainState:
  """Initial state, already in its shards; depends on `config.seed` only."""
  return make_init(parts)(parts.config.seed)


def make_init(parts: Parts) -> Callable[[int], TrainState]:
  """Compiles to one program: seed -> initial state, already in its shards."""
  tokens = jnp.zeros((1, parts.config.data.seq_len), jnp.int32)
  tx = build.make_optimizer(parts.config, parts.recipe, s24.phase_at(parts.recipe, 0, parts.config.steps))

  def init(seed: int) -> TrainState:
    params = parts.model.init(jax.random.key(seed), tokens)['params']
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))

  if parts.mesh is None:
    return jax.jit(init)
  return jax.jit(init, out_shardings=build.state_sharding(parts.mesh, jax.eval_shape(init, parts.config.seed)))


def loss_fn(model: Any, params: Any, sparse: Any, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
  """Mean next-token cross-entropy in nats, float32 scalar, of tokens [B, T]."""
  key_mvue, key_dropout = jax.random.split(key)
  rngs = {'mvue': key_mvue, 'dropout': key_dropout}
  logits_BxTxV = model.apply({'params': params, 'sparse24': sparse}, batch['inputs'], rngs=rngs)
  return optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, batch['targets']).mean()


def make_step(
  parts: Parts, phase: str, shardings: Any, attention: Attention = None
) -> Callable[..., tuple[TrainState, StepMetrics]]:
  """Compiles to one program a phase: (state, micro-batches [accumulate, B, T], seed) -> (state, metrics).

  The seed, for sampling, is that of the configuration unless given: runs that differ in it share the program.
  """
  config, recipe = parts.config, parts.recipe
  tx = build.make_optimizer(config, recipe, phase)
  deterministic = not parts.model.config.dropout
  model = s24.sparsify(build.model_for(parts, attention, deterministic=deterministic), recipe, phase=phase)

  @functools.partial(jax.jit, donate_argnums=0, out_shardings=shardings)
  def step(
    state: TrainState, batches: dict[str, jax.Array], seed: int = config.seed
  ) -> tuple[TrainState, StepMetrics]:
    # Every step's key comes from its number, so a resumed run draws what the interrupted one would have drawn.
    key = jax.random.fold_in(jax.random.key(seed + 1), state.step)
    # Masks of this optimizer step, for all micro-batches: read from the optimizer state, searched by its update.
    sparse = s24.sparse_variables(state.params, state.opt_state, recipe, phase=phase)
    value_and_grad = jax.value_and_grad(functools.partial(loss_fn, model))

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
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    flips = s24.get_flip_rate(opt_state)
    rates = [jnp.ravel(rate) for rate in flips.per_weight.values()] or [jnp.zeros(0)]
    norm, learning_rate = optax.tree.norm(grads), build.learning_rate(config)(state.step)
    metrics = StepMetrics(loss, norm, jnp.asarray(learning_rate), flips.overall, jnp.concatenate(rates))
    return TrainState(state.step + 1, params, opt_state), metrics

  return step


def make_eval(
  parts: Parts, phase: str, attention: Attention = None, *, num_batches: int
) -> Callable[[TrainState], jax.Array]:
  """Compiles to one program: state -> mean validation loss, over the same batches every time.

  Activations are dense, whatever the recipe, see `build.eval_recipe`.
  """
  model = s24.sparsify(build.model_for(parts, attention), build.eval_recipe(parts.recipe), phase=phase)
  stacked = build.validation_batches(parts, num_batches)

  @jax.jit
  def evaluate(params: Any, opt_state: Any, batches: dict[str, jax.Array]) -> jax.Array:
    sparse = s24.sparse_variables(params, opt_state, parts.recipe, phase=phase)
    return jax.lax.map(lambda batch: loss_fn(model, params, sparse, batch, jax.random.key(0)), batches).mean()

  return lambda state: evaluate(state.params, state.opt_state, stacked)


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
    init: see `make_init`.
    step: phase, attention -> see `make_step`.
    evaluate: phase, attention -> see `make_eval`.
    probe: phase, attention -> see `activations.make_probe`.
  """

  def __init__(self, parts: Parts):
    self.init = make_init(parts)
    shardings = None
    if parts.mesh:
      shardings = (build.state_sharding(parts.mesh, jax.eval_shape(self.init, parts.config.seed)), None)
    self.step = functools.cache(lambda phase, attention: make_step(parts, phase, shardings, attention))
    count = parts.config.eval_batches
    self.evaluate = functools.cache(lambda phase, attention: make_eval(parts, phase, attention, num_batches=count))
    self.probe = functools.cache(functools.partial(activations.make_probe, parts))


class Run:
  """One run in its folder: the loop's bookkeeping, kept out of the arithmetic above.

  Args:
    parts: from `build.make_parts`.
    folder: the run's folder; resumed from its newest checkpoint when there is one.
    quiet: no progress bar.
    programs: of a run that differs in seeds only, to compile nothing again.
  """

  def __init__(self, parts: Parts, folder: str | Path, *, quiet: bool = False, programs: Programs | None = None):
    self.parts, self.folder, self.quiet = parts, Path(folder), quiet
    self.config: Config = parts.config
    self.iterator = parts.data.train()
    self.seconds = 0.0
    self.programs = programs or Programs(parts)
    self.state = self.programs.init(parts.config.seed)
    # Outside jit, where shards are known: refuses a mesh that splits groups of four.
    first = s24.phase_at(parts.recipe, 0, parts.config.steps)
    s24.sparse_variables(self.state.params, self.state.opt_state, parts.recipe, phase=first)
    self.names = flip_rate_names(self.state.opt_state)
    self.probes = activations.can_probe(parts)

  def train(self) -> dict[str, Any]:
    """Trains to the end and returns the summary.

    Raises:
      TrainingDivergedError: a training loss, gradient norm or validation loss that is not finite; names the step. No
        checkpoint of that step is written.
      CheckpointError: a checkpoint that cannot be written, read or used.
    """
    self.folder.mkdir(parents=True, exist_ok=True)
    with Checkpoints(self.folder / 'checkpoints', keep=self.config.keep_checkpoints) as checkpoints:
      if checkpoints.latest() is not None:
        self._restore(checkpoints)
      done = int(self.state.step)
      if done == self.config.steps and (self.folder / 'summary.json').exists():
        return json.loads((self.folder / 'summary.json').read_text())
      self._write_json('config.json', self.config.to_dict())
      self._write_json('environment.json', environment())
      with metrics_lib.MetricsWriter(self.folder, step=done) as writer:
        validation = self._loop(done, checkpoints, writer)
    summary = {
      'name': self.config.name,
      'recipe': self.config.recipe.name,
      'seed': self.config.seed,
      'steps': self.config.steps,
      'validation_loss': validation,
      'seconds': self.seconds,
    }
    self._write_json('summary.json', summary)
    return summary

  def _loop(self, done: int, checkpoints: Checkpoints, writer: metrics_lib.MetricsWriter) -> float:
    config, programs, window, due = self.config, self.programs, [], None
    validation = math.nan
    if done == config.steps:  # Killed between the last checkpoint and the summary.
      return self._validate(done, programs.evaluate(*build.phase_of(self.parts, done - 1)))
    tokens = config.data.batch_size * config.data.seq_len
    with Progress(config.name, done, config.steps, tokens, quiet=self.quiet) as progress:
      clock = time.monotonic()
      while done < config.steps:
        phase, attention = build.phase_of(self.parts, done)
        batches = build.shard_batch(self.parts, next(self.iterator))
        params = build.enter_phase(self.parts, done, self.state.params, self.state.opt_state)
        opt_state = build.regroup(self.parts, done, self.state.params, self.state.opt_state)
        self.state = self.state._replace(params=params, opt_state=opt_state)
        self.state, step_metrics = programs.step(phase, attention)(self.state, batches, config.seed)
        done += 1
        if due:  # Read the last window while the device is busy with the step just dispatched.
          due = self._log(*due, writer, progress)
        window.append(step_metrics)
        if done % config.log_every == 0 or done == config.steps:
          now = time.monotonic()
          self.seconds, clock = self.seconds + now - clock, now
          due, window = (done, phase, window), []
        last = done == config.steps
        if last or done % config.eval_every == 0 or self._is_due(done):
          due = due and self._log(*due, writer, progress)
          if last or done % config.eval_every == 0:
            validation = self._validate(done, programs.evaluate(phase, attention))
            probed = programs.probe(phase, attention)(self.state) if self.probes else {}
            writer.write('validation', done, {'loss': validation, 'phase': phase, **probed})
          if (config.checkpoint_every and last) or self._is_due(done):
            self._save(done, checkpoints)
          now = time.monotonic()
          self.seconds, clock = self.seconds + now - clock, now
          progress.restart_clock()
    return validation

  def _is_due(self, done: int) -> bool:
    """Whether a checkpoint is, apart from the one at the end."""
    return bool(self.config.checkpoint_every) and done % self.config.checkpoint_every == 0

  def _log(self, step: int, phase: str, window: list[StepMetrics], writer: Any, progress: Progress) -> None:
    """Writes one line about the window of steps that ends at `step`."""
    losses, norms, last = jax.device_get(([m.loss for m in window], [m.grad_norm for m in window], window[-1]))
    for at, (loss, norm) in enumerate(zip(losses, norms, strict=True), step - len(window) + 1):
      self._check_finite(at, 'loss', loss)
      self._check_finite(at, 'norm of the gradient', norm)
    writer.write(
      'train',
      step,
      {
        'loss': float(np.mean(losses, dtype=np.float64)),
        'grad_norm': float(np.mean(norms, dtype=np.float64)),
        'learning_rate': float(last.learning_rate),
        'phase': phase,
        'flip_rate': float(last.flip_rate),
        'flip_rates': dict(zip(self.names, map(float, last.flip_rates), strict=True)),
      },
    )
    speed = progress.update(step, loss=float(losses[-1]), flip_rate=float(last.flip_rate))
    writer.write('timing', step, {'seconds': self.seconds, 'tokens_per_s': speed})

  def _validate(self, step: int, evaluate: Callable[[TrainState], jax.Array]) -> float:
    loss = float(evaluate(self.state))
    self._check_finite(step, 'validation loss', loss)
    return loss

  def _check_finite(self, step: int, what: str, value: float) -> None:
    if not math.isfinite(value):
      raise TrainingDivergedError(
        f'{self.folder}: the {what} is {value} at step {step}; training stopped, the last checkpoint is from before. '
        'Lower optimizer.peak_lr or recipe.kwargs.masked_decay, or raise optimizer.warmup_steps.'
      )

  def _save(self, step: int, checkpoints: Checkpoints) -> None:
    """Saves everything that decides the rest of the run."""
    meta = {
      'identity': build.identity(self.parts),
      'data_state': self.iterator.get_state(),
      'seconds': self.seconds,
      'config': self.config.to_dict(),
      'phase': s24.phase_at(self.parts.recipe, step - 1, self.config.steps),
    }
    checkpoints.save(step, self.state.params, self.state.opt_state, meta)

  def _restore(self, checkpoints: Checkpoints) -> None:
    # Identity travels through JSON, where tuples become lists.
    wanted = json.loads(json.dumps(build.identity(self.parts)))
    found = checkpoints.restore(self.state.params, self.state.opt_state, identity=wanted)
    step = jax.device_put(jnp.asarray(found.meta['step'], jnp.int32), self.state.step.sharding)
    self.state = TrainState(step, found.params, found.opt_state)
    self.iterator.set_state(found.meta['data_state'])
    self.seconds = found.meta['seconds']

  def _write_json(self, name: str, value: Any) -> None:
    (self.folder / name).write_text(json.dumps(value, indent=2) + '\n')


def train(
  config: Config, folder: str | Path, *, data: Any = None, quiet: bool = False, programs: list[Programs] | None = None
) -> dict[str, Any]:
  """Trains one configuration in a folder, or resumes it, or returns the summary of the finished run.

  A run without checkpoints (`checkpoint_every` 0) cannot be resumed: one that was cut starts again.

  Args:
    config: from `experiment.load_config`.
    folder: the run's folder.
    data: batches in place of the configured corpus.
    quiet: no progress bar.
    programs: empty, or the programs of a run that differs in seeds only; what this run compiles is put in.

  Returns:
    The summary: name, recipe, seed, steps, validation_loss (nats a token), seconds.
  """
  if not config.checkpoint_every and (summary := _finished(config, Path(folder))):
    return summary
  programs = [] if programs is None else programs
  parts = build.make_parts(config, data=data)
  run = Run(parts, folder, quiet=quiet, programs=programs[0] if programs else None)
  programs[:] = [run.programs]
  return run.train()


def _finished(config: Config, folder: Path) -> dict[str, Any] | None:
  """The summary of a finished run of this very configuration."""
  if not (folder / 'summary.json').exists():
    return None
  # JSON makes lists of tuples.
  if json.loads((folder / 'config.json').read_text()) != json.loads(json.dumps(config.to_dict())):
    raise ValueError(f'{folder} holds a run with other settings; name another folder, or remove it')
  return json.loads((folder / 'summary.json').read_text())
