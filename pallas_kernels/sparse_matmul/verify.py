"""Random problems, drawn over all that the op takes and all that its kernel ships, against NumPy's matmul."""

from collections.abc import Sequence
import dataclasses
import functools
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _bench, _device, _dispatch, _records, _tuning, formats
from pallas_kernels.arch import kernels_of
from pallas_kernels.sparse_matmul import _predict, arg_specs, mosaic_gpu, reference
from pallas_kernels.sparse_matmul.api import BACKENDS
from pallas_kernels.sparse_matmul.call import Call, Vectors


def random_problem(rng: np.random.Generator, implementation: str = 'mosaic_gpu') -> dict[str, Any]:
  """Sizes from one group up, mostly ones that no tile divides, and everything else the op and its kernel take."""
  m, n = (int(rng.integers(1, 700)) if rng.random() < 0.8 else 64 * int(rng.integers(1, 12)) for _ in range(2))
  k = 4 * int(rng.integers(1, 400))
  narrow = rng.random() < 0.25 and 1 in kernels_of(mosaic_gpu.OP)[implementation].itemsizes

  def choose(*values: Any) -> Any:
    return values[int(rng.integers(len(values)))]

  dtype = choose('float8_e4m3fn', 'float8_e5m2') if narrow else choose('bfloat16', 'bfloat16', 'float16')
  activation = choose(None, None, 'gelu', 'silu', 'relu', 'squared_relu')
  # Squares of sums so long exceed what float16 holds.
  out_dtypes = ('bfloat16', 'float32') if activation == 'squared_relu' else ('bfloat16', 'float16', 'float32')
  case = dict(
    m=m, n=n, k=k, a_dtype=dtype, b_dtype=choose('float8_e4m3fn', 'float8_e5m2') if narrow else dtype,
    out_dtype=choose(*out_dtypes), b_layout='nk' if narrow else choose('nk', 'kn'),
    out_layout=choose('mn', 'nm'), activation=activation,
    bias=choose(True, False), a_scale=choose(None, 'scalar', 'row') if narrow else None,
    b_scale=choose(None, 'scalar', 'row') if narrow else None,
    keep_preactivation=choose(False, False, True), alpha=choose(1.0, 2.0) if narrow else 1.0,
    amax=choose(False, False, True),
    seed=int(rng.integers(2**31)),
  )
  return case | dict(config=_setting(rng, case) if implementation == 'mosaic_gpu' else None)


def _setting(rng: np.random.Generator, case: dict[str, Any]) -> dict[str, Any] | None:
  """How the kernel is set: as a record says, as a tuner would try, or as the kernel itself decides (None)."""
  a, b, out = (jnp.dtype(case[name]) for name in ('a_dtype', 'b_dtype', 'out_dtype'))
  p = mosaic_gpu.Problem(case['m'], case['n'], case['k'], a, b, out, case['b_layout'], case['out_layout'])
  # Kinds alike, however often each won; of a kind, buffers and the order of tiles differ.
  kinds: dict[Any, list[mosaic_gpu.Config]] = {}
  for c in _measured(a.itemsize):
    if mosaic_gpu.fits(p, c):
      kinds.setdefault((c.rows, c.bn, c.cluster, c.along, c.delay, c.split, c.halves), []).append(c)
  source = rng.random()
  if source < 0.15:
    return None
  # One GPU's, so that a seed draws the same on all.
  found = _predict.candidates(p, _predict.H100_SMS) if source < 0.3 else list(kinds.values())[rng.integers(len(kinds))]
  return dataclasses.asdict(found[rng.integers(len(found))])


@functools.cache
def _measured(itemsize: int) -> Sequence[mosaic_gpu.Config]:
  """The fastest setting of each recorded matmul of values of so many bytes, which the library runs there."""
  rows = [
    _records.best_of(entry, 'mosaic_gpu')
    for path in sorted(_records.TUNED.glob('*/sparse_matmul.json')) for entry in _records.entries_of(path)
    if jnp.dtype(entry['key']['dtype']).itemsize == itemsize
  ]
  return tuple(dict.fromkeys(mosaic_gpu.Config(**row['config']) for row in rows if row is not None))


