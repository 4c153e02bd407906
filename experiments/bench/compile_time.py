"""`python -m experiments.bench.compile_time --out FILE`: seconds until the steps of each twin are compiled.

Each contender of races is traced, lowered and compiled in a process of its own, since what XLA timed for
one would serve the next: with its layers unrolled and in a scan. Three processes follow one another: the first finds
nothing on disk, the next the compiled kernels of the first, and the last its programs too. The programs are those that
a run needs in its first phase, one after another: with masks to search two, of steps with and without a search. One
record a contender and layout; dense is one of them.
"""

import argparse
from collections.abc import Mapping, Sequence
import itertools
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import measure
from experiments.runs.race.contenders import CONTENDERS, make_model, SIZES
from experiments.runs.race.programs import Programs
from pallas_kernels import _bench, _disk_cache

MODULE = 'experiments.bench.compile_time'
CASES = ('dense', 'dense_fp8', 'fst', 's_ste_fp8', 'fst_all', 's_ste_fp8_all', 'fst_fp8_all')
LAYOUTS = ('unrolled', 'scan')
_MEMORY = 'XLA_PYTHON_CLIENT_PREALLOCATE'


def stages(name: str, layout: str, options: Any) -> dict[str, float]:
  """Seconds of each stage of the first phase's steps, in this process, and how many programs these are."""
  vocab, batch = (256, 2) if options.tiny else (50304, options.batch)
  model = make_model(name, options.size, vocab, tiny=options.tiny, scan=layout == 'scan')
  text = jax.ShapeDtypeStruct((1_000_000,), jnp.int32)
  programs = Programs(model, CONTENDERS[name], batch, text, jnp.zeros((1, batch), jnp.int32))
  seconds = dict.fromkeys(('trace_s', 'lower_s', 'compile_s'), 0.0)
  for refresh in programs.refreshes:
    step, arguments = programs.step_of(programs.phases[0][0], refresh)
    stamps = [time.perf_counter()]

    def done(made: Any, stamps: list[float] = stamps) -> Any:
      stamps.append(time.perf_counter())
      return made

    done(done(done(step.trace(*arguments)).lower()).compile())
    for stage, (a, b) in zip(seconds, itertools.pairwise(stamps), strict=True):
      seconds[stage] += b - a
  found = seconds | {'total_s': sum(seconds.values())}
  return {stage: round(value, 2) for stage, value in found.items()} | {'programs': len(programs.refreshes)}


def run(name: str, layout: str, options: Any, head: Mapping[str, Any]) -> dict[str, Any]:
  """The record of one contender, from three processes that share folders of kernels and of programs."""
  with tempfile.TemporaryDirectory() as folder:
    kernels, programs, none = (str(Path(folder, each)) for each in ('kernels', 'programs', 'none'))
    first, following, again = (
      _in_a_process(name, layout, options, kernels, found) for found in (programs, none, programs)
    )
  return dict(
    bench='compile_time', **head, op='compile', model=f'gpt2-{options.size}', recipe=name, layouts=layout,
    shape={'batch': options.batch}, first=first, next=following, again=again, headline=not options.tiny,
  )  # fmt: skip


def _in_a_process(name: str, layout: str, options: Any, kernels: str, programs: str) -> dict[str, float]:
  command = [sys.executable, '-m', MODULE, '--one', name, layout, '--cache', programs, '--size', options.size]
  command += ['--batch', str(options.batch), '--out', str(options.out), *(['--tiny'] if options.tiny else [])]
  env = {key: value for key, value in os.environ.items() if key != _MEMORY} | {_disk_cache.VARIABLE: kernels}
  done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
  if done.returncode:
    raise RuntimeError(f'exit status {done.returncode}: {done.stderr[-1000:]}')
  return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> int:
  """Measures the selected contenders; returns the number that failed."""
  parser = measure.plain_parser(MODULE, __doc__)
  parser.add_argument('--select', nargs='+', default=CASES, choices=tuple(CONTENDERS), metavar='CONTENDER')
  parser.add_argument('--layouts', nargs='+', default=LAYOUTS, choices=LAYOUTS)
  parser.add_argument('--size', default='124m', help=f'of GPT-2, or one of {", ".join(SIZES)} (default: %(default)s)')
  parser.add_argument('--batch', type=int, default=32, help='sequences a step (default: %(default)s)')
  parser.add_argument('--tiny', action='store_true', help='a small model and plain jax.numpy, to see that it runs')
  parser.add_argument('--one', nargs=2, help=argparse.SUPPRESS)
  parser.add_argument('--cache', help=argparse.SUPPRESS)
  options = parser.parse_args(argv)
  if options.one:
    jax.config.update('jax_compilation_cache_dir', options.cache)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    name, layout = options.one
    print(json.dumps(stages(name, layout, options)))
    return 0
  os.environ[_MEMORY] = 'false'  # this process only asks for the GPU's name
  measure.check_gpu(parser, options)
  head = measure.environment(MODULE, argv)
  cases = {f'{name}-{layout}': (name, layout) for name in options.select for layout in options.layouts}

  def summary(record: Mapping[str, Any]) -> str:
    first, following, again = record['first'], record['next'], record['again']
    stages = ', '.join(f'{key.removesuffix("_s")} {seconds:.1f}' for key, seconds in first.items() if key[-2:] == '_s')
    kept = f'with kernels from disk {following["total_s"]:.1f} s, with programs {again["total_s"]:.1f} s'
    return f'{first["programs"]} programs: {stages} s; {kept}'

  return _bench.run_each(cases, lambda case: run(*cases[case], options, head), options.out, summary)


if __name__ == '__main__':
  raise SystemExit(main())
