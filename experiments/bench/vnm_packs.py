"""The packers' part of `python -m experiments.bench.neuron_level`, and what its parts share: cases and plans."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments.bench import measure
from pallas_kernels.vnm import api
from pallas_kernels.vnm.format import VNMOperand

# What the block calls.
PACKS = (
  'forward', 'residuals', 'pull_back', 'transpose', 'transpose_gradient', 'transpose_24', 'transpose_24_gradient',
  'columns',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
  """One row: `kind` is 'matmul' (rows, sum, columns), 'pack' (rows, columns) or 'ffn' (tokens, width, hidden).

  `setting` is of a block, a key of `measure.ACTIVATIONS`.
  """

  kind: str
  v: int
  m: int
  shape: tuple[int, ...]
  role: str = 'forward'
  setting: str = ''

  @property
  def name(self) -> str:
    """What `--select` calls it."""
    parts = [self.kind, f'{self.v}x2x{self.m}', *([self.role] if self.kind == 'pack' else [])]
    parts += [self.setting] if self.setting else []
    return '-'.join([*parts, 'x'.join(map(str, self.shape))])


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a case is measured.

  Attributes:
    jobs: name -> (function, arguments or their shapes), compiled ahead with those of all other cases.
    run: compiled functions by name, without those that were refused -> what the record says.
    explain: these functions and the record -> device time by kind of kernel, or None.
  """

  jobs: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]]
  run: Callable[[Mapping[str, Any]], dict[str, Any]]
  explain: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] = lambda *_: None


def compile_all(plans: Mapping[str, Plan]) -> dict[str, dict[str, Any]]:
  """Compiled functions of each case by name, those of all cases at once; without what is refused."""
  jobs = {f'{case}: {name}': (jax.jit(f), args) for case, p in plans.items() for name, (f, args) in p.jobs.items()}
  made = measure.compile_all(jobs, threads=12)
  return {
    case: {name: made[key] for name in plan.jobs if (key := f'{case}: {name}') in made} for case, plan in plans.items()
  }


def pack(case: Case, options: Any) -> Plan:
  """Measures a packer beside a copy."""
  shape = case.shape
  if options.tiny:
    shape = (2 * case.v, 32 * case.m)
    shape = (32 * case.m, max(2 * case.v, 16 * case.m)) if case.role.startswith('transpose') else shape
  f, arguments = _packer(case)

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
    rows = measure.timed(calls, options)
    moved = _read(case, args) + sum(a.nbytes for a in jax.tree.leaves(compiled['pack'](*args)))
    bandwidth = 2 * words.nbytes / rows['copy']['median_ms']
    return dict(
      bench='memory_bound', op='vnm_pack', role=case.role, pattern=f'{case.v}:2:{case.m}',
      shape=dict(rows=shape[0], columns=shape[1]), mode='forward', implementation='triton', **rows['pack'],
      baselines=dict(copy=rows['copy']), bytes=moved, copy_share=moved / rows['pack']['median_ms'] / bandwidth,
    )  # fmt: skip

  return Plan(jobs, run)


def _packer(case: Case) -> tuple[Callable[..., Any], Callable[[Array, Array], tuple[Any, ...]]]:
  """What is timed, and what makes its arguments from activations and a gradient."""
  vnm_pack = functools.partial(api.vnm_pack, v=case.v, m=case.m, activation='squared_relu')

  def given(x: Array, gradient: Array, pattern: VNMOperand) -> Array:
    return vnm_pack(x, gradient=gradient, pattern=pattern).operand.compact.values

  def kept(x: Array, gradient: Array) -> tuple[Any, ...]:
    made = vnm_pack(x, residuals=True)
    return made.inputs, gradient, made.operand

  def transposed(x: Array, _: Array) -> tuple[Any, ...]:
    a = vnm_pack(x).operand
    dense = _dense_neurons(x.shape[1])
    used = jnp.ones((x.shape[1],), bool).at[dense].set(False)
    match case.role:
      case 'columns':
        return a, dense
      case 'transpose' | 'transpose_24':
        return a, used
      case 'transpose_gradient':
        return a, api.transpose_pack(a, used=used)
      case _:
        return a, api.transpose_pack_24(a, used=used)

  match case.role:
    case 'forward' | 'residuals':
      return functools.partial(vnm_pack, residuals=case.role == 'residuals'), lambda x, _: (x,)
    case 'pull_back':
      return given, kept
    case 'transpose':
      return lambda a, used: api.transpose_pack(a, used=used), transposed
    case 'transpose_gradient':
      return lambda a, pattern: api.transpose_pack(a, pattern=pattern).compact.values, transposed
    case 'transpose_24':
      return lambda a, used: api.transpose_pack_24(a, used=used), transposed
    case 'transpose_24_gradient':
      return lambda a, pattern: api.transpose_pack_24(a, pattern=pattern).values, transposed
    case _:
      return api.take_columns, transposed


def _dense_neurons(neurons: int) -> Array:
  order = jnp.argsort(jax.random.uniform(jax.random.key(2), (neurons,)))
  return jnp.sort(order[: round(0.05 * neurons)]).astype(jnp.int32)


def _read(case: Case, args: tuple[Any, ...]) -> int:
  """Bytes that must be read."""
  if case.role == 'columns':
    a, dense = args
    groups = np.unique(np.asarray(dense) // case.m)
    # Sectors of 32 bytes with a word that is asked for; a tile of positions has 16 groups of 64 rows.
    rows = a.shape[0]
    return len(np.unique(groups // 8)) * 32 * rows + len(np.unique(groups // 16)) * 512 * (rows // 64)
  if case.role == 'transpose_gradient':
    a, pattern = args
    kept = (a.compact.values.nbytes + a.compact.metadata.nbytes) * 4 // case.m  # four rows of each M
    return kept + a.rows.nbytes + pattern.compact.metadata.nbytes + pattern.rows.nbytes
  arrays = sum(a.nbytes for a in jax.tree.leaves(args))
  if case.role == 'transpose_24_gradient':
    return arrays - args[1].values.nbytes
  if case.role == 'pull_back':
    arrays -= args[2].compact.values.nbytes  # of the pattern, the positions alone
  return arrays
