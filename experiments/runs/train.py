"""The training loop: any configuration, any recipe, resumable bit for bit.

A run folder holds ``config.json``, ``environment.json``, ``metrics.jsonl``, ``timing.jsonl``, ``tensorboard/``,
``checkpoints/`` and, once finished, ``summary.json``. Starting the same command again resumes or does nothing; two
processes at a time are refused, by a lock on ``.lock``.
"""

from collections.abc import Callable, Iterator
import contextlib
import fcntl
import json
import math
import os
from pathlib import Path
import socket
import sys
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np

from experiments.runs import activations, build, hosts, records
from experiments.runs import metrics as metrics_lib
from experiments.runs.build import Parts
from experiments.runs.checkpoint import Checkpoints, NotFiniteError
from experiments.runs.environment import environment
from experiments.runs.experiment import Config
from experiments.runs.programs import flip_rate_names, Programs, StepMetrics, TrainState
from experiments.runs.progress import Progress, Stopwatch
import sparse24_jax as s24
from sparse24_jax.attention import Attention


class TrainingDivergedError(RuntimeError):
  """A loss or the norm of the gradient is not finite any more."""


class Run:
  """One run in its folder: the loop's bookkeeping, kept out of the arithmetic of `Programs`.

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
    self.watch, self._logged = Stopwatch(), 0.0
    self.programs = programs or Programs(parts)
    self.state = self.programs.init(parts.config.seed)
    if parts.mesh is not None:  # Outside jit, where shards are known: refuses those that split groups of four.
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
      'seconds': self.watch.total,
      'spent': self.watch.spent,
    }
    self._write_json('summary.json', summary)
    return summary

  def _loop(self, done: int, checkpoints: Checkpoints, writer: metrics_lib.MetricsWriter) -> float:
    config, window, due = self.config, [], None
    validation = math.nan
    if done == config.steps:  # Killed between the last checkpoint and the summary.
      return self._validate(done, self.programs.evaluate(*build.phase_of(self.parts, done - 1)))
    program = None
    with Progress(config.name, done, config.steps, quiet=self.quiet) as progress:
      jax.block_until_ready(self.state)
      self.watch = Stopwatch(self.watch.spent)  # from here on
      self._logged = self.watch.spent['training']
      while done < config.steps:
        phase, attention = build.phase_of(self.parts, done)
        compiles, program = program != (phase, attention), (phase, attention)
        if compiles:
          # Or the device would go on with the steps it has while the host compiles, and neither's time be known.
          jax.block_until_ready(self.state)
          self.watch.lap('training')
        step_metrics = self._step(done, phase, attention)
        if compiles:
          self.watch.lap('compiling')
        done += 1
        if due:  # Read the last window while the device is busy with the step just dispatched.
          due = self._log(*due, writer, progress)
        window.append(step_metrics)
        last = done == config.steps
        if last or done % config.log_every == 0:
          due, window = (done, phase, window), []
        evaluates = last or done % config.eval_every == 0
        saves = config.checkpoint_every and (last or done % config.checkpoint_every == 0)
        if evaluates or saves:
          due = due and self._log(*due, writer, progress)
          if evaluates:
            validation = self._validate(done, self.programs.evaluate(phase, attention))
            probed = self.programs.probe(phase, attention)(self.state) if self.probes else {}
            writer.write('validation', done, {'loss': validation, 'phase': phase, **probed})
            self.watch.lap('evaluation')
          if saves:
            self._save(done, checkpoints)
            self.watch.lap('checkpoints')
    return validation

  def _step(self, done: int, phase: str, attention: Attention) -> StepMetrics:
    """Dispatches the optimizer step after `done` of them."""
    batches = build.shard_batch(self.parts, next(self.iterator))
    params = build.enter_phase(self.parts, done, self.state.params, self.state.opt_state)
    opt_state = build.regroup(self.parts, done, self.state.params, self.state.opt_state)
    # No other reference may keep the old weights alive.
    self.state = self.state._replace(params=params, opt_state=opt_state)
    self.state, step_metrics = self.programs.step(phase, attention)(self.state, batches, self.config.seed)
    return step_metrics

  def _log(self, step: int, phase: str, window: list[StepMetrics], writer: Any, progress: Progress) -> None:
    """Writes one line about the window of steps that ends at `step`."""
    losses, norms, last = jax.device_get(([m.loss for m in window], [m.grad_norm for m in window], window[-1]))
    flip_rate, flip_rates = self._flip_rates(window)
    self.watch.lap('training')
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
        'flip_rate': flip_rate,
        'flip_rates': dict(zip(self.names, flip_rates, strict=True)),
      },
    )
    # Steps are dispatched ahead, so that a window is read one step late, or on time if an evaluation waits for it.
    spent = self.watch.spent
    tokens = len(window) * self.config.data.batch_size * self.config.data.seq_len
    speed, self._logged = tokens / max(spent['training'] - self._logged, 1e-9), spent['training']
    writer.write('timing', step, {'seconds': self.watch.total, 'spent': spent, 'tokens_per_s': speed})
    progress.update(
      step, loss=float(losses[-1]), flip_rate=flip_rate if self.names else None, tokens_per_s=speed
    )

  def _flip_rates(self, window: list[StepMetrics]) -> tuple[float, list[float]]:
    """Of all weights, and of each: the mean over the steps of a window, or what the last refresh found.

    Links that move every so many steps flip in those steps alone: a rate a step is a mean, not that of one step.
    """
    steps = window if self.parts.recipe.flip_rate == 'step' else window[-1:]
    overall, each = jax.device_get(([m.flip_rate for m in steps], [m.flip_rates for m in steps]))
    return float(np.mean(overall, dtype=np.float64)), np.mean(each, axis=0, dtype=np.float64).tolist()

  def _validate(self, step: int, evaluate: Callable[[TrainState], jax.Array]) -> float:
    loss = float(evaluate(self.state))
    self._check_finite(step, 'validation loss', loss)
    return loss

  def _check_finite(self, step: int, what: str, value: float) -> None:
    if not math.isfinite(value):
      raise self._diverged(f'the {what} is {value} at step {step}')

  def _diverged(self, what: str) -> TrainingDivergedError:
    return TrainingDivergedError(
      f'{self.folder}: {what}; training stopped, the last checkpoint is from before. '
      'Lower optimizer.peak_lr or recipe.kwargs.masked_decay, or raise optimizer.warmup_steps.'
    )

  def _save(self, step: int, checkpoints: Checkpoints) -> None:
    """Saves everything that decides the rest of the run."""
    meta = {
      'identity': build.identity(self.parts),
      'data_state': self.iterator.get_state(),
      'spent': self.watch.spent,
      'config': self.config.to_dict(),
      'phase': s24.phase_at(self.parts.recipe, step - 1, self.config.steps),
    }
    try:
      checkpoints.save(step, self.state.params, self.state.opt_state, meta)
    except NotFiniteError as error:
      raise self._diverged(str(error)) from error

  def _restore(self, checkpoints: Checkpoints) -> None:
    # Identity travels through JSON, where tuples become lists.
    wanted = json.loads(json.dumps(build.identity(self.parts)))
    found = checkpoints.restore_newest(self.state.params, self.state.opt_state, identity=wanted, tell=_tell)
    step = jax.device_put(jnp.asarray(found.meta['step'], jnp.int32), self.state.step.sharding)
    self.state = TrainState(step, found.params, found.opt_state)
    self.iterator.set_state(found.meta['data_state'])
    self.watch = Stopwatch(found.meta['spent'])

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
    programs: empty, or the programs of a run that differs in seeds only, used unless the recipe depends on the seed;
      what this run compiles is put in.

  Returns:
    The summary: name, recipe, seed, steps, validation_loss (nats a token), seconds, and what they were `spent` on.

  Raises:
    ValueError: another process trains in the folder, or a setting does not fit.
    TrainingDivergedError, CheckpointError: see `Run.train`.
  """
  if not config.checkpoint_every and (summary := _finished(config, Path(folder))):
    return summary
  programs = [] if programs is None else programs
  parts = build.make_parts(config, data=data)
  with held(Path(folder)):
    # Random masks have the seed in their programs.
    shared = programs[0] if programs and programs[0].recipe == parts.recipe else None
    run = Run(parts, folder, quiet=quiet, programs=shared)
    programs[:] = [run.programs]
    return run.train()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
  """Keeps other processes from training in `folder`; the operating system lets go of it however this one ends.

  Raises:
    ValueError: another process holds it; names that.
  """
  if jax.process_index():  # The first of several processes of one run holds it for all.
    yield
    return
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / '.lock').open('a+') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      lock.seek(0)
      holder = lock.read() or 'another process'
      raise ValueError(f'{holder} trains in {folder}; wait for it, stop it, or name another folder') from None
    except OSError as error:  # some file systems of clusters have no locks
      message = f'{folder} cannot be locked ({error}): nothing keeps a second process from training in it'
      warnings.warn(message, stacklevel=2)
    lock.truncate(0)
    lock.write(f'process {os.getpid()} on {socket.gethostname()}')
    lock.flush()
    yield


def _tell(line: str) -> None:
  """Says something that must not go unseen."""
  if hosts.first():
    print(line, file=sys.stderr, flush=True)


def _finished(config: Config, folder: Path) -> dict[str, Any] | None:
  """The summary of a finished run of this very configuration."""
  if not (folder / 'summary.json').exists():
    return None
  # JSON makes lists of tuples.
  if records.read_config(folder) != json.loads(json.dumps(config.to_dict())):
    raise ValueError(f'{folder} holds a run with other settings; name another folder, or remove it')
  return json.loads((folder / 'summary.json').read_text())
