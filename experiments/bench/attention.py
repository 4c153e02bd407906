"""`python -m experiments.bench.attention --out FILE`: attention under a pattern, forward and backward.

The baseline `masked` is the dense form with the pattern's mask, for the shorter sequences only: its scores do not pay
for longer ones, and take long to compile. `full` is full causal attention by the fastest library kernel, which is what
a model would run otherwise. Errors are those of output and gradients against the masked form in float32.

Each case is compiled when it is its turn, its twins at once, and nothing compiles while steps are timed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
# In the order of what they tell: whether sparsity pays is seen first where it is highest.
CASES = {
  f'{kind}-{length}': (kind, length)
  for kinds in (('local', 'combined'), ('fixed', 'strided')) for length in ('4k', '1k') for kind in kinds
}  # fmt: skip
# For what is compared and not timed: autotuning float32 products takes longer than all else.
_NO_AUTOTUNING = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}
GROUPS = {'all': list(CASES), 'first': list(CASES)[:4], '1k': [case for case in CASES if case.endswith('1k')]}


def step_of(pattern: Pattern, implementation: str) -> Callable[..., Any]:
  """(q, k, v, dy) -> (y, gradients of q, k and v)."""

  def step(q: Array, k: Array, v: Array, dy: Array) -> Any:
    y, vjp = jax.vjp(lambda *x: sparse_attention(*x, patterns=pattern, implementation=implementation), q, k, v)
    return y, vjp(dy)

  return step


@dataclasses.dataclass(frozen=True)
class Case:
  """One case, its inputs and its programs.

  Attributes:
    pattern: of the twins but `full`.
    args: q, k, v and the cotangent, [batch, positions, heads, head size].
    few: the first sequence of them, float32.
    programs: twin -> compiled step, or the error that refused it.
    expected: the masked form in float32, compiled for `few`.
  """

  pattern: Pattern
  args: Sequence[Array]
  few: Sequence[Array]
  programs: Mapping[str, Any]
  expected: Any


def prepare(name: str, options: Any, pool: ThreadPoolExecutor, full: dict[str, Future]) -> Case:
  """Compiles one case.

  Args:
    name: a key of `CASES`.
    options: of the command line.
    pool: twins are compiled in.
    full: length -> the twin of that name, which all patterns share; what is not there is put in.
  """
  kind, length = CASES[name]
  shape = TINY if options.tiny else SHAPES[length]
  pattern = Pattern(kind, 8 if options.tiny else options.window)
  dtype = jnp.float32 if options.tiny else jnp.bfloat16
  args = [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in jax.random.split(jax.random.key(0), 4)]
  few = [x[:1].astype(jnp.float32) for x in args]
  jobs = {'blocks': (pattern, 'blocks'), 'cudnn': (pattern, 'cudnn')}
  if length == '1k':
    jobs['masked'] = (pattern, 'reference')

  def compile_one(job: tuple[Pattern, str]) -> Any:
    try:
      return jax.jit(step_of(*job)).lower(*args).compile()
    except (ValueError, RuntimeError) as error:  # JAX's own and NotImplementedError are RuntimeErrors
      return error

  def reference() -> Any:
    with jax.default_matmul_precision('highest'):
      return jax.jit(step_of(pattern, 'reference')).lower(*few).compile(compiler_options=_NO_AUTOTUNING)

  expected = pool.submit(reference)
  programs = {twin: pool.submit(compile_one, job) for twin, job in jobs.items()}
  if length not in full:
    full[length] = pool.submit(compile_one, (Pattern('full'), 'reference' if options.tiny else 'cudnn'))
  programs['full'] = full[length]
  return Case(pattern, args, few, {twin: each.result() for twin, each in programs.items()}, expected.result())


def run(case: Case, options: Any, head: Mapping[str, Any], clock: measure.Clock) -> dict[str, Any]:
  """Measures one case and returns its record."""
  pattern, args = case.pattern, case.args
  shape = args[0].shape
  compiled = dict(case.programs)
  refused = {twin: str(compiled.pop(twin))[:200] for twin, f in list(compiled.items()) if isinstance(f, Exception)}
  if 'blocks' not in compiled:
    raise ValueError(f'the block form does not compile: {refused["blocks"]}')
  expected = jax.tree.leaves(case.expected(*case.few))

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


def within(
  names: Sequence[str], seconds: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[str, bool]]:
  """(name, whether it would end in time if it took as long as the longest so far); 0 seconds are no limit."""
  start, longest = clock(), 0.0
  for name in names:
    begin = clock()
    yield name, not seconds or begin - start + longest <= seconds
    longest = max(longest, clock() - begin)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected cases; returns the number that failed."""
  parser = measure.parser(MODULE, __doc__, [*GROUPS, *CASES], ['first'])
  parser.add_argument('--window', type=int, default=128, help='c of the patterns (default: %(default)s)')
  parser.add_argument('--seconds', type=float, default=0.0, help='begin no case that would end later (0: no limit)')
  options = parser.parse_args(argv)
  head = measure.environment(MODULE, argv)
  failed, clock = 0, measure.Clock()
  full: dict[str, Future] = {}
  names = list(dict.fromkeys(name for chosen in options.select for name in GROUPS.get(chosen, [chosen])))
  for name, in_time in within(names, options.seconds):
    if not in_time:
      print(f'{name}: left out, would end after {options.seconds:g} s', flush=True)
      failed += 1
      continue
    try:
      with ThreadPoolExecutor() as pool:
        case = prepare(name, options, pool, full)
      clock.lap(f'compile {name}')
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
