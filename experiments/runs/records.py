"""Reading finished and unfinished runs back from their folders, and grouping them by method."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
import numpy as np

from experiments.runs import activations, durable, events, metrics, recipes, shapes
from experiments.runs.method_table import METHODS
import sparse24_jax as s24


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """One run as its folder tells it.

  Attributes:
    folder: where it is.
    config: the resolved configuration.
    environment: device, versions, commit and command.
    train: records of kind 'train', in order of step.
    validation: records of kind 'validation'.
    timing: records of kind 'timing'.
    summary: None while the run is unfinished.
    events: what happened on the way, see `experiments.runs.events`.
  """

  folder: Path
  config: Mapping[str, Any]
  environment: Mapping[str, Any]
  train: tuple[Mapping[str, Any], ...]
  validation: tuple[Mapping[str, Any], ...]
  timing: tuple[Mapping[str, Any], ...]
  summary: Mapping[str, Any] | None
  events: tuple[Mapping[str, Any], ...] = ()

  @property
  def label(self) -> str:
    """The method's name in tables and legends."""
    return self.config['label'] or self.config['recipe']['name'] + ('' if self.method else ', no method')

  @property
  def seed(self) -> int:
    """Seed of parameters and sampling."""
    return self.config['seed']

  @property
  def method(self) -> str:
    """The key of `method_table.METHODS` that was put in; '' for a configuration of its own, compared with no other."""
    return self.config['method']

  @property
  def is_baseline(self) -> bool:
    """Whether others are compared with this run."""
    return self.is_dense_of(self)

  def is_dense_of(self, other: 'RunRecord') -> bool:
    """Whether another run is compared with this one, which their methods say."""
    return bool(other.method) and self.method == METHODS[other.method].baseline

  @property
  def validation_loss(self) -> float:
    """Last validation loss, nats a token; NaN when there is none yet."""
    return self.validation[-1]['loss'] if self.validation else float('nan')

  def validation_loss_at(self, step: int) -> float | None:
    """Validation loss that the run measured after some steps; None where it measured none."""
    return next((record['loss'] for record in self.validation if record['step'] == step), None)

  @property
  def sparse_end(self) -> int:
    """Last logged step of the sparse phase; the last step of all without one; what a record keeps."""
    if not self.train:
      return (self.summary or {}).get('sparse_end', 0)
    sparse = [record['step'] for record in self.train if record['phase'] == 'sparse']
    return sparse[-1] if sparse else (self.train[-1]['step'] if self.train else 0)

  @property
  def sparse_steps(self) -> int:
    """Optimizer steps of the whole run that are in sparse phases."""
    recipe = recipes.make_recipe(ConfigDict({'recipe': self.config['recipe'], 'steps': self.config['steps']}))
    return sum(s24.phase_at(recipe, step, self.config['steps']) == 'sparse' for step in range(self.config['steps']))

  @property
  def seconds(self) -> float:
    """Wall-clock seconds of training, evaluation and checkpoints, of earlier attempts as far as checkpoints tell."""
    return self.summary['seconds'] if self.summary else (self.timing[-1]['seconds'] if self.timing else float('nan'))

  @property
  def spent(self) -> Mapping[str, float]:
    """What the seconds were spent on, see `progress.Stopwatch`; {} before the first line of metrics."""
    return (self.summary or (self.timing[-1] if self.timing else {'spent': {}}))['spent']

  @property
  def tokens_per_s(self) -> float:
    """Median training speed, without compiling, evaluation and checkpoints."""
    return float(np.median([record['tokens_per_s'] for record in self.timing])) if self.timing else float('nan')

  @property
  def side_by_side(self) -> bool:
    """Whether the run shared its device with others, so that its seconds say nothing about speed."""
    return ' experiments sweep ' in self.environment['command']

  @property
  def on_cpu(self) -> bool:
    """Whether the device was a CPU, whose seconds say nothing about sparsity."""
    return 'CPU cores' in self.environment['device']

  @property
  def was_timed(self) -> bool:
    """Whether the run is finished, and its folder has the seconds of each logged step."""
    return bool(self.summary and self.timing)

  def training_seconds(self) -> tuple[list[int], list[float]]:
    """Logged steps from 0 on, and the seconds of training alone until each; of a run that `was_timed`."""
    return [0, *(r['step'] for r in self.timing)], [0.0, *(r['spent']['training'] for r in self.timing)]

  def activation_curve(self, measure: str, layer: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a measure of `experiments.runs.activations` in a layer; empty for runs without it."""
    pairs = [(r['step'], r[measure][layer]) for r in self.validation if layer in r.get(measure, {})]
    return np.array([step for step, _ in pairs]), np.array([value for _, value in pairs])

  def activation_summary(self) -> dict[str, dict[str, Any]]:
    """The measures at the first evaluation, at the last one of the sparse phase, and at the last; {} without any."""
    records = [r for r in self.validation if activations.ZEROS in r]
    if not records:
      return {}
    chosen = {'first': records[0], 'last': records[-1]}
    if sparse := [r for r in records if r['phase'] == 'sparse']:
      chosen['sparse_end'] = sparse[-1]
    kept = ('step', activations.ZEROS, activations.KEPT, activations.KEPT_SUM)
    return {when: {name: r[name] for name in kept if name in r} for when, r in chosen.items()}

  def flip_curve(self) -> tuple[np.ndarray, np.ndarray]:
    """Steps and overall flip rates, from the first comparison of masks on."""
    pairs = [(record['step'], record['flip_rate']) for record in self.train if record['flip_rate'] is not None]
    return np.array([step for step, _ in pairs]), np.array([rate for _, rate in pairs])

  def flip_summary(self, end: int | None = None) -> dict[str, float]:
    """The flip-rate curve in numbers: peak, its step, mean over the tenth before `end`, that end, last value.

    Args:
      end: a step; None is the end of the run's own sparse phase, the only one that a record without a curve knows.
    """
    if not self.train:
      return dict((self.summary or {}).get('flip_rate', {}))
    end = end or self.sparse_end
    steps, rates = self.flip_curve()
    if not len(rates):
      return {}
    inside = steps <= end
    tail = inside & (steps > 0.9 * end)
    peak = int(np.argmax(rates))
    return {
      'peak': float(rates[peak]),
      'peak_step': int(steps[peak]),
      'tail': float(rates[tail].mean()) if tail.any() else float('nan'),
      'end': end,
      'last': float(rates[-1]),
    }


# Runs by label: all seeds of a method.
Groups = Mapping[str, Sequence[RunRecord]]


def read_config(folder: str | Path) -> dict[str, Any]:
  """The configuration of a run.

  Raises:
    ValueError: the folder is not a run's, does not say a method that there is, or is damaged.
  """
  file = Path(folder) / 'config.json'
  if not file.is_file():
    raise ValueError(f'{folder} is not the folder of a run: it has no config.json')
  config = durable.read_json(file)
  shapes.require(file, config, shapes.CONFIG)
  if config['method'] not in ('', *METHODS):
    raise ValueError(f'{file}: method is {config["method"]!r}; known: {", ".join(METHODS)}, and an empty one')
  return config


def read_run(folder: str | Path) -> RunRecord:
  """Reads one run folder.

  Raises:
    ValueError: the folder is not a run's, or a file of it is damaged; names that.
  """
  folder = Path(folder)
  config = read_config(folder)
  kinds: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in shapes.RECORDS}
  for name in (metrics.METRICS, metrics.TIMING):
    for record in metrics.read_records(folder / name):
      if record['kind'] not in kinds or record['step'] not in range(config['steps'] + 1):
        raise ValueError(
          f'{folder / name} has a record of kind {record["kind"]!r} and step {record["step"]}; known kinds are'
          f' {", ".join(kinds)}, and the run has {config["steps"]} steps'
        )
      shapes.require(f'{folder / name}, step {record["step"]}', record, shapes.RECORDS[record['kind']])
      kinds[record['kind']].append(record)
  summary = folder / 'summary.json'
  return RunRecord(
    folder,
    config,
    _read(folder / 'environment.json', shapes.ENVIRONMENT),
    **{kind: tuple(records) for kind, records in kinds.items()},
    summary=_read(summary, shapes.SUMMARY) if summary.exists() else None,
    events=tuple(events.read(folder)),
  )


def _read(file: Path, shape: shapes.Shape) -> dict[str, Any]:
  found = durable.read_json(file)
  shapes.require(file, found, shape)
  return found


def find_runs(folders: Iterable[str | Path]) -> list[RunRecord]:
  """Reads run folders, and every run folder below the ones that are not runs themselves.

  Raises:
    ValueError: a folder that holds no run.
  """
  found = []
  for folder in map(Path, folders):
    paths = [folder] if (folder / 'config.json').is_file() else sorted(p.parent for p in folder.rglob('config.json'))
    runs = [run for run in map(read_run, paths) if run.train]
    if not runs:
      raise ValueError(f'{folder} holds no run with at least one line of metrics')
    found += runs
  return found


def group(runs: Iterable[RunRecord]) -> dict[str, list[RunRecord]]:
  """Runs by label, dense first, then in order of mean final validation loss; each group in order of seed."""
  groups: dict[str, list[RunRecord]] = {}
  for run in sorted(runs, key=lambda run: run.seed):
    groups.setdefault(run.label, []).append(run)

  def order(label: str) -> tuple[bool, float]:
    done = [run for run in groups[label] if run.summary is not None]
    losses = [run.validation_loss for run in done or groups[label]]
    return not groups[label][0].is_baseline, float(np.mean(losses))

  return {label: groups[label] for label in sorted(groups, key=order)}


def dense_of(groups: Groups, label: str) -> Sequence[RunRecord]:
  """The runs of the best dense group that those of a label are compared with; none if there is no such group."""
  return next((dense for dense in groups.values() if dense[0].is_dense_of(groups[label][0])), ())


def common_sparse_end(runs: Iterable[RunRecord]) -> int:
  """The last step at which every run that has a sparse phase is still in it; flip rates compare up to there."""
  runs = list(runs)
  sparse = [run.sparse_end for run in runs if any(record['phase'] == 'sparse' for record in run.train)]
  return min(sparse or [run.sparse_end for run in runs])


def settings_that_differ(runs: Iterable[RunRecord]) -> dict[str, list[Any]]:
  """Fields, apart from method, seed and intervals of logging, that are not the same in all runs."""
  ignored = (
    'name',
    'method',
    'label',
    'seed',
    'recipe',
    'data.seed',
    'data.data_dir',
    'data.manual_dir',
    'model.ffn_width',
    'model.ffn_order',
    'bad_numbers',
    'log_every',
    'eval_every',
    'checkpoint_every',
    'keep_checkpoints',
  )
  values: dict[str, list[Any]] = {}
  for run in runs:
    for key, value in _flat(run.config):
      if not any(key == name or key.startswith(f'{name}.') for name in ignored):
        values.setdefault(key, []).append(value)
  return {key: sorted({repr(v) for v in found}) for key, found in values.items() if len({repr(v) for v in found}) > 1}


def _flat(config: Mapping[str, Any], prefix: str = '') -> Iterable[tuple[str, Any]]:
  for key, value in config.items():
    if isinstance(value, Mapping) and value:
      yield from _flat(value, f'{prefix}{key}.')
    else:
      yield f'{prefix}{key}', value
