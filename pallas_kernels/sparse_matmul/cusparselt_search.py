"""Finds the fastest algorithm of cuSPARSELt that gives the right result, for the tuner and as a baseline.

cuSPARSELt's own search returns ids whose results are wrong or change from run to run, and the id it takes by itself may
be much slower than the best. So every id is timed briefly, the best few also with their sums split, and the fastest are
checked against the reference and repeated.
"""

import collections
from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import functools
import statistics
from typing import Any

import jax

from pallas_kernels import _compat, _tuning, operand
from pallas_kernels.ffi import cusparselt as library
from pallas_kernels.sparse_matmul import cusparselt, mosaic_gpu

Array = jax.Array
Config = cusparselt.Config

# (split_k, split_k_mode): sums split in one kernel or in two, and the schedules that newer kernels know by name.
_SPLITS = ((2, 1), (2, 2), (4, 1), (4, 2), (0, 4), (2, 5), (0, 6))
_SPLIT_IDS = 2
_SCREEN_ITERATIONS = 4
_HEAT_GAP_S = 0.05
_COMPILERS = 8


@dataclasses.dataclass(frozen=True)
class Found:
  """What a search gave.

  Attributes:
    candidates: the fastest at a first look, in that order; none is verified yet.
    others: rows for the record of those that were slower or refused, with their samples or the reason.
    compress_samples_ms: times to make the blob from the dense matrix, which no candidate's samples hold.
  """

  candidates: list[_tuning.Candidate]
  others: list[dict[str, Any]]
  compress_samples_ms: list[float]


def search(
  p: mosaic_gpu.Problem, a_dense: Array, b: Array, *, sparse: operand.SparseOperand | None = None, keep: int = 5
) -> Found:
  """Times every algorithm briefly and hands on the `keep` fastest.

  Args:
    p: the problem.
    a_dense: A [M, K], dense, 2:4 along its rows.
    b: B in `p.b_layout`.
    sparse: A in this package's own form, which a call of `sparse_matmul` starts from: what making the blob from it
      costs is the candidates' `setup_ms`. None leaves that at zero, as for a baseline whose blob is given.
    keep: how many candidates to hand on.

  Raises:
    NotImplementedError: no cuSPARSELt, or it does not take the problem.
  """
  a, compress_samples = _compressed(a_dense)
  setup_ms = 0.0 if sparse is None else statistics.median(_compressed(sparse)[1])
  count = library.algorithms(*_sizes(p), p.a_dtype, p.out_dtype, b_layout=p.b_layout, out_layout=p.out_layout)
  first = _screen(p, [Config(algorithm=i) for i in (-1, *range(count))], a, b)
  best = [x for x in _by_time(first) if x.config.algorithm >= 0][:_SPLIT_IDS]
  split = [dataclasses.replace(x.config, split_k=s, split_k_mode=mode) for x in best for s, mode in _SPLITS]
  timed = [*first, *_screen(p, split, a, b)]
  order = _by_time(timed)
  chosen = _spread(order, keep)
  candidates = [_candidate(x.config, x.f, a, b, setup_ms) for x in chosen]
  slower = [_row(x.config, f'slower than {keep} others at a first look', x.samples) for x in order if x not in chosen]
  return Found(candidates, slower + [_row(x.config, x.reason) for x in timed if x.reason], compress_samples)


def fastest(
  p: mosaic_gpu.Problem, a_dense: Array, b: Array, expected: Array, *, known: Config | None = None
) -> tuple[_tuning.Candidate, list[float]]:
  """The fastest algorithm that agrees with the reference and repeats, and the samples of making its blob.

  Args:
    p: the problem.
    a_dense: A [M, K], dense, 2:4 along its rows.
    b: B in `p.b_layout`.
    expected: the reference's float32 result.
    known: tried alone first: the algorithm that the records name.

  Raises:
    NotImplementedError: no cuSPARSELt, or no algorithm of it is right.
  """
  if known is not None:
    a, samples = _compressed(a_dense)
    (compiled,) = _compile(p, [known], a, b)
    if not isinstance(compiled, Exception):
      candidate = _candidate(known, compiled, a, b)
      if _tuning.verify(candidate, expected)[1] is None:
        return candidate, samples
  found = search(p, a_dense, b)
  reasons = [_tuning.verify(candidate, expected)[1] for candidate in found.candidates]
  right = [c for c, reason in zip(found.candidates, reasons, strict=True) if reason is None]
  if not right:
    said = '; '.join(f'{c.config}: {reason}' for c, reason in zip(found.candidates, reasons, strict=True))
    raise NotImplementedError(f'no algorithm of cuSPARSELt is right for {p.key}: {said}')
  # A first look errs by 4%, which is as much as the baseline differs from what it is compared with.
  times = _tuning.interleave(right, _compat.device_times_ms, rounds=2, iterations=10, gap_s=_HEAT_GAP_S)
  best = min(zip(right, times, strict=True), key=lambda pair: statistics.median(pair[1]))[0]
  return best, found.compress_samples_ms


