"""A matmul on the GPU at hand: random data, the right answer, and compiled ways to it, sparse and dense.

Data are random because power, hence the clock, depends on them: on zeros the same kernel runs faster. The dense
baseline is the faster of XLA's two ways to write the matmul (A.B, or B^T.A^T with the transposition that the layout
asks for), which are made in the same process since XLA's choice differs from one to the next, and which count only if
they give what the kernels must.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import functools
import logging
import statistics
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _device, _tuning, formats, operand
from pallas_kernels._own_kernel import OwnKernel
from pallas_kernels._tuning import compile_all, times_ms
from pallas_kernels.mosaic.sizes import ceil
from pallas_kernels.sparse_matmul import arg_specs, mosaic_gpu
from pallas_kernels.sparse_matmul._predict import reads_only
from pallas_kernels.sparse_matmul.call import Vectors

Array = jax.Array
# The oracle need not be fast, and XLA's search for a fast one takes longer than all else.
_UNTUNED = {'xla_gpu_autotune_level': 0, 'xla_gpu_enable_triton_gemm': False}
# XLA tries Triton matmuls of 8 bits for minutes; in the steps that were traced it took none.
_VENDOR = {'xla_gpu_enable_triton_gemm': False}
# Packed in 8 bits they take three times what an H200's second-level cache holds.
_UNCACHED_ENTRIES = 240_000_000
_MOST_WEIGHTS = 60  # smaller ones are timed as all else is


@dataclasses.dataclass(frozen=True)
class Inputs:
  """One problem's data in the formats that candidates take."""

  a: operand.SparseOperand
  a_dense: Array
  b: Array


def problem(spec: arg_specs.Spec) -> mosaic_gpu.Problem:
  """The spec as the kernel sees it; float8 gives bfloat16, in a layer by way of a scale."""
  eight_bit = spec.dtype.itemsize == 1
  out = jnp.dtype('bfloat16') if eight_bit else spec.dtype
  return mosaic_gpu.Problem(
    *spec.mnk, spec.dtype, spec.b_dtype, out, spec.b_layout, spec.out_layout,
    scalars=2 if eight_bit and spec.role != 'plain' else 0,
  )  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def inputs(p: mosaic_gpu.Problem, key: Array) -> Inputs:
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


@functools.partial(jax.jit, static_argnums=0)
def full(p: mosaic_gpu.Problem, key: Array) -> Array:
  """A random A [m, k] without the zeros of the pattern: what dense training multiplies."""
  return jax.random.normal(key, (p.m, p.k), jnp.float32).astype(p.a_dtype)


jax.tree_util.register_dataclass(Inputs, ['a', 'a_dense', 'b'], [])


def expected(p: mosaic_gpu.Problem, a_dense: Array, b: Array) -> Array:
  """The matmul of exact terms summed in float32, by XLA.

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
  """XLA's dense matmul written both ways round, for float8 also as the pattern that XLA maps to 8-bit GEMMs."""
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


def _dense_jobs(p: mosaic_gpu.Problem, args: Sequence[Any], *options: Any) -> list[tuple[Any, ...]]:
  options = options or ((_VENDOR,) if p.a_dtype.itemsize == 1 else ())
  return [(in_turn(p, f), args, *options) for f in _dense_ways(p).values()]


def sparse(
  p: mosaic_gpu.Problem, config: Any, kernel: Callable[..., Any], device: _device.Device
) -> Callable[..., Array]:
  vectors = Vectors(None, *[jnp.float32(1)] * p.scalars)
  return functools.partial(kernel, vectors=vectors, call=p.call, config=config, device=device)


def plain(c: Any) -> dict[str, Any]:
  return dataclasses.asdict(c)


def weights(p: mosaic_gpu.Problem) -> int:
  """How many weights of its size a call of a candidate multiplies with, one after another.

  One, but where reading it takes the time: then so many, whatever their dtype, that the second-level cache cannot hold
  what it does not hold in a model either.
  """
  large = p.m * p.k >= _UNCACHED_ENTRIES // _MOST_WEIGHTS
  return ceil(_UNCACHED_ENTRIES, p.m * p.k) if reads_only(p) and large else 1