def check(case: dict[str, Any], implementation: str = 'mosaic_gpu') -> tuple[float, str | None]:
  """Error of a kernel on a `random_problem` against a NumPy matmul, and what is wrong, or None."""
  rng = np.random.default_rng(case['seed'])
  m, n, k = case['m'], case['n'], case['k']
  values = rng.standard_normal((m, k // 2)).astype(np.float32).astype(jnp.dtype(case['a_dtype']))
  pairs = np.asarray(formats.PAIRS)[rng.integers(6, size=(m, k // 4))]
  a = np.zeros((m, k // 4, 4), np.float32)
  np.put_along_axis(a, pairs, values.astype(np.float32).reshape(m, k // 4, 2), axis=-1)
  nibbles = np.zeros((m, -(-k // 8) * 2), np.uint8)
  nibbles[:, : k // 4] = pairs[..., 0] | pairs[..., 1] << 2
  compressed = formats.Compressed24(jnp.asarray(values), jnp.asarray(nibbles[:, ::2] | nibbles[:, 1::2] << 4), -1)
  b = rng.standard_normal((n, k)).astype(np.float32).astype(jnp.dtype(case['b_dtype']))
  vectors = Vectors(*(_vector(rng, case[name], size) for name, size in (('bias', m), ('a_scale', m), ('b_scale', n))))
  d = a.reshape(m, k) @ b.astype(np.float32).T
  call = Call(
    jnp.dtype(case['out_dtype']), case['b_layout'], case['out_layout'], case['activation'], case['keep_preactivation'],
    case['alpha'], case['amax'],
  )
  exact = dataclasses.replace(call, out_dtype=jnp.dtype('float32'))
  expected = reference.results(jnp.asarray(d), vectors, exact)
  config = case['config'] and mosaic_gpu.Config(**case['config'])

  @jax.jit
  def f(*args: Any) -> list[jax.Array]:
    return _compared(_dispatch.load(BACKENDS[implementation])(*args, call, config=config), call)

  args = (compressed, jnp.asarray(b if case['b_layout'] == 'nk' else b.T), vectors)
  found = [
    _tuning.verify(_tuning.Candidate(implementation, None, lambda *args, i=i: f(*args)[i], args), e)
    for i, e in enumerate(_compared(expected, call))
  ]
  return max(error for error, _ in found), next((reason for _, reason in found if reason), None)


def _compared(outputs: Any, call: Call) -> list[jax.Array]:
  """Results that are compared each by itself: D, with Z, and a number that would hide what is wrong with these."""
  if not isinstance(outputs, tuple):
    return [outputs]
  matrices = outputs[:-1] if call.amax else outputs
  return [jnp.stack(matrices), *outputs[len(matrices) :]]


def _vector(rng: np.random.Generator, kind: Any, size: int) -> jax.Array | None:
  """None, one factor, one a row, or (True) a bias."""
  if not kind:
    return None
  drawn = rng.standard_normal(size) if kind is True else rng.uniform(0.5, 2.0, () if kind == 'scalar' else size)
  return jnp.asarray(drawn, jnp.float32)


def verify(
  count: int, seed: int = 0, seconds: float = math.inf, out: pathlib.Path | None = None,
  implementation: str = 'mosaic_gpu',
) -> int:
  """Checks `count` random problems, or as many as are begun in `seconds`; returns how many failed and prints those.

  With `out` one record of the run is appended to that file.
  """
  rng, errors, failures = np.random.default_rng(seed), [], []
  fixed = [dict(m=m, n=n, k=k) for m, n, k in arg_specs.RAGGED] if seed == 0 else []
  start = time.monotonic()
  while len(errors) < count and time.monotonic() - start <= seconds:
    case = random_problem(rng, implementation)
    case |= fixed[len(errors)] if len(errors) < len(fixed) else {}
    error, reason = check(case, implementation)
    errors.append(math.inf if math.isnan(error) else error)
    if reason:
      failures.append(dict(reason=reason, problem=case))
      print(f'FAILED {reason}: {case}', flush=True)
  done, worst = len(errors), max(errors, default=0.0)
  print(
    f'sparse_matmul by {implementation}: {done - len(failures)} of {done} random problems agree,'
    f' {_tuning.REPEATS} repeats bit-identical; worst error {worst:.2e}'
  )
  if out is not None:
    record = dict(
      bench='verify', **_device.environment(), op='sparse_matmul', implementation=implementation, count=done,
      seed=seed, worst_error=worst if math.isfinite(worst) else None, tolerance=_tuning.TOLERANCE,
      repeats=_tuning.REPEATS, failures=failures,
    )
    _bench.append(out, record)
  return len(failures)
