"""Checks and times the float8 kernels and products on a GPU: `python -m pallas_kernels.quantize.bench --out FILE`.

Times are CUPTI's on random data, as in `pallas_kernels.pack.bench`. Parts: `check` compares every kernel with the
reference bit for bit, `passes` times the memory-bound kernels, `products` the three products of a layer.
"""

import argparse
from collections.abc import Callable, Sequence
import concurrent.futures
import functools
import json
import pathlib
import re
import statistics
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _compat, _device, _triton, formats
from pallas_kernels.gated_activation import api as gated_api
from pallas_kernels.pack import api as pack_api
from pallas_kernels.pack import bench, costs
from pallas_kernels.pack import reference as pack_reference
from pallas_kernels.quantize import api, reference
from pallas_kernels.sparse_matmul.api import sparse_matmul
from pallas_kernels.sparse_matmul.dense import matmul
from pallas_kernels.sparse_matmul.operand import from_operand

gated = _triton.kernels('pallas_kernels.gated_activation.triton')
pack = _triton.kernels('pallas_kernels.pack.triton')
triton = _triton.kernels('pallas_kernels.quantize.triton')
BF16, F32 = jnp.bfloat16, jnp.float32
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
ORIGIN = dict(origin=(0, 0, 0))
PARTS = ('check', 'passes', 'products')


def tiles(*names: str) -> tuple[Any, ...]:
  """Configs from names such as '16x32x4': blocks down, blocks across, warps."""
  return tuple(pack.Config(*map(int, name.split('x'))) for name in names)


def check() -> list[dict[str, Any]]:
  """Every kernel against the reference, on ragged and batched shapes with ties, infinities and NaN."""
  jobs = []
  # Largest entries that saturate, fit, and round to zero.
  tops = (0.5, 5.0, 3e5)
  for i, (shape, source) in enumerate((((2, 1028, 260), BF16), ((512, 512), jnp.float16), ((516, 388), F32))):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    x = np.where(rng.random(shape) < 0.2, np.round(2 * x), x)
    for value in (0.0, -0.0, np.inf, -np.inf, np.nan):
      x = np.where(rng.random(shape) < 0.003, np.float32(value), x)
    x = jnp.asarray(x).astype(source)
    key = jax.random.key(5)
    for j, dtype in enumerate((E4M3, E5M2)):
      top = tops[(i + j) % 3]
      scale = jnp.full(shape[:-2], float(jnp.finfo(dtype).max) / top, F32)
      calls = {'quantize': ((triton, reference), 'quantize', (x, scale), dict(transpose='both'))}
      for axis in (-1, -2):
        options, both = dict(axis=axis, with_dense=True), (pack, pack_reference)
        calls[f'soft_threshold_pack8{axis}'] = both, 'soft_threshold_pack8', (x, scale), options
        calls[f'mvue_pack8{axis}'] = both, 'mvue_pack8', (x, key, scale), options | dict(origin=(1, 2, 4))
      jobs += [(name, source, dtype, top, *call) for name, call in calls.items()]

  def compare(job: Any) -> dict[str, Any]:
    name, source, dtype, top, modules, function, arrays, options = job
    made = [jax.jit(functools.partial(getattr(m, function), dtype=dtype, **options))(*arrays) for m in modules]
    differing = bench.differing(*made)
    return dict(op=name, source=jnp.dtype(source).name, dtype=dtype.name, top=top, differing=differing)

  def backward(job: tuple[str, bool]) -> dict[str, Any]:
    name, gate = job
    features, tokens = 512, 260
    dh = jax.random.normal(jax.random.key(0), (tokens, features), BF16)
    z = 2 * jax.random.normal(jax.random.key(1), (tokens, features * (2 if gate else 1)), BF16)
    options, key, scale = dict(activation=name, gated=gate), jax.random.key(2), F32(5000)
    made = jax.jit(functools.partial(gated.activation_backward_pack8, dtype=E5M2, **ORIGIN, **options))(
      dh, z, key, scale
    )  # fmt: skip
    dz, _ = gated.activation_backward_pack(dh, z, key, **ORIGIN, **options)
    pick = functools.partial(pack_reference.mvue_pack8, axis=-2, dtype=E5M2, with_dense=True, **ORIGIN)
    differing = bench.differing(made, jax.jit(pick)(dz, key, scale))
    return dict(op='activation_backward_pack8', **options, differing=differing)

  kinds = [('silu', True), ('gelu', False)]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    return [*pool.map(compare, jobs), *pool.map(backward, kinds)]


