"""A page about the losses that are recorded: for each file of records its comparison, and what the papers claim."""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reports import claims, page, report
from experiments.reports.provenance import faults
from experiments.runs.records import group, RunRecord


def load(path: Path) -> list[RunRecord]:
  """The runs of a file of records, without their curves, which are not recorded."""
  records = map(json.loads, path.read_text().splitlines())
  return [run_of(record) for record in records if {'label', 'experiment'} <= record.keys()]


def run_of(record: Mapping[str, Any]) -> RunRecord:
  """A run as its record tells it."""
  config = {
    'method': record['method'], 'label': record['label'], 'seed': record['seed'], 'steps': record['steps'],
    'model': record['model'], 'data': {'corpus': record['corpus']}, 'optimizer': record['optimizer'],
    'recipe': {'name': record['recipe'], 'kwargs': record['recipe_kwargs'], 'flip_rate': 'step'},
  }  # fmt: skip
  origin = {key: record.get(key) for key in ('device', 'python', 'versions', 'commit', 'command')}
  end = ({'step': record['steps'], 'loss': record['validation_loss']},)
  summary = {'seconds': record['seconds'], 'spent': record.get('spent', {})}
  return RunRecord(Path(record['experiment']), config, origin, (), end, (), summary)


def section(name: str, runs: Sequence[RunRecord]) -> str:
  """A file's table, dots and findings; settings that were run apart are sections of their own."""
  parts = [page.title(name, part=True)]
  kinds: dict[tuple[Any, ...], list[RunRecord]] = {}
  for run in runs:
    kinds.setdefault((run.folder.name, run.environment['device']), []).append(run)
  for (experiment, device), chosen in kinds.items():
    groups = group(chosen)
    baselines = {g[0].baseline: g for g in [*groups.values()][::-1] if g[0].is_baseline}
    colours, rows = report.colours_of(groups), []
    for label, found in groups.items():
      losses = [run.validation_loss for run in found]
      dense = baselines.get(found[0].baseline, ())
      differences = claims.paired(found, dense) if found is not dense else []
      half = claims.half_width(differences)
      mean = np.mean(differences) if differences else 0.0
      rows.append([
        page.swatch(colours[label], label), str(len(found)), f'{found[0].config["steps"]:,}',
        f'{np.mean(losses):.4f}' + (f' ± {np.std(losses, ddof=1):.4f}' if len(losses) > 1 else ''),
        ', '.join(f'{d:+.4f}' for d in differences),
        f'{mean - half:+.4f} to {mean + half:+.4f}' if len(differences) > 1 else '',
        '' if not any(faults(run.environment) for run in found) else 'to be measured again',
      ])  # fmt: skip
    heads = ['method', 'seeds', 'steps', 'validation loss', 'minus dense, seed by seed', '95% interval', 'record']
    lead = f'{experiment}, {chosen[0].config["data"]["corpus"]}, {device}. Final validation loss, nats a token.'
    parts += [page.paragraph(lead), page.table(heads, rows), report.dots(groups, colours), report.findings(chosen)]
    commands = sorted({str(run.environment['command']) for run in chosen})
    parts.append(page.folded('Commands', page.listing(commands)))
  return '\n'.join(parts)


def write(files: Sequence[Path]) -> str:
  """The HTML of the page."""
  parts = [page.title('Measured quality', 'From the records in experiments/results; a file a part.')]
  for path in sorted(files):
    if runs := load(path):
      parts.append(section(path.stem, runs))
  return page.page('Measured quality', parts)
