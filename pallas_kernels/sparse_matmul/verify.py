"""Random problems, drawn over everything the op takes, against a product computed by NumPy."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _tuning, formats
from pallas_kernels.sparse_matmul import arg_specs, mosaic_gpu, reference


def random_problem(rng: np.random.Generator) -> dict[str, Any]:
  """Sizes from one group up, mostly ones that no tile divides, and everything else an op takes."""
  m, n = (int(rng.integers(1, 700)) if rng.random() < 0.8 else 64 * int(rng.integers(1, 12)) for _ in range(2))
  k = 4 * int(rng.integers(1, 400))
  narrow = rng.random() < 0.25

  def choose(*values: Any) -> Any:
    return values[int(rng.integers(len(values)))]

  dtype = choose('float8_e4m3fn', 'float8_e5m2') if narrow else choose('bfloat16', 'bfloat16', 'float16')
  activation = choose(None, None, 'gelu', 'silu', 'relu', 'squared_relu')
  # Squares of sums so long exceed what float16 holds.
  out_dtypes = ('bfloat16', 'float32') if activation == 'squared_relu' else ('bfloat16', 'float16', 'float32')
  return dict(
    m=m, n=n, k=k, a_dtype=dtype, b_dtype=choose('float8_e4m3fn', 'float8_e5m2') if narrow else dtype,
    out_dtype=choose(*out_dtypes), b_layout='nk' if narrow else choose('nk', 'kn'),
    out_layout=choose('mn', 'nm'), activation=activation,
    bias=choose(True, False), a_scale=choose(None, 'scalar', 'row') if narrow else None,
    b_scale=choose(None, 'scalar', 'row') if narrow else None, split=choose(1, 4), slots=choose(1, 2),
    keep_preactivation=choose(False, False, True), seed=int(rng.integers(2**31)),
    along=choose('m', 'n'),
  )


def check(case: dict[str, Any]) -> tuple[float, str | None]:
  """Error of the kernel on a `random_problem` against a NumPy product, and what is wrong, or None."""
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
  vectors = [_vector(rng, case[name], size) for name, size in (('bias', m), ('a_scale', m), ('b_scale', n))]
  d = a.reshape(m, k) @ b.astype(np.float32).T
  bias, a_scale, b_scale = vectors
  static = dict(
    activation=case['activation'], out_layout=case['out_layout'], keep_preactivation=case['keep_preactivation']
  )
  expected = reference.results(jnp.asarray(d), bias, a_scale, b_scale, out_dtype=jnp.dtype('float32'), **static)
  small_chunks = case['out_dtype'] == 'float32'
  base = mosaic_gpu.Config(bk=128, delay=0) if jnp.dtype(case['a_dtype']).itemsize == 1 else mosaic_gpu.Config()
  config = dataclasses.replace(base, **{name: case[name] for name in ('split', 'slots', 'along')})
  config = dataclasses.replace(config, epilogue_n=32 if small_chunks else 64)

  @jax.jit
  def f(*args: Any) -> jax.Array:
    return _one_array(mosaic_gpu.sparse_matmul(
      *args, **static, out_dtype=jnp.dtype(case['out_dtype']), b_layout=case['b_layout'], config=config
    ))

  args = (compressed, jnp.asarray(b if case['b_layout'] == 'nk' else b.T), *vectors)
  candidate = _tuning.Candidate('mosaic_gpu', dataclasses.asdict(config), f, args)
  return _tuning.verify(candidate, _one_array(expected))


def _one_array(outputs: Any) -> jax.Array:
  return jnp.stack(outputs) if isinstance(outputs, tuple) else outputs


def _vector(rng: np.random.Generator, kind: Any, size: int) -> jax.Array | None:
  """None, one factor, one a row, or (True) a bias."""
  if not kind:
    return None
  drawn = rng.standard_normal(size) if kind is True else rng.uniform(0.5, 2.0, () if kind == 'scalar' else size)
  return jnp.asarray(drawn, jnp.float32)


def verify(count: int, seed: int = 0) -> int:
  """Checks `count` random problems; returns how many failed and prints those."""
  rng, failures, worst = np.random.default_rng(seed), 0, 0.0
  fixed = [dict(m=m, n=n, k=k) for m, n, k in arg_specs.RAGGED] if seed == 0 else []
  for i in range(count):
    case = random_problem(rng) | (fixed[i] if i < len(fixed) else {})
    error, reason = check(case)
    worst = max(worst, error)
    if reason:
      failures += 1
      print(f'FAILED {reason}: {case}', flush=True)
  print(
    f'sparse_matmul: {count - failures} of {count} random problems agree, {_tuning.REPEATS} repeats bit-identical;'
    f' worst error {worst:.2e}'
  )
  return failures
