"""Checks and times the memory-bound kernels on a GPU: `python -m pallas_kernels.pack.bench --out FILE`.

Every time is the sum of a call's kernels by CUPTI on random data (it does not see the 4-byte memset of the transposable
pack); `copy_share` is the bytes that must move over the time, as a share of the bandwidth of a plain copy measured in
the same run.
"""

import argparse
from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _compat, _device, _triton
from pallas_kernels.gated_activation import reference as gated_reference
from pallas_kernels.pack import reference

gated = _triton.kernels('pallas_kernels.gated_activation.triton')
pack = _triton.kernels('pallas_kernels.pack.triton')
BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
  """One row of the table.

  Attributes:
    op: its name in the record.
    shape: of the main input.
    inputs: makes the arrays from a key.
    triton: the kernel, as a function of the arrays and a config; None where XLA's form is what the library runs.
    xla: the plain jnp form, or None.
    configs: to try of the kernel.
    moved: bytes that must be read and written.
  """

  op: str
  shape: tuple[int, ...]
  inputs: Callable[[jax.Array], tuple[Any, ...]]
  triton: Callable[..., Any] | None
  xla: Callable[..., Any] | None
  configs: tuple[Any, ...]
  moved: Callable[..., int]
  dtype: str = 'bfloat16'


def nbytes(tree: Any) -> int:
  """Bytes of all arrays of a tree, random keys aside."""
  leaves = jax.tree.leaves(tree)
  return sum(x.size * x.dtype.itemsize for x in leaves if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def normal(shape: tuple[int, ...], dtype: Any = BF16) -> Callable[[jax.Array], jax.Array]:
  return lambda key: jax.random.normal(key, shape, dtype)


def _configs(*names: str) -> tuple[Any, ...]:
  return tuple(pack.Config(*map(int, name.split('x'))) for name in names)


def cases(tokens: int, hidden: int) -> list[Case]:
  """All rows; the tile lists start with the default."""
  weight = (16384, 4096)
  tiles = _configs('16x16x2', '32x16x4', '16x16x4', '16x32x4')
  few, fewer_warps_first = _configs('16x16x4', '16x16x2'), _configs('16x16x2', '16x16x4')
  halves, whole = _configs('16x16x8', '16x16x4', '16x32x16'), _configs('16x16x4', '16x16x8', '16x32x8')

  def codes(key: jax.Array) -> jax.Array:
    return jax.jit(functools.partial(reference.transposable_pack, dtype=BF16))(normal(weight)(key)).codes

  def draw(shape: tuple[int, ...]) -> Callable[[jax.Array], tuple[Any, ...]]:
    return lambda key: (normal(shape)(key), jax.random.key(1))

  def backward(gate: bool) -> Callable[[jax.Array], tuple[Any, ...]]:
    def make(key: jax.Array) -> tuple[Any, ...]:
      z = normal((tokens, hidden * (2 if gate else 1)))(jax.random.key(3))
      return normal((tokens, hidden))(key), z, jax.random.key(2)
    return make

  def moved(inputs: Any, outputs: Any) -> int:
    return nbytes(inputs) + nbytes(outputs)

  rows = []
  for dtype in (BF16, jnp.float32):
    rows.append(Case(
      'transposable_pack', weight, lambda key, dtype=dtype: (normal(weight, dtype)(key),),
      lambda w, config: pack.transposable_pack(w, dtype=BF16, config=config),
      lambda w: reference.transposable_pack(w, dtype=BF16), tiles if dtype == BF16 else fewer_warps_first, moved,
      jnp.dtype(dtype).name,
    ))  # fmt: skip
  rows.append(Case(
    'masked_pack', weight, lambda key: (normal(weight)(key), codes(jax.random.key(9))),
    lambda w, old, config: pack.masked_pack(w, old, dtype=BF16, config=config),
    lambda w, old: reference.masked_pack(w, old, dtype=BF16), few,
    # The codes come back as they went in.
    lambda inputs, outputs: nbytes(inputs) + nbytes((outputs.rows, outputs.columns)),
  ))  # fmt: skip
  for axis in (-2, -1):
    rows.append(Case(
      f'soft_threshold_pack_axis{axis}', weight, lambda key: (normal(weight)(key), jnp.float32(1.48)),
      lambda w, s, config, axis=axis: pack.soft_threshold_pack(w, s, axis=axis, dtype=BF16, config=config),
      lambda w, s, axis=axis: reference.soft_threshold_pack(w, s, axis=axis, dtype=BF16),
      fewer_warps_first if axis == -2 else few, moved,
    ))  # fmt: skip
    rows.append(Case(
      f'mvue_pack_axis{axis}', (tokens, hidden), draw((tokens, hidden)),
      lambda x, k, config, axis=axis: pack.mvue_pack(x, k, axis=axis, origin=(0, 0, 0), dtype=BF16, config=config),
      lambda x, k, axis=axis: reference.mvue_pack(x, k, axis=axis, origin=(0, 0, 0), dtype=BF16),
      _configs('16x16x2', '16x16x4', '16x32x4', '32x16x4'), moved,
    ))  # fmt: skip
  for activation in ('silu', 'gelu'):
    shape = (tokens, 2 * hidden)
    rows.append(Case(
      f'gated_{activation}_axis-1', shape, lambda key, shape=shape: (normal(shape)(key),), None,
      lambda z, a=activation: gated_reference.gated_activation(z, activation=a), (), moved,
    ))  # fmt: skip
  for activation, gate in (('silu', True), ('gelu', True), ('gelu', False), ('squared_relu', False)):
    name = f'{"gated_" if gate else ""}{activation}_backward'
    make, options = backward(gate), dict(activation=activation, gated=gate)
    shape = (tokens, hidden)
    rows.append(Case(
      name, shape, lambda key, make=make: make(key)[:2], None,
      lambda d, z, o=options: gated_reference.activation_backward(d, z, **o), (), moved,
    ))  # fmt: skip
    rows.append(Case(
      f'{name}_pack_axis-1', shape, make,
      lambda d, z, k, config, o=options: gated.activation_backward_pack(d, z, k, origin=(0, 0, 0), config=config, **o),
      lambda d, z, k, o=options: gated_reference.activation_backward_pack(d, z, k, origin=(0, 0, 0), **o),
      halves if gate else whole, moved,
    ))  # fmt: skip
  return rows


def masked_decay_case(key: jax.Array) -> tuple[Callable[..., Any], tuple[Any, ...], str]:
  """AdamW with masked decay of one weight in plain jnp: what XLA makes of it."""
  shape = (16384, 4096)
  g, m, p = (jax.random.normal(k, shape, jnp.float32) for k in jax.random.split(key, 3))
  mask = reference.code_mask(jax.random.bits(key, (shape[0] // 4, shape[1] // 4), jnp.uint16))

  def step(g: Any, m: Any, v: Any, p: Any, mask: Any) -> Any:
    g = g + jnp.where(mask, 0.0, 6e-5 * p)
    m = 0.9 * m + 0.1 * g
    v = 0.999 * v + 0.001 * g * g
    return m, v, p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p)

  return step, (g, m, jnp.abs(m), p, mask), 'adamw_masked_decay'


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


def difference(found: Any, expected: Any) -> float:
  found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
  return float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))


def check() -> list[dict[str, Any]]:
  """Every kernel against the reference on the GPU, on ragged shapes with ties, infinities and NaN."""
  jobs = []
  ragged, square = (2, 1028, 260), (512, 512)
  for shape, dtype, special in (
    (ragged, BF16, 0.003), (square, jnp.float16, 0.003), (square, jnp.float32, 0.003),
    (ragged, BF16, 0.0), (square, jnp.float16, 0.0), (square, jnp.float32, 0.0),
  ):  # fmt: skip
    out = jnp.float16 if dtype == jnp.float16 else BF16
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape).astype(np.float32)
    w = np.where(rng.random(shape) < 0.2, np.round(2 * w), w)
    for value in (-0.0, np.inf, -np.inf, np.nan):
      w = np.where(rng.random(shape) < (special if value else 0.003), np.float32(value), w)
    w = jnp.asarray(w).astype(dtype)
    codes = reference.mask_codes(reference.transposable.transposable_mask(-w[..., ::-1]))
    scale, key = jnp.full(shape[:-2], 1.48, jnp.float32), jax.random.key(5)
    calls = {
      'transposable_pack': (lambda m, w, o=out: m.transposable_pack(w, dtype=o), (w,)),
      'masked_pack': (lambda m, w, p, o=out: m.masked_pack(w, p, dtype=o), (w, codes)),
    }
    # Special values matter to the first alone.
    for axis in (-1, -2) if special else ():
      calls[f'soft_threshold_pack{axis}'] = (
        lambda m, w, s, a=axis, o=out: m.soft_threshold_pack(w, s, axis=a, dtype=o), (w, scale),
      )  # fmt: skip
      calls[f'mvue_pack{axis}'] = (
        lambda m, w, k, a=axis, o=out: m.mvue_pack(w, k, axis=a, origin=(1, 2, 4), dtype=o), (w, key),
      )  # fmt: skip
    jobs += [(name, shape, dtype, *call) for name, call in calls.items()]

  def compare(job: Any) -> dict[str, Any]:
    name, shape, dtype, call, arrays = job
    found = jax.jit(functools.partial(call, pack))(*arrays)
    counts = differing(found, jax.jit(functools.partial(call, reference))(*arrays))
    return dict(op=name, shape=shape, dtype=jnp.dtype(dtype).name, differing=counts)

  def activation(job: tuple[str, bool]) -> dict[str, Any]:
    name, gate = job
    features, tokens = 512, 260
    dh = jax.random.normal(jax.random.key(0), (tokens, features), BF16)
    z = 2 * jax.random.normal(jax.random.key(1), (tokens, features * (2 if gate else 1)), BF16)
    options, key = dict(activation=name, gated=gate), jax.random.key(2)
    dz, operand = gated.activation_backward_pack(dh, z, key, origin=(0, 0, 0), **options)
    pick = functools.partial(reference.mvue_pack, axis=-2, origin=(0, 0, 0), dtype=BF16)
    counts = differing(operand, jax.jit(pick)(dz, key))
    error = difference(dz, gated_reference.activation_backward(dh, z, **options))
    return dict(op='activation', **options, differing=counts, error=error)

  kinds = [('silu', True), ('gelu', True), ('gelu', False), ('squared_relu', False)]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    return [*pool.map(compare, jobs), *pool.map(activation, kinds)]


