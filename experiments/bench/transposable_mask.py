"""`python -m experiments.bench.transposable_mask`: the exact transposable mask against the form of the papers' code.

Both find the best of the 90 patterns of each 4x4 block. The papers' form is one matmul, magnitudes [blocks, 16] by
patterns [16, 90], and an argmax; ours meets in the middle. Measured in one process, in turn, on random weights.

In turn means that each form also pays for fresh memory after the other has given its own back: on a CPU that is half of
our time, and little of the other form's.
"""

import argparse
from collections.abc import Callable, Sequence
import datetime
import importlib.metadata
import itertools
import os
from pathlib import Path
import platform
import shlex
import statistics
import subprocess
import sys
import time

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments.bench.measure import append
from pallas_kernels.transposable_mask import reference

RESULTS = Path(__file__).parents[1] / 'results' / 'transposable_mask.jsonl'
BASELINE = 'matmul_argmax'


def all_patterns() -> np.ndarray:
  """Every 4x4 pattern with two entries in each row and each column, bool [90, 16]."""
  rows = [[i in pair for i in range(4)] for pair in itertools.combinations(range(4), 2)]
  found = [np.array(choice) for choice in itertools.product(rows, repeat=4)]
  return np.array([pattern.ravel() for pattern in found if (pattern.sum(0) == 2).all()])


@jax.jit
def matmul_argmax(w: Array) -> Array:
  """The form of the papers' code: scores of all patterns by a matmul, then the best; float32 sums."""
  rows, columns = w.shape
  patterns = jnp.asarray(all_patterns())
  blocks = jnp.abs(w.astype(jnp.float32)).reshape(rows // 4, 4, columns // 4, 4).transpose(0, 2, 1, 3).reshape(-1, 16)
  scores = jnp.dot(blocks, patterns.T.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
  best = patterns[jnp.argmax(scores, axis=-1)]
  return best.reshape(rows // 4, columns // 4, 4, 4).transpose(0, 2, 1, 3).reshape(rows, columns)


FORMS: dict[str, Callable[[Array], Array]] = {
  'pallas_kernels': jax.jit(reference.transposable_mask),
  BASELINE: matmul_argmax,
}


def measure(w: Array, rounds: int) -> tuple[dict[str, list[float]], float]:
  """Milliseconds of each form in each round, forms in turn; and the share of 4x4 blocks on which they agree.

  Raises:
    ValueError: the masks do not keep the same magnitude, up to the rounding of a float32 sum.
  """
  masks = {name: form(w) for name, form in FORMS.items()}  # compiles as well
  wide = np.abs(np.asarray(w).astype(np.float64))
  kept = [(wide * np.asarray(mask)).reshape(w.shape[0] // 4, 4, -1, 4).sum((1, 3)) for mask in masks.values()]
  if not np.allclose(*kept, rtol=1e-6, atol=0):
    raise ValueError('the two forms keep different magnitudes of a block')
  differ = np.asarray(masks['pallas_kernels'] != masks[BASELINE]).reshape(w.shape[0] // 4, 4, -1, 4).any((1, 3))
  samples: dict[str, list[float]] = {name: [] for name in FORMS}
  for _ in range(rounds):
    for name, form in FORMS.items():
      start = time.perf_counter()
      form(w).block_until_ready()
      samples[name].append((time.perf_counter() - start) * 1e3)
  return samples, 1 - float(differ.mean())


def device_name() -> str:
  """The GPU, or the CPU's model and how many cores this process may use."""
  device = jax.devices()[0]
  if device.platform != 'cpu':
    return device.device_kind
  info = Path('/proc/cpuinfo')
  lines = info.read_text().splitlines() if info.exists() else []
  model = next((line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')), platform.machine())
  cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
  return f'{model}, {cores} cores'


def current_commit() -> str | None:
  """The commit of this checkout, or None outside one."""
  git = ['git', '-C', str(Path(__file__).parent), 'rev-parse', '--short', 'HEAD']
  try:
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return None


def run(size: int, dtype: str, rounds: int, command: str) -> dict:
  """Measures one square weight and returns the record."""
  w = jax.random.normal(jax.random.key(0), (size, size), jnp.float32).astype(dtype)
  samples, agreement = measure(w, rounds)
  medians = {name: statistics.median(times) for name, times in samples.items()}
  rounded = {name: [round(t, 4) for t in times] for name, times in samples.items()}
  return {
    'bench': 'transposable_mask',
    'device': device_name(),
    'versions': {
      'python': platform.python_version(),
      **{package: importlib.metadata.version(package) for package in ('jax', 'jaxlib', 'numpy')},
    },
    'commit': current_commit(),
    'command': command,
    'when': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
    'op': 'transposable_mask',
    'dtype': dtype,
    'shape': [size, size],
    'mode': 'forward',
    'implementation': 'pallas_kernels',
    'samples_ms': rounded['pallas_kernels'],
    'median_ms': round(medians['pallas_kernels'], 4),
    'baselines': {BASELINE: {'samples_ms': rounded[BASELINE], 'median_ms': round(medians[BASELINE], 4)}},
    'speedup': round(medians[BASELINE] / medians['pallas_kernels'], 2),
    'same_blocks': agreement,
  }


def table(record: dict) -> str:
  """Median and range of both forms, in milliseconds."""
  rows = {record['implementation']: record, **record['baselines']}
  shape = ' x '.join(map(str, record['shape']))
  lines = [f'{record["dtype"]} {shape} on {record["device"]}', f'{"form":<16}{"median ms":>12}{"range ms":>22}']
  for name, row in rows.items():
    span = f'{min(row["samples_ms"]):.1f} to {max(row["samples_ms"]):.1f}'
    lines.append(f'{name:<16}{row["median_ms"]:>12.1f}{span:>22}')
  lines.append(f'{record["speedup"]:.1f} times faster; {record["same_blocks"]:.4%} of the blocks have the same mask')
  return '\n'.join(lines)


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(prog='python -m experiments.bench.transposable_mask', description=__doc__)
  parser.add_argument('--size', type=int, default=4096, help='side of the square weight (default: %(default)s)')
  parser.add_argument('--dtype', default='bfloat16', choices=('bfloat16', 'float16', 'float32'))
  parser.add_argument('--rounds', type=int, default=9, help='timings of each form (default: %(default)s)')
  parser.add_argument('--results', type=Path, default=RESULTS, help='JSON-lines file to append the record to')
  args = parser.parse_args(argv)
  if args.size < 4 or args.size % 4:
    parser.error(f'--size {args.size} must be a positive multiple of 4')
  if args.rounds < 1:
    parser.error(f'--rounds {args.rounds} must be 1 or more')
  given = shlex.join(sys.argv[1:] if argv is None else argv)
  record = run(args.size, args.dtype, args.rounds, f'python -m experiments.bench.transposable_mask {given}'.rstrip())
  print(table(record))
  append(args.results, record)


if __name__ == '__main__':
  main()
