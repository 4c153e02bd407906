"""`python -m experiments.scale --simulate`: programs compiled for 8 and 64 simulated devices, and what they exchange.

The records go to `experiments/results/scale.jsonl`. docs/scale.md is made of them and of `formula`, here without
`--simulate` as by `python -m experiments pages`.
"""

import argparse
from collections.abc import Sequence
import json
import os
import subprocess
import sys
from typing import Any

from experiments.reports import provenance
from experiments.reports import scale as report
from experiments.runs import durable

PAGE = provenance.ROOT / 'docs' / 'scale.md'


def simulate(devices: int) -> list[dict[str, Any]]:
  """Compiles for so many simulated devices, in a process of its own."""
  variables = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
  }
  code = f'from experiments.scale import simulate; simulate.main({devices})'
  command = [sys.executable, '-c', code]
  out = subprocess.run(command, env=variables, cwd=provenance.ROOT, check=True, stdout=subprocess.PIPE, text=True)
  return [json.loads(line) for line in out.stdout.splitlines()]


def main(argv: Sequence[str] | None = None) -> int:
  """Writes the page."""
  parser = argparse.ArgumentParser(prog='python -m experiments.scale', description=__doc__)
  parser.add_argument('--simulate', action='store_true', help='compile anew; about five minutes')
  args = parser.parse_args(argv)
  if args.simulate:
    from experiments.runs.environment import environment

    os.environ.setdefault('JAX_PLATFORMS', 'cpu')
    found = [{**record, **environment(), 'command': 'python -m experiments.scale --simulate'}
             for devices in (8, 64) for record in simulate(devices)]  # fmt: skip
    durable.write_text(provenance.RESULTS / 'scale.jsonl', ''.join(json.dumps(record) + '\n' for record in found))
  durable.write_text(PAGE, report.page())
  return 0


if __name__ == '__main__':
  sys.exit(main())