def copy_bandwidth(dtype: Any = jnp.uint32) -> float:
  """Bytes a millisecond of XLA's element-wise pass over half a GB, read and written.

  Over words of four bytes that is a copy: on an H200 as fast as PyTorch's or Triton's, 4.28 TB/s. Over bfloat16, what
  XLA makes of much else, it is 3.36 there.
  """
  bits = jax.random.bits(jax.random.key(0), (8192, 16384), jnp.uint32)
  x = bits if dtype == jnp.uint32 else jax.lax.bitcast_convert_type(bits, dtype)
  ms = statistics.median(_compat.device_times_ms(jax.jit(jnp.negative), (x,), 20))
  return 2 * x.nbytes / ms


def bandwidths() -> dict[str, float]:
  """TB/s of a copy and of a pass over bfloat16, as records name them."""
  return dict(copy_tb_s=copy_bandwidth() / 1e9, pass_tb_s=copy_bandwidth(BF16) / 1e9)


def torch_baseline(shape: tuple[int, int]) -> list[float]:
  """PyTorch's own prune + pack both ways, by CUDA events; empty if PyTorch lacks it."""
  try:
    import torch

    w = torch.randn(shape, device='cuda', dtype=torch.bfloat16)
    for _ in range(5):
      torch._sparse_semi_structured_tile(w, '')
    times = []
    for _ in range(30):
      start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
      start.record()
      torch._sparse_semi_structured_tile(w, '')
      end.record()
      torch.cuda.synchronize()
      times.append(start.elapsed_time(end))
    return times
  except Exception as e:
    print('no PyTorch baseline:', e)
    return []


