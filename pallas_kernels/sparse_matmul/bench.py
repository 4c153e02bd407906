"""Tunes, benchmarks and verifies `sparse_matmul` on the card at hand; `python -m pallas_kernels` is the way in.

Every comparison is made in one process, on the same random data, with the same output layout: the dense baseline is the
faster of XLA's two ways to write it (A.B, or B^T.A^T with the transposition that the layout asks for). Data are random
because power, hence the clock, depends on them: on zeros the same kernel runs 13% faster.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import concurrent.futures
import dataclasses
import functools
import json
import logging
import pathlib
import statistics
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _device, _tuning, formats
from pallas_kernels.sparse_matmul import arg_specs, cusparselt, cusparselt_search, mosaic_gpu, operand
from pallas_kernels.sparse_matmul.verify import verify

__all__ = ['bench', 'tune', 'verify', 'where_it_pays']

Array = jax.Array
OP = 'sparse_matmul'
SELECTIONS = {
  'square': arg_specs.SQUARE, 'headline': arg_specs.HEADLINE, 'small': arg_specs.SMALL,
  'middle': arg_specs.MIDDLE, 'all': arg_specs.ALL,
}
_SUSTAINED_S = 1.1
_COMPILERS = 8


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


def _expected(a_dense: Array, b: Array, b_layout: str, out_layout: str) -> Array:
  """The product in float32. The casts stay outside the jit: fused into the product they cost XLA minutes of tuning."""
  return _product32(a_dense.astype(jnp.float32), b.astype(jnp.float32), 1 if b_layout == 'nk' else 0, out_layout)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _product32(a: Array, b: Array, along_k: int, out_layout: str) -> Array:
  d = jax.lax.dot_general(a, b, (((1,), (along_k,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
  return d if out_layout == 'mn' else d.T


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


def _compile(jobs: Sequence[tuple[Callable[..., Array], Sequence[Any]]]) -> list[Any]:
  """Compiled functions, or the exception that stands in a refused one's place."""

  def one(job: tuple[Callable[..., Array], Sequence[Any]]) -> Any:
    try:
      return jax.jit(job[0]).lower(*job[1]).compile()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as e:
      return e

  with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
    return list(pool.map(one, jobs))


def _sparse(p: mosaic_gpu.Problem, config: mosaic_gpu.Config) -> Callable[..., Array]:
  return functools.partial(
    mosaic_gpu.sparse_matmul, activation=p.activation, out_dtype=p.out_dtype, b_layout=p.b_layout,
    out_layout=p.out_layout, config=config,
  )


def configs(p: mosaic_gpu.Problem, num_sms: int) -> list[mosaic_gpu.Config]:
  """The settings that are worth timing for a problem."""
  wide = mosaic_gpu.default_config(p)
  narrow = dataclasses.replace(wide, rows=64, bn=256, stages=5 if p.a_dtype.itemsize == 2 else 4, delay=1)
  square = dataclasses.replace(narrow, bn=128, stages=6)
  change = dataclasses.replace
  if _device_waves(p, wide, num_sms) > 2:
    wide = change(wide, minor=0)
    some = min(128, balanced(p, wide, num_sms))
    found = [change(wide, ctas=ctas, slots=slots) for ctas in (None, 128) for slots in (1, 2)]
    found += [change(wide, slots=2, band=16), change(wide, slots=2, band=4, ctas=some)]
    found += [change(narrow, minor=0, ctas=some)]
  else:
    found = [change(base, split=split) for base in (wide, narrow, square) for split in (1, 4)]
    found += [change(square, cluster=1)]
  unique = list(dict.fromkeys(found))
  return [c for c in unique if mosaic_gpu.fits(p, c)]


