"""Tunes, benchmarks and verifies `sparse_matmul` on the card at hand; `python -m pallas_kernels` is the way in.

Every comparison is made in one process, on the same random data, with the same output layout: the dense baseline is the
faster of XLA's two ways to write it (A.B, or B^T.A^T with the transposition that the layout asks for). Data are random
because power, hence the clock, depends on them: on zeros the same kernel runs 13% faster.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _device, _processes, _tuning, formats
from pallas_kernels.sparse_matmul import _predict, arg_specs, cusparselt, cusparselt_search, mosaic_gpu, operand
from pallas_kernels.sparse_matmul.verify import verify

__all__ = ['bench', 'tune', 'verify', 'where_it_pays']

Array = jax.Array
OP = 'sparse_matmul'
SELECTIONS = {
  'square': arg_specs.SQUARE, 'headline': arg_specs.HEADLINE, 'small': arg_specs.SMALL,
  'gpt2_124m': arg_specs.GPT2_124M, 'gpt2_774m': arg_specs.GPT2_774M, 'gpt2_1558m': arg_specs.GPT2_1558M,
  'llama_3b': arg_specs.LLAMA_3B, 'block': arg_specs.BLOCK, 'models': arg_specs.MODELS, 'all': arg_specs.ALL,
}
_SUSTAINED_S = 1.1
_COMPILERS = 12
# The oracle need not be fast, and XLA's search for a fast one takes longer than all else.
_UNTUNED = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}
# Other profilers have no business in a benchmark's process.
_times_ms = functools.partial(_compat.device_times_ms, detach=False)


@dataclasses.dataclass(frozen=True)
class Inputs:
  """One problem's data in the formats that candidates take."""

  a: operand.SparseOperand
  a_dense: Array
  b: Array


def problem(spec: arg_specs.Spec) -> mosaic_gpu.Problem:
  """The spec as the kernel sees it; float8 gives bfloat16."""
  out = jnp.dtype('bfloat16') if spec.dtype.itemsize == 1 else spec.dtype
  return mosaic_gpu.Problem(*spec.mnk, spec.dtype, spec.dtype, out, spec.b_layout, spec.out_layout)


@functools.partial(jax.jit, static_argnums=0)
def _inputs(p: mosaic_gpu.Problem, key: Array) -> Inputs:
  key_a, key_b = jax.random.split(key)
  w = jax.random.normal(key_a, (p.m, p.k), jnp.float32)
  # Rank within a group by comparisons; ties go to the lower index.
  parts = [jnp.abs(x) for x in formats.split_groups(w, -1)]
  above = [[parts[j] > parts[i] if j > i else parts[j] >= parts[i] for j in range(4) if j != i] for i in range(4)]
  keep = [sum(x.astype(jnp.int32) for x in row) < 2 for row in above]
  mask = formats.join_groups(keep, -1)
  w = w.astype(p.a_dtype)
  b = jax.random.normal(key_b, (p.n, p.k) if p.b_layout == 'nk' else (p.k, p.n), jnp.float32).astype(p.b_dtype)
  a_dense = jnp.where(mask, w, jnp.zeros((), w.dtype))
  return Inputs(operand.to_operand(formats.compress(w, mask, axis=-1)), a_dense, b)


jax.tree_util.register_dataclass(Inputs, ['a', 'a_dense', 'b'], [])


def _expected(p: mosaic_gpu.Problem, a_dense: Array, b: Array) -> Array:
  """The product of exact terms summed in float32, by XLA.

  16-bit operands go in as they are, since their products are exact in float32; 8-bit ones, whose own GEMMs sum with
  fewer bits, as bfloat16, which holds their values.
  """
  wide = jnp.bfloat16 if p.a_dtype.itemsize == 1 else p.a_dtype
  a, b, along_k = a_dense.astype(wide), b.astype(wide), 1 if p.b_layout == 'nk' else 0
  operands, axes = ((a, b), (1, along_k)) if p.out_layout == 'mn' else ((b, a), (along_k, 1))
  return jax.lax.dot_general(*operands, (tuple((x,) for x in axes), ((), ())), preferred_element_type=jnp.float32)


def _scaled(x: Array) -> Array:
  return x.astype(jnp.bfloat16) * jnp.bfloat16(1)


