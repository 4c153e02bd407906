"""Rounding to float8 and the matmuls of what it makes, checked and timed: `python -m pallas_kernels bench quantize`."""

from collections.abc import Callable
import concurrent.futures
import functools
import re
import statistics
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _device, _passes, _triton, formats
from pallas_kernels._passes import difference, differing, float8_inputs, normal, samples
from pallas_kernels.operand import from_operand
from pallas_kernels.pack import api as pack_api
from pallas_kernels.quantize import api, arg_specs, reference
from pallas_kernels.sparse_matmul.api import OP as SPARSE
from pallas_kernels.sparse_matmul.api import sparse_matmul
from pallas_kernels.sparse_matmul.dense import matmul

triton = _triton.kernels('pallas_kernels.quantize.triton')
BF16, F32 = jnp.bfloat16, jnp.float32
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


def check() -> list[dict[str, Any]]:
  """Every kernel against the reference."""

  def compare(job: Any) -> dict[str, Any]:
    shape, source, dtype, top, x = job
    scale = jnp.full(shape[:-2], float(jnp.finfo(dtype).max) / top, F32)
    made = [
      jax.jit(functools.partial(m.quantize, dtype=dtype, transpose='both'))(x, scale) for m in (triton, reference)
    ]
    found = dict(op='quantize', source=jnp.dtype(source).name, dtype=dtype.name, top=top)
    return found | dict(differing=differing(*made))

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    return list(pool.map(compare, float8_inputs()))


def matmuls(options: Any, write: Callable[[dict[str, Any]], None]) -> None:
  """The three matmuls of y[T, O] = x[T, I] W[I, O] in float8, from the kernels' own operands, against bfloat16."""
  tokens, d_in, d_out = arg_specs.LAYER
  flops = 2 * tokens * d_in * d_out
  shapes = (tokens, d_in), (d_in, d_out), (tokens, d_out)
  x, w, dz = (normal(s)(jax.random.key(i)) for i, s in enumerate(shapes))

  @jax.jit
  def operands(x: jax.Array, w: jax.Array, dz: jax.Array) -> Any:
    w_scale, x_scale = (api.current_scale(api.amax(a), E4M3) for a in (w, x))
    dz_scale = api.current_scale(api.amax(dz), E5M2)
    x8, xt8 = api.quantize(x, x_scale, dtype=E4M3, transpose='both')
    packed_w = pack_api.soft_threshold_pack(w, w_scale, dtype=E4M3)
    packed_dz = pack_api.mvue_pack(dz, jax.random.key(7), dz_scale, dtype=E5M2)
    return x8, xt8, x_scale, packed_w, w_scale, packed_dz, dz_scale

  x8, xt8, x_scale, packed_w, w_scale, packed_dz, dz_scale = operands(x, w, dz)
  sample_scale = dz_scale / pack_api.MVUE_HEADROOM
  sparse = functools.partial(sparse_matmul, out_dtype=BF16, out_layout='nm', implementation='sparse')

  def forward(a: Any, b: Any, s: Any, t: Any) -> jax.Array:
    return sparse(a, b, a_scale=s, b_scale=t)

  def dense(a: Any, b: Any) -> jax.Array:
    return matmul(a, b, b_layout='nk').astype(BF16)

  def wanted(a: Any, b: Any, s: Any, t: Any) -> jax.Array:
    # A few rows of the matmul of what the operands hold, on the dense bfloat16 tensor cores: float8 fits bfloat16.
    return jax.lax.dot_general(
      a.astype(BF16), b.astype(BF16), (((1,), (1,)), ((), ())), preferred_element_type=F32
    ) / s / t  # fmt: skip

  def quick(f: Any, arrays: Any) -> Any:
    return jax.jit(f).lower(*arrays).compile(compiler_options={'xla_gpu_enable_triton_gemm': False})

  def opened(operand: Any) -> jax.Array:
    return formats.expand(from_operand(operand))

  rows = 256
  cases: dict[str, Any] = {
    'forward': (forward, (packed_w.operand, x8, w_scale, x_scale), lambda f, a, b, s, t: (
      f[:rows], wanted(b[:rows], opened(a), s, t))),
    'input_grad': (api.fp8_dot, (packed_dz.dense, packed_w.dense, dz_scale, w_scale), lambda f, a, b, s, t: (
      f[:rows], wanted(a[:rows], b, s, t))),
    'weight_grad': (forward, (packed_dz.operand, xt8, sample_scale, x_scale), lambda f, a, b, s, t: (
      f[:rows], wanted(b[:rows], opened(a), s, t))),
  }  # fmt: skip
  plain = {'forward': (x, w.T.copy()), 'input_grad': (dz, w), 'weight_grad': (x.T.copy(), dz.T.copy())}
  dense8 = {
    'forward': (x8, packed_w.dense.T.copy(), x_scale, w_scale),
    'weight_grad': (xt8, packed_dz.dense.T.copy(), x_scale, dz_scale),
  }
  for role, (f, arrays, oracle) in cases.items():
    # With XLA's defaults, as in training; the baselines without Triton matmuls, which cost minutes to tune.
    compiled = jax.jit(f).lower(*arrays).compile()
    targets = sorted(set(re.findall(r'custom_call_target="([^"]*)"', compiled.as_text() or '')))
    times = _compat.device_times_ms(compiled, arrays, options.iterations)
    others = {'dense': (dense, plain[role])} | ({'dense_fp8': (api.fp8_dot, dense8[role])} if role in dense8 else {})
    baselines = {
      name: samples(_compat.device_times_ms(quick(g, xs), xs, options.iterations)) for name, (g, xs) in others.items()
    }
    outputs = compiled(*arrays), *arrays
    found, expected = quick(oracle, outputs)(*outputs)
    error, ms = difference(found, expected), statistics.median(times)
    times_of = ', '.join(f'{name} {b["median_ms"]:.4f}' for name, b in baselines.items())
    said = f'{role:12s} {ms:.4f} ms {flops / ms / 1e9:.0f} TFLOP/s; {times_of}; error {error:.1e}; {targets}'
    print(said, flush=True)
    own = _device.current().arch.kernel(SPARSE, 1)
    op, implementation = ('fp8_dot', 'xla') if role == 'input_grad' else (SPARSE, own and own.backend)
    write(dict(
      bench='float8_matmuls', op=op, role=role, shape=dict(tokens=tokens, d_in=d_in, d_out=d_out),
      dtype=jax.tree.leaves(arrays)[0].dtype.name,
      implementation=implementation, custom_calls=targets, tflops=flops / ms / 1e9, error=error, recipe='s_ste_fp8',
      baselines=baselines, **samples(times),
    ))  # fmt: skip


OP = _passes.Op('quantize', arg_specs.cases, check, {'matmuls': matmuls})
arguments = _passes.bench_arguments
run = functools.partial(_passes.bench, OP)