def cases() -> list[bench.Case]:
  """Rows of the table; the tile lists start with the default."""

  def moved(inputs: Any, outputs: Any) -> int:
    return bench.nbytes(inputs) + bench.nbytes(outputs)

  def case(op: str, shape: Any, inputs: Any, kernel: Any, xla: Any, configs: Any, dtype: str = 'bfloat16') -> Any:
    return bench.Case(op, shape, inputs, kernel, xla, configs, moved, dtype)

  rows = []
  for shape in ((16384, 4096), (16384, 16384)):
    rows.append(case(
      'quantize_both', shape, lambda key, s=shape: (bench.normal(s)(key), F32(80)),
      lambda x, s, config: triton.quantize(x, s, dtype=E4M3, transpose='both', config=config),
      lambda x, s: reference.quantize(x, s, dtype=E4M3, transpose='both'),
      tiles('32x32x8', '16x16x4', '32x32x4', '16x32x4', '32x16x4', '32x64x8', '64x32x8'),
    ))  # fmt: skip
    small = shape[1] == 4096
    rows.append(case(
      'mvue_pack8', shape, lambda key, s=shape: (bench.normal(s)(key), jax.random.key(1), F32(1e4)),
      lambda x, k, s, config: pack.mvue_pack8(x, k, s, axis=-2, dtype=E5M2, with_dense=True, config=config, **ORIGIN),
      (lambda x, k, s: pack_reference.mvue_pack8(x, k, s, axis=-2, dtype=E5M2, with_dense=True, **ORIGIN))
      if small else None,
      tiles('16x32x4', '16x16x2', '16x16x4', '16x16x8', '32x16x4', '16x32x2', '32x16x8', '16x32x8', '64x16x8'),
    ))  # fmt: skip
  for dtype in (BF16, F32):
    rows.append(case(
      'soft_threshold_pack8', (4096, 16384), lambda key, d=dtype: (bench.normal((4096, 16384), d)(key), F32(100)),
      lambda w, s, config: pack.soft_threshold_pack8(w, s, axis=-2, dtype=E4M3, with_dense=True, config=config),
      (lambda w, s: pack_reference.soft_threshold_pack8(w, s, axis=-2, dtype=E4M3, with_dense=True))
      if dtype == BF16 else None,
      tiles('16x16x4', '16x16x2', '32x16x4', '16x32x4', '32x32x8'), jnp.dtype(dtype).name,
    ))  # fmt: skip
  for name, gate, configs in (
    ('gelu', False, tiles('16x32x8', '16x16x4', '16x16x2', '16x16x8', '32x16x4', '32x16x8', '16x32x4', '64x16x8')),
    ('silu', True, tiles('16x32x16', '16x16x8', '16x16x4', '32x16x16', '32x16x8', '16x32x8')),
  ):  # fmt: skip
    tokens, features = (16384, 16384) if not gate else (16384, 8192)
    options = dict(activation=name, gated=gate, dtype=E5M2, **ORIGIN)
    rows.append(case(
      f'{"gated_" if gate else ""}{name}_backward_pack8', (tokens, features),
      lambda key, t=tokens, f=features, g=gate: (
        bench.normal((t, f))(key), bench.normal((t, 2 * f if g else f))(jax.random.key(3)), jax.random.key(1), F32(5e3)
      ),
      lambda d, z, k, s, config, o=options: gated.activation_backward_pack8(d, z, k, s, config=config, **o),
      None, configs,
    ))  # fmt: skip
  return rows


def reductions() -> list[tuple[str, Any, Callable[..., Any], tuple[Any, ...]]]:
  """The passes that find scales, all XLA's: (name, shape, function, shapes of its inputs)."""
  wide, narrow = (16384, 16384), (16384, 4096)
  backward = functools.partial(gated_api.activation_backward_amax, activation='gelu', gated=False)
  gate = functools.partial(gated_api.activation_backward_amax, activation='silu', gated=True)
  return [
    ('amax', wide, api.amax, (wide,)),
    ('amax', narrow, api.amax, (narrow,)),
    ('gelu_backward_amax', wide, backward, (wide, wide)),
    ('gated_silu_backward_amax', (16384, 8192), gate, ((16384, 8192), wide)),
  ]


