"""`python -m experiments.bench.attention --out FILE`: attention under a pattern, forward and backward.

`triton`, `cudnn` and `blocks` are back ends of the pattern; `blocks` is compiled for one case only, as XLA
tunes its many matmuls for longer than all else takes. `full` is full causal attention by the fastest library
kernel, which is what a model would run otherwise. Errors are those of output and gradients of the first head of the
first sequence against the masked form in float32 on the host, for the longest sequences against the block form.

Times are those of a step's kernels on a GPU: most steps are shorter than the host takes to start them. Each case is
compiled when it is its turn, its twins at once, and nothing compiles while steps are timed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import dataclasses
import time
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments.bench import measure
from pallas_kernels import _tuning
from pallas_kernels.sparse_attention import cudnn
from pallas_kernels.sparse_attention.api import Pattern, sparse_attention

MODULE = 'experiments.bench.attention'
# Batch, positions, heads, head size: GPT-2 124M, and longer sequences of the same tokens.
SHAPES = {'1k': (16, 1024, 12, 64), '4k': (4, 4096, 12, 64), '16k': (1, 16384, 12, 64)}
TINY = (2, 64, 2, 8)
WINDOW = 128
KINDS = ('combined', 'fixed', 'local', 'strided')
CASES = {f'{kind}-{length}': (kind, length) for length in ('4k', '1k', '16k') for kind in KINDS}
# Cases with the plain-XLA form beside the kernels.
BLOCKS = ('combined-4k',)
GROUPS = {'all': list(CASES)} | {size: [case for case in CASES if case.endswith(f'-{size}')] for size in SHAPES}


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
  pattern = Pattern(kind, 8 if options.tiny else WINDOW)
  dtype = jnp.float32 if options.tiny else jnp.bfloat16
  args = [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key in jax.random.split(jax.random.key(0), 4)]
  jobs = {'triton': (pattern, 'triton')}
  if not options.tiny and kind == 'local':
    jobs['cudnn'] = (pattern, 'cudnn')
  if name in BLOCKS:
    jobs['blocks'] = (pattern, 'blocks')

  def compile_one(pattern: Pattern, implementation: str) -> Any:
    return measure.compile_step(jax.jit(step_of(pattern, implementation)), args)

  def reference() -> Sequence[np.ndarray]:
    few = [np.asarray(x[:1, :, :1]).astype(np.float32) for x in args]
    # A mask of 16384 squared would be a constant of the program.
    form = 'blocks' if length == '16k' else 'reference'
    with jax.default_device(jax.devices('cpu')[0]):
      return [np.asarray(x) for x in jax.tree.leaves(jax.jit(step_of(pattern, form))(*few))]

  expected = pool.submit(reference)
  programs = {twin: pool.submit(compile_one, *job) for twin, job in jobs.items()}
  if length not in full:
    full[length] = pool.submit(compile_one, Pattern('full'), 'reference' if options.tiny else 'cudnn')
  programs['full'] = full[length]
  found = {twin: each.result() for twin, each in programs.items()}
  if isinstance(found['triton'], Exception) and 'blocks' not in found:
    found['blocks'] = compile_one(pattern, 'blocks')
  return Case(pattern, args, found, expected.result())


def run(case: Case, options: Any, head: Mapping[str, Any], clock: measure.Clock) -> dict[str, Any]:
  """Measures one case and returns its record."""
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
  rows = measure.timed({twin: (f, args) for twin, f in compiled.items()}, options, detach=False)
  clock.lap('time')
  for twin, row in rows.items():
    row['memory_gb'] = measure.memory(compiled[twin])
  row = rows.pop(ours)
  return dict(
    bench='attention', **head, op='sparse_attention', pattern=pattern.kind, window=pattern.window,
    dtype=args[0].dtype.name,
    shape=dict(zip(('batch', 'length', 'heads', 'head_size'), shape, strict=True)), mode='forward_and_vjp',
    implementation=ours, computed_share=round(pattern.computed(shape[1]) / shape[1] ** 2, 4), **row,
    baselines=rows, refused=refused, error=error,
    speedup=measure.speedup(rows, row['median_ms']),
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
  parser = measure.parser(MODULE, __doc__, [*GROUPS, *CASES], ['all'])
  parser.add_argument('--seconds', type=float, default=0.0, help='begin no case that would end later (0: no limit)')
  options = parser.parse_args(argv)
  measure.check_gpu(parser, options)
  head = measure.environment(MODULE, argv)
  failed, clock = 0, measure.Clock()
  full: dict[str, Future] = {}
  for name, in_time in within(measure.selected(options, GROUPS), options.seconds):
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
    times = {twin: row['median_ms'] for twin, row in (record['baselines'] | {record['implementation']: record}).items()}
    print(f'{name}: {times} ms; errors {record["error"]}; refused {record["refused"]}', flush=True)
  return failed


if __name__ == '__main__':
  raise SystemExit(main())
