"""`python -m experiments.bench.neuron_level --out FILE`: V:N:M matmul, packers and feed-forward block against dense.

Three groups of cases. `matmul`: the product against the faster of XLA's two ways to write the dense one, with the
settings of `tuned/<device>/vnm_matmul.json`, which `--tune FOLDER` writes first. `pack`: each packer's bytes over its
time, as a share of the copy bandwidth of the same run. `ffn`: the block, forward and backward with all its packs,
against dense squared ReLU. All are timed in turns by the sum of their kernels (by the wall clock on a CPU).
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
from pathlib import Path
import statistics
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from experiments.bench import measure
from pallas_kernels import _compat, _device, _tuning, formats
from pallas_kernels.sparse_matmul.operand import to_operand
from pallas_kernels.vnm import api, mosaic_gpu
from pallas_kernels.vnm.format import decompress_operand, VNMOperand
from sparse24_jax.activation_sparsity import ActivationPolicy, neuron_level_ffn

MODULE = 'experiments.bench.neuron_level'
PATTERNS = ((128, 8), (128, 16), (64, 8), (64, 16))
SHAPES = ((16384, 4096, 16384), (16384, 16384, 4096))
BLOCK = (16384, 4096, 16384)
TINY = (128, 256, 128)
_PACKS = ('forward', 'forward_masked', 'tokens', 'gradient', 'tokens_gradient')


@dataclasses.dataclass(frozen=True)
class Case:
  """One row: `kind` is 'matmul' (rows, sum, columns), 'pack' (rows, columns) or 'ffn' (tokens, width, hidden)."""

  kind: str
  v: int
  m: int
  shape: tuple[int, ...]
  role: str = 'forward'

  @property
  def name(self) -> str:
    """What `--select` calls it."""
    parts = [self.kind, f'{self.v}x2x{self.m}', *([self.role] if self.kind == 'pack' else [])]
    return '-'.join([*parts, 'x'.join(map(str, self.shape))])


CASES = {
  case.name: case
  for v, m in PATTERNS
  for case in (
    *(Case('matmul', v, m, shape) for shape in SHAPES),
    *(Case('pack', v, m, (BLOCK[0], BLOCK[2]), role) for role in _PACKS),
    Case('ffn', v, m, BLOCK),
  )
}
GROUPS = {kind: [n for n in CASES if n.startswith(kind)] for kind in ('matmul', 'pack', 'ffn')}


def configs(v: int) -> list[mosaic_gpu.Config]:
  """The settings that are worth timing."""
  best = mosaic_gpu.default_config(v)
  change = dataclasses.replace
  if v % 256 == 0:
    return [best, change(best, stages=5, lag=2)]
  if v % 128 == 0:
    deep = change(best, bn=128, stages=5)
    return [best, change(best, delay=0), change(best, delay=0, lag=2), deep, change(deep, lag=2), change(deep, lag=3)]
  return [best, change(best, bn=192, stages=4), change(best, bn=128, stages=5, lag=2)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def operand(r: int, k: int, v: int, m: int, key: Array) -> VNMOperand:
  """A random V:2:M operand [r, k], made without a packer."""
  values, pairs, order = jax.random.split(key, 3)
  compact = 4 * k // m
  legal = jnp.array([low | high << 2 for low, high in formats.PAIRS], jnp.uint8)
  nibbles = legal[jax.random.randint(pairs, (r, compact // 4), 0, len(formats.PAIRS))]
  order = jnp.argsort(jax.random.uniform(order, (r // v, k // m, m)), axis=-1)[..., :4]
  rows = jnp.sort(order, axis=-1) + (jnp.arange(k // m) * m)[None, :, None]
  entries = jax.random.normal(values, (r, compact // 2), jnp.float32).astype(jnp.bfloat16)
  packed = to_operand(formats.Compressed24(entries, formats.pack_nibbles(nibbles, -1), -1))
  return VNMOperand(packed, rows.reshape(r // v, compact).astype(jnp.int32), m)


def compile_all(jobs: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]) -> dict[str, Any]:
  """Compiled functions; those that are refused are left out, with a line that says why."""

  def one(job: tuple[Callable[..., Any], Sequence[Any]]) -> Any:
    try:
      return jax.jit(job[0]).lower(*job[1]).compile()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
      return error

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    made = dict(zip(jobs, pool.map(one, jobs.values()), strict=True))
  for name in [name for name, f in made.items() if isinstance(f, Exception)]:
    print(f'  {name} does not compile: {str(made.pop(name))[:300]}', flush=True)
  return made


def timer(f: Callable[..., Any], args: Sequence[Any], iterations: int) -> list[float]:
  """Milliseconds of each call: of its kernels on a GPU, by the wall clock elsewhere."""
  if jax.default_backend() == 'gpu':
    return _compat.device_times_ms(f, args, iterations)
  return measure.stream_ms(lambda: f(*args), iterations)


def timed(compiled: Mapping[str, Any], args: Mapping[str, Sequence[Any]], options: Any) -> dict[str, dict[str, Any]]:
  """Samples and medians, taken in turns."""
  runs = [_tuning.Candidate(name, None, f, args[name]) for name, f in compiled.items()]
  gap_s = 0.0 if options.tiny else 0.15
  samples = _tuning.interleave(runs, timer, rounds=options.rounds, iterations=options.steps, gap_s=gap_s)
  return {
    name: dict(samples_ms=s, median_ms=statistics.median(s)) for name, s in zip(compiled, samples, strict=True)
  }


def _multiply(config: mosaic_gpu.Config | None, tiny: bool) -> Callable[..., Array]:
  if tiny:
    return functools.partial(api.vnm_matmul, implementation='reference')
  return functools.partial(mosaic_gpu.vnm_matmul, out_dtype=jnp.dtype('bfloat16'), out_layout='mn', config=config)


def _dense_ways(wide: Any) -> dict[str, Callable[[Array, Array], Array]]:
  def plain(a: Array, b: Array) -> Array:
    return jnp.dot(a.astype(wide), b.astype(wide)).astype(a.dtype)

  def swapped(a: Array, b: Array) -> Array:
    return jax.lax.dot_general(b.astype(wide), a.astype(wide), (((0,), (1,)), ((), ()))).T.astype(a.dtype)

  return {'dense plain': plain, 'dense swapped': swapped}


def matmul(case: Case, options: Any) -> dict[str, Any]:
  """Measures a product; with `--tune` finds its settings first."""
  r, k, n = TINY if options.tiny else case.shape
  a = operand(r, k, case.v, case.m, jax.random.key(r + case.m))
  b = jax.random.normal(jax.random.key(k + n), (k, n), jnp.float32).astype(a.dtype)
  dense = jax.jit(decompress_operand)(a)
  key, device = api.key(a, n, a.dtype, 'mn'), _device.current()
  # XLA's CPU multiplies bfloat16 slowly and not in all layouts.
  ways = _dense_ways(jnp.float32 if options.tiny else a.dtype)
  args: dict[str, Any] = {name: (dense, b) for name in ways}
  args['sparse'] = (a, b)
  baselines = compile_all({name: (f, args[name]) for name, f in ways.items()})
  heat = {name: statistics.median(timer(f, args[name], options.steps)) for name, f in baselines.items()}
  best = min(heat, key=heat.__getitem__)
  expected = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))(*(
    x.astype(jnp.float32) if options.tiny else x for x in (dense, b)
  ))
  if options.tune:
    chosen = [None] if options.tiny else configs(case.v)
    made = compile_all({str(i): (_multiply(c, options.tiny), (a, b)) for i, c in enumerate(chosen)})
    settings = [None if chosen[int(i)] is None else dataclasses.asdict(chosen[int(i)]) for i in made]
    found = _tuning.tune(
      key, _tuning.Candidate('dense', {'way': best}, baselines[best], (dense, b)),
      [_tuning.Candidate('mosaic_gpu', c, f, (a, b)) for c, f in zip(settings, made.values(), strict=True)],
      expected, timer, finalists=2, quick=dict(rounds=2, iterations=options.steps, gap_s=0.05),
      final=dict(rounds=options.rounds, iterations=options.steps, gap_s=0.1),
    )
    _tuning.save(options.tune / device.slug / f'{api.OP}.json', _device.environment() | {'op': api.OP}, [found])
  choice = _tuning.lookup(device.slug, api.OP, key, implementation='mosaic_gpu', folder=options.tune or _tuning.TUNED)
  config = mosaic_gpu.Config(**choice.config) if choice and choice.config else mosaic_gpu.default_config(case.v)
  sparse = compile_all({'sparse': (_multiply(config, options.tiny), (a, b))})
  if not sparse:
    raise ValueError(f'{case.name}: no compiled kernel')
  error, reason = _tuning.verify(_tuning.Candidate('mosaic_gpu', None, sparse['sparse'], (a, b)), expected)
  if reason:
    raise ValueError(f'{case.name}: {reason}')
  rows = timed(sparse | {best: baselines[best]}, args, options)
  ms = rows['sparse']['median_ms']
  return dict(
    bench='vnm_matmul', op='vnm_matmul', role='forward', pattern=f'{case.v}:2:{case.m}',
    shape=dict(tokens=r, d_in=k, d_out=n, m=r, n=n, k=k), layouts=dict(b='kn', out='mn'), mode='forward',
    implementation='mosaic_gpu', config=dataclasses.asdict(config), **rows['sparse'],
    baselines=dict(dense=rows[best] | {'config': {'way': best}}), speedup=round(rows[best]['median_ms'] / ms, 4),
    tflops=2 * r * n * k / ms / 1e9, error=error,
  )  # fmt: skip


def _packer(case: Case, x: Array, gradient: Array) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
  """What is timed, its arguments, and the bytes that it must read."""
  along = dict(axis=-2, spread=True) if case.role.startswith('tokens') else dict(activation='squared_relu')
  pack = functools.partial(api.vnm_pack, v=case.v, m=case.m, **along)
  if not case.role.endswith('gradient'):
    return functools.partial(pack, masked=case.role == 'forward_masked'), (x,), x.nbytes
  pattern = jax.jit(pack)(x).operand
  masked = case.role == 'gradient'

  def f(x: Array, gradient: Array, pattern: VNMOperand) -> tuple[Array, Array | None]:
    made = pack(x, gradient=gradient, pattern=pattern, masked=masked)
    return made.operand.compact.values, made.masked

  # Along neurons both arrays, along tokens the kept part of one.
  read = 2 * x.nbytes if masked else 4 * x.nbytes // case.m
  return f, (x, gradient, pattern), read + pattern.compact.words.nbytes + pattern.rows.nbytes


def pack(case: Case, options: Any) -> dict[str, Any]:
  """Measures a packer beside a copy."""
  shape = (2 * case.v, 32 * case.m) if options.tiny else case.shape
  if options.tiny and case.role.startswith('tokens'):
    shape = shape[::-1]
  x, gradient = (jax.random.normal(jax.random.key(i), shape, jnp.float32).astype(jnp.bfloat16) for i in range(2))
  f, args, read = _packer(case, x, gradient)
  jobs: dict[str, Any] = {'pack': (f, args), 'copy': (lambda x: x * jnp.bfloat16(2), (x,))}
  compiled = compile_all(jobs)
  rows = timed(compiled, {name: job[1] for name, job in jobs.items()}, options)
  moved = read + sum(a.nbytes for a in jax.tree.leaves(compiled['pack'](*args)))
  bandwidth = 2 * x.nbytes / rows['copy']['median_ms']
  return dict(
    bench='memory_bound', op='vnm_pack', role=case.role, pattern=f'{case.v}:2:{case.m}',
    shape=dict(rows=shape[0], columns=shape[1]), mode='forward', implementation='auto', **rows['pack'],
    baselines=dict(copy=rows['copy']), bytes=moved, copy_share=moved / rows['pack']['median_ms'] / bandwidth,
  )  # fmt: skip


def ffn(case: Case, options: Any) -> dict[str, Any]:
  """Measures the block, forward and backward."""
  tokens, d, hidden = (case.v, 64, 2 * case.v) if options.tiny else case.shape
  dtype = jnp.float32 if options.tiny else jnp.bfloat16
  policy = ActivationPolicy(v=case.v, m=case.m, implementation=None if options.tiny else 'kernels')
  keys = jax.random.split(jax.random.key(5), 4)
  sizes = ((tokens, d), (d, hidden), (hidden, d), (tokens, d))
  x, up, down, dz = (
    (jax.random.normal(key, size, jnp.float32) * scale).astype(dtype)
    for key, size, scale in zip(keys, sizes, (1, d**-0.5, hidden**-0.5, 1), strict=True)
  )
  assert policy.up is not None and policy.down is not None
  state = {'up': policy.up.init(up), 'down': policy.down.init(down)}

  def step(block: Callable[..., Array]) -> Callable[..., Any]:
    def both(x: Array, up: Array, down: Array, dz: Array, state: Any) -> Any:
      z, vjp = jax.vjp(lambda *a: block(*a, state), x, up, down)
      return z, *vjp(dz)

    return both

  def dense(x: Array, up: Array, down: Array, state: Any) -> Array:
    del state
    return jnp.dot(jnp.square(jax.nn.relu(jnp.dot(x, up))), down)

  steps = {
    'sparse': step(lambda x, up, down, state: neuron_level_ffn(x, up, down, state, policy=policy)),
    'dense': step(dense), 'dense recompute': step(jax.checkpoint(dense)),
  }  # fmt: skip
  args = (x, up, down, dz, state)
  compiled = compile_all({name: (f, args) for name, f in steps.items()})
  if 'sparse' not in compiled:
    raise ValueError(f'{case.name}: the step does not compile')
  rows = timed(compiled, dict.fromkeys(compiled, args), options)
  best = min((name for name in rows if name != 'sparse'), key=lambda name: rows[name]['median_ms'])
  return dict(
    bench='ffn', op='neuron_level_ffn', role='forward_and_vjp', activation='squared_relu',
    pattern=f'{case.v}:2:{case.m}', shape=dict(tokens=tokens, d=d, hidden=hidden), mode='forward_and_vjp',
    implementation=policy.implementation or 'reference', dense_features=policy.dense_features, **rows['sparse'],
    baselines=dict(dense=rows[best] | {'form': best}),
    speedup=dict(dense=round(rows[best]['median_ms'] / rows['sparse']['median_ms'], 4)),
    memory_gb=measure.memory(compiled['sparse']),
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected cases; returns the number that failed."""
  parser = measure.parser(MODULE, __doc__, [*GROUPS, *CASES], list(GROUPS))
  parser.add_argument(
    '--tune', type=Path, metavar='FOLDER', help='choose settings of the products first and keep the records there'
  )
  options = parser.parse_args(argv)
  head = measure.environment(MODULE, argv)
  runs = {'matmul': matmul, 'pack': pack, 'ffn': ffn}
  failed = 0
  for name in dict.fromkeys(name for chosen in options.select for name in GROUPS.get(chosen, [chosen])):
    case = CASES[name]
    try:
      record = dict(**head, recipe='neuron_level', dtype='bfloat16', headline=not options.tiny)
      record |= runs[case.kind](case, options)
    except (ValueError, RuntimeError) as error:
      print(f'{name}: failed: {type(error).__name__}: {str(error)[:600]}', flush=True)
      failed += 1
      continue
    measure.append(options.out, record)
    share = f'{record["copy_share"]:.2f} of copy' if case.kind == 'pack' else f'speedup {record["speedup"]}'
    print(f'{name}: {record["median_ms"]:.3f} ms, {share}', flush=True)
  return failed


if __name__ == '__main__':
  raise SystemExit(main())