def _dense_ways(p: mosaic_gpu.Problem) -> dict[str, Callable[[Array, Array], Array]]:
  """XLA's dense product written both ways round, for float8 also as the pattern that XLA maps to 8-bit GEMMs."""
  along_k = 1 if p.b_layout == 'nk' else 0

  def way(swapped: bool, cast: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    def f(a: Array, b: Array) -> Array:
      a, b = cast(a), cast(b)
      if swapped:
        d = jax.lax.dot_general(b, a, (((along_k,), (1,)), ((), ())), preferred_element_type=p.out_dtype)
        return d if p.out_layout == 'nm' else d.T
      d = jax.lax.dot_general(a, b, (((1,), (along_k,)), ((), ())), preferred_element_type=p.out_dtype)
      return d if p.out_layout == 'mn' else d.T

    return f

  ways = {'plain': way(False, lambda x: x), 'swapped': way(True, lambda x: x)}
  if p.a_dtype.itemsize == 1:
    ways |= {'scaled': way(False, _scaled), 'scaled_swapped': way(True, _scaled)}
  return ways


def _compile(jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
  """Compiled functions, or the exception that stands in a refused one's place, of (f, args[, compiler options])."""

  def one(job: tuple[Any, ...]) -> Any:
    try:
      return jax.jit(job[0]).lower(*job[1]).compile(*job[2:])
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as e:
      return e

  with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
    return list(pool.map(one, jobs))


def _sparse(p: mosaic_gpu.Problem, config: mosaic_gpu.Config) -> Callable[..., Array]:
  return functools.partial(
    mosaic_gpu.sparse_matmul, activation=p.activation, out_dtype=p.out_dtype, b_layout=p.b_layout,
    out_layout=p.out_layout, config=config,
  )


def _plain(c: mosaic_gpu.Config) -> dict[str, Any]:
  return dataclasses.asdict(c)


def _unique(specs: Iterable[arg_specs.Spec]) -> Iterator[tuple[mosaic_gpu.Problem, list[arg_specs.Spec]]]:
  """Problems with the specs that come down to them (one layer's forward is its neighbour's input gradient)."""
  groups: dict[mosaic_gpu.Problem, list[arg_specs.Spec]] = {}
  for spec in specs:
    groups.setdefault(problem(spec), []).append(spec)
  yield from groups.items()


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A problem on the card: its data, the right answer, and compiled ways to it; `dense` is the fastest dense one."""

  x: Inputs
  expected: Array
  dense: _tuning.Candidate
  sparse: list[_tuning.Candidate]


Compiled = list[tuple[mosaic_gpu.Config, Callable[..., Array]]]


def compile_sparse(p: mosaic_gpu.Problem, choices: Sequence[mosaic_gpu.Config]) -> Compiled:
  """The settings that compile, compiled; the card itself is not used."""
  x = jax.eval_shape(functools.partial(_inputs, p), jax.random.key(0))
  compiled = _compile([(_sparse(p, c), (x.a, x.b)) for c in choices])
  for c, f in zip(choices, compiled, strict=True):
    if isinstance(f, Exception):
      logging.warning('%s does not compile: %s', c, f)
  return [(c, f) for c, f in zip(choices, compiled, strict=True) if not isinstance(f, Exception)]


def prepare(p: mosaic_gpu.Problem, compiled: Compiled, seed: int) -> Prepared:
  """Makes a problem's data and the right answer, and finds the best dense way."""
  key = jax.random.key(seed)
  make = functools.partial(_inputs, p)
  x = jax.eval_shape(make, key)
  args = (x.a_dense, x.b)
  # Together: XLA's own tuning of the dense ways leaves most cores idle.
  jobs = [(make, (key,)), (functools.partial(_expected, p), args, _UNTUNED)]
  inputs, expected, *dense = _compile(jobs + [(f, args) for f in _dense_ways(p).values()])
  for f in (inputs, expected):
    if isinstance(f, Exception):
      raise f
  x = inputs(key)
  sparse = [_tuning.Candidate('mosaic_gpu', _plain(c), f, (x.a, x.b)) for c, f in compiled]
  return Prepared(x, expected(x.a_dense, x.b), _fastest_dense(p, x, dense), sparse)


def _dense_candidate(p: mosaic_gpu.Problem, x: Inputs) -> _tuning.Candidate:
  return _fastest_dense(p, x, _compile([(f, (x.a_dense, x.b)) for f in _dense_ways(p).values()]))


def _fastest_dense(p: mosaic_gpu.Problem, x: Inputs, compiled: Sequence[Any]) -> _tuning.Candidate:
  """XLA's best way here and now: from process to process what its own tuning finds differs by up to 4%."""
  candidates = [
    _tuning.Candidate('dense', {'way': name}, f, (x.a_dense, x.b))
    for name, f in zip(_dense_ways(p), compiled, strict=True) if not isinstance(f, Exception)
  ]
  times = _tuning.interleave(candidates, _times_ms, rounds=2, iterations=10, gap_s=_gap_s(p, 10))
  return min(zip(candidates, times, strict=True), key=lambda pair: statistics.median(pair[1]))[0]


def _gap_s(p: mosaic_gpu.Problem, iterations: int) -> float:
  """Idle time before a burst: eight times its length, so that heat and clock are those of a short burst."""
  burst_s = iterations * 2 * p.m * p.n * p.k / 1e15
  return min(0.2, max(0.02, 8 * burst_s))


def _cusparselt_search(p: mosaic_gpu.Problem, x: Inputs) -> cusparselt_search.Found:
  try:
    return cusparselt_search.search(p, x.a_dense, x.b, sparse=x.a)
  except NotImplementedError as e:
    logging.warning('not tuned with cuSPARSELt: %s', e)
    return cusparselt_search.Found([], [], [])


def tune(
  selection: str | Sequence[arg_specs.Spec],
  folder: pathlib.Path = _tuning.TUNED,
  backends: Sequence[str] = ('mosaic_gpu', 'cusparselt'),
  alone: contextlib.AbstractContextManager[Any] | None = None,
) -> None:
  """Writes `tuned/<device>/sparse_matmul.json` for a selection of specs, each as soon as it is known.

  Args:
    selection: a key of `SELECTIONS`, or specs.
    folder: of the records.
    backends: whose settings are searched. Of 'mosaic_gpu', if it is left out, the best known setting takes part all
      the same; older rows of settings that are not timed now stay in the record as they are.
    alone: entered while the card or the record is used, not while the kernels are compiled, which takes a core longer:
      a lock that processes which tune different problems share.
  """
  device = _device.current()
  path = folder / device.slug / f'{OP}.json'
  for p, _ in _unique(SELECTIONS[selection] if isinstance(selection, str) else selection):
    laps = [time.monotonic()]
    compiled = compile_sparse(p, _settings(p, device, folder, 'mosaic_gpu' in backends))
    laps.append(time.monotonic())
    with alone or contextlib.nullcontext():
      laps.append(time.monotonic())
      ready = prepare(p, compiled, p.m + p.k)
      searches = 'cusparselt' in backends
      found = _cusparselt_search(p, ready.x) if searches else cusparselt_search.Found([], [], [])
      candidates = ready.sparse + found.candidates
      laps.append(time.monotonic())
      entry = _tuning.tune(
        p.key, ready.dense, candidates, ready.expected, _times_ms, finalists=2,
        quick=dict(rounds=2, iterations=10, gap_s=_gap_s(p, 10)),
        final=dict(rounds=4, iterations=20, gap_s=_gap_s(p, 20)),
      )
      entry['candidates'] = _tuning.merged(entry['candidates'] + found.others, _tuning.entry_of(path, p.key))
      _tuning.save(path, _device.environment() | {'op': OP}, [entry])
      laps.append(time.monotonic())
    _print_tuned(p, entry, len(candidates), laps)
    del ready, candidates, found, compiled


def tune_in_processes(
  selections: Sequence[str], folder: pathlib.Path, backends: Sequence[str], processes: int, seconds: float
) -> int:
  """`tune` in several processes; returns how many problems failed. In the order of the selections, while time lasts."""
  return _processes.run(functools.partial(_tune_one, tuple(selections), folder, tuple(backends)), processes, seconds)


def _tune_one(
  selections: Sequence[str], folder: pathlib.Path, backends: Sequence[str], i: int, turn: _processes.Turn
) -> bool:
  groups = list(_unique(spec for name in selections for spec in SELECTIONS[name]))
  if i < len(groups):
    tune(groups[i][1][:1], folder, backends, turn)
  return i < len(groups)


def _print_tuned(p: mosaic_gpu.Problem, entry: dict[str, Any], timed: int, laps: Sequence[float]) -> None:
  """The four fastest of the first `timed` candidates, and where the time went."""
  dense_ms = statistics.median(entry['baseline']['samples_ms'])
  rows = entry['candidates'][:timed]
  rejected = [r['rejected'] for r in rows if r['rejected']]
  spent = ', '.join(
    f'{name} {end - start:.1f} s'
    for name, start, end in zip(('compile', 'wait', 'prepare', 'time'), laps, laps[1:], strict=False)
  )
  lines = [f'{p.key} dense {dense_ms:.4f} ms, {timed} candidates, rejected {rejected}; {spent}']
  for row in sorted(rows, key=lambda r: statistics.median(r.get('samples_ms', [1e9])))[:4]:
    ms = statistics.median(row.get('final_samples_ms', row.get('samples_ms', [float('nan')])))
    setup = f' and {row["setup_ms"]:.4f} ms set-up' if 'setup_ms' in row else ''
    lines += [f'   {ms:.4f} ms{setup} x{dense_ms / ms:.3f} {row["implementation"]} {_difference(row["config"])}']
  # At once: processes that share a terminal do not mix their lines then.
  print('\n'.join(lines), flush=True)


def _settings(
  p: mosaic_gpu.Problem, device: _device.Device, folder: pathlib.Path, search: bool
) -> list[mosaic_gpu.Config]:
  """What to time of this package's kernel: the best known setting, and with `search` all that look promising."""
  if not device.has_sparse_wgmma:
    return []
  known = _tuning.lookup(device.slug, OP, p.key, implementation='mosaic_gpu', reach=0.0, folder=folder)
  found = [mosaic_gpu.Config(**known.config)] if known and known.config else []
  return list(dict.fromkeys(found + (_predict.candidates(p, device.num_sms) if search else [])))


def _difference(config: dict[str, Any]) -> dict[str, Any]:
  default = _plain(mosaic_gpu.Config())
  return {k: v for k, v in config.items() if v != default.get(k)}


def _cusparselt_baseline(
  p: mosaic_gpu.Problem, x: Inputs, expected: Array, device: _device.Device, folder: pathlib.Path
) -> tuple[_tuning.Candidate, list[float]] | None:
  """cuSPARSELt's fastest right algorithm, its blob given, and times of making that; None where there is none."""
  try:
    known = cusparselt.tuned_config(
      p.m, p.n, p.k, p.a_dtype, p.out_dtype, p.b_layout, p.out_layout, device, folder=folder
    )
    return cusparselt_search.fastest(p, x.a_dense, x.b, expected, known=known)
  except NotImplementedError as e:
    logging.warning('no cuSPARSELt baseline: %s', e)
    return None


def bench(selection: str, out: pathlib.Path, folder: pathlib.Path = _tuning.TUNED) -> None:
  """Appends one record a spec to `out`: tuned sparse against dense, interleaved and sustained."""
  device, environment = _device.current(), _device.environment()
  for p, specs in _unique(SELECTIONS[selection]):
    tuned = _tuning.lookup(device.slug, OP, p.key, implementation='mosaic_gpu', folder=folder)
    config = mosaic_gpu.Config(**tuned.config) if tuned and tuned.config else mosaic_gpu.default_config(p)
    ready = prepare(p, compile_sparse(p, [config]), p.m + p.n + 1)
    x, runs = ready.x, [*ready.sparse, ready.dense]
    if not ready.sparse:
      raise ValueError(f'{p.key}: {config} does not compile')
    names = ['dense' if p.a_dtype.itemsize == 2 else 'dense_fp8']
    if p.a_dtype.itemsize == 1:
      wide = dataclasses.replace(p, a_dtype=jnp.dtype('bfloat16'), b_dtype=jnp.dtype('bfloat16'))
      runs.append(_dense_candidate(wide, _inputs(wide, jax.random.key(p.m + p.n + 1))))
      names.append('dense')
    error, reason = _tuning.verify(runs[0], ready.expected)
    if reason:
      raise ValueError(f'{p.key}: {reason}')
    vendor = _cusparselt_baseline(p, x, ready.expected, device, folder)
    if vendor is not None:
      runs.append(vendor[0])
      names.append('cusparselt')
    samples = _tuning.interleave(runs, _times_ms, rounds=6, iterations=20)
    # Two loops each, in turns: the second starts as hot as the first ended.
    loops = [[_tuning.sustained_ms(r.f, r.args, seconds=_SUSTAINED_S) for r in runs] for _ in range(2)]
    sustained = [[loop[i] for loop in loops] for i in range(len(runs))]
    for spec in specs:
      record = _record(spec, p, environment, runs, names, samples, sustained, error)
      if vendor is not None:
        # Apart from the product: who keeps A over many products pays it once.
        record['baselines']['cusparselt']['compress_samples_ms'] = vendor[1]
      with out.open('a') as f:
        f.write(json.dumps(record) + '\n')
      ratio = record['baselines'][names[0]]['median_ms'] / record['median_ms']
      hot = record['baselines'][names[0]]['sustained_ms'] / record['sustained_ms']
      print(
        f'{spec.tokens}x{spec.d_in}x{spec.d_out} {spec.role} {spec.dtype.name}: {record["tflops"]:.0f} TFLOP/s,'
        f' x{ratio:.3f}{_over_cusparselt(record)}; sustained {spec.flops / record["sustained_ms"] / 1e9:.0f},'
        f' x{hot:.3f}; {error:.1e} {_difference(_plain(config))}', flush=True,
      )


def _over_cusparselt(record: dict[str, Any]) -> str:
  baseline = record['baselines'].get('cusparselt')
  return f' (x{baseline["median_ms"] / record["median_ms"]:.3f} cuSPARSELt)' if baseline else ''


def _record(
  spec: arg_specs.Spec, p: mosaic_gpu.Problem, environment: dict[str, Any], runs: Sequence[_tuning.Candidate],
  names: Sequence[str], samples: list[list[float]], sustained: list[list[float]], error: float,
) -> dict[str, Any]:

  def timed(i: int) -> dict[str, Any]:
    return dict(
      samples_ms=samples[i], median_ms=statistics.median(samples[i]),
      sustained_samples_ms=sustained[i], sustained_ms=statistics.median(sustained[i]),
    )

  mine = timed(0)
  return dict(
    bench=OP, **environment, op=OP, role=spec.role, dtype=spec.dtype.name,
    shape=dict(tokens=spec.tokens, d_in=spec.d_in, d_out=spec.d_out, m=p.m, n=p.n, k=p.k),
    layouts=dict(b=p.b_layout, out=p.out_layout), mode='forward', implementation='mosaic_gpu', config=runs[0].config,
    **mine,
    baselines={name: timed(i + 1) | {'config': runs[i + 1].config} for i, name in enumerate(names)},
    tflops=spec.flops / mine['median_ms'] / 1e9, sustained_tflops=spec.flops / mine['sustained_ms'] / 1e9,
    error=error, headline=spec.headline,
  )


def where_it_pays(folder: pathlib.Path = _tuning.TUNED) -> Iterator[str]:
  """Lines of a table: measured problems, dense time, best sparse time, choice."""
  yield f'{"m":>6} {"n":>6} {"k":>6}  {"dtype":14} {"B":2} {"D":2}  {"dense ms":>9} {"sparse ms":>9}  ratio  choice'
  path = folder / _device.current().slug / f'{OP}.json'
  paths = [path] if path.exists() else sorted(folder.glob(f'*/{OP}.json'))
  for found in paths:
    yield f'# {found.parent.name}'
    for entry in json.loads(found.read_text())['entries']:
      key, dense_ms = entry['key'], statistics.median(entry['baseline']['samples_ms'])
      best = _tuning.best_of(entry, 'mosaic_gpu')
      if best is None:
        continue
      ms = statistics.median(best.get('final_samples_ms', best['samples_ms']))
      yield (
        f'{key["m"]:6} {key["n"]:6} {key["k"]:6}  {key["dtype"]:14} {key["b_layout"]:2} {key["out_layout"]:2}'
        f'  {dense_ms:9.4f} {ms:9.4f}  {dense_ms / ms:5.2f}  {entry["choice"]["implementation"]}'
      )