@dataclasses.dataclass(frozen=True)
class _Timed:
  config: Config
  f: Callable[..., Array] | None
  samples: list[float]
  reason: str | None


def _screen(
  p: mosaic_gpu.Problem, configs: Sequence[Config], a: cusparselt.CusparseltOperand, b: Array
) -> list[_Timed]:
  """Each setting's time in a few calls, or why it does not run."""
  out = []
  for config, f in zip(configs, _compile(p, configs, a, b), strict=True):
    if isinstance(f, Exception):
      out.append(_Timed(config, None, [], f'refused: {f}'))
      continue
    try:
      jax.block_until_ready(f(a, b))
      out.append(_Timed(config, f, _compat.device_times_ms(f, (a, b), _SCREEN_ITERATIONS), None))
    except RuntimeError as e:  # also CUPTI's, where calls launch different kernels
      out.append(_Timed(config, None, [], f'fails: {e}'))
  return out


def _compile(
  p: mosaic_gpu.Problem, configs: Sequence[Config], a: cusparselt.CusparseltOperand, b: Array
) -> list[Any]:
  """Compiled matmuls, or what refused the setting; plans are asked for first, since they cost less."""

  def one(config: Config) -> Any:
    f = functools.partial(
      cusparselt.matmul, out_dtype=p.out_dtype, b_layout=p.b_layout, out_layout=p.out_layout, config=config
    )
    return jax.jit(f).lower(a, b).compile()

  out: list[Any] = [_refusal(p, config) for config in configs]
  accepted = [i for i, refusal in enumerate(out) if refusal is None]
  with concurrent.futures.ThreadPoolExecutor(_COMPILERS) as pool:
    for i, f in zip(accepted, pool.map(one, [configs[i] for i in accepted]), strict=True):
      out[i] = f
  return out


def _refusal(p: mosaic_gpu.Problem, config: Config) -> NotImplementedError | None:
  try:
    library.workspace_bytes(
      *_sizes(p), p.a_dtype, p.out_dtype, b_layout=p.b_layout, out_layout=p.out_layout, config=config
    )
  except NotImplementedError as e:
    return e
  return None


def _sizes(p: mosaic_gpu.Problem) -> tuple[int, int, int]:
  return cusparselt.padded_sizes(p.m, p.n, p.k)


def _compressed(a: Array | operand.SparseOperand) -> tuple[cusparselt.CusparseltOperand, list[float]]:
  """The blob, and times of making it."""
  f = jax.jit(cusparselt.prepare).lower(a).compile()
  return jax.block_until_ready(f(a)), _compat.device_times_ms(f, (a,), 2 * _SCREEN_ITERATIONS)


def _by_time(timed: Sequence[_Timed]) -> list[_Timed]:
  return sorted((x for x in timed if x.reason is None), key=lambda x: statistics.median(x.samples))


def _spread(order: Sequence[_Timed], count: int) -> list[_Timed]:
  """The first `count`, two of an id at most: an id that is wrong is wrong with its sums split as well."""
  taken: collections.Counter[int] = collections.Counter()
  out = []
  for x in order:
    taken[x.config.algorithm] += 1
    if taken[x.config.algorithm] <= 2:
      out.append(x)
  return out[:count]


def plain(config: Config) -> dict[str, Any]:
  """A setting as the records hold it: with the version that its ids belong to."""
  return dataclasses.asdict(config) | {'version': list(library.version())}


def _candidate(config: Config, f: Any, a: Any, b: Array, setup_ms: float = 0.0) -> _tuning.Candidate:
  return _tuning.Candidate('cusparselt', plain(config), f, (a, b), setup_ms)


def _row(config: Config, reason: str | None, samples: Sequence[float] = ()) -> dict[str, Any]:
  timed = dict(samples_ms=list(samples)) if samples else {}
  return dict(implementation='cusparselt', config=plain(config), error=None, rejected=reason) | timed
