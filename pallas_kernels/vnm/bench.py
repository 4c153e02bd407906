"""Times V:N:M matmuls and packers as the library runs them: `python -m pallas_kernels bench vnm_matmul`.

`matmul`: against the faster of XLA's two ways to write the dense one, with the settings of
`tuned/<device>/vnm_matmul.json`. `packs`: each packer's bytes over its time, as a share of the copy bandwidth of the
same run. All are timed in turns by the sum of their kernels; records hold every sample.
"""

import argparse
from collections.abc import Callable, Mapping
import dataclasses
import functools
import statistics
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _bench, _device, _own_kernel, _tuning
from pallas_kernels.vnm import api
from pallas_kernels.vnm.arg_specs import dense_ways, matrices, PACK_SPECS, PACKED, PackSpec, Spec, SPECS
from pallas_kernels.vnm.format import VNMOperand

SELECTIONS = {'matmul': list(SPECS), 'packs': list(PACK_SPECS)}
TINY = (128, 256, 128)


def arguments(parser: argparse.ArgumentParser) -> None:
  """What `bench vnm_matmul` takes."""
  _bench.arguments(parser, [*SELECTIONS, *SPECS, *PACK_SPECS], list(SELECTIONS))


def run(options: argparse.Namespace) -> int:
  """Exit status 1 if a case failed."""
  head = _device.environment() | dict(recipe='neuron_level', dtype='bfloat16', headline=not options.tiny)
  plans = {
    name: matmul(SPECS[name], options, head) if name in SPECS else pack(PACK_SPECS[name], options, head)
    for name in _bench.selected(options, SELECTIONS)
  }
  return min(_bench.run_plans(plans, options.out, _summary), 1)


def _summary(record: Mapping[str, Any]) -> str:
  said = f'{record["copy_share"]:.2f} of copy' if 'copy_share' in record else f'speedup {record["speedup"]}'
  if 'sustained_ms' in record:
    said += f', sustained {record["baselines"]["dense"]["sustained_ms"] / record["sustained_ms"]:.4f}'
  return f'{record["median_ms"]:.4f} ms, {said}'


def matmul(spec: Spec, options: Any, head: Mapping[str, Any]) -> _bench.Plan:
  """Measures a matmul with the settings that the records have of it."""
  spec = dataclasses.replace(spec, shape=TINY) if options.tiny else spec
  m, k, n = spec.shape

  def make(key: Array) -> tuple[VNMOperand, Array, Array, Array]:
    a, b, dense = matrices(spec, key)
    return a, b, dense, jax.random.normal(jax.random.fold_in(key, 2), (m, k), jnp.float32).astype(a.dtype)

  key = jax.random.key(m + spec.group)
  a, b, dense, _ = jax.eval_shape(make, key)
  # XLA's CPU multiplies bfloat16 slowly and not in all layouts.
  wide = jnp.float32 if options.tiny else a.dtype
  ways = dense_ways(wide)
  if options.tiny:
    name, config, multiply = 'reference', None, functools.partial(api.vnm_matmul, implementation='reference')
  else:
    kernel = _own_kernel.here(api.OP, api.MATMULS)
    known = kernel.known(api.key(a, n, a.dtype, 'mn')) or kernel.module.default_config(a.v)
    name, config = kernel.name, dataclasses.asdict(known)
    multiply = functools.partial(kernel.module.vnm_matmul, out_dtype=a.dtype, out_layout='mn', config=known)

  def right(x: Array, y: Array) -> Array:
    return jnp.dot(x.astype(wide), y.astype(wide), preferred_element_type=jnp.float32)

  jobs: dict[str, Any] = {'make': (make, (key,)), 'expected': (right, (dense, b)), 'sparse': (multiply, (a, b))}
  jobs |= {name: (f, (dense, b)) for name, f in ways.items()}

  def run(compiled: Mapping[str, Any]) -> dict[str, Any]:
    a, b, dense, full = compiled['make'](key)
    expected = compiled['expected'](dense, b)
    heat = {name: statistics.median(_bench.timer(compiled[name], (dense, b), options.steps)) for name in ways}
    best = min(heat, key=heat.__getitem__)
    error, reason = _tuning.verify(_tuning.Candidate(name, config, compiled['sparse'], (a, b)), expected)
    if reason:
      raise ValueError(reason)
    # Zeros take less power, so that the same kernel multiplies `dense`, whose zeros are the pattern's, faster.
    calls = {
      'sparse': (compiled['sparse'], (a, b)), 'dense': (compiled[best], (dense, b)),
      'dense_without_zeros': (compiled[best], (full, b)),
    }  # fmt: skip
    rows = _bench.timed(calls, options)
    if not options.tiny:
      hot = dict(zip(calls, _tuning.sustained([*calls.values()]), strict=True))
      rows = {name: row | hot[name] for name, row in rows.items()}
    sparse = rows.pop('sparse')
    ms = sparse['median_ms']
    return dict(
      **head, bench='vnm_matmul', op='vnm_matmul', role='forward', pattern=f'{spec.v}:2:{spec.group}',
      shape=dict(tokens=m, d_in=k, d_out=n, m=m, n=n, k=k), layouts=dict(b='kn', out='mn'), mode='forward',
      implementation=name, config=config, **sparse,
      baselines={name: row | {'config': {'way': best}} for name, row in rows.items()},
      speedup=round(rows['dense']['median_ms'] / ms, 4), tflops=2 * m * n * k / ms / 1e9, error=error,
    )  # fmt: skip

  return _bench.Plan(jobs, run)


