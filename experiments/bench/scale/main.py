"""`python -m experiments scale`: programs compiled for 8 and 64 simulated devices, and what they exchange.

It takes about five minutes. docs/scale.md is made of the records in `experiments/results/scale.jsonl`.
"""

import argparse
from collections.abc import Sequence
import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

from experiments.runs import durable
from experiments.runs.environment import environment

ROOT = Path(__file__).parents[3]


def simulate(devices: int) -> list[dict[str, Any]]:
  """Compiles for so many simulated devices, in a process of its own."""
  variables = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
  }
  code = f'from experiments.bench.scale import simulate; simulate.main({devices})'
  command = [sys.executable, '-c', code]
  out = subprocess.run(command, env=variables, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
  return [json.loads(line) for line in out.stdout.splitlines()]


def main(argv: Sequence[str] | None = None) -> int:
  """Compiles, and writes the records."""
  parser = argparse.ArgumentParser(prog='python -m experiments scale', description=__doc__)
  parser.add_argument('--out', type=Path, default=Path('scale.jsonl'), help='file of records (default: %(default)s)')
  parser.add_argument('--simulate', action='store_true', help=argparse.SUPPRESS)  # in commands of records
  args = parser.parse_args(argv)
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  found = [{**record, **environment(), 'command': 'python -m experiments scale'}
           for devices in (8, 64) for record in simulate(devices)]  # fmt: skip
  durable.write_text(args.out, ''.join(json.dumps(record) + '\n' for record in found))
  print(f'records: {args.out}')
  return 0