def _device_waves(p: mosaic_gpu.Problem, c: mosaic_gpu.Config, num_sms: int) -> float:
  work = mosaic_gpu.schedule(p, c, num_sms)
  return work.tiles / max(1, num_sms // c.cluster)


def balanced(p: mosaic_gpu.Problem, c: mosaic_gpu.Config, num_sms: int) -> int:
  """The fewest CTAs that need no more waves than all of them: an idle SM saves power, which sets the clock."""
  clusters = num_sms // c.cluster
  tiles = mosaic_gpu.schedule(p, c, num_sms).tiles
  waves = -(-tiles // clusters)
  return -(-tiles // waves) * c.cluster


def _plain(c: mosaic_gpu.Config) -> dict[str, Any]:
  return dataclasses.asdict(c)


def _unique(specs: Iterable[arg_specs.Spec]) -> Iterator[tuple[mosaic_gpu.Problem, list[arg_specs.Spec]]]:
  """Problems with the specs that come down to them (one layer's forward is its neighbour's input gradient)."""
  groups: dict[mosaic_gpu.Problem, list[arg_specs.Spec]] = {}
  for spec in specs:
    groups.setdefault(problem(spec), []).append(spec)
  yield from groups.items()


def _dense_candidate(p: mosaic_gpu.Problem, x: Inputs) -> _tuning.Candidate:
  """XLA's best way here and now: from process to process its own tuning differs by up to 4%."""
  ways = _dense_ways(p)
  args = (x.a_dense, x.b)
  compiled = _compile([(f, args) for f in ways.values()])
  candidates = [
    _tuning.Candidate('dense', {'way': name}, f, args)
    for name, f in zip(ways, compiled, strict=True) if not isinstance(f, Exception)
  ]
  times = _tuning.interleave(candidates, _compat.device_times_ms, rounds=2, iterations=10, gap_s=0.1)
  return min(zip(candidates, times, strict=True), key=lambda pair: statistics.median(pair[1]))[0]


def _mosaic_candidates(
  p: mosaic_gpu.Problem, x: Inputs, choices: Sequence[mosaic_gpu.Config]
) -> list[_tuning.Candidate]:
  candidates = []
  for c, f in zip(choices, _compile([(_sparse(p, c), (x.a, x.b)) for c in choices]), strict=True):
    if isinstance(f, Exception):
      logging.warning('%s does not compile: %s', c, f)
    else:
      candidates.append(_tuning.Candidate('mosaic_gpu', _plain(c), f, (x.a, x.b)))
  return candidates


def _cusparselt_search(p: mosaic_gpu.Problem, x: Inputs) -> cusparselt_search.Found:
  try:
    return cusparselt_search.search(p, x.a_dense, x.b, sparse=x.a)
  except NotImplementedError as e:
    logging.warning('not tuned with cuSPARSELt: %s', e)
    return cusparselt_search.Found([], [], [])


def tune(
  selection: str, folder: pathlib.Path = _tuning.TUNED, backends: Sequence[str] = ('mosaic_gpu', 'cusparselt')
) -> None:
  """Writes `tuned/<device>/sparse_matmul.json` for a selection of specs.

  Args:
    selection: a key of `SELECTIONS`.
    folder: of the records.
    backends: whose settings are searched. Of 'mosaic_gpu', if it is left out, the best known setting takes part all
      the same; older rows of settings that are not timed now stay in the record as they are.
  """
  device = _device.current()
  path = folder / device.slug / f'{OP}.json'
  for p, _ in _unique(SELECTIONS[selection]):
    x = _inputs(p, jax.random.key(p.m + p.k))
    known = _tuning.lookup(device.slug, OP, p.key, implementation='mosaic_gpu', reach=0.0, folder=folder)
    choices = configs(p, device.num_sms)
    if 'mosaic_gpu' not in backends:
      choices = [mosaic_gpu.Config(**known.config)] if known and known.config else []
    candidates = _mosaic_candidates(p, x, choices) if choices and device.has_sparse_wgmma else []
    found = _cusparselt_search(p, x) if 'cusparselt' in backends else cusparselt_search.Found([], [], [])
    candidates += found.candidates
    short = p.m * p.n * p.k < 2**36  # tens of microseconds: no heat to let off between bursts
    entry = _tuning.tune(
      p.key, _dense_candidate(p, x), candidates, _expected(x.a_dense, x.b, p.b_layout, p.out_layout),
      _compat.device_times_ms, finalists=2,
      quick=dict(rounds=2, iterations=10, gap_s=0.1 if short else 0.2),
      final=dict(rounds=4, iterations=20, gap_s=0.1 if short else 0.2),
    )
    entry['candidates'] = _tuning.merged(entry['candidates'] + found.others, _tuning.entry_of(path, p.key))
    _tuning.save(path, _device.environment() | {'op': OP}, [entry])
    dense_ms = statistics.median(entry['baseline']['samples_ms'])
    timed_now = entry['candidates'][: len(candidates)]
    rejected = [r['rejected'] for r in timed_now if r['rejected']]
    print(f'{p.key} dense {dense_ms:.4f} ms, {len(candidates)} candidates, rejected {rejected}', flush=True)
    for row in sorted(timed_now, key=lambda r: statistics.median(r.get('samples_ms', [1e9])))[:4]:
      ms = statistics.median(row.get('final_samples_ms', row.get('samples_ms', [float('nan')])))
      setup = f' and {row["setup_ms"]:.4f} ms set-up' if 'setup_ms' in row else ''
      name = row['implementation']
      print(f'   {ms:.4f} ms{setup} x{dense_ms / ms:.3f} {name} {_difference(row["config"], p)}', flush=True)
    del x, candidates, found


def _difference(config: dict[str, Any], p: mosaic_gpu.Problem) -> dict[str, Any]:
  default = _plain(mosaic_gpu.default_config(p))
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
    x = _inputs(p, jax.random.key(p.m + p.n + 1))
    tuned = _tuning.lookup(device.slug, OP, p.key, implementation='mosaic_gpu', folder=folder)
    config = mosaic_gpu.Config(**tuned.config) if tuned and tuned.config else mosaic_gpu.default_config(p)
    (compiled,) = _compile([(_sparse(p, config), (x.a, x.b))])
    if isinstance(compiled, Exception):
      raise compiled
    runs = [_tuning.Candidate('mosaic_gpu', _plain(config), compiled, (x.a, x.b)), _dense_candidate(p, x)]
    names = ['dense' if p.a_dtype.itemsize == 2 else 'dense_fp8']
    if p.a_dtype.itemsize == 1:
      wide = dataclasses.replace(p, a_dtype=jnp.dtype('bfloat16'), b_dtype=jnp.dtype('bfloat16'))
      runs.append(_dense_candidate(wide, _inputs(wide, jax.random.key(p.m + p.n + 1))))
      names.append('dense')
    expected = _expected(x.a_dense, x.b, p.b_layout, p.out_layout)
    error, reason = _tuning.verify(runs[0], expected)
    if reason:
      raise ValueError(f'{p.key}: {reason}')
    vendor = _cusparselt_baseline(p, x, expected, device, folder)
    if vendor is not None:
      runs.append(vendor[0])
      names.append('cusparselt')
    samples = _tuning.interleave(runs, _compat.device_times_ms, rounds=6, iterations=20)
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
        f' x{hot:.3f}; {error:.1e} {_difference(_plain(config), p)}', flush=True,
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
