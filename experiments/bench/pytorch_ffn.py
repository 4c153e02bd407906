"""`python -m experiments.bench.pytorch_ffn --out FILE`: the feed-forward block by PyTorch's 2:4 operators.

The work of `experiments.bench.ffn` with what PyTorch offers for 2:4 training: its tile packer, which prunes and packs a
matrix both ways, and cuSPARSELt's matmul with the best algorithm that its search finds. `weights` makes the forward and
the input gradient sparse, as its training modules do; `all` prunes the output gradient as well. Times only: on Hopper
the packer's layout is not the one that the matmul reads, so the numbers are wrong there. It runs in a process of its
own, since two frameworks would share neither memory nor streams.
"""

import argparse
from collections.abc import Callable, Sequence
import datetime
import itertools
import json
from pathlib import Path
import statistics
import time
from typing import Any

MODULE = 'experiments.bench.pytorch_ffn'
SHAPES = ((16384, 4096, 16384), (32768, 4096, 14336))


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
    self.algorithms: dict[tuple[int, ...], int] = {}

  def pack(self, w: Any) -> tuple[Any, Any]:
    """w and its transpose, compressed."""
    packed, _, packed_t, _, _ = self.torch._sparse_semi_structured_tile(w, '', use_cutlass=False)
    return packed, packed_t

  def product(self, packed: Any, dense: Any, *, transpose: bool) -> Any:
    """packed @ dense with the best algorithm for these shapes."""
    key = (*packed.shape, *dense.shape, *dense.stride())
    if key not in self.algorithms:
      self.algorithms[key] = int(self.torch._cslt_sparse_mm_search(packed, dense, transpose_result=transpose))
    return self.torch._cslt_sparse_mm(packed, dense, alg_id=self.algorithms[key], transpose_result=transpose)

  def linear(self, x: Any, w: Any, packed: Any) -> Any:
    return x @ w.t() if packed is None else self.product(packed[0], x.t(), transpose=True)

  def gradients(self, dz: Any, x: Any, w: Any, packed: Any) -> tuple[Any, Any]:
    """(of x, of w)."""
    dx = dz @ w if packed is None else self.product(packed[1], dz.t(), transpose=True)
    if self.kind != 'all':
      return dx, dz.t() @ x
    return dx, self.product(self.pack(dz)[1], x, transpose=False)

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
    except (RuntimeError, AttributeError, NotImplementedError) as error:
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
    versions={'torch': torch.__version__, 'cusparselt': str(torch.backends.cusparselt.version())},
    when=datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'), op='ffn', recipe=f'pytorch, {best}',
    activation='swiglu' if gated else 'gelu', dtype='bfloat16', shape=dict(tokens=tokens, d=d, hidden=hidden),
    mode='forward_and_vjp', implementation='pytorch', **rows[best],
    baselines={kind: row for kind, row in rows.items() if kind != best},
    tflops=6 * tokens * d * hidden * (3 if gated else 2) / rows[best]['median_ms'] / 1e9,
    algorithms=sorted(set(blocks[best].algorithms.values())),
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs all cases; returns the number that failed."""
  parser = argparse.ArgumentParser(prog=f'python -m {MODULE}', description='PyTorch 2:4 feed-forward block.')
  parser.add_argument('--out', type=Path, required=True, help='JSON-lines file to append records to')
  parser.add_argument('--rounds', type=int, default=4)
  parser.add_argument('--steps', type=int, default=6, help='steps a burst (default: %(default)s)')
  options = parser.parse_args(argv)
  try:
    import torch
  except ImportError:
    parser.error('PyTorch is not installed')
  if not torch.cuda.is_available():
    parser.error('no CUDA device')
  failed = 0
  for shape in SHAPES:
    for gated in (False, True):
      start = time.perf_counter()
      try:
        record = run(torch, shape, gated, options.rounds, options.steps)
      except RuntimeError as error:
        print(f'{shape} gated={gated}: failed: {str(error)[:400]}', flush=True)
        failed += 1
        continue
      record['command'] = f'python -m {MODULE} --out {options.out.name}'
      options.out.parent.mkdir(parents=True, exist_ok=True)
      with options.out.open('a') as file:
        file.write(json.dumps(record) + '\n')
      rows = {record['recipe']: record['median_ms']} | {k: r['median_ms'] for k, r in record['baselines'].items()}
      print(f'{shape} gated={gated}: {rows} ms; {time.perf_counter() - start:.0f} s', flush=True)
      torch.cuda.empty_cache()
  return failed


if __name__ == '__main__':
  raise SystemExit(main())
