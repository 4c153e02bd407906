"""Checks, times and prices the memory-bound kernels on a GPU: what the `bench.py` and `tune.py` of such ops share.

Every time is the sum of a call's kernels by CUPTI on random data (it does not see the 4-byte memset of the transposable
pack); `copy_share` is the bytes that must move over the time, as a share of the bandwidth of a plain copy measured in
the same run.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
import pathlib
import statistics
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _bench, _compat, _device, _triton, costs

BF16 = jnp.bfloat16
# For bfloat16 results that sum or multiply in another order.
_TOLERANCE = 4e-3
_pack = _triton.kernels('pallas_kernels.pack.triton')


@dataclasses.dataclass(frozen=True)
class Case:
  """One row of the table.

  Attributes:
    move: its name in the record, and the bytes that must be read and written.
    shape: of the main input.
    inputs: makes the arrays from a key.
    triton: the kernel, as a function of the arrays and a config; None where XLA's form is what the library runs.
    xla: the plain jnp form, or None.
    configs: to try of the kernel.
    dtype: of the main input.
    mode: 'forward', or 'step' of an optimizer.
    baselines: name -> what gives times of another library, none where it is not installed.
  """

  move: costs.Move
  shape: tuple[int, ...]
  inputs: Callable[[jax.Array], tuple[Any, ...]]
  triton: Callable[..., Any] | None
  xla: Callable[..., Any] | None
  configs: tuple[Any, ...]
  dtype: str = 'bfloat16'
  mode: str = 'forward'
  baselines: Mapping[str, Callable[[], list[float]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Op:
  """An op of memory-bound kernels.

  Attributes:
    name: its folder.
    cases: makes the rows of its table.
    check: compares every kernel with the reference; rows with how many entries are `differing`, and perhaps an `error`.
    more: name -> (options, function that takes a record) -> None, what else `bench` measures.
  """

  name: str
  cases: Callable[[], Sequence[Case]]
  check: Callable[[], Sequence[Mapping[str, Any]]]
  more: Mapping[str, Callable[[Any, Callable[[dict[str, Any]], None]], None]] = dataclasses.field(default_factory=dict)


def normal(shape: tuple[int, ...], dtype: Any = BF16) -> Callable[[jax.Array], jax.Array]:
  return lambda key: jax.random.normal(key, shape, dtype)


def tiles(*names: str) -> tuple[Any, ...]:
  """Settings from names such as '16x32x4': blocks down, blocks across, warps."""
  return tuple(_pack.Config(*map(int, name.split('x'))) for name in names)


def differing(found: Any, expected: Any) -> list[int]:
  """Elements that differ in bits, for each array of two trees. One NaN is as good as another: XLA gives several."""
  counts = []
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    bits = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    other = jax.lax.bitcast_convert_type(a, bits) != jax.lax.bitcast_convert_type(b, bits)
    counts.append(int((other & ~(_nan(a) & _nan(b))).sum()))
  return counts


def _nan(x: jax.Array) -> jax.Array:
  return jnp.isnan(x.astype(jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros(x.shape, bool)


def float8_inputs() -> list[tuple[tuple[int, ...], Any, jnp.dtype, float, jax.Array]]:
  """(shape, dtype, float8 dtype, largest entry after scaling, array): ragged and batched, with ties, infinities, NaN.

  Largest entries saturate, fit, and round to zero.
  """
  tops, found = (0.5, 5.0, 3e5), []
  for i, (shape, source) in enumerate((((2, 1028, 260), BF16), ((512, 512), jnp.float16), ((516, 388), jnp.float32))):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    x = np.where(rng.random(shape) < 0.2, np.round(2 * x), x)
    for value in (0.0, -0.0, np.inf, -np.inf, np.nan):
      x = np.where(rng.random(shape) < 0.003, np.float32(value), x)
    for j, dtype in enumerate((jnp.float8_e4m3fn, jnp.float8_e5m2)):
      found.append((shape, source, jnp.dtype(dtype), tops[(i + j) % 3], jnp.asarray(x).astype(source)))
  return found


def difference(found: Any, expected: Any) -> float:
  found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
  return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


def copy_bandwidth(dtype: Any = jnp.uint32) -> float:
  """Bytes a millisecond of XLA's element-wise pass over half a GB, read and written.

  Over words of four bytes that is a copy, as fast as PyTorch's or Triton's. Over bfloat16, as much of XLA's other code
  is, it is slower.
  """
  bits = jax.random.bits(jax.random.key(0), (8192, 16384), jnp.uint32)
  x = bits if dtype == jnp.uint32 else jax.lax.bitcast_convert_type(bits, dtype)
  ms = statistics.median(_compat.device_times_ms(jax.jit(jnp.negative), (x,), 20))
  return 2 * x.nbytes / ms


def bandwidths() -> dict[str, float]:
  """TB/s of a copy and of a pass over bfloat16, as records name them."""
  return dict(copy_tb_s=copy_bandwidth() / 1e9, pass_tb_s=copy_bandwidth(BF16) / 1e9)


def measure(
  case: Case, bandwidth: float, iterations: int, *, first_config: bool = False, with_xla: bool = True
) -> dict[str, Any] | None:
  """Times every config of a case and XLA's form, prints them, and gives the record of the best; None if none ran."""
  inputs, (op, moved) = case.inputs(jax.random.key(0)), case.move
  jobs: dict[str, Any] = {
    str(c): functools.partial(case.triton, config=c)
    for c in (case.configs[:1] if first_config else case.configs) if case.triton is not None
  }
  if case.xla is not None and (with_xla or case.triton is None):
    jobs['xla'] = case.xla
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    compiled = dict(zip(jobs, pool.map(functools.partial(compiled_or_error, inputs), jobs.values()), strict=True))
  found: dict[str, Any] = {}
  for name, f in compiled.items():
    if isinstance(f, Exception):
      print(op, name, 'failed:', repr(f)[:300], flush=True)
      continue
    found[name] = _compat.device_times_ms(f, inputs, 5 if name == 'xla' and case.triton else iterations)
    ms = statistics.median(found[name])
    print(f'{op:32s} {case.dtype:9s} {name:60s} {ms:.4f} ms {moved / ms / bandwidth:.1%}', flush=True)
  if case.triton is None and 'xla' in found:
    ms = statistics.median(found['xla'])
    return dict(
      op=op, shape=case.shape, dtype=case.dtype, mode=case.mode, implementation='xla', bytes=round(moved),
      copy_share=moved / ms / bandwidth, **samples(found['xla']),
    )  # fmt: skip
  xla = found.pop('xla', None)
  if not found:
    return None
  baselines = {name: times() for name, times in case.baselines.items()} | ({} if xla is None else {'xla': xla})
  best = min(found, key=lambda c: statistics.median(found[c]))
  return dict(
    op=op, shape=case.shape, dtype=case.dtype, mode=case.mode, implementation='triton', config=best,
    bytes=round(moved), copy_share=moved / statistics.median(found[best]) / bandwidth,
    baselines={name: samples(times) for name, times in baselines.items() if times},
    tried={c: statistics.median(t) for c, t in found.items()}, **samples(found[best]),
  )  # fmt: skip


