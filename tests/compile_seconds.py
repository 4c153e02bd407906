"""CPU seconds until XLA has compiled a training step for an H100, dense and sparse in turn, on a machine without a GPU.

  JAX_PLATFORMS=cpu python -m tests.compile_seconds --out seconds.jsonl     # of GPT-2 124M, unrolled and in a scan

Every figure is of a process of its own: the first one of a method keeps its kernels in an empty folder, the second
finds them there; JAX keeps no programs on disk. Matmuls are cuBLAS', attention is XLA's. What needs the GPU itself,
choosing among cuBLAS' algorithms and loading the program, is not in them. Seconds are of user and system in all
threads, ptxas included: they depend less on what else runs than those of a clock. It needs the CUDA plug-in wheels.
"""

import argparse
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import itertools
import json
import os
from pathlib import Path
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from experiments.bench import measure
from experiments.bench.compile_time import CASES, LAYOUTS
from experiments.runs.race.contenders import CONTENDERS, make_model
from experiments.runs.race.programs import Programs
from pallas_kernels import _bench, _compat, _device, _disk_cache
from tests import targets
from tests.pallas_kernels import compiling
from tests.sparse24_jax import hlo, hopper

MODULE = 'tests.compile_seconds'
_FLAGS = '--xla_gpu_enable_triton_gemm=false'


def stages(name: str, layout: str, options: argparse.Namespace, program: Path | None = None) -> dict[str, float]:
  """CPU seconds of each stage of most steps of the first phase, in this process, and what the program is made of."""
  model = make_model(name, options.size, 50304, scan=layout == 'scan')
  model = model.clone(config=dataclasses.replace(model.config, attention='xla'))
  text = jax.ShapeDtypeStruct((1_000_000,), jnp.int32)
  programs = Programs(model, CONTENDERS[name], options.batch, text, jnp.zeros((1, options.batch), jnp.int32))
  with _on_an_h100():
    step, arguments = programs.step_of(programs.phases[0][0], programs.refreshes[0])
    sharding = hopper.sharding()
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    stamps = [_cpu_seconds()]
    traced = step.trace(*arguments)
    stamps.append(_cpu_seconds())
    lowered = traced.lower(lowering_platforms=('cuda',))
    stamps.append(_cpu_seconds())
    compiled = lowered.compile()
    stamps.append(_cpu_seconds())
  names = ('trace_s', 'lower_s', 'compile_s')
  seconds = {name: round(b - a, 2) for name, (a, b) in zip(names, itertools.pairwise(stamps), strict=True)}
  made = compiled.as_text() or ''
  if program:
    program.write_text(made)
  return seconds | {'total_s': round(stamps[-1] - stamps[0], 2)} | parts(made)


def parts(text: str) -> dict[str, int]:
  """How many instructions, fusions and kernels a compiled program has: XLA compiles fusions that are alike once."""
  computations = hlo.computations(text)
  fused = [
    name for lines in computations.values() for line in lines
    for name in re.findall(r' fusion\(.*calls=%?([\w.\-]+)', line)
  ]  # fmt: skip
  return dict(
    instructions=sum(map(len, computations.values())), fusions=len(fused),
    distinct_fusions=len({_anonymous(computations[name]) for name in fused}),
    custom_calls=text.count('custom_call_target='),
  )  # fmt: skip


def _anonymous(lines: Sequence[str]) -> str:
  """A computation without the names of its instructions and where in the source they are from."""
  numbers: dict[str, str] = {}
  plain = [re.sub(r', (metadata=\{[^}]*\}|(backend_config|frontend_attributes)=.*)', '', line) for line in lines]
  return re.sub(r'%[\w.\-]+', lambda m: numbers.setdefault(m[0], f'%{len(numbers)}'), '\n'.join(plain))


@contextlib.contextmanager
def _on_an_h100() -> Any:
  with (
    mock.patch.object(_device, 'current', lambda: targets.target_device(hopper.TARGET)),
    mock.patch.object(_device, 'arrays_are_whole', lambda: True),
    targets.lowering_for(90),
    _compat.assumed_capability(9, 0),
  ):
    yield


