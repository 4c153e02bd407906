"""`python -m experiments race --out FILE --text FOLDER`: same seconds or steps for all, each contender tuned alike.

Every contender gets the same seconds of training on the same GPU, with as many steps as fit and a schedule for these
steps; learning rates (and decays) are searched with as many trials for all, then the best trial is repeated with other
seeds and with fewer seconds. Seconds are steps times the milliseconds of a step, which are measured first, with nothing
else on the GPU; compiling and evaluating do not count. While one contender trains, the next is compiled. With --steps
every contender gets as many steps, so as many tokens, in place of seconds. Contenders with sparse activations in blocks
of tokens take a batch of many short sequences, and are refused with another before anything trains.

The text is what `python -m experiments data` prepares: FOLDER holds train.bin, validation.bin and meta.json. Records go
to FILE, one a line, as trials end; the same command given again goes on after those that are there. For several GPUs
start a process on each, with CUDA_VISIBLE_DEVICES, contenders and a FILE of its own.
"""

import argparse
from collections.abc import Mapping, Sequence
import dataclasses
import os
from pathlib import Path
import queue
import threading
import time
from typing import Any

import jax
import numpy as np

from experiments.runs import environment, json_lines
from experiments.runs.data import packing
from experiments.runs.models import gpt2
from experiments.runs.models.layers import param_count
from experiments.runs.race import trials
from experiments.runs.race.contenders import (
  CONTENDERS,
  DECAY,
  length_of,
  make_contender,
  make_model,
  SEARCH_EVERY,
  SIZES,
  STYLES,
)
from experiments.runs.race.programs import Programs
from experiments.runs.race.search import Budget, next_trial, or_inf, Trial