def in_turn(p: mosaic_gpu.Problem, f: Callable[..., Array]) -> Callable[..., Any]:
  """`f` of each of `many` A and of one B: a list of results, of one A the result itself."""
  if weights(p) == 1:
    return f

  def g(many: Sequence[Any], b: Array) -> list[Array]:
    found = []
    for a in many:
      # Each waits for the one before, as the layers of a model do.
      d, b = jax.lax.optimization_barrier((f(a, b), b))
      found.append(d)
    return found

  return g


def many(p: mosaic_gpu.Problem, a: Any) -> Any:
  """`weights(p)` copies of an A in memory, or of its shape."""
  count = weights(p)
  if count == 1:
    return a
  concrete = all(isinstance(x, jax.Array) for x in jax.tree.leaves(a))
  return tuple(jax.tree.map(jnp.copy, a) if concrete else a for _ in range(count))


def timer(p: mosaic_gpu.Problem) -> Callable[..., list[float]]:
  """`times_ms` of one matmul."""
  return lambda f, args, iterations: [ms / weights(p) for ms in times_ms(f, args, iterations)]


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A problem on the GPU: its data, the right answer, and compiled ways to it; `dense` is the fastest dense one."""

  x: Inputs
  expected: Array
  dense: _tuning.Candidate
  sparse: list[_tuning.Candidate]


Compiled = list[tuple[Any, Callable[..., Array]]]


def compile_sparse(
  p: mosaic_gpu.Problem, choices: Sequence[Any], kernel: Callable[..., Any], device: _device.Device
) -> Compiled:
  """A kernel with each of the settings with which it compiles, compiled; the GPU itself is not used."""
  x = jax.eval_shape(functools.partial(inputs, p), jax.random.key(0))
  compiled = compile_all([(in_turn(p, sparse(p, c, kernel, device)), (many(p, x.a), x.b)) for c in choices])
  for c, f in zip(choices, compiled, strict=True):
    if isinstance(f, Exception):
      logging.warning('%s: %s is left out: %s', p.key, c, f)
  return [(c, f) for c, f in zip(choices, compiled, strict=True) if not isinstance(f, Exception)]


def prepare(p: mosaic_gpu.Problem, compiled: Compiled, seed: int, own: OwnKernel | None) -> Prepared:
  """Makes a problem's data and the right answer, and finds the best dense way; `compiled` is of `own`."""
  key = jax.random.key(seed)
  make = functools.partial(inputs, p)
  x = jax.eval_shape(make, key)
  # Together: XLA's own tuning of the dense ways leaves most cores idle.
  jobs = [(make, (key,)), (functools.partial(expected, p), (x.a_dense, x.b), _UNTUNED)]
  made, right, *dense = compile_all(jobs + _dense_jobs(p, (many(p, x.a_dense), x.b)))
  for f in (made, right):
    if isinstance(f, Exception):
      raise f
  x = made(key)
  packed = many(p, x.a)
  candidates = [_tuning.Candidate(own.name, plain(c), f, (packed, x.b)) for c, f in compiled] if own else []
  args = (many(p, x.a_dense), x.b)
  result = right(x.a_dense, x.b)
  return Prepared(x, result, _fastest_dense(p, args, dense, result), candidates)


def dense_candidate(p: mosaic_gpu.Problem, x: Inputs) -> _tuning.Candidate:
  return _dense(p, (x.a_dense, x.b))


def dense_way(p: mosaic_gpu.Problem, name: str, args: Sequence[Array]) -> Callable[..., Array]:
  """The way that a dense candidate's `config` names, compiled as it was."""
  (found,) = compile_all([job for way, job in zip(_dense_ways(p), _dense_jobs(p, args), strict=True) if way == name])
  if isinstance(found, Exception):
    raise found
  return found