def pack(spec: PackSpec, options: Any, head: Mapping[str, Any]) -> _bench.Plan:
  """Measures a packer beside a copy."""
  shape = PACKED
  if options.tiny:
    shape = (2 * spec.v, 32 * spec.group)
    shape = (32 * spec.group, max(2 * spec.v, 16 * spec.group)) if spec.role.startswith('transpose') else shape
  f, arguments = _packer(spec)

  def make(key: Array) -> tuple[Array, tuple[Any, ...]]:
    x, gradient = (jax.random.normal(k, shape, jnp.float32).astype(jnp.bfloat16) for k in jax.random.split(key))
    # XLA's pass over entries of two bytes is slower than the memory.
    words = jax.lax.bitcast_convert_type(x.reshape(shape[0], -1, 2), jnp.uint32)
    return words, arguments(x, gradient)

  key = jax.random.key(0)
  words, args = jax.eval_shape(make, key)
  jobs: dict[str, Any] = {'make': (make, (key,)), 'pack': (f, args), 'copy': (jnp.negative, (words,))}

  def run(compiled: Mapping[str, Any]) -> dict[str, Any]:
    words, args = compiled['make'](key)
    calls = {'pack': (compiled['pack'], args), 'copy': (compiled['copy'], (words,))}
    rows = _bench.timed(calls, options)
    moved = _read(spec, args) + sum(a.nbytes for a in jax.tree.leaves(compiled['pack'](*args)))
    bandwidth = 2 * words.nbytes / rows['copy']['median_ms']
    return dict(
      **head, bench='memory_bound', op='vnm_pack', role=spec.role, pattern=f'{spec.v}:2:{spec.group}',
      shape=dict(rows=shape[0], columns=shape[1]), mode='forward', implementation='triton', **rows['pack'],
      baselines=dict(copy=rows['copy']), bytes=moved, copy_share=moved / rows['pack']['median_ms'] / bandwidth,
    )  # fmt: skip

  return _bench.Plan(jobs, run)


def _packer(spec: PackSpec) -> tuple[Callable[..., Any], Callable[[Array, Array], tuple[Any, ...]]]:
  """What is timed, and what makes its arguments from activations and a gradient."""
  vnm_pack = functools.partial(api.vnm_pack, v=spec.v, m=spec.group, activation='squared_relu')

  def given(x: Array, gradient: Array, pattern: VNMOperand) -> Array:
    return vnm_pack(x, gradient=gradient, pattern=pattern).operand.compact.values

  def kept(x: Array, gradient: Array) -> tuple[Any, ...]:
    made = vnm_pack(x, residuals=True)
    return made.inputs, gradient, made.operand

  transpose = api.transpose_pack_24 if spec.role.startswith('transpose_24') else api.transpose_pack

  def transposed(x: Array, _: Array) -> tuple[Any, ...]:
    a = vnm_pack(x).operand
    neurons = x.shape[1]
    order = jnp.argsort(jax.random.uniform(jax.random.key(2), (neurons,)))
    dense = jnp.sort(order[: round(0.05 * neurons)]).astype(jnp.int32)
    if spec.role == 'columns':
      return a, dense
    used = jnp.ones((neurons,), bool).at[dense].set(False)
    return a, transpose(a, used=used) if spec.role.endswith('gradient') else used

  match spec.role:
    case 'forward' | 'residuals':
      return functools.partial(vnm_pack, residuals=spec.role == 'residuals'), lambda x, _: (x,)
    case 'pull_back':
      return given, kept
    case 'transpose' | 'transpose_24':
      return lambda a, used: transpose(a, used=used), transposed
    case 'transpose_gradient':
      return lambda a, pattern: api.transpose_pack(a, pattern=pattern).compact.values, transposed
    case 'transpose_24_gradient':
      return lambda a, pattern: api.transpose_pack_24(a, pattern=pattern).values, transposed
    case _:
      return api.take_columns, transposed


def _read(spec: PackSpec, args: tuple[Any, ...]) -> int:
  """Bytes that must be read."""
  if spec.role == 'columns':
    a, dense = args
    groups = np.unique(np.asarray(dense) // spec.group)
    # Sectors of 32 bytes of which something is asked for; a tile of metadata has 16 groups of 64 rows.
    rows = a.shape[0]
    return len(np.unique(groups // 8)) * 32 * rows + len(np.unique(groups // 16)) * 512 * (rows // 64)
  if spec.role == 'transpose_gradient':
    a, pattern = args
    kept = (a.compact.values.nbytes + a.compact.metadata.nbytes) * 4 // spec.group  # four rows of each M
    return kept + a.rows.nbytes + pattern.compact.metadata.nbytes + pattern.rows.nbytes
  arrays = sum(a.nbytes for a in jax.tree.leaves(args))
  if spec.role == 'transpose_24_gradient':
    return arrays - args[1].values.nbytes
  if spec.role == 'pull_back':
    arrays -= args[2].compact.values.nbytes  # of the pattern, the positions alone
  return arrays
