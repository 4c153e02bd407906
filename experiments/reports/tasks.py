"""A table of the papers' tasks from their records: losses, differences to dense, and what each task measures beside."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reports import provenance, tables
from experiments.reports.claims import half_width
from experiments.runs import json_lines

# What a row says of the file that it is of.
FILES: Mapping[str, str] = {
  'compare_llama_nano.jsonl': 'next token, SwiGLU',
  'cloze_llama_nano.jsonl': 'cloze of these',
  'compare_bert_nano.jsonl': 'masked LM, GEGLU',
  'compare_deit_nano.jsonl': 'digits, ViT',
  'compare_translation_nano.jsonl': 'translation',
  'compare_finetune_from_dense.jsonl': 'fine-tuned from dense',
  'compare_finetune_from_fst.jsonl': 'fine-tuned from FST',
  'compare_finetune_from_s_ste.jsonl': 'fine-tuned from S-STE',
  'compare_finetune_from_nothing.jsonl': 'the same, not pre-trained',
}
_NAMES = {'accuracy': 'accuracy', 'bleu': 'BLEU', 'exact': 'exact'}


def markdown() -> str:
  """The table of all files that there are."""
  made = []
  for file, title in FILES.items():
    if (path := provenance.RESULTS / file).exists():
      made += rows(title, json_lines.read(path))
  head = ['task', 'method', 'steps', 'seeds', 'validation loss, 95% interval', 'minus dense', 'measure']
  return tables.markdown(head, made)


def rows(title: str, records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
  """A row a method, dense first; differences are of the seeds that both have.

  >>> record = {'method': 'dense', 'label': 'dense', 'steps': 9, 'seed': 0, 'measures': {'accuracy': 0.5}}
  >>> other = {**record, 'method': 'fst', 'label': 'FST', 'validation_loss': 1.25}
  >>> record['validation_loss'] = 1.0
  >>> rows('x', [other, record])
  [['x', 'dense', '9', '1', '1.000', '', 'accuracy 0.500'], ['x', 'FST', '9', '1', '1.250', '+0.250', 'accuracy 0.500']]
  >>> del other['validation_loss']
  >>> rows('x', [other])
  [['x', 'FST', '9', '1', '', '', 'accuracy 0.500']]
  """
  by_method: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
  for record in sorted(records, key=lambda r: (r['method'] != 'dense', r['label'], r['seed'])):
    by_method.setdefault((record['method'], record['label']), {})[record['seed']] = record
  dense_losses, made = _losses({r['seed']: r for r in records if r['method'] == 'dense'}), []
  for (method, label), found in by_method.items():
    losses = _losses(found)
    minus = [loss - dense_losses[seed] for seed, loss in losses.items() if seed in dense_losses]
    first = next(iter(found.values()))
    measures = [
      f'{shown} {_interval([record["measures"][name] for record in found.values()])}'
      for name, shown in _NAMES.items() if name in first['measures']
    ]  # fmt: skip
    made.append([
      title, label, f'{first["steps"]:,}', str(len(found)), _interval(list(losses.values())),
      _interval(minus, '+') if method != 'dense' else '', ', '.join(measures),
    ])  # fmt: skip
  return made


def _losses(records: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
  """The losses by seed, without those of checkpoints at which the run did not evaluate."""
  return {seed: record['validation_loss'] for seed, record in records.items() if 'validation_loss' in record}


def _interval(values: Sequence[float], sign: str = '') -> str:
  """The mean and half its 95% interval; of one value no interval."""
  if not values:
    return ''
  half = f' ± {half_width(values):.3f}' if len(values) > 1 else ''
  return f'{np.mean(values):{sign}.3f}{half}'