def in_16_bits(p: mosaic_gpu.Problem, a_dense: Array, key: Array) -> _tuning.Candidate:
  """The dense matmul of a problem in 8 bits in bfloat16, with other numbers in the places of A's."""
  bf16 = jnp.dtype('bfloat16')
  wide = dataclasses.replace(p, a_dtype=bf16, b_dtype=bf16)

  @jax.jit
  def make(a_dense: Array, key: Array) -> tuple[Array, Array]:
    key_a, key_b = jax.random.split(key)
    a = jax.random.normal(key_a, a_dense.shape, bf16)
    b = jax.random.normal(key_b, (p.n, p.k) if p.b_layout == 'nk' else (p.k, p.n), bf16)
    return jnp.where(a_dense == 0, jnp.zeros((), bf16), a), b

  args = make(a_dense, key)
  return _dense(wide, args, _VENDOR)


def _dense(p: mosaic_gpu.Problem, args: Sequence[Array], *options: Any) -> _tuning.Candidate:
  right, *ways = compile_all([
    (functools.partial(expected, p), args, _UNTUNED), *_dense_jobs(p, (many(p, args[0]), args[1]), *options),
  ])  # fmt: skip
  if isinstance(right, Exception):
    raise right
  return _fastest_dense(p, (many(p, args[0]), args[1]), ways, right(*args))


def _fastest_dense(
  p: mosaic_gpu.Problem, args: Sequence[Array], compiled: Sequence[Any], expected: Array
) -> _tuning.Candidate:
  """XLA's best right way here and now: what its own tuning finds differs from process to process."""
  candidates, reasons = [], []
  for name, f in zip(_dense_ways(p), compiled, strict=True):
    candidate = _tuning.Candidate('dense', {'way': name}, f, args)
    reason = f'does not compile: {f}' if isinstance(f, Exception) else _refusal(p, candidate, expected)
    if reason is None:
      candidates.append(candidate)
    else:
      reasons.append(f'{name} {reason}')
      logging.warning('%s: a dense way is left out: %s', p.key, reasons[-1])
  if not candidates:
    raise ValueError(f'{p.key}: no dense way is right: {"; ".join(reasons)}')
  times = _tuning.interleave(candidates, timer(p), rounds=2, iterations=10, gap_s=gap_s(p, 10))
  return min(zip(candidates, times, strict=True), key=lambda pair: statistics.median(pair[1]))[0]


def _refusal(p: mosaic_gpu.Problem, dense: _tuning.Candidate, expected: Array) -> str | None:
  """Why a dense way is no baseline, or None: in another layout or dtype it would be timed at another task."""
  # 8-bit GEMMs sum with fewer bits, dense ones twice as many terms as sparse ones.
  tolerance = _tuning.TOLERANCE * (2 if p.a_dtype.itemsize == 1 else 1)
  try:
    found = jax.tree.leaves(dense.f(*dense.args))[0]
    if (found.shape, found.dtype) != (expected.shape, p.out_dtype):
      return f'gives {found.dtype} {found.shape}, not {p.out_dtype} {expected.shape}'
    error = _tuning.relative_error(found, expected)
  except jax.errors.JaxRuntimeError as e:
    return f'fails: {e}'
  return None if error <= tolerance else f'is off by {error:.2e}, more than {tolerance:.0e}'


def gap_s(p: mosaic_gpu.Problem, iterations: int) -> float:
  """Idle time before a burst: eight times its length, so that heat and clock are those of a short burst."""
  burst_s = iterations * 2 * p.m * p.n * p.k / (2e15 if p.a_dtype.itemsize == 1 else 1e15)
  return min(0.2, max(0.02, 8 * burst_s))


def unique(specs: Iterable[arg_specs.Spec]) -> Iterator[tuple[mosaic_gpu.Problem, list[arg_specs.Spec]]]:
  """Problems with the specs that come down to them (one layer's forward is its neighbour's input gradient)."""
  groups: dict[mosaic_gpu.Problem, list[arg_specs.Spec]] = {}
  for spec in specs:
    groups.setdefault(problem(spec), []).append(spec)
  yield from groups.items()


def difference(config: dict[str, Any]) -> dict[str, Any]:
  """The settings that are not the default."""
  default = plain(mosaic_gpu.Config())
  return {k: v for k, v in config.items() if v != default.get(k)}
