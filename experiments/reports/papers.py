"""The papers' claims beside what the committed records say of each: agrees, disagrees, open, or nothing."""

from collections.abc import Mapping, Sequence
import itertools
from pathlib import Path
import re
import statistics
from typing import Any

from experiments.reports import claims, provenance, tables
from experiments.reports import race_table as table
from experiments.runs.experiment import load_config
from experiments.runs.records import group, RunRecord

# Comparisons -> what a row calls them; those of which every method was tuned come first.
FILES: Mapping[str, str] = {
  'grid_nano.jsonl': 'nano, tuned', 'grid_small.jsonl': '10.7 M, tuned', 'grid_flops_nano_cpu.jsonl': 'nano, tuned',
  'grid_activations_nano.jsonl': 'nano, tuned', 'grid_activations_small.jsonl': '10.7 M, tuned',
  'compare_nano.jsonl': 'nano', 'compare_llama_nano.jsonl': 'Llama nano', 'compare_neuron_level_nano.jsonl': 'nano',
  'compare_dense_neurons_nano.jsonl': 'nano', 'compare_two_of_four_tokens_nano.jsonl': 'nano',
  'compare_flops_nano.jsonl': 'nano', 'compare_bert_nano.jsonl': 'BERT nano',
  'compare_deit_nano.jsonl': 'DeiT nano', 'compare_translation_nano.jsonl': 'translation nano',
}  # fmt: skip


def markdown() -> str:
  """A row a claim."""
  compared = [(where, [*group(runs(name)).values()]) for name, where in FILES.items()]
  rows = []
  for claim, source, judge, pairs in claims.CLAIMS:
    said: dict[str, list[str]] = {}
    for where, groups in compared:
      for ours, theirs in pairs:
        sides = ([runs for runs in groups if runs[0].method == method] for method in (ours, theirs))
        for a, b in itertools.product(*sides):
          differences = claims.paired(a, b)
          if len(differences) > 1 and (found := judge(a, b)):
            of = ''
            if len(pairs) > 1:
              of = f'{a[0].label}, ' if len({ours for ours, _ in pairs}) > 1 else f'against {b[0].label}, '
            half = claims.half_width(differences)
            difference = f'{statistics.fmean(differences):+.4f} ± {half:.4f}'
            if judge in claims.OF_FLIPS:
              difference = claims.flips_in_short(a, b)
            said.setdefault(found[0], []).append(f'{difference} ({of}{where}, {len(differences)} seeds)')
    evidence = '; '.join(f'**{verdict}** {", ".join(said[verdict])}' for verdict in sorted(said))
    paper = re.search(r'\d{4}\.\d{5}', source)
    rows.append([claim, paper[0] if paper else 'ours', evidence or 'not by these records'])
  return tables.markdown(['claim', 'paper', 'here, nats and 95% interval'], rows)


def runs(name: str) -> list[RunRecord]:
  """The runs of a file of records; of a grid those of each method at its best, with the seeds that are reported."""
  records = provenance.read(name)
  if 'label' in records[0]:
    return [run_of(record) for record in records]
  found = []
  for contender, best in table.by_seed(records).items():
    settings = {'contender': contender, 'rate': best.rate, 'decay': best.decay}
    (record, *_) = (r for r in records if settings.items() <= r.items())
    same = {
      'experiment': record['experiment'], 'method': contender, 'label': best.title, 'steps': record['equal_steps'],
      'recipe': record['recipe']['name'], 'recipe_kwargs': record['recipe']['kwargs'], 'model': record['model'],
      'corpus': record['data']['corpus'], 'optimizer': record['optimizer'], 'seconds': None,
      'spent': {}, 'flip_rate': {}, 'sparse_steps': 0,
    }  # fmt: skip
    found += [run_of({**same, 'seed': seed, 'validation_loss': loss}) for seed, loss in best.losses.items()]
  return found


def run_of(record: Mapping[str, Any]) -> RunRecord:
  """A run as its record tells it: losses without their curves, and the peak and the tail of flip rates."""
  scale = load_config(record['experiment']).recipe.flip_rate
  config = {
    'method': record['method'], 'label': record['label'], 'seed': record['seed'], 'steps': record['steps'],
    'model': record['model'], 'data': {'corpus': record['corpus']}, 'optimizer': record['optimizer'],
    'recipe': {'name': record['recipe'], 'kwargs': record['recipe_kwargs'], 'flip_rate': scale},
  }  # fmt: skip
  origin = {key: record.get(key) for key in ('device', 'python', 'versions', 'commit', 'command')}
  end: Sequence[Mapping[str, Any]] = ({'step': record['steps'], 'loss': record['validation_loss']},)
  summary = {
    'seconds': record['seconds'], 'spent': record['spent'], 'flip_rate': record['flip_rate'],
    'sparse_end': record['sparse_steps'] or record['steps'],
  }  # fmt: skip
  return RunRecord(Path(record['experiment']), config, origin, (), tuple(end), (), summary)
