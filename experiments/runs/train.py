"""The training loop: any configuration, any recipe, resumable bit for bit.

A run folder holds ``config.json``, ``environment.json``, ``metrics.jsonl``, ``timing.jsonl``, ``tensorboard/``,
``checkpoints/``, ``events.jsonl`` if something out of the ordinary happened and, once finished, ``summary.json``.
Starting the same command again resumes or does nothing; two runs at a time are refused, by a lock on ``.lock``.
"""

from collections.abc import Callable, Mapping
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.runs import (
  activations,
  bad_numbers,
  build,
  durable,
  events,
  hosts,
  meshes,
  restored,
  run_folder,
  stopping,
  warm_start,
)
from experiments.runs import metrics as metrics_lib
from experiments.runs.build import Parts
from experiments.runs.checkpoint import Checkpoints
from experiments.runs.checkpoint_errors import CheckpointError, DifferentRunError, NotFiniteError
from experiments.runs.environment import environment
from experiments.runs.experiment import Config
from experiments.runs.programs import flip_rate_names, make_predict, Programs, StepMetrics, TrainState
from experiments.runs.progress import Progress, Stopwatch
from experiments.runs.windows import Windows
import sparse24_jax as s24
from sparse24_jax.attention import Attention


class TrainingDivergedError(RuntimeError):
  """The numbers of a run are bad, and its policy does not let it go on."""


