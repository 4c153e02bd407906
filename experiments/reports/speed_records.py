"""What a benchmark record is called, and what its figures are."""

from collections.abc import Mapping
import math
from typing import Any

type Record = Mapping[str, Any]

# Of neurons, in weight gradients.
_PUBLISHED_DENSE_SHARE = 0.05


def title(record: Record) -> str:
  """A record in a few words.

  >>> title({'bench': 'ffn', 'recipe': 's_ste', 'activation': 'gelu', 'shape': {'tokens': 8, 'd': 4, 'hidden': 16}})
  's_ste gelu 8 x 4 x 16'
  """
  if record['bench'] == 'mesh':
    where = f' on {math.prod(record["mesh"].values())} {record["device"].removeprefix("NVIDIA ")}'
    how = [record['sharding']] if record.get('sharding', 'whole') != 'whole' else []
    how += ['pipelined exchanges'] if 'pipelined' in record.get('xla_flags', '') else []
    return ', '.join([title({**record, 'bench': record['op']}) + where, *how])
  if record['bench'] == 'mesh_check':
    return f'{record["op"]} on {record["device"]}'
  shape = record['shape']
  if record['bench'] == 'attention':
    return f'{record["pattern"]}, window {record["window"]}, {shape["batch"]} x {shape["length"]}'
  if record['bench'] == 'tracking':
    return f'{record["model"]} of {shape["layers"]} layers'
  if isinstance(shape, Mapping):
    wanted = ('tokens', 'd', 'hidden') if 'hidden' in shape else ('tokens', 'd_in', 'd_out')
    wanted = ('batch', 'length') if record['bench'] in ('block', 'train_step') else wanted
    wanted = ('rows', 'columns') if 'rows' in shape else wanted
    shape = [shape[key] for key in wanted]
  match record['bench']:
    case 'ffn' | 'ffn_check' | 'ffn_pytorch':
      words = [record['recipe'], record['activation']]
    case 'block' | 'train_step':
      words = [record['model'], record['recipe']]
    case 'sparse_matmul' | 'float8_products' | 'cusparselt' | 'epilogue':
      words = [record['role'], record['dtype']]
    case 'vnm_matmul':
      words = [record['dtype']]
    case _:
      words = [record['op'], record['dtype']]
  words += [pattern(record)] if 'pattern' in record else []
  return ' '.join([*words, ' x '.join(map(str, shape))])


def pattern(record: Record) -> str:
  """The pattern of a record's activations, with that along tokens or the share of dense neurons where it is not usual.

  >>> pattern({'pattern': '128:2:8', 'dense_features': 0.2})
  '128:2:8 with 20% dense neurons'
  """
  if record.get('token_pattern'):
    return f'{record["pattern"]}, {record["token_pattern"]} along tokens'
  share = dense_features(record)
  return record['pattern'] + ('' if share == _PUBLISHED_DENSE_SHARE else f' with {share:.0%} dense neurons')


def dense_features(record: Record) -> float:
  """The share of neurons that are dense in the weight gradients; older records of steps leave out the usual one."""
  return record.get('dense_features', _PUBLISHED_DENSE_SHARE)


def milliseconds(record: Record) -> float:
  """The time that counts: with mask searches spread over their period where there are any."""
  return record.get('amortised_ms') or record['median_ms']


def ratios(record: Record) -> dict[str, float]:
  """Baseline -> how many times longer it takes."""
  return {name: row['median_ms'] / milliseconds(record) for name, row in record.get('baselines', {}).items()}


def traced(record: Record) -> dict[str, float]:
  """Baseline -> how many times longer its steps take in a trace; {} where these were not traced."""
  times = {
    twin: summary['busy_ms'] + summary['idle_ms'] for twin, summary in (record.get('profile') or {}).items() if summary
  }
  if 'sparse' not in times:
    return {}
  return {name: ms / times['sparse'] for name, ms in times.items() if name != 'sparse'}


def lower(record: Record) -> dict[str, float]:
  """`ratios`, or those of a trace where these are lower: a burst is over before a GPU is warm.

  >>> row = {'median_ms': 2.0, 'baselines': {'dense': {'median_ms': 4.0}}}
  >>> profile = {'sparse': {'busy_ms': 2.0, 'idle_ms': 0.0}, 'dense': {'busy_ms': 3.5, 'idle_ms': 0.1}}
  >>> lower(row), lower(row | {'profile': profile})
  ({'dense': 2.0}, {'dense': 1.8})
  """
  found = traced(record)
  return {name: min(ratio, found.get(name, ratio)) for name, ratio in ratios(record).items()}
