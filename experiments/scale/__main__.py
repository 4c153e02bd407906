"""`python -m experiments.scale`: what 8B and 70B models cost on 64 and 1,024 GPUs, written to docs/scale.md.

Two parts: figures on paper (`formula`), and programs compiled for 8 and 64 simulated devices (`simulate`), whose
records are kept in `experiments/results/scale.jsonl` and made anew with `--simulate`.
"""

import argparse
from collections.abc import Mapping, Sequence
import json
import os
from pathlib import Path
import subprocess
import sys
import textwrap
from typing import Any

from experiments.runs import durable
from experiments.scale import formula

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / 'experiments' / 'results', ROOT / 'docs' / 'scale.md'
_PAPER = (
  'model †', 'GPUs', 'layout', 'GB', 'received GB, dense', 'sparse', 'computing s, dense', 'sparse',
  'communication s, dense', 'sparse', 'x, hidden', 'x, apart',
)  # fmt: skip
_SIMULATED = (
  'devices', 'data x fsdp x model', 'recomputed', 'step, dense', 'step, sparse', 'MiB, dense', 'MiB, sparse',
  'mask refresh', 'packing',
)  # fmt: skip
STEP = {'model': 'llama-3b', 'recipe': 'transposable_srste'}


def measured_step() -> dict[str, Any]:
  """The newest record of a step of Llama 3B."""
  records = [json.loads(line) for line in (RESULTS / 'train_step.jsonl').open()]
  return [record for record in records if STEP.items() <= record.items()][-1]


def simulated() -> list[dict[str, Any]]:
  """The records of what was compiled."""
  return [json.loads(line) for line in (RESULTS / 'scale.jsonl').open()]


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
  out = subprocess.run(command, env=variables, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
  return [json.loads(line) for line in out.stdout.splitlines()]


def page(record: Mapping[str, Any], simulated: Sequence[Mapping[str, Any]]) -> str:
  """docs/scale.md."""
  compute, text = formula.measured(record), (formula.__doc__ or '').split('\n\n', 1)[1]
  lines = []
  for row in formula.rows(compute):
    (c_dense, c_sparse), (t_dense, t_sparse) = row.communication, row.compute
    apart, hidden = (c_dense + t_dense) / (c_sparse + t_sparse), max(c_dense, t_dense) / max(c_sparse, t_sparse)
    lines.append(
      f'| {row.model} | {row.gpus:,} | {row.layout} | {row.memory:,.0f} | {row.dense_traffic:,.0f} | '
      f'{row.sparse_traffic:,.0f} | {t_dense:.2f} | {t_sparse:.2f} | {c_dense:.2f} | {c_sparse:.2f} | {hidden:.2f} | '
      f'{apart:.2f} |'
    )
  paper = '\n'.join(lines)
  counted = '\n'.join(map(_counted, simulated))
  basis = (
    f'{formula.TOKENS:,} tokens a step, micro-batches of at most {formula.MICRO:,} a GPU, sequences of '
    f'{record["shape"]["length"]:,}, recomputation; transposable masks in all feed-forward layers. Measured on one '
    f'{record["device"]}: {compute.dense * 1e15:.1f} fs a parameter and token for a dense step, '
    f'{compute.saved * 1e15:.1f} fs less for one in a sparse feed-forward layer. *GB* is what a GPU holds: where that '
    'is above 80 the layout does not fit. *Received* is what it receives in a step, dense and sparse; then seconds of '
    'computing and of communication. The last two columns are how many times faster the sparse step is: if '
    'communication hides behind computing, or computing behind it, and if nothing does. Dense and sparse differ in '
    'traffic under FSDP alone, where packed weights are gathered. Packing is in the measured step; how it changes with '
    'the number of GPUs is not in the formula.'
  )
  return f"""# Many GPUs, on paper and by simulation

Written by `python -m experiments.scale`. Nothing here was measured on more than one GPU.

## On paper

{text.strip()}

{textwrap.fill(basis, 118)}

<!-- records: train_step.jsonl?model=llama-3b -->
{_head(*_PAPER)}
{paper}

† The record of the step is of a source with uncommitted changes.

## By simulation

A Llama of two layers (width 512, hidden 2,048), its whole training step of 4,096 tokens compiled for that many
simulated CPU devices: exchanges in the program, and the MiB that they leave on a device. The last columns are the
search for all masks, and packing all sparse weights along both axes, each compiled alone: they exchange nothing.
Masks are exchanged by no step; the one all-reduce more under FSDP is that of flip rates. XLA for CPUs has no
reduce-scatter, and gathers weights as they are, 4 bytes each, not packed; that packed weights are gathered is held,
for two GPUs, by `tests/sparse24_jax/mesh_on_hopper_test.py`. What a sparse step receives more here are the
transposes of its feed-forward weights, which it gathers apart: with recomputation 2 2/3 gathers of a weight for 2,
packed 3 bytes for 4; without it 2 gathers for 1, packed 2 1/4 bytes for 2.

<!-- records: scale.jsonl -->
{_head(*_SIMULATED)}
{counted}
"""


def _head(*names: str) -> str:
  return f'| {" | ".join(names)} |\n|{"---|" * len(names)}'


def _counted(record: Mapping[str, Any]) -> str:
  dense, sparse = record['dense'], record['sparse']
  layout = ' x '.join(map(str, record['layout']))
  cells = [
    record['devices'], layout, 'yes' if record['remat'] else 'no', _kinds(dense['exchanges']),
    _kinds(sparse['exchanges']), *(f'{twin["bytes"] / 2**20:.1f}' for twin in (dense, sparse)),
    _kinds(record['mask refresh']), _kinds(record['packing']),
  ]  # fmt: skip
  return f'| {" | ".join(map(str, cells))} |'


def _kinds(exchanges: Mapping[str, int]) -> str:
  return ', '.join(f'{count} {kind}' for kind, count in exchanges.items()) or '0'


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
    durable.write_text(RESULTS / 'scale.jsonl', ''.join(json.dumps(record) + '\n' for record in found))
  durable.write_text(PAGE, page(measured_step(), simulated()))
  return 0


if __name__ == '__main__':
  sys.exit(main())
