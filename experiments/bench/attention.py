"""`python -m experiments.bench.attention --out FILE`: attention under a pattern, forward and backward.

The baseline `masked` is the dense form with the pattern's mask; `full` is full causal attention by the fastest library
kernel, which is what a model would run otherwise. Errors are those of output and gradients against the masked form in
float32.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import dataclasses
import time
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from experiments.bench import measure
from pallas_kernels.sparse_attention.api import Pattern, sparse_attention

MODULE = 'experiments.bench.attention'
# Batch, positions, heads, head size: GPT-2 124M, and a longer sequence of the same tokens.
SHAPES = {'1k': (16, 1024, 12, 64), '4k': (4, 4096, 12, 64)}
TINY = (2, 64, 2, 8)
CASES = {f'{kind}-{name}': (kind, name) for name in SHAPES for kind in ('local', 'combined', 'fixed', 'strided')}
# For what is compared and not timed: autotuning float32 products takes longer than all else.
_NO_AUTOTUNING = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}
GROUPS = {'all': list(CASES), '1k': [case for case in CASES if case.endswith('1k')]}


def step_of(pattern: Pattern, implementation: str) -> Callable[..., Any]:
  """(q, k, v, dy) -> (y, gradients of q, k and v)."""

  def step(q: Array, k: Array, v: Array, dy: Array) -> Any:
    y, vjp = jax.vjp(lambda *x: sparse_attention(*x, patterns=pattern, implementation=implementation), q, k, v)
    return y, vjp(dy)

  return step


@dataclasses.dataclass(frozen=True)
class Case:
  """One case, its inputs and its programs being compiled.

  Attributes:
    pattern: of the twins but `full`.
    args: q, k, v and the cotangent, [batch, positions, heads, head size].
    few: the first sequence of them, float32.
    programs: twin -> future of a compiled step, or of the error that refused it.
    expected: future of the masked form in float32, for `few`.
  """

  pattern: Pattern
  args: Sequence[Array]
  few: Sequence[Array]
  programs: Mapping[str, Future]
  expected: Future


def prepare(name: str, options: Any, pool: ThreadPoolExecutor) -> Case:
  """Starts to compile one case."""
  kind, length = CASES[name]
  shape = TINY if options.tiny else SHAPES[length]
  pattern = Pattern(kind, 8 if options.tiny else options.window)
  dtype = jnp.float32 if options.tiny else jnp.bfloat16
  args = [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in jax.random.split(jax.random.key(0), 4)]
  few = [x[:1].astype(jnp.float32) for x in args]
  full = 'reference' if options.tiny else 'cudnn'
  jobs = {
    'blocks': (pattern, 'blocks'), 'cudnn': (pattern, 'cudnn'), 'masked': (pattern, 'reference'),
    'full': (Pattern('full'), full),
  }  # fmt: skip

  def compile_one(job: tuple[Pattern, str]) -> Any:
    try:
      return jax.jit(step_of(*job)).lower(*args).compile()
    except (ValueError, RuntimeError) as error:  # JAX's own and NotImplementedError are RuntimeErrors
      return error

  def reference() -> Any:
    with jax.default_matmul_precision('highest'):
      return jax.jit(step_of(pattern, 'reference')).lower(*few).compile(compiler_options=_NO_AUTOTUNING)

  programs = {twin: pool.submit(compile_one, job) for twin, job in jobs.items()}
  return Case(pattern, args, few, programs, pool.submit(reference))


def run(case: Case, options: Any, head: Mapping[str, Any], clock: measure.Clock) -> dict[str, Any]:
  """Measures one case and returns its record."""
  pattern, args = case.pattern, case.args
  shape = args[0].shape
  compiled = {twin: future.result() for twin, future in case.programs.items()}
  refused = {twin: str(compiled.pop(twin))[:200] for twin, f in list(compiled.items()) if isinstance(f, Exception)}
  if 'blocks' not in compiled:
    raise ValueError(f'the block form does not compile: {refused["blocks"]}')
  expected = jax.tree.leaves(case.expected.result()(*case.few))

  def errors(twin: str) -> dict[str, float]:
    found = jax.tree.leaves(compiled[twin](*args))
    pairs = zip(('y', 'dq', 'dk', 'dv'), found, expected, strict=True)
    return {what: float(f'{measure.relative_error(a[:1], b):.3e}') for what, a, b in pairs}

  error = {twin: errors(twin) for twin in compiled if twin != 'full'}
  clock.lap('check')
  calls = {twin: lambda f=f: f(*args) for twin, f in compiled.items()}
  bursts = measure.interleave(calls, rounds=options.rounds, steps=options.steps)
  clock.lap('time')
  rows = {twin: measure.timing(bursts[twin]) | {'memory_gb': measure.memory(compiled[twin])} for twin in calls}
  blocks = rows.pop('blocks')
  return dict(
    bench='attention', **head, op='sparse_attention', pattern=pattern.kind, window=pattern.window,
    dtype=args[0].dtype.name,
    shape=dict(zip(('batch', 'length', 'heads', 'head_size'), shape, strict=True)), mode='forward_and_vjp',
    implementation='blocks', computed_share=round(pattern.computed(shape[1]) / shape[1] ** 2, 4), **blocks,
    baselines=rows, refused=refused, error=error,
    speedup={twin: round(row['median_ms'] / blocks['median_ms'], 4) for twin, row in rows.items()},
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected cases; returns the number that failed."""
  parser = measure.parser(MODULE, __doc__, [*GROUPS, *CASES], ['1k'])
  parser.add_argument('--window', type=int, default=128, help='c of the patterns (default: %(default)s)')
  parser.add_argument('--seconds', type=float, default=0.0, help='begin no case after these (default: no limit)')
  options = parser.parse_args(argv)
  head = measure.environment(MODULE, argv)
  failed, start, clock = 0, time.monotonic(), measure.Clock()
  names = list(dict.fromkeys(name for chosen in options.select for name in GROUPS.get(chosen, [chosen])))
  with ThreadPoolExecutor() as pool:
    cases = {name: prepare(name, options, pool) for name in names}
  # All at once, and before anything is timed: compiling takes the processor from the thread that starts the steps.
  clock.lap('compile')
  for name, case in cases.items():
    if options.seconds and time.monotonic() - start > options.seconds:
      print(f'{name}: left out after {options.seconds:g} s', flush=True)
      failed += 1
      continue
    try:
      record = run(case, options, head, clock)
    except (ValueError, RuntimeError) as error:
      print(f'{name}: failed: {type(error).__name__}: {str(error)[:600]}', flush=True)
      failed += 1
      continue
    measure.append(options.out, record)
    times = {'blocks': record['median_ms']} | {twin: row['median_ms'] for twin, row in record['baselines'].items()}
    print(f'{name}: {times} ms; errors {record["error"]}; refused {record["refused"]}', flush=True)
  return failed


if __name__ == '__main__':
  raise SystemExit(main())