def compiled_or_error(inputs: tuple[Any, ...], f: Callable[..., Any]) -> Any:
  try:
    return jax.jit(f).lower(*inputs).compile()
  except Exception as e:
    return e


def samples(times: list[float]) -> dict[str, Any]:
  return dict(samples_ms=[round(t, 5) for t in times], median_ms=statistics.median(times))


def common_fields(device: str) -> dict[str, Any]:
  """What every record of a run says."""
  import triton

  here = _device.environment()
  return dict(
    bench='memory_bound', headline=True, device=device,
    driver=here['driver'], commit=here['commit'],
    versions={'jax': jax.__version__, 'triton': triton.__version__},
    command=' '.join(['python -m pallas_kernels', *(pathlib.Path(a).name for a in sys.argv[1:])]),
    when=here['when'],
  )  # fmt: skip


def tune_arguments(parser: argparse.ArgumentParser) -> None:
  """What `tune` of such an op takes."""
  parser.add_argument('--only', nargs='+', default=[], help='prefixes of rows')
  parser.add_argument('--iterations', type=int, default=15)


def bench_arguments(parser: argparse.ArgumentParser) -> None:
  """What `bench` of such an op takes."""
  tune_arguments(parser)
  parser.add_argument('--first-config', action='store_true', help='only the settings that the library runs')
  parser.add_argument('--skip-xla', action='store_true', help="not the passes that XLA would make in a kernel's place")
  parser.add_argument('--skip-check', action='store_true', help='do not compare with the reference first')


def bench(op: Op, options: Any) -> int:
  """Checks and measures; exit status 1 if a result is wrong or a part failed."""
  write = functools.partial(_bench.append, options.out)
  status = _run(op, options, write, check=not options.skip_check, with_xla=not options.skip_xla)
  for name, measure_more in op.more.items():
    if not options.only or name in options.only:
      measure_more(options, lambda record: write(common_fields(_device.current().name) | record))
  return status


def tune(op: Op, options: Any) -> int:
  """Checks and measures every setting, and keeps the bandwidths by which passes are priced, unless something failed.

  Which setting the library runs stands in its source: one for all sizes, the first of a row. The printed times say
  whether another one wins on this GPU.
  """
  written: list[Mapping[str, Any]] = []
  options.first_config = False
  status = _run(op, options, written.append, check=True, with_xla=False)
  if status == 0 and written and not options.only:
    (folder := options.tuned / _device.current().slug).mkdir(parents=True, exist_ok=True)
    costs.write(written, folder / f'memory_bound_{op.name}.json')
  return status


def _run(op: Op, options: Any, write: Callable[[Mapping[str, Any]], None], *, check: bool, with_xla: bool) -> int:
  """Exit status: 1 if a result is wrong or a part failed."""
  say = functools.partial(print, flush=True)
  device = _device.current()
  wrong, failed = _checked(op) if check else (None, False)
  common = common_fields(device.name) | bandwidths()
  say(f'{device.name}: copy {common["copy_tb_s"]:.3f} TB/s')
  for case in op.cases():
    if options.only and not case.move.op.startswith(tuple(options.only)):
      continue
    record = measure(
      case, 1e9 * common['copy_tb_s'], options.iterations, first_config=options.first_config, with_xla=with_xla
    )
    if record:
      write(common | record | dict(error=wrong))
  return int(bool(wrong or failed))


def _checked(op: Op) -> tuple[int | None, bool]:
  """Entries that differ, None where the comparison broke off, and whether it did."""
  try:
    rows = op.check()
  except Exception:
    print('the comparison failed:', traceback.format_exc(limit=4), flush=True)
    return None, True
  bad = [row for row in rows if sum(row['differing']) or row.get('error', 0) > _TOLERANCE]
  for row in bad:
    print('WRONG', row)
  print(f'check: {len(rows)} comparisons,', f'{len(bad)} differ' if bad else 'all equal', flush=True)
  return sum(sum(row['differing']) + (row.get('error', 0) > _TOLERANCE) for row in bad), False