def products(say: Callable[..., None], iterations: int) -> list[dict[str, Any]]:
  """The three products of y[T, O] = x[T, I] W[I, O] in float8, from the kernels' own operands, against bfloat16."""
  tokens, d_in, d_out = 16384, 4096, 16384
  flops = 2 * tokens * d_in * d_out
  shapes = (tokens, d_in), (d_in, d_out), (tokens, d_out)
  x, w, dz = (bench.normal(s)(jax.random.key(i)) for i, s in enumerate(shapes))

  @jax.jit
  def operands(x: jax.Array, w: jax.Array, dz: jax.Array) -> Any:
    w_scale, w_factor = api.current_scale(api.amax(w), E4M3)
    x_scale, x_factor = api.current_scale(api.amax(x), E4M3)
    dz_scale, dz_factor = api.current_scale(api.amax(dz), E5M2)
    x8, xt8 = api.quantize(x, x_scale, dtype=E4M3, transpose='both')
    packed_w = pack_api.soft_threshold_pack8(w, w_scale)
    packed_dz = pack_api.mvue_pack8(dz, jax.random.key(7), dz_scale)
    return x8, xt8, x_factor, packed_w, w_factor, packed_dz, dz_factor

  x8, xt8, x_factor, packed_w, w_factor, packed_dz, dz_factor = operands(x, w, dz)
  sample_factor = pack_api.MVUE_HEADROOM * dz_factor
  sparse = functools.partial(sparse_matmul, out_dtype=BF16, out_layout='nm', implementation='mosaic_gpu')

  def forward(a: Any, b: Any, s: Any, t: Any) -> jax.Array:
    return sparse(a, b, a_scale=s, b_scale=t)

  def dense(a: Any, b: Any) -> jax.Array:
    return matmul(a, b, b_layout='nk').astype(BF16)

  def wanted(a: Any, b: Any, s: Any, t: Any) -> jax.Array:
    # A few rows of the product of what the operands hold, on the dense bfloat16 tensor cores: float8 fits bfloat16.
    return jax.lax.dot_general(
      a.astype(BF16), b.astype(BF16), (((1,), (1,)), ((), ())), preferred_element_type=F32
    ) * (s * t)  # fmt: skip

  def quick(f: Any, arrays: Any) -> Any:
    return jax.jit(f).lower(*arrays).compile(compiler_options={'xla_gpu_enable_triton_gemm': False})

  def opened(operand: Any) -> jax.Array:
    return formats.expand(from_operand(operand))

  rows = 256
  cases: dict[str, Any] = {
    'forward': (forward, (packed_w.operand, x8, w_factor, x_factor), lambda f, a, b, s, t: (
      f[:rows], wanted(b[:rows], opened(a), s, t))),
    'input_grad': (api.fp8_dot, (packed_dz.dense, packed_w.dense, dz_factor, w_factor), lambda f, a, b, s, t: (
      f[:rows], wanted(a[:rows], b, s, t))),
    'weight_grad': (forward, (packed_dz.operand, xt8, sample_factor, x_factor), lambda f, a, b, s, t: (
      f[:rows], wanted(b[:rows], opened(a), s, t))),
  }  # fmt: skip
  plain = {'forward': (x, w.T.copy()), 'input_grad': (dz, w), 'weight_grad': (x.T.copy(), dz.T.copy())}
  dense8 = {
    'forward': (x8, packed_w.dense.T.copy(), x_factor, w_factor),
    'weight_grad': (xt8, packed_dz.dense.T.copy(), x_factor, dz_factor),
  }
  records = []
  for role, (f, arrays, oracle) in cases.items():
    try:
      # With XLA's defaults, as in training; the baselines without Triton products, which cost minutes to tune.
      compiled = jax.jit(f).lower(*arrays).compile()
      targets = sorted(set(re.findall(r'custom_call_target="([^"]*)"', compiled.as_text() or '')))
      times = _compat.device_times_ms(compiled, arrays, iterations)
      others = {'dense': (dense, plain[role])} | ({'dense_fp8': (api.fp8_dot, dense8[role])} if role in dense8 else {})
      baselines = {
        name: bench.samples(_compat.device_times_ms(quick(g, xs), xs, iterations)) for name, (g, xs) in others.items()
      }
      outputs = compiled(*arrays), *arrays
      found, expected = quick(oracle, outputs)(*outputs)
      error, ms = bench.difference(found, expected), statistics.median(times)
      times_of = ', '.join(f'{name} {b["median_ms"]:.4f}' for name, b in baselines.items())
      say(f'{role:12s} {ms:.4f} ms {flops / ms / 1e9:.0f} TFLOP/s; {times_of}; error {error:.1e}; {targets}')
      op, implementation = ('fp8_dot', 'xla') if role == 'input_grad' else ('sparse_matmul', 'mosaic_gpu')
      records.append(dict(
        op=op, role=role, shape=(tokens, d_in, d_out), dtype=jax.tree.leaves(arrays)[0].dtype.name,
        implementation=implementation, custom_calls=targets, tflops=flops / ms / 1e9, error=error, recipe='s_ste_fp8',
        baselines=baselines, **bench.samples(times),
      ))  # fmt: skip
    except Exception:
      say(role, 'failed:', traceback.format_exc(limit=3))
  return records


