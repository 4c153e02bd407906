"""The comparison of methods over seeds at equal steps: runs, one record a run, and the report.

Claim: on the embedded corpus, nano GPT-2 at 4,000 steps orders dense, 2:4 with masked decay, 2:4 without, and a dense
model with half the feed-forward width.
Cost: 8 methods x 3 seeds, one to two minutes a run on 2 cores.
Command: python -m experiments compare
"""

from collections.abc import Iterable, Sequence
import datetime
import json
from pathlib import Path
from typing import Any

from experiments.reports import main_job, race_table, report
from experiments.runs import flops, json_lines, method_table, methods, records
from experiments.runs.environment import without_folders
from experiments.runs.experiment import load_config
from experiments.runs.race.search import Trial
from experiments.runs.race.tuned import Comparison


def compare(
  folder: str | Path,
  *,
  experiment: str = 'nano',
  names: Sequence[str] = method_table.AT_EQUAL_STEPS,
  seeds: Sequence[int] = (0, 1, 2),
  tiny: bool = False,
  overrides: Sequence[str] = (),
  results: Path | None = None,
  data: Any = None,
) -> Path:
  """Runs what is not finished yet, then writes records and report.

  Args:
    folder: gets one folder a run, and report.html.
    experiment: see `experiment.load_config`.
    names: keys of `METHODS` or `GROUPS` of `method_table`.
    seeds: one run a method and seed.
    tiny: the experiment's tiny twin.
    overrides: 'section.key=value' strings.
    results: JSON-lines file for the records; None writes none.
    data: batches in place of the corpus.

  Returns:
    The path of the report.
  """
  folders = methods.run_all(experiment, names, seeds, folder, tiny=tiny, overrides=overrides, data=data)
  if results is not None:
    name = load_config(experiment, overrides, tiny=tiny).name
    write_records(records.find_runs(folders), results, experiment=name)
    print(f'records: {results}')
  path = report.write_report(folders, Path(folder) / 'report.html', title=f'Methods compared, {experiment}')
  main_job.show_table(folders)
  print(f'report: {path.resolve()}')
  return path


def report_tuned(comparison: Comparison) -> Path:
  """Prints the table of methods that were each tuned, writes the report of the best runs and returns its path."""
  print(race_table.steps_markdown(comparison.records))
  folders = [
    comparison.folder_of(name, Trial(own.rate, own.decay, seed))
    for name, own in race_table.by_seed(comparison.records).items() for seed in own.losses
  ]  # fmt: skip
  return report.write_report(
    [folder for folder in folders if (folder / 'summary.json').exists()], comparison.folder / 'report.html',
    title=f'Methods compared, each at its best, {comparison.experiment}',
  )  # fmt: skip


def write_records(found: Iterable[records.RunRecord], path: Path, *, experiment: str) -> None:
  """Writes one JSON line a finished run, in place of the older line of the same run.

  Args:
    found: runs; unfinished ones are left out.
    path: JSON-lines file, made when missing.
    experiment: name of the experiment that all of them belong to.

  Raises:
    ValueError: the older line is of another model, text or optimizer; nothing is written.
  """
  kept = {_key(record): record for record in json_lines.read(path)} if path.exists() else {}
  finished = [run for run in found if run.summary is not None]
  # Learning rates fall, and flip rates with them: those of all methods are of the same steps.
  end = records.common_sparse_end(finished) if finished else None
  for run in finished:
    record = {
      'bench': 'quality',
      'experiment': experiment,
      'model': run.config['model'],
      'method': run.method,
      'label': run.label,
      'recipe': run.config['recipe']['name'],
      'recipe_kwargs': run.config['recipe']['kwargs'],
      'seed': run.seed,
      'steps': run.config['steps'],
      # Counted, over the whole run: the blocks and causal attention, without and with the language-model head.
      'training_flops': _training_flops(run),
      'corpus': run.config['data']['corpus'],
      'optimizer': run.config['optimizer'],
      'sparse_steps': run.sparse_steps,
      'dense_from': run.config['recipe']['dense_from'],
      'validation_loss': run.validation_loss,
      # What the task measures beside: accuracy, BLEU.
      'measures': (run.summary or {}).get('measures', {}),
      'flip_rate': run.flip_summary(end),
      # Per layer, of squared-ReLU blocks: at the first evaluation, the last one of the sparse phase, and the last.
      'activations': run.activation_summary(),
      'seconds': run.seconds,
      'spent': run.spent,
      'tokens_per_s': run.tokens_per_s,
      **without_folders(run.environment),
      'when': datetime.datetime.fromtimestamp((run.folder / 'summary.json').stat().st_mtime, datetime.UTC).isoformat(),
    }
    old = kept.get(_key(record), record)
    others = [name for name in ('model', 'corpus', 'optimizer') if name in old and old[name] != record[name]]
    if others:
      raise ValueError(
        f'{path} holds a run of {record["label"]}, seed {run.seed}, with another {" and ".join(others)}: give another'
        ' file, or delete its line'
      )
    kept[_key(record)] = record
  path.parent.mkdir(parents=True, exist_ok=True)
  json_lines.write(path, kept.values())


def _training_flops(run: records.RunRecord) -> dict[str, float] | None:
  curve = flops.of_run(run.config)
  return curve and {name: curve.sum().total(head=name == 'with_head') for name in ('without_head', 'with_head')}


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
  kwargs = json.dumps(record['recipe_kwargs'], sort_keys=True)
  return *(record[name] for name in ('experiment', 'label', 'seed', 'steps')), kwargs