def _cpu_seconds() -> float:
  used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
  return sum(u.ru_utime + u.ru_stime for u in used)


def in_turns(layout: str, options: argparse.Namespace) -> dict[str, dict[str, list[dict[str, float]]]]:
  """Method -> 'first' and 'again' -> what each round took."""
  found: dict[str, dict[str, list[Any]]] = {name: {'first': [], 'again': []} for name in options.select}
  for name in _bench.turns(options.select, options.rounds):
    with tempfile.TemporaryDirectory() as folder:
      for process in found[name].values():
        process.append(_in_a_process(name, layout, options, folder))
        print(f'  {name}, {layout}: {process[-1]}', flush=True)
  return found


def _in_a_process(name: str, layout: str, options: argparse.Namespace, folder: str) -> dict[str, float]:
  command = [sys.executable, '-m', MODULE, '--one', name, layout, '--size', options.size]
  command += ['--batch', str(options.batch), '--out', str(options.out)]
  # Nobody's cache of programs, nor fewer optimizations as tests have them.
  env = {key: value for key, value in os.environ.items() if not key.startswith('JAX_')}
  env |= {_disk_cache.VARIABLE: folder, 'TRITON_CACHE_DIR': f'{folder}/triton'}
  env |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': _FLAGS}
  done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
  if done.returncode:
    raise RuntimeError(f'exit status {done.returncode}: {done.stderr[-1000:]}')
  return json.loads(done.stdout.splitlines()[-1])


def records(layout: str, options: argparse.Namespace, head: Mapping[str, Any]) -> list[dict[str, Any]]:
  """One a method: medians of its processes, all samples, and how many times dense's seconds they are."""
  found = in_turns(layout, options)
  medians = {
    name: {which: {k: statistics.median(s[k] for s in samples) for k in samples[0]} for which, samples in both.items()}
    for name, both in found.items()
  }
  dense = medians.get('dense')
  return [
    dict(
      bench='compile_seconds', **head, device='compiled for an H100 on a CPU', op='compile', recipe=name,
      model=f'gpt2-{options.size}', layouts=layout, shape={'batch': options.batch}, **medians[name],
      samples={which: [s['total_s'] for s in samples] for which, samples in both.items()},
      over_dense={w: round(v['total_s'] / dense[w]['total_s'], 3) for w, v in medians[name].items()} if dense else None,
    )
    for name, both in found.items()
  ]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Measures the selected methods, and appends a record of each."""
  parser = argparse.ArgumentParser(prog=f'python -m {MODULE}', description=(__doc__ or '').partition('\n')[0])
  parser.add_argument('--out', type=Path, required=True, help='JSON-lines file to append records to')
  parser.add_argument('--select', nargs='+', default=CASES, choices=tuple(CONTENDERS), metavar='CONTENDER')
  parser.add_argument('--layouts', nargs='+', default=LAYOUTS, choices=LAYOUTS)
  parser.add_argument('--size', default='124m', help='of GPT-2 (default: %(default)s)')
  parser.add_argument('--batch', type=int, default=32, help='sequences a step (default: %(default)s)')
  parser.add_argument('--rounds', type=int, default=3, help='pairs of processes a method (default: %(default)s)')
  parser.add_argument('--program', type=Path, help='with --one: keep the compiled program in this file')
  parser.add_argument('--one', nargs=2, metavar=('CONTENDER', 'LAYOUT'), help='only this one, in this process')
  options = parser.parse_args(argv)
  if not compiling.can_compile_for_gpu():
    parser.error('this needs the CUDA plug-in wheels, as .venv-kernels has them')
  if options.one:
    print(json.dumps(stages(options.one[0], options.one[1], options, options.program)))
    return 0
  head = measure.environment(MODULE, argv)
  del head['device']
  for layout in options.layouts:
    for record in records(layout, options, head):
      _bench.append(options.out, record)
      first, again, over = record['first'], record['again'], record['over_dense'] or {}
      print(f'{record["recipe"]}, {layout}: {first["total_s"]:.1f} and {again["total_s"]:.1f} s, {over} times dense')
  return 0


if __name__ == '__main__':
  raise SystemExit(main())
