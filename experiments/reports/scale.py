"""docs/scale.md: figures on paper (`experiments.bench.scale.formula`) and what was compiled for simulated devices."""

from collections.abc import Mapping
import textwrap
from typing import Any

from experiments.bench.scale import formula
from experiments.reports import best_steps, provenance, tables

_STEP = ('NVIDIA H200', 'llama-3b')
_PAPER = (
  'model', 'GPUs', 'layout', 'GB', 'received GB, dense', 'sparse', 'computing s, dense', 'sparse',
  'communication s, dense', 'sparse', 'x, hidden', 'x, apart',
)  # fmt: skip
_SIMULATED = (
  'devices', 'data x fsdp x model', 'layers', 'step, dense', 'step, sparse', 'MiB, dense', 'MiB, sparse',
  'mask refresh', 'packing',
)  # fmt: skip
# Picoseconds a weight: to make a packing of the other on an H100, and to gather one by NVLink within a machine.
_REPACK, _GATHER = 1e12 * 2 * 9 / 8 / 3.35e12, 1e12 * formula.Links().gather(9 / 8, 8)
_SIMULATION = textwrap.fill(
  'The whole training step of a Llama of two layers (width 512, hidden 2,048; 4,096 tokens) was compiled for 8 and for '
  '64 simulated CPU devices. The table counts the exchanges in the program and the MiB that they leave on a device; '
  'those of a loop over layers count once. The last two columns are the search for all masks and the packing of all '
  'sparse weights along both axes, each compiled alone: neither exchanges anything. No step exchanges masks. Under '
  'FSDP a sparse step also sums flip rates, and samples of a few weights that tell it whether it was given the weights '
  'that it left; on 64 devices neighbours pass each other single rows for these sums. XLA for CPUs has no '
  'reduce-scatter, and it gathers whole weights, 4 bytes an entry, not packed ones. So a sparse step that gathers as '
  'often as a dense one receives as much here. Where layers run one by one it receives more: the transposes of '
  'feed-forward weights. `train` constrains the activations between layers to stay sharded like the batch. Without '
  'that, XLA moved the activations instead of the weights in a loop over layers, dense and sparse: do the same in your '
  'own models ([guide](guide.md)).',
  118, break_on_hyphens=False,
)


def page() -> str:
  """The whole of docs/scale.md, from steps of Llama 3B and the records of `scale.jsonl`."""
  simulated = provenance.read('scale.jsonl')
  steps, text = best_steps.load()[_STEP], (formula.__doc__ or '').split('\n\n', 1)[1]
  fst, dense = steps['fst'], steps['fst'].beside['dense']
  shape = fst.record['shape']
  compute = formula.measured(
    dense.ms, fst.ms, shape['batch'] * shape['length'], fst.record['parameters'],
    3 * shape['layers'] * shape['d'] * shape['hidden'],
  )  # fmt: skip
  return f"""# Many GPUs, on paper and by simulation

Made by `make pages`. Nothing here was measured on more than one GPU.

## On paper

{text.strip()}

{textwrap.fill(_basis(fst, compute), 118)}

<!-- records: best_steps.jsonl?model=llama-3b -->
{tables.markdown(_PAPER, map(_computed, formula.rows(compute)))}

## By simulation

Bytes that a device gathers of a feed-forward weight in a step of FSDP, counted in what XLA compiles for 8 and 64 H100s
(SwiGLU, bfloat16, packed weights; `tests/sparse24_jax/mesh_on_hopper_test.py` holds them):

<!-- records: none, a test counts them -->

| layers | dense | sparse |
| --- | --- | --- |
| in a loop (`scan_layers`) | 4 | 2 1/4 |
| one by one, recomputed | 4 | 3 |
| one by one | 2 | 2 1/4 |

A sparse weight is gathered packed: 9/8 bytes along one axis for the forward pass, and as many along the other for the
backward pass. A dense weight moves 2 bytes each time that it is gathered. If a step does not keep whole weights from
the forward to the backward pass, which is what FSDP is for, a dense weight is gathered twice, and sparse moves less. If
layers run one by one and are not recomputed, XLA gathers a dense weight once and keeps it whole, 2 bytes of every
weight on every device. Only there does sparse move more, by 1/4 byte, and it keeps no whole weight. To gather only the
packing for the forward, and to make the other from it on each device, would move 9/8 bytes. This was not built: it
reads and writes 2 1/4 bytes of memory a weight and micro-batch, which takes {_REPACK:.2f} ps at an H100's 3.35 TB/s and
holds up the matmuls, while the gather that it saves, {_GATHER:.1f} ps by NVLink, runs beside them.

{_SIMULATION}

<!-- records: scale.jsonl -->
{tables.markdown(_SIMULATED, map(_counted, simulated))}
"""


def _basis(fst: best_steps.Best, compute: formula.Compute) -> str:
  """What the figures on paper take for granted."""
  return (
    f'A step has {formula.TOKENS:,} tokens in sequences of {fst.record["shape"]["length"]:,}, micro-batches of at most '
    f'{formula.MICRO:,} tokens a GPU, recomputation, and transposable masks in all feed-forward layers. By the steps '
    f'of one {fst.record["device"]} (the medians of {fst.processes} processes), a dense step that recomputes its '
    f'blocks would take {compute.dense * 1e15:.1f} fs a parameter and token, and a sparse one '
    f'{compute.saved * 1e15:.1f} fs less for a parameter of a feed-forward layer. *GB* is what a GPU holds: from 141 '
    'on the layout does not fit. *Received* is what it receives in a step. The last two columns say how many times '
    'faster the sparse step is: *hidden* if the shorter of computing and communication hides behind the longer, '
    '*apart* if nothing hides. Dense and sparse differ in traffic only under FSDP, which gathers packed weights. The '
    'measured step includes packing; the formula does not say how its time changes with the number of GPUs.'
  )


def _computed(row: formula.Row) -> list[Any]:
  (c_dense, c_sparse), (t_dense, t_sparse) = row.communication, row.compute
  apart, hidden = (c_dense + t_dense) / (c_sparse + t_sparse), max(c_dense, t_dense) / max(c_sparse, t_sparse)
  sizes = row.memory, row.dense_traffic, row.sparse_traffic
  times = t_dense, t_sparse, c_dense, c_sparse, hidden, apart
  return [
    row.model, f'{row.gpus:,}', row.layout, *(f'{size:,.0f}' for size in sizes), *(f'{time:.2f}' for time in times)
  ]  # fmt: skip


def _counted(record: Mapping[str, Any]) -> list[Any]:
  dense, sparse = record['dense'], record['sparse']
  layout = ' x '.join(map(str, record['layout']))
  return [
    record['devices'], layout, record['layers'], _kinds(dense['exchanges']),
    _kinds(sparse['exchanges']), *(f'{twin["bytes"] / 2**20:.1f}' for twin in (dense, sparse)),
    _kinds(record['mask refresh']), _kinds(record['packing']),
  ]  # fmt: skip


def _kinds(exchanges: Mapping[str, int]) -> str:
  return ', '.join(f'{count} {kind}' for kind, count in exchanges.items()) or '0'
