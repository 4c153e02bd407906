"""What a memory-bound pass costs on a measured GPU: bytes over the bandwidth of its kernel there, and 5 us.

The `costs.py` of an op says what its passes move. Sizes of entries are in bytes; scalars and keys are not counted.
"""

from collections.abc import Iterable, Mapping
import functools
import json
import pathlib
from typing import Any, NamedTuple

from pallas_kernels import _records

# The op that is an element-wise pass of XLA's over large arrays of bfloat16.
COPY = 'copy'
# What a pass takes besides its bytes, with the small kernels that come with it (keys, codes of masks): ours, by three
# feed-forward blocks of 0.1 to 0.3 ms on an H100.
_BESIDES_MS = 0.005


class Move(NamedTuple):
  """A pass over memory: what records call it, and the bytes that it reads and writes."""

  op: str
  size: float


def sparse_entry(width: int) -> float:
  """Bytes of a 2:4 operand an entry of its matrix: half of the values, two bits for each of these."""
  return width / 2 + 1 / 8


def write(records: Iterable[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Keeps the bandwidth of each op, from records of `_passes`.

  The slowest of several shapes counts. Ops without a kernel, such as reductions, have XLA's.
  """
  passes = [r for r in records if r['bench'] == 'memory_bound']
  kernels = {r['op'] for r in passes if r['implementation'] == 'triton'}
  tb_s: dict[str, float] = {}
  for r in passes:
    if r['implementation'] == 'triton' or r['op'] not in kernels:
      tb_s[r['op']] = min(tb_s.get(r['op'], float('inf')), r['bytes'] / r['median_ms'] / 1e9)
  head = {name: passes[0][name] for name in ('device', 'driver', 'versions', 'when', 'copy_tb_s', 'pass_tb_s')}
  path.write_text(json.dumps(head | {'tb_s': {op: round(v, 3) for op, v in sorted(tb_s.items())}}, indent=1) + '\n')
  _measured.cache_clear()


@functools.cache
def _measured(device: str, folder: pathlib.Path) -> Mapping[str, float]:
  """Bandwidths by op. Each op's `tune` writes a file of its own; what several files have is the newest's."""
  names = {path.stem for path in folder.glob('*/memory_bound*.json')}
  paths = [path for path in (_records.path_of(folder, device, name) for name in names) if path.exists()]
  kept = [(path.parent.name == device, json.loads(path.read_text())) for path in paths]
  found: dict[str, float] = {}
  for _, record in sorted(kept, key=lambda pair: (pair[0], pair[1]['when'])):
    found |= {COPY: record['pass_tb_s']} | record['tb_s']
  return found


def expected_ms(device: str, op: str, size: int, *, folder: pathlib.Path = _records.TUNED) -> float | None:
  """Milliseconds of a pass of `op` that moves `size` bytes; None if the GPU or the op was not measured.

  >>> expected_ms('no_such_gpu', 'masked_pack', 1 << 30) is None
  True
  """
  tb_s = _measured(device, folder).get(op)
  return None if tb_s is None else size / tb_s / 1e9 + _BESIDES_MS
