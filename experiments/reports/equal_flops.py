"""Tables of runs with equal training FLOPs: dense models of other shapes, and what restoring all links does to MST."""

from collections.abc import Mapping, Sequence
import inspect
from typing import Any

from experiments.reports import race_table as table
from experiments.reports import tables
from experiments.runs.build import FAMILIES
import sparse24_jax as s24


def named_by_shape(record: Mapping[str, Any]) -> dict[str, Any]:
  """A record of a dense model that is called by its shape and steps, so that several make rows of one table.

  >>> record = {'model': {'size': 'nano', 'num_layers': 1, 'embed_dim': 48, 'num_heads': 3}, 'steps': 1662}
  >>> named_by_shape(record)['title']
  'dense, as many FLOPs: 1 layer, width 48, FFN 192, 1,662 steps'
  """
  settings = {name: record['model'][name] for name in ('size', *_SHAPE) if name in record['model']}
  made = FAMILIES['gpt2'].make_config(**settings, vocab_size=256)
  layers = f'{made.num_layers} layer{"s" * (made.num_layers > 1)}'
  shape = f'{layers}, width {made.embed_dim}, FFN {made.hidden_dim}, {record["steps"]:,} steps'
  return {**record, 'title': f'dense, as many FLOPs: {shape}', 'contender': f'dense: {shape}'}


_SHAPE = ('num_layers', 'num_heads', 'embed_dim', 'ffn_width')
MST = 'mixed_sparsity'


def named_by_stage(record: Mapping[str, Any]) -> dict[str, Any]:
  """A record of MST that is called after its last stage and its links, where these are not the usual ones.

  >>> kwargs = {'restoration': 0, 'density': 0.25}
  >>> named_by_stage({'contender': 'mixed_sparsity', 'title': 'MST', 'recipe': {'kwargs': kwargs}})['title']
  'MST, never restored, density 0.25'
  """
  kwargs, title = record['recipe']['kwargs'], record['title']
  if kwargs.get('restoration') == 0:
    title += ', never restored' + (f', density {kwargs["density"]:g}' if 'density' in kwargs else '')
    record = {**record, 'contender': title}
  return {**record, 'title': title}


def restoration_markdown(races: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> str:
  """A row a method and place: the losses before the stage that restores all links and at the end, at the best rate.

  Args:
    races: what the place is called, and records of MST with curves of validation, of one race.

  Returns:
    The loss before is that of the last evaluation that no step of the restored model came before. The last column
    compares with MST of that place, seed by seed.

  >>> def run(seed, *losses):
  ...   return {'contender': 'mixed_sparsity', 'title': 'MST', 'seed': seed, 'rate': 0.01, 'decay': 0.0, 'share': 1.0,
  ...           'steps': 1000, 'loss': losses[-1], 'searched_with': [0], 'recipe': {'kwargs': {'restoration': 0.1}},
  ...           'validation': [[step, None, loss] for step, loss in zip((500, 900, 950, 1000), losses)]}
  >>> print(restoration_markdown([('CPU', [run(0, 9.0, 9.0, 9.0, 9.0), run(1, 3.0, 2.5, 2.6, 2.7)])]))
  | method | rate | seeds | restored from step | loss at step | before | at the end | end minus before | minus MST |
  | --- | --- | --- | --- | --- | --- | --- | --- | --- |
  | MST, CPU | 0.01 | 1 | 900 | 900 | 2.500, one seed | 2.700, one seed | +0.200, one seed |  |
  """
  head = [
    'method', 'rate', 'seeds', 'restored from step', 'loss at step', 'before', 'at the end', 'end minus before',
    'minus MST',
  ]  # fmt: skip
  rows = []
  for place, race in races:
    records = [named_by_stage(r) for r in race]
    found = table.by_seed(records)
    for name, own in found.items():
      runs = [r for r in records if r['contender'] == name and r['rate'] == own.rate and r['seed'] in own.losses]
      if (begin := _restored_from(runs[0])) < runs[0]['steps']:
        at = max(step for step, _, _ in runs[0]['validation'] if step <= begin)
        before = [{step: loss for step, _, loss in r['validation']}[at] for r in runs]
        gained = [r['loss'] - loss for r, loss in zip(runs, before, strict=True)]
        stage = [f'{begin:,}', f'{at:,}', table.interval(before), table.interval(gained, '+')]
      else:
        stage = ['never', '', '', '']
      rows.append([
        f'{own.title}, {place}', f'{own.rate:g}', str(len(runs)), *stage[:3], table.interval([*own.losses.values()]),
        stage[3], '' if name == MST else table.interval(table.pairs_of(own, found[MST]), '+'),
      ])  # fmt: skip
  return tables.markdown(head, rows)


def _restored_from(record: Mapping[str, Any]) -> int:
  usual = inspect.signature(s24.recipes.mixed_sparsity).parameters['restoration'].default
  share = record['recipe']['kwargs'].get('restoration', usual)
  return round((1 - share) * record['steps'])
