"""`python -m experiments.bench.pytorch_ffn --out FILE`: the feed-forward block by PyTorch's 2:4 operators.

The work of `experiments.bench.ffn` with what PyTorch offers for 2:4 training: its tile packer, which prunes and packs a
matrix both ways, and cuSPARSELt's matmul with the best algorithm that its search finds. `weights` makes the forward and
the input gradient sparse, as its training modules do; `all` prunes the output gradient as well. `error` in the record
is how far the forward's matmul is from the dense one with the pruned weight: where the packer's layout is not the one
that the matmul reads, the times stand and the numbers do not. It runs in a process of its own, since two frameworks
would share neither memory nor streams.
"""

import argparse
from collections.abc import Callable, Sequence
import datetime
import itertools
from pathlib import Path
import statistics
import time
from typing import Any

from experiments.runs import json_lines
from pallas_kernels import _device

MODULE = 'experiments.bench.pytorch_ffn'
SHAPES = ((16384, 4096, 16384), (32768, 4096, 14336))
# What an operator that is absent, has another signature or refuses its operands may raise; out of memory is the first.
REFUSALS = (RuntimeError, AttributeError, NotImplementedError, TypeError, ValueError)


class Block:
  """Forward and backward of a block in PyTorch, written out.

  Args:
    torch: the module.
    shape: tokens, model width, hidden width.
    gated: SwiGLU in place of GELU.
    kind: 'dense', 'weights' or 'all'.
  """

  def __init__(self, torch: Any, shape: tuple[int, int, int], *, gated: bool, kind: str):
    self.torch, self.gated, self.kind = torch, gated, kind
    tokens, d, hidden = shape
    make = dict(device='cuda', dtype=torch.bfloat16)
    names = ('gate', 'up') if gated else ('up',)
    # PyTorch keeps weights [out, in].
    self.into = [torch.randn(hidden, d, **make) / d**0.5 for _ in names]
    self.down = torch.randn(d, hidden, **make) / hidden**0.5
    self.x, self.dy = torch.randn(tokens, d, **make), torch.randn(tokens, d, **make)
    self.algorithms: dict[tuple[int, ...], dict[str, int]] = {}

  def pack(self, w: Any) -> tuple[Any, Any]:
    """w and its transpose, compressed."""
    packed, _, packed_t, _, _ = self.torch._sparse_semi_structured_tile(w, algorithm='', use_cutlass=False)
    return packed.view(w.shape[0], -1), packed_t.view(w.shape[1], -1)

  def matmul(self, packed: Any, dense: Any, *, transpose: bool) -> Any:
    """packed @ dense with the best algorithm for these shapes."""
    key = (*packed.shape, *dense.shape, *dense.stride())
    if key not in self.algorithms:
      self.algorithms[key] = self.search(packed, dense, transpose=transpose)
    return self.torch._cslt_sparse_mm(packed, dense, transpose_result=transpose, **self.algorithms[key])

  def search(self, packed: Any, dense: Any, *, transpose: bool) -> dict[str, int]:
    """Arguments that name the best algorithm: with the split of the sum where this release searches it."""
    try:
      found = self.torch._C._cusparselt.mm_search(packed, dense, None, None, None, transpose)
      return dict(zip(('alg_id', 'split_k', 'split_k_mode'), map(int, found), strict=False))
    except REFUSALS as error:
      print(f'  search with splits: {type(error).__name__}: {str(error)[:120]}', flush=True)
    try:
      return {'alg_id': int(self.torch._cslt_sparse_mm_search(packed, dense, transpose_result=transpose))}
    except REFUSALS as error:
      print(f'  no search, algorithm 0: {type(error).__name__}: {str(error)[:120]}', flush=True)
      return {'alg_id': 0}

  def error(self) -> float:
    """Relative error of the up-projection of 256 tokens against the dense matmul with the pruned weight."""
    torch, w, x = self.torch, self.into[0], self.x[:256]
    *_, threads = torch._sparse_semi_structured_tile(w, algorithm='', use_cutlass=False)
    kept = torch._sparse_semi_structured_apply_dense(w, threads)
    expected = x.float() @ kept.float().t()
    found = torch._cslt_sparse_mm(self.pack(w)[0], x.t(), transpose_result=True)
    return float((found.float() - expected).norm() / expected.norm())

  def linear(self, x: Any, w: Any, packed: Any) -> Any:
    return x @ w.t() if packed is None else self.matmul(packed[0], x.t(), transpose=True)

  def gradients(self, dz: Any, x: Any, w: Any, packed: Any) -> tuple[Any, Any]:
    """(of x, of w)."""
    dx = dz @ w if packed is None else self.matmul(packed[1], dz.t(), transpose=True)
    if self.kind != 'all':
      return dx, dz.t() @ x
    return dx, self.matmul(self.pack(dz)[1], x, transpose=False)

  def step(self) -> Any:
    """Output and all gradients; packing included."""
    nn, weights = self.torch.nn.functional, [*self.into, self.down]
    packs = [None] * len(weights) if self.kind == 'dense' else [self.pack(w) for w in weights]
    with self.torch.no_grad():
      z = [self.linear(self.x, w, p) for w, p in zip(self.into, packs, strict=False)]
    leaves = [value.requires_grad_() for value in z]
    h = nn.silu(leaves[0]) * leaves[1] if self.gated else nn.gelu(leaves[0], approximate='tanh')
    with self.torch.no_grad():
      y = self.linear(h, self.down, packs[-1])
      dh, d_down = self.gradients(self.dy, h.detach(), self.down, packs[-1])
    dz = self.torch.autograd.grad(h, leaves, dh)
    with self.torch.no_grad():
      found = [self.gradients(d, self.x, w, p) for d, w, p in zip(dz, self.into, packs, strict=False)]
      return y, sum(dx for dx, _ in found), [dw for _, dw in found], d_down