class Race:
  """One process, one device.

  Args:
    options: of the command line.
  """

  def __init__(self, options: argparse.Namespace):
    self.options = options
    self.end = time.monotonic() + 60 * options.minutes
    self.head = environment.head()
    packed = packing.open_packed(options.text)
    train, validation = packed.splits['train'], packed.splits['validation']
    highest = int(max(train.max(initial=0), validation.max(initial=0)))
    if packed.vocab_size <= highest:
      raise ValueError(
        f'{options.text}: its meta.json says that its vocabulary has {packed.vocab_size} tokens, and token {highest} is'
        ' among them: it was changed; delete this folder and prepare the text anew'
      )
    self.vocab = packed.vocab_size
    dtype = np.uint8 if self.vocab <= 256 else train.dtype
    self.length = length_of(options.size, tiny=options.tiny)
    self.num_windows = (len(train) - 1) // self.length
    together = np.concatenate([np.asarray(train, dtype), np.asarray(validation, dtype)])
    if len(validation) < self.length + 2:
      raise ValueError(
        f'{options.text} holds out {len(validation)} tokens; an evaluation takes {self.length + 2} or more'
      )
    count = options.batch * options.eval_batches
    # Spread over all documents that are held out.
    begin = np.linspace(len(train), len(together) - self.length - 2, count).astype(np.int32)
    self.held_out = begin.reshape(options.eval_batches, options.batch)
    self.tokens = jax.device_put(together)
    self.head |= {
      'text': packed.digest, 'size': options.size, 'style': options.style, 'batch': options.batch,
      'length': self.length, 'seconds': None if options.steps else options.seconds, 'equal_steps': options.steps,
      'held_out_tokens': count * self.length, 'xla_flags': os.environ.get('XLA_FLAGS', ''),
    }  # fmt: skip
    # Where any of these differs, a record is of another race.
    self.same = {key: self.head[key] for key in (
      'device', 'text', 'size', 'style', 'batch', 'length', 'seconds', 'equal_steps', 'held_out_tokens', 'xla_flags',
    )}  # fmt: skip
    self.names = list(dict.fromkeys([*options.contenders, *options.clock_only]))
    self.done: dict[str, dict[Trial, float]] = {name: {} for name in self.names}
    self.clocked: dict[str, Mapping[str, Any]] = {}
    # This thread traces a contender while nothing trains, another one compiles it while the one before trains. Each
    # has None in place of programs that failed, and seconds; all else is this thread's.
    self.traced: queue.SimpleQueue[tuple[str, Programs | None, float]] = queue.SimpleQueue()
    self.made: queue.SimpleQueue[tuple[str, Programs | None, float]] = queue.SimpleQueue()
    self.to_trace: list[tuple[str, Programs]] = []
    self.programs: dict[str, Programs] = {}
    self.compile_s: dict[str, float] = {}
    self.failed: set[str] = set()
    self._resume()

  def run(self) -> int:
    """Trials until none is left or the time is over; returns the number of contenders that failed."""
    for name in self.names:
      self._guarded(name, self._prepare)  # what cannot run is said before anything trains
    threading.Thread(target=self._compile_all, args=(len(self.to_trace),), daemon=True).start()
    self._trace_next()
    while time.monotonic() < self.end:
      coming = set(self.names) - set(self.programs) - self.failed
      todo = [
        (len(self.done[name]), i, name, trial)
        for i, name in enumerate(self.names)
        if name in self.clocked and name not in self.failed and (trial := self._next(name)) and self._fits(name, trial)
      ]
      if coming and (not todo or not self.made.empty()):
        self._take()
      elif todo:
        *_, name, trial = min(todo, key=lambda found: found[:2])
        self._guarded(name, self._trial, trial)
      else:
        break
    return len(self.failed)

  def _next(self, name: str) -> Trial | None:
    contender, options = CONTENDERS[name], self.options
    if name not in options.contenders:
      return None
    if contender.rate:
      return next_trial(self.done[name], Trial(contender.rate, 0.0), Budget(trials=1))
    repeats = tuple((seed, 1.0) for seed in options.seeds)
    if not options.steps:
      repeats += ((0, 0.7),)
    decay = (options.decay or contender.decay) if contender.decays else 0.0
    return next_trial(self.done[name], Trial(options.rate, decay), Budget(options.trials, repeats))

  def _steps(self, name: str, trial: Trial) -> int:
    seconds = trial.share * self.options.seconds
    return self.options.steps or max(1, int(seconds * 1e3 / self.clocked[name]['step_ms']))

  def _fits(self, name: str, trial: Trial) -> bool:
    seconds = self._steps(name, trial) * self.clocked[name]['step_ms'] / 1e3
    return time.monotonic() + 1.08 * seconds < self.end

  def _take(self) -> None:
    """Times what was compiled, if anything is within a second, with nothing beside it; then traces the next."""
    try:
      name, programs, seconds = self.made.get(timeout=1)
    except queue.Empty:
      return
    if programs is None:
      self.failed.add(name)
    else:
      self.compile_s[name], self.programs[name] = round(seconds, 2), programs
      self._say(f'{name}: compiled in {seconds:.0f} s')
      self._guarded(name, self._clock)
    self._trace_next()

  def _trace_next(self) -> None:
    if not self.to_trace:
      return
    (name, programs), start = self.to_trace.pop(0), time.perf_counter()
    try:
      programs.lower()
    except Exception as error:  # whatever JAX raises
      programs = None
      self._say_failed(name, error)
    self.traced.put((name, programs, time.perf_counter() - start))

  def _compile_all(self, count: int) -> None:
    for _ in range(count):
      name, programs, seconds = self.traced.get()
      start = time.perf_counter()
      try:
        if programs:
          programs.compile()
      except Exception as error:  # whatever XLA raises
        programs = None
        self._say_failed(name, error)
      self.made.put((name, programs, seconds + time.perf_counter() - start))

  def _prepare(self, name: str) -> None:
    contender = make_contender(name, tiny=self.options.tiny)
    if self.options.steps and name in self.options.contenders:
      contender.make(self.options.decay, self.options.steps)  # refuses too few
    model = make_model(
      name, self.options.size, self.vocab, style=self.options.style, tiny=self.options.tiny
    )
    shape = jax.ShapeDtypeStruct(self.tokens.shape, self.tokens.dtype)
    made = Programs(model, contender, self.options.batch, shape, self.held_out)
    self.to_trace.append((name, made))

  def _guarded(self, name: str, what: Any, *args: Any) -> None:
    """One contender that fails costs the others nothing."""
    try:
      what(name, *args)
    except Exception as error:  # whatever XLA raises
      self.failed.add(name)
      self._say_failed(name, error)

  def _say_failed(self, name: str, error: Exception) -> None:
    self._say(f'{name}: failed: {type(error).__name__}: {str(error)[:1500]}')

  def _clock(self, name: str) -> None:
    while self.options.wait_for and not self.options.wait_for.exists() and time.monotonic() < self.end:
      time.sleep(0.2)
    programs = self.programs[name]
    search_every = 4 if self.options.tiny else SEARCH_EVERY
    found = trials.clock(
      programs, self.tokens, search_every=search_every, bursts=self.options.bursts,
      warm_s=0.0 if self.options.tiny else self.options.warm,
    )  # fmt: skip
    config = programs.model.config
    shape = dict(layers=config.num_layers, d=config.embed_dim, hidden=config.hidden_dim, vocab=config.vocab_size)
    memory = {phase: programs.memory_gb(phase) for phase, _ in programs.phases}
    self.clocked[name] = {
      'parameters': param_count(programs.shapes.params), 'shape': shape, 'scan_layers': config.scan_layers,
      'remat': config.remat, 'compile_s': self.compile_s[name], 'temporaries_gb': memory, **found,
    }  # fmt: skip
    json_lines.append(self.options.out, {'bench': 'race_clock', **self.head, **self._who(name), **self.clocked[name]})
    self._say(f'{name}: {found["step_ms"]:.2f} ms a step {found["phases_ms"]}, temporaries {memory} GB')

  def _trial(self, name: str, trial: Trial) -> None:
    step_ms = self.clocked[name]['step_ms']
    steps = self._steps(name, trial)
    found = trials.run(
      self.programs[name], self.tokens, self.num_windows, trial, steps=steps, step_ms=step_ms,
      evaluations=self.options.evaluations,
    )
    self.done[name][trial] = or_inf(found['loss'])
    clocked = {key: self.clocked[name][key] for key in ('parameters', 'shape', 'step_ms')}
    json_lines.append(self.options.out, {
      'bench': 'race', **self.head, **self._who(name), **clocked, **dataclasses.asdict(trial), 'steps': steps, **found,
    })  # fmt: skip
    norms = [row[3] for row in found['train']]
    self._say(
      f'{name}: rate {trial.rate:g} decay {trial.decay:g} seed {trial.seed} share {trial.share:g}: {steps} steps,'
      f' loss {found["loss"]}, wall {found["wall_s"]:.1f} s, norm up to {max(norms):.1f}'
    )

  def _who(self, name: str) -> dict[str, Any]:
    return {'contender': name, 'title': CONTENDERS[name].label, 'dense_phase': CONTENDERS[name].dense_phase}

  def _resume(self) -> None:
    if not self.options.out.exists():
      self.options.out.parent.mkdir(parents=True, exist_ok=True)
      return
    others = 0
    for record in json_lines.read(self.options.out):
      if record['bench'] != 'race':
        continue
      today = CONTENDERS.get(record['contender'])
      if not self.same.items() <= record.items() or (today and today.dense_phase != record.get('dense_phase')):
        others += 1
      elif record['contender'] in self.done:
        trial = Trial(**{field.name: record[field.name] for field in dataclasses.fields(Trial)})
        self.done[record['contender']][trial] = or_inf(record['loss'])
    if others:
      what = ', '.join([*self.same, 'dense_phase'])
      self._say(f'{self.options.out}: {others} trials of other races (another of {what}) do not count')

  def _say(self, what: str) -> None:
    left = self.end - time.monotonic()
    print(f'[{left:6.0f} s left] {what}', flush=True)