def measure(
  case: Case, bandwidth: float, iterations: int, *, first_config: bool = False, with_xla: bool = True
) -> dict[str, Any] | None:
  """Times every config of a case and XLA's form, prints them, and gives the record of the best; None if none ran."""
  inputs = case.inputs(jax.random.key(0))
  jobs: dict[str, Any] = {
    str(c): functools.partial(case.triton, config=c)
    for c in (case.configs[:1] if first_config else case.configs) if case.triton is not None
  }
  if case.xla is not None and (with_xla or case.triton is None):
    jobs['xla'] = case.xla
  moved = case.moved(inputs, jax.eval_shape(next(iter(jobs.values())), *inputs))
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    compiled = dict(zip(jobs, pool.map(functools.partial(compiled_or_error, inputs), jobs.values()), strict=True))
  found: dict[str, Any] = {}
  for name, f in compiled.items():
    if isinstance(f, Exception):
      print(case.op, name, 'failed:', repr(f)[:300], flush=True)
      continue
    found[name] = _compat.device_times_ms(f, inputs, iterations if name != 'xla' else 5)
    ms = statistics.median(found[name])
    print(f'{case.op:32s} {case.dtype:9s} {name:60s} {ms:.4f} ms {moved / ms / bandwidth:.1%}', flush=True)
  if case.triton is None and 'xla' in found:
    ms = statistics.median(found['xla'])
    return dict(
      op=case.op, shape=case.shape, dtype=case.dtype, mode='forward', implementation='xla', bytes=moved,
      copy_share=moved / ms / bandwidth, **samples(found['xla']),
    )  # fmt: skip
  xla = found.pop('xla', None)
  if not found:
    return None
  best = min(found, key=lambda c: statistics.median(found[c]))
  return dict(
    op=case.op, shape=case.shape, dtype=case.dtype, mode='forward', implementation='triton', config=best,
    bytes=moved, copy_share=moved / statistics.median(found[best]) / bandwidth,
    baselines={} if xla is None else {'xla': samples(xla)},
    tried={c: statistics.median(t) for c, t in found.items()}, **samples(found[best]),
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Checks and measures what is asked for; exit status 1 if a result is wrong."""
  parser = argparse.ArgumentParser(prog='python -m pallas_kernels.pack.bench')
  parser.add_argument('--out', type=pathlib.Path, required=True, help='records are appended here')
  parser.add_argument('--tokens', type=int, default=16384)
  parser.add_argument('--hidden', type=int, default=8192)
  parser.add_argument('--only', default='', help='comma-separated prefixes of ops')
  parser.add_argument('--iterations', type=int, default=15)
  parser.add_argument('--skip-check', action='store_true')
  parser.add_argument('--skip-xla', action='store_true')
  parser.add_argument('--first-config', action='store_true')
  options = parser.parse_args(argv)
  _triton.check_program(parser)
  wrong = 0
  if not options.skip_check:
    for row in check():
      bad = sum(row['differing']) + (row.get('error', 0) > 4e-3)
      wrong += bad
      if bad:
        print('WRONG', row)
    print('check:', 'all equal' if not wrong else f'{wrong} differ', flush=True)
  device = _device.current()
  common = common_fields(device.name) | bandwidths()
  print(f'{device.name}: copy {common["copy_tb_s"]:.3f} TB/s', flush=True)
  bandwidth = 1e9 * common['copy_tb_s']
  pytorch = torch_baseline((16384, 4096))
  if pytorch:
    print(f'PyTorch tile 16384x4096: {statistics.median(pytorch):.4f} ms', flush=True)
  wanted = [x for x in options.only.split(',') if x]
  for case in cases(options.tokens, options.hidden):
    if wanted and not any(case.op.startswith(x) for x in wanted):
      continue
    record = measure(
      case, bandwidth, options.iterations, first_config=options.first_config, with_xla=not options.skip_xla
    )
    if record is None:
      continue
    if pytorch and case.op == 'transposable_pack' and case.dtype == 'bfloat16':
      record['baselines']['pytorch'] = samples(pytorch)
    record = common | record | dict(error=wrong if not options.skip_check else None)
    with options.out.open('a') as f:
      f.write(json.dumps(record) + '\n')
  if not wanted or 'adamw' in wanted:
    step, arrays, name = masked_decay_case(jax.random.key(0))
    f = jax.jit(step)
    times = _compat.device_times_ms(f, arrays, options.iterations)
    moved = nbytes(arrays) + nbytes(jax.eval_shape(f, *arrays))
    ms = statistics.median(times)
    print(f'{name:32s} float32   XLA {ms:.4f} ms {moved / ms / bandwidth:.1%}')
    record = common | dict(
      op=name, shape=arrays[0].shape, dtype='float32', mode='step', implementation='xla', bytes=moved,
      copy_share=moved / ms / bandwidth, **samples(times),
    )  # fmt: skip
    with options.out.open('a') as f:
      f.write(json.dumps(record) + '\n')
  return int(wrong > 0)


def compiled_or_error(inputs: tuple[Any, ...], f: Callable[..., Any]) -> Any:
  try:
    return jax.jit(f).lower(*inputs).compile()
  except Exception as e:
    return e


def samples(times: list[float]) -> dict[str, Any]:
  return dict(samples_ms=[round(t, 5) for t in times], median_ms=statistics.median(times))


def common_fields(device: str, module: str = 'pallas_kernels.pack.bench') -> dict[str, Any]:
  """What every record of a run says."""
  import triton

  def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

  return dict(
    bench='memory_bound', headline=True, device=device,
    driver=output('nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader'),
    commit=output('git', 'rev-parse', '--verify', '-q', 'HEAD'),
    versions={'jax': jax.__version__, 'triton': triton.__version__},
    command=' '.join([f'python -m {module}', *(pathlib.Path(a).name for a in sys.argv[1:])]),
    when=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
  )  # fmt: skip


if __name__ == '__main__':
  sys.exit(main())