def main(argv: Sequence[str] | None = None) -> int:
  """Checks and measures what is asked for; exit status 1 if a result is wrong or a part failed."""
  parser = argparse.ArgumentParser(prog='python -m pallas_kernels.quantize.bench')
  parser.add_argument('--out', type=pathlib.Path, required=True, help='records are appended here')
  parser.add_argument('--iterations', type=int, default=15)
  parser.add_argument('--parts', default=','.join(PARTS))
  parser.add_argument('--first-config', action='store_true', help='only the tiles that the library runs')
  parser.add_argument('--only', default='', help='comma-separated prefixes of kernels, of the passes')
  parser.add_argument('--skip-xla', action='store_true', help="not the passes that XLA would make in a kernel's place")
  parser.add_argument('--tuned', type=pathlib.Path, help='folder of tuned records that gets the bandwidths')
  options = parser.parse_args(argv)
  _triton.check_program(parser)
  parts, only = options.parts.split(','), tuple(filter(None, options.only.split(',')))
  say = functools.partial(print, flush=True)
  wrong, failed = None, []
  device = _device.current()
  common = bench.common_fields(device.name, 'pallas_kernels.quantize.bench') | bench.bandwidths()
  say(f'{device.name}: copy {common["copy_tb_s"]:.3f} TB/s')
  bandwidth = 1e9 * common['copy_tb_s']

  written: list[dict[str, Any]] = []

  def write(record: dict[str, Any]) -> None:
    written.append(common | record)
    with options.out.open('a') as f:
      f.write(json.dumps(written[-1]) + '\n')

  def part(name: str, f: Callable[[], None]) -> None:
    if name in parts:
      try:
        f()
      except Exception:
        failed.append(name)
        say(f'part {name} failed:', traceback.format_exc(limit=4))

  def run_check() -> None:
    nonlocal wrong
    rows = check()
    bad = [row for row in rows if sum(row['differing'])]
    wrong = sum(sum(row['differing']) for row in bad)
    for row in bad:
      say('WRONG', row)
    say(f'check: {len(rows)} comparisons,', 'all equal' if not bad else f'{len(bad)} differ')

  def run_passes() -> None:
    for case in cases():
      if only and not case.op.startswith(only):
        continue
      record = bench.measure(
        case, bandwidth, options.iterations, first_config=options.first_config, with_xla=not options.skip_xla
      )
      if record:
        write(record | dict(error=wrong))
    for name, shape, f, shapes in [] if only else reductions():
      arrays = tuple(bench.normal(s)(jax.random.key(i)) for i, s in enumerate(shapes))
      times = _compat.device_times_ms(jax.jit(f), arrays, options.iterations)
      moved, ms = bench.nbytes(arrays), statistics.median(times)
      say(f'{name:32s} XLA {ms:.4f} ms {moved / ms / bandwidth:.1%}')
      write(dict(op=name, shape=shape, dtype='bfloat16', mode='forward', implementation='xla', bytes=moved,
                 copy_share=moved / ms / bandwidth, **bench.samples(times)))  # fmt: skip

  def run_products() -> None:
    for record in products(say, options.iterations):
      write(record | dict(bench='float8_products'))

  part('check', run_check)
  part('products', run_products)
  part('passes', run_passes)
  checked = wrong == 0 or 'check' not in parts
  if options.tuned and not only and checked and any(record['bench'] == 'memory_bound' for record in written):
    (folder := options.tuned / device.slug).mkdir(parents=True, exist_ok=True)
    costs.write(written, folder / 'memory_bound_fp8.json')
  return int(bool(wrong or failed))


if __name__ == '__main__':
  sys.exit(main())