def _positive(text: str) -> float:
  if not (value := float(text)) > 0:
    raise argparse.ArgumentTypeError(f'{text} must be above zero')
  return value


def _count(text: str) -> int:
  if not text.isdecimal() or (value := int(text)) < 1:
    raise argparse.ArgumentTypeError(f'{text} must be a whole number, 1 or more')
  return value


def parser() -> argparse.ArgumentParser:
  """The parser of the command line."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments race', description=(__doc__ or '').partition('\n')[0],
    epilog='python -m experiments.reports.race_table FILE prints the tables of its records.',
  )  # fmt: skip
  parser.add_argument('--out', type=Path, required=True, help='JSON-lines file of records')
  parser.add_argument('--text', type=Path, required=True, help='folder of prepared tokens')
  blocks = [name for name, contender in CONTENDERS.items() if contender.model.get('ffn_order') == 'position']
  parser.add_argument('--contenders', nargs='+', required=True, choices=list(CONTENDERS), metavar='NAME',
                      help=f'in the order in which they are compiled: {", ".join(CONTENDERS)}. Of these'
                      f' {", ".join(blocks)} take a --batch of 64 or 128 sequences, or a multiple, so short ones:'
                      ' a --size that ends in _short')  # fmt: skip
  parser.add_argument('--clock-only', nargs='+', default=[], choices=list(CONTENDERS), metavar='NAME',
                      help='contenders of which only a step is timed, after the others')  # fmt: skip
  parser.add_argument('--size', default='wide2048', choices=list(dict.fromkeys([*SIZES, *gpt2.SIZES])),
                      help='those that end in _short have 256 tokens a sequence (default: %(default)s)')  # fmt: skip
  parser.add_argument('--batch', type=_count, default=32, help='sequences a step (default: %(default)s)')
  parser.add_argument('--seconds', type=_positive, default=75, help='of training a trial (default: %(default)s)')
  parser.add_argument('--steps', type=_count, help='of a trial, the same for all, in place of seconds')
  parser.add_argument('--minutes', type=float, default=25, help='until no trial begins that would not end in time')
  parser.add_argument('--rate', type=_positive, default=1e-3, help='with which searches begin (default: %(default)s)')
  parser.add_argument('--decay', type=_positive,
                      help='masked decay with which searches begin of contenders that have one (default: their own,'
                      f' as a rule {DECAY:g})')
  parser.add_argument('--trials', type=int, default=5, help='of the search of each contender (default: %(default)s)')
  parser.add_argument('--seeds', type=int, nargs='*', default=[1, 2],
                      help='of the best trial, after the search, which is with seed 0 (default: 1 2)')  # fmt: skip
  parser.add_argument('--style', default='gpt2', choices=list(STYLES), help='of all models (default: %(default)s)')
  parser.add_argument('--bursts', type=_count, default=3, help='of steps, for the clock (default: %(default)s)')
  parser.add_argument('--warm', type=float, default=15,
                      help='seconds of steps before a clock, on a warm GPU (default: %(default)s)')  # fmt: skip
  parser.add_argument('--eval-batches', type=_count, default=24, help='(default: %(default)s)')
  parser.add_argument('--evaluations', type=_count, default=8, help='of a trial, evenly spread (default: %(default)s)')
  parser.add_argument('--wait-for', type=Path, help='a file: no step is timed before it exists; compiling may begin')
  parser.add_argument('--tiny', action='store_true', help='small shapes, to see that it runs')
  return parser


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the number of contenders that failed."""
  return Race(parser().parse_args(argv)).run()
