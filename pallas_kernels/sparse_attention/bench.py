"""Times attention under a pattern, forward and backward: `python -m pallas_kernels bench sparse_attention`.

`triton`, `cudnn` and `blocks` are back ends of the pattern; `blocks` is compiled for one case only, as XLA tunes its
many matmuls for longer than all else takes. `full` is full causal attention by the fastest library kernel, which is
what a model would run otherwise. Errors are those of output and gradients of the first head of the first sequence
against the masked form in float32 on the host, for the longest sequences against the block form.

Times are those of a step's kernels on a GPU: most steps are shorter than the host takes to start them. Each case is
compiled when it is its turn, its twins at once, and nothing compiles while steps are timed.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import dataclasses
import time
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _bench, _device, _tuning
from pallas_kernels.sparse_attention import cudnn
from pallas_kernels.sparse_attention.api import Pattern, sparse_attention
from pallas_kernels.sparse_attention.arg_specs import BLOCKS, SELECTIONS, SHAPES, Spec, SPECS

TINY = (2, 64, 2, 8)


def arguments(parser: argparse.ArgumentParser) -> None:
  """What `bench sparse_attention` takes."""
  _bench.arguments(parser, [*SELECTIONS, *SPECS], ['all'])
  parser.add_argument('--seconds', type=float, default=0.0, help='begin no case that would end later (0: no limit)')


def run(options: argparse.Namespace) -> int:
  """Exit status 1 if a case failed or found no time."""
  head, clock = _device.environment(), _bench.Clock()
  full: dict[str, Future] = {}
  start, longest = time.monotonic(), 0.0

  def measured(name: str) -> dict[str, Any]:
    nonlocal longest
    begin = time.monotonic()
    if options.seconds and begin - start + longest > options.seconds:
      raise ValueError(f'left out, it would end after {options.seconds:g} s')
    try:
      with ThreadPoolExecutor() as pool:
        case = prepare(SPECS[name], options, pool, full)
      clock.lap(f'compile {name}')
      return head | measure(case, options, clock)
    finally:
      longest = max(longest, time.monotonic() - begin)

  def summary(record: Mapping[str, Any]) -> str:
    twins = record['baselines'] | {record['implementation']: record}
    times = {twin: row['median_ms'] for twin, row in twins.items()}
    return f'{times} ms; errors {record["error"]}; refused {record["refused"]}'

  return min(_bench.run_each(_bench.selected(options, SELECTIONS), measured, options.out, summary), 1)


def step_of(pattern: Pattern, implementation: str) -> Callable[..., Any]:
  """(q, k, v, dy) -> (y, gradients of q, k and v)."""

  def attend(q: Array, k: Array, v: Array) -> Array:
    if implementation == 'cudnn':  # the back end would compile a trial first
      return cudnn.attend(pattern, q, k, v, q.shape[-1] ** -0.5, 'cudnn')
    return sparse_attention(q, k, v, patterns=pattern, implementation=implementation)

  def step(q: Array, k: Array, v: Array, dy: Array) -> Any:
    y, vjp = jax.vjp(attend, q, k, v)
    return y, vjp(dy)

  return step


@dataclasses.dataclass(frozen=True)
class Case:
  """One case, its inputs and its programs.

  Attributes:
    pattern: of the twins but `full`.
    args: q, k, v and the cotangent, [batch, positions, heads, head size].
    programs: twin -> compiled step, or the error that refused it.
    expected: y, dq, dk, dv of the first head of the first sequence.
  """

  pattern: Pattern
  args: Sequence[Array]
  programs: Mapping[str, Any]
  expected: Sequence[np.ndarray]


def prepare(spec: Spec, options: Any, pool: ThreadPoolExecutor, full: dict[str, Future]) -> Case:
  """Compiles one case.

  Args:
    spec: what is measured.
    options: of the command line.
    pool: twins are compiled in.
    full: length -> the twin of that name, which all patterns share; what is not there is put in.
  """
  shape = TINY if options.tiny else SHAPES[spec.length]
  pattern = dataclasses.replace(spec.pattern, window=8) if options.tiny else spec.pattern
  dtype = jnp.float32 if options.tiny else jnp.bfloat16
  args = [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in jax.random.split(jax.random.key(0), 4)]
  twins = ['triton']
  twins += ['cudnn'] if pattern.kind == 'local' and not options.tiny else []
  twins += ['blocks'] if spec.name in BLOCKS else []

  def compile_one(pattern: Pattern, implementation: str) -> Any:
    return _bench.compile_step(jax.jit(step_of(pattern, implementation)), args)

  def reference() -> Sequence[np.ndarray]:
    few = [np.asarray(x[:1, :, :1]).astype(np.float32) for x in args]
    # A mask of 16384 squared would be a constant of the program.
    form = 'blocks' if spec.length == '16k' else 'reference'
    with jax.default_device(jax.devices('cpu')[0]):
      return [np.asarray(x) for x in jax.tree.leaves(jax.jit(step_of(pattern, form))(*few))]

  expected = pool.submit(reference)
  programs = {twin: pool.submit(compile_one, pattern, twin) for twin in twins}
  if spec.length not in full:
    full[spec.length] = pool.submit(compile_one, Pattern('full'), 'reference' if options.tiny else 'cudnn')
  programs['full'] = full[spec.length]
  found = {twin: each.result() for twin, each in programs.items()}
  if isinstance(found['triton'], Exception) and 'blocks' not in found:
    found['blocks'] = compile_one(pattern, 'blocks')
  return Case(pattern, args, found, expected.result())


def measure(case: Case, options: Any, clock: _bench.Clock) -> dict[str, Any]:
  """What the record of one case says."""
  pattern, args = case.pattern, case.args
  shape = args[0].shape
  compiled = dict(case.programs)
  refused = {twin: str(compiled.pop(twin))[:200] for twin, f in list(compiled.items()) if isinstance(f, Exception)}
  ours = next((twin for twin in ('triton', 'blocks') if twin in compiled), None)
  if ours is None:
    raise ValueError(f'nothing compiles: {refused}')

  def errors(twin: str) -> dict[str, float]:
    found = jax.tree.leaves(compiled[twin](*args))
    pairs = zip(('y', 'dq', 'dk', 'dv'), found, case.expected, strict=True)
    return {
      what: float(f'{_tuning.relative_error(a[:1, :, :1], jnp.asarray(b)):.3e}') for what, a, b in pairs
    }

  error = {twin: errors(twin) for twin in compiled if twin != 'full'}
  clock.lap('check')
  rows = _bench.timed({twin: (f, args) for twin, f in compiled.items()}, options, detach=False)
  clock.lap('time')
  for twin, row in rows.items():
    row['memory_gb'] = _bench.memory(compiled[twin])
  row = rows.pop(ours)
  return dict(
    bench='attention', op='sparse_attention', pattern=pattern.kind, window=pattern.window,
    dtype=args[0].dtype.name,
    shape=dict(zip(('batch', 'length', 'heads', 'head_size'), shape, strict=True)), mode='forward_and_vjp',
    implementation=ours, computed_share=round(pattern.computed(shape[1]) / shape[1] ** 2, 4), **row,
    baselines=rows, refused=refused, error=error,
    speedup=_bench.speedup(rows, row['median_ms']),
  )  # fmt: skip