def samples_ms(torch: Any, step: Callable[[], Any], calls: int) -> list[float]:
  """Device time of each call, by events, with the device kept busy."""
  marks = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
  step()
  marks[0].record()
  for mark in marks[1:]:
    step()
    mark.record()
  torch.cuda.synchronize()
  return [start.elapsed_time(end) for start, end in itertools.pairwise(marks)]


def run(torch: Any, shape: tuple[int, int, int], gated: bool, rounds: int, calls: int) -> dict[str, Any]:
  """Measures one case."""
  blocks: dict[str, Block] = {}
  for kind in ('dense', 'weights', 'all'):
    block = Block(torch, shape, gated=gated, kind=kind)
    try:
      block.step()
      torch.cuda.synchronize()
      blocks[kind] = block
    except REFUSALS as error:
      print(f'  {kind}: {type(error).__name__}: {str(error)[:300]}', flush=True)
  samples: dict[str, list[float]] = {kind: [] for kind in blocks}
  for r in range(rounds):
    for kind in list(blocks) if r % 2 == 0 else list(blocks)[::-1]:
      samples[kind] += samples_ms(torch, blocks[kind].step, calls)
  rows = {
    kind: dict(samples_ms=[round(ms, 4) for ms in times], median_ms=round(statistics.median(times), 4))
    for kind, times in samples.items()
  }
  best = min((kind for kind in rows if kind != 'dense'), key=lambda kind: rows[kind]['median_ms'], default=None)
  if best is None:
    raise RuntimeError('no 2:4 operator of PyTorch works here')
  tokens, d, hidden = shape
  return dict(
    bench='ffn_pytorch', device=torch.cuda.get_device_name(),
    versions={'torch': torch.__version__, 'cusparselt': _or_none(torch.backends.cusparselt.version)},
    when=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'), op='ffn', recipe=f'pytorch, {best}',
    activation='swiglu' if gated else 'gelu', dtype='bfloat16', shape=dict(tokens=tokens, d=d, hidden=hidden),
    mode='forward_and_vjp', implementation='pytorch', **rows[best],
    baselines={kind: row for kind, row in rows.items() if kind != best},
    tflops=6 * tokens * d * hidden * (3 if gated else 2) / rows[best]['median_ms'] / 1e9,
    algorithms=list(blocks[best].algorithms.values()), error=_or_none(blocks[best].error),
  )  # fmt: skip


def _or_none(f: Callable[[], Any]) -> Any:
  """What `f` returns, or None where this release cannot say."""
  try:
    return f()
  except REFUSALS as error:
    print(f'  not known: {type(error).__name__}: {str(error)[:200]}', flush=True)
    return None


def main(argv: Sequence[str] | None = None) -> int:
  """Runs all cases; returns the number that failed."""
  parser = argparse.ArgumentParser(prog=f'python -m {MODULE}', description='PyTorch 2:4 feed-forward block.')
  parser.add_argument('--out', type=Path, required=True, help='JSON-lines file to append records to')
  parser.add_argument('--rounds', type=int, default=4, help='bursts of each kind (default: %(default)s)')
  parser.add_argument('--seconds', type=float, default=60, help='no case is begun after so long (default: %(default)s)')
  parser.add_argument('--steps', type=int, default=6, help='steps a burst (default: %(default)s)')
  options = parser.parse_args(argv)
  try:
    import torch
  except ImportError:
    parser.error('PyTorch is not installed')
  if not torch.cuda.is_available():
    parser.error('no CUDA device')
  failed, begun = 0, time.perf_counter()
  for shape in SHAPES:
    for gated in (False, True):
      start = time.perf_counter()
      if start - begun > options.seconds:
        print(f'{shape} gated={gated}: no time left', flush=True)
        failed += 1
        continue
      torch.cuda.empty_cache()
      try:
        record = run(torch, shape, gated, options.rounds, options.steps)
      except REFUSALS as error:
        print(f'{shape} gated={gated}: failed: {str(error)[:400]}', flush=True)
        failed += 1
        continue
      record |= {'commit': _device.commit(), 'command': f'python -m {MODULE} --out {options.out.name}'}
      options.out.parent.mkdir(parents=True, exist_ok=True)
      json_lines.append(options.out, record)
      rows = {record['recipe']: record['median_ms']} | {k: r['median_ms'] for k, r in record['baselines'].items()}
      print(f'{shape} gated={gated}: {rows} ms; {time.perf_counter() - start:.0f} s', flush=True)
  return failed


if __name__ == '__main__':
  raise SystemExit(main())