class Run:
  """One run in its folder: the loop's bookkeeping, kept out of the arithmetic of `Programs`.

  Args:
    parts: from `build.make_parts`.
    folder: the run's folder; resumed from its newest checkpoint when there is one.
    quiet: no progress bar.
    programs: of a run that differs in seeds only, to compile nothing again.
    from_step: resume from the checkpoint of this step; later ones are set aside.
    accept_changes: go on although settings of the optimizer differ from those of the checkpoint.
  """

  def __init__(
    self,
    parts: Parts,
    folder: str | Path,
    *,
    quiet: bool = False,
    programs: Programs | None = None,
    from_step: int | None = None,
    accept_changes: bool = False,
  ):
    self.parts, self.folder, self.quiet = parts, Path(folder), quiet
    self.config: Config = parts.config
    self.from_step, self.accept_changes = from_step, accept_changes
    self.iterator = parts.data.train()
    self.watch = Stopwatch()
    self.rolled_back = 0
    self.programs = programs or Programs(parts)
    self.state = self.programs.init(parts.config.seed)
    if parts.mesh is not None:  # Outside jit, where shards are known: refuses those that split groups of four.
      first = s24.phase_at(parts.recipe, 0, parts.config.steps)
      s24.sparse_variables(self.state.params, self.state.opt_state, parts.recipe, phase=first)
      if not quiet:
        meshes.show(meshes.weight_rows(self.state.params, parts.recipe))
    self.windows = Windows(parts, self.folder, flip_rate_names(self.state.opt_state))
    self.probes = activations.can_probe(parts)

  def train(self) -> dict[str, Any]:
    """Trains to the end and returns the summary.

    Raises:
      TrainingDivergedError: bad numbers, see `bad_numbers`; names the step. No checkpoint has them.
      StoppedError: a signal told the run to stop; what was done is saved.
      CheckpointError: a checkpoint that cannot be written, read or used.
    """
    self.folder.mkdir(parents=True, exist_ok=True)
    keep = self.config.keep_checkpoints
    with (
      stopping.listening() as stop,
      Checkpoints(self.folder / 'checkpoints', keep=keep, asynchronous=True) as checkpoints,
    ):
      if self.from_step is not None or checkpoints.latest() is not None:
        self._resume(checkpoints)
      elif self.config.init_from:
        self._warm_start(self.config.init_from)
      done = int(self.state.step)
      if done == self.config.steps and (summary := run_folder.summary(self.folder)):
        return summary
      if done:
        events.note(self.folder, done, 'resumed', f'going on from step {done}')
      hosts.by_first('write config.json and environment.json', self._write_settings)
      validation: dict[str, float] = {}
      while not validation:
        try:
          with hosts.together('open the metrics', self._writer) as writer:
            validation = self._loop(int(self.state.step), checkpoints, writer, stop)
        except bad_numbers.BadNumbersError as error:
          self._roll_back(checkpoints, str(error))
      checkpoints.wait()
    loss = validation.pop('loss')
    measures = {**validation, **self._score()}
    summary = {
      'name': self.config.name,
      'recipe': self.config.recipe.name,
      'seed': self.config.seed,
      'steps': self.config.steps,
      'text': self.parts.data.fingerprint,
      'validation_loss': loss,
      **({'measures': measures} if measures else {}),
      'seconds': self.watch.total,
      'spent': self.watch.spent,
    }
    hosts.by_first('write summary.json', lambda: durable.write_json(self.folder / 'summary.json', summary))
    return summary

  def _writer(self) -> metrics_lib.MetricsWriter:
    return metrics_lib.MetricsWriter(self.folder, step=int(self.state.step))

  def _write_settings(self) -> None:
    durable.write_json(self.folder / 'config.json', self.config.to_dict())
    durable.write_json(self.folder / 'environment.json', environment())

  def _warm_start(self, folder: str) -> None:
    """Takes the parameters of another run, and notes which are not of it, and which are left out."""
    first = s24.phase_at(self.parts.recipe, 0, self.config.steps)
    source = warm_start.read(folder, into_phase=first)
    params, new, left_out = warm_start.merge(self.state.params, source, warm_start.settings_of(self.parts))
    self.state = self.programs.restart(params)
    what = f'parameters are those of {folder} after step {source.step}; new are {", ".join(new) or "none"}'
    events.note(self.folder, 0, 'started from', f'{what}; left out are {", ".join(left_out) or "none"}')

  def _loop(
    self, done: int, checkpoints: Checkpoints, writer: metrics_lib.MetricsWriter, stop: stopping.Stop
  ) -> dict[str, float]:
    config, due = self.config, None
    validation: dict[str, float] = {}
    if done == config.steps:  # Killed between the last checkpoint and the summary.
      return self._validate(done, self.programs.evaluate(*build.phase_of(self.parts, done - 1)))
    compiled: set[Any] = set()
    with Progress(config.name, done, config.steps, quiet=self.quiet or not hosts.first()) as progress:
      jax.block_until_ready(self.state)
      self.watch = Stopwatch(self.watch.spent)  # from here on
      self.windows.begin(self.watch)
      while done < config.steps:
        phase, attention = build.phase_of(self.parts, done)
        program = phase, attention, build.refresh_of(self.parts, done)
        compiles = program not in compiled
        compiled.add(program)
        if compiles:
          # Or the device would go on with the steps it has while the host compiles, and neither's time be known.
          jax.block_until_ready(self.state)
          self.watch.lap('training')
        step_metrics = self._step(done, *program)
        if compiles:
          self.watch.lap('compiling')
        done += 1
        if due:  # Read the last window while the device is busy with the step just dispatched.
          due = self.windows.write(*due, self.watch, writer, progress)
        self.windows.steps.append(step_metrics)
        last = done == config.steps
        if last or done % config.log_every == 0:
          due = done, phase, self.windows.close()
        told_by = stop.told_by(done)
        evaluates = last or done % config.eval_every == 0
        saves = config.checkpoint_every and (last or done % config.checkpoint_every == 0 or told_by is not None)
        if evaluates or saves:
          due = due and self.windows.write(*due, self.watch, writer, progress)
          if evaluates:
            validation = self._validate(done, self.programs.evaluate(phase, attention))
            probed = self.programs.probe(phase, attention)(self.state) if self.probes else {}
            writer.write('validation', done, {**validation, 'phase': phase, **probed})
            self.watch.lap('evaluation')
          if saves:
            self.windows.require_good(done)
            hosts.by_first('write the metrics', writer.sync)
            self._save(done, checkpoints)
            self.watch.lap('checkpoints')
        if told_by is not None and not last:
          checkpoints.wait()
          raise stopping.StoppedError(self._stopped(told_by.name, done), told_by)
    return validation

  def _stopped(self, told_by: str, done: int) -> str:
    if self.config.checkpoint_every:
      return f'{self.folder}: stopped by {told_by}; step {done} is saved, and the same command goes on from there'
    return f'{self.folder}: stopped by {told_by} after step {done}; checkpoint_every is 0, so it will start again'

  def _step(self, done: int, phase: str, attention: Attention, refresh: bool | None) -> StepMetrics:
    """Dispatches the optimizer step after `done` of them."""
    batches = build.shard_batch(self.parts, next(self.iterator))
    params = build.enter_phase(self.parts, done, self.state.params, self.state.opt_state)
    opt_state = build.regroup(self.parts, done, self.state.params, self.state.opt_state)
    # No other reference may keep the old weights alive.
    self.state = self.state._replace(params=params, opt_state=opt_state)
    step = self.programs.step(phase, attention, refresh)
    self.state, step_metrics = step(self.state, batches, self.config.seed, self.windows.losses.limit())
    return step_metrics

  def _validate(self, step: int, evaluate: Callable[[TrainState], Mapping[str, jax.Array]]) -> dict[str, float]:
    """The loss, and what the task measures beside."""
    found = {name: float(value) for name, value in jax.device_get(evaluate(self.state)).items()}
    bad_numbers.require_finite(step, 'validation loss', found['loss'])
    return found

  def _score(self) -> dict[str, float]:
    """What the task asks of the finished model."""
    if self.parts.task.score is None:
      return {}
    if hosts.several():
      events.tell(f'{self.folder}: not scored, as several processes train; `eval` scores it')
      return {}
    predict = make_predict(self.parts, *build.phase_of(self.parts, self.config.steps - 1), self.state)
    return self.parts.task.score(predict, self.parts.data, self.config.eval_batches)

  def _roll_back(self, checkpoints: Checkpoints, why: str) -> None:
    """Goes back to the last checkpoint, and on with the batches that follow; or ends the run."""
    checkpoints.wait()
    policy = self.windows.policy
    if policy.name != 'roll_back' or self.rolled_back >= policy.cap or not checkpoints.steps():
      if policy.name == 'roll_back':
        why += f'; it was rolled back {self.rolled_back} times' if self.rolled_back else '; there is no checkpoint'
      raise self._diverged(why, checkpoints.steps())
    position, rolled_back = self.iterator.get_state(), self.rolled_back + 1
    self._restore(checkpoints)
    self.iterator.set_state(position)
    self.rolled_back = rolled_back
    step = int(self.state.step)
    what = f'{why}; rolled back to step {step}, going on with the batches that follow'
    events.note(self.folder, step, 'rolled back', what)

  def _diverged(self, what: str, steps: list[int]) -> TrainingDivergedError:
    here = f', or go on in this one from step {steps[-1]} with such settings and --accept-changes' if steps else ''
    return TrainingDivergedError(
      f'{self.folder}: {what}; training stopped, and no checkpoint has bad numbers. Train in another folder with a '
      f'lower optimizer.peak_lr or recipe.kwargs.masked_decay, or a longer optimizer.warmup_steps{here}. '
      'bad_numbers.policy=skip or roll_back let a run go on past a bad batch.'
    )

  def _save(self, step: int, checkpoints: Checkpoints) -> None:
    """Saves everything that decides the rest of the run."""
    meta = {
      'identity': build.identity(self.parts),
      'data_state': self.iterator.get_state(),
      'spent': self.watch.spent,
      'config': self.config.to_dict(),
      'phase': s24.phase_at(self.parts.recipe, step - 1, self.config.steps),
      **self.windows.to_meta(),
      'rolled_back': self.rolled_back,
    }
    try:
      checkpoints.save(step, self.state.params, self.state.opt_state, meta)
    except NotFiniteError as error:
      raise bad_numbers.BadNumbersError(str(error)) from error

  def _resume(self, checkpoints: Checkpoints) -> None:
    """Takes up the run where its checkpoint left it, and notes what is not as it was."""
    changed = self._restore(checkpoints, self.from_step)
    step = int(self.state.step)
    if later := [other for other in checkpoints.steps() if other > step]:
      aside = checkpoints.set_aside(later)
      what = f'going on from step {step}; the checkpoints of steps {later} were moved to {aside}'
      events.note(self.folder, step, 'went back', what)
    if changed:
      lines = ', '.join(f'{field} from {old!r} to {new!r}' for field, (old, new) in changed.items())
      what = f'from step {step} on, settings are others than before: {lines}'
      events.note(self.folder, step, 'settings changed', what, changed=changed)

  def _restore(self, checkpoints: Checkpoints, step: int | None = None) -> Mapping[str, tuple[Any, Any]]:
    """Reads a checkpoint; returns what settings differ from its."""
    # Identity travels through JSON, where tuples become lists.
    options: dict[str, Any] = {
      'identity': json.loads(json.dumps(build.identity(self.parts))),
      'may_differ': _may_change if self.accept_changes else lambda _: False,
    }
    state = self.state.params, self.state.opt_state
    try:
      if step is not None:
        found = checkpoints.restore(*state, step=step, **options)
      else:
        found = checkpoints.restore_newest(*state, tell=self._note_unreadable, **options)
    except DifferentRunError as error:
      if not all(map(_may_change, error.fields)):
        raise
      message = f'{error} To go on here with the new settings, from that step on, add --accept-changes.'
      raise CheckpointError(message) from error
    restored.require_ours(checkpoints.directory, found, self.parts.recipe)
    meta = found.meta
    step_array = jax.device_put(jnp.asarray(meta['step'], jnp.int32), self.state.step.sharding)
    self.state = TrainState(step_array, found.params, found.opt_state)
    self.iterator.set_state(meta['data_state'])
    self.watch = Stopwatch(meta['spent'])
    self.windows.restore(meta)
    self.rolled_back = meta['rolled_back']
    return found.changed

  def _note_unreadable(self, what: str) -> None:
    events.note(self.folder, int(self.state.step), 'checkpoint', what)


def _may_change(field: str) -> bool:
  """Whether a run may go on with another value of a field of its identity: the learning rate, the decay."""
  return field.startswith('optimizer.') or field == 'recipe.masked_decay'


def train(
  config: Config,
  folder: str | Path,
  *,
  data: Any = None,
  quiet: bool = False,
  programs: list[Programs] | None = None,
  from_step: int | None = None,
  accept_changes: bool = False,
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
    from_step: go on from the checkpoint of this step, not from the newest; later ones are set aside.
    accept_changes: go on though settings of the optimizer differ from the checkpoint's; `events.jsonl` says so.

  Returns:
    The summary: name, recipe, seed, steps, the `text` that was read, validation_loss (nats a token, or a class), the
    `measures` of the task if it has some, seconds, and what they were `spent` on.

  Raises:
    ValueError: another process trains in the folder, or a setting does not fit.
    TrainingDivergedError, StoppedError, CheckpointError: see `Run.train`.
  """
  if not config.checkpoint_every and (summary := run_folder.finished(config, Path(folder))):
    return summary
  programs = [] if programs is None else programs
  parts = build.make_parts(config, data=data)
  hosts.require_same('settings or data', json.dumps([config.to_dict(), build.identity(parts), str(folder), from_step]))
  hosts.require_shared(Path(folder))
  with run_folder.held(Path(folder)):
    # Random masks have the seed in their programs.
    shared = programs[0] if programs and programs[0].recipe == parts.recipe else None
    run = Run(
      parts, folder, quiet=quiet, programs=shared, from_step=from_step, accept_changes=accept_changes
    )
    programs[:] = [run.programs]
    return run.train()
