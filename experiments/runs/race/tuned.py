"""Methods of an experiment at equal steps, each at its best: `python -m experiments compare --tune`.

Every method searches its learning rate, and its masked decay if it has one, with the first seed and as many trials as
all others, from those of the experiment on; the best is trained with the other seeds. The final rate of a schedule
keeps its share of the peak. All trials are records, one a line, written as they end; the same command given again goes
on after those that are there.

Cost of nano with five methods, six trials and five seeds: 50 runs of one to two minutes on 2 cores.
"""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
from typing import Any

from experiments.runs import build, environment, json_lines, method_table, methods, records, train
from experiments.runs.experiment import Config
from experiments.runs.programs import Programs
from experiments.runs.race.search import Budget, next_trial, or_inf, Trial


def first_trial(config: Config, seed: int) -> Trial:
  """The first trial of a method's search: the rate of its configuration, and its decay if it has one."""
  return Trial(config.optimizer.peak_lr, config.recipe.kwargs.get('masked_decay') or 0.0, seed)


def configure(config: Config, trial: Trial) -> Config:
  """A copy of a method's configuration with what a trial is told."""
  config = config.copy_and_resolve_references()
  with config.unlocked():
    config.optimizer.end_lr *= trial.rate / config.optimizer.peak_lr
    config.optimizer.peak_lr = trial.rate
    if trial.decay:
      config.recipe.kwargs.masked_decay = trial.decay
    config.seed = config.data.seed = trial.seed
    config.name = f'{config.method}-rate{trial.rate:g}' + (f'-decay{trial.decay:g}' if trial.decay else '')
    config.name += f'-seed{trial.seed}'
  return config


def describe(config: Config) -> dict[str, Any]:
  """What the result of a run depends on, as its record has it."""
  fields = json.loads(json.dumps(config.to_dict()))  # lists of tuples
  fields['data'] = {key: value for key, value in fields['data'].items() if key not in ('data_dir', 'manual_dir')}
  return {name: fields[name] for name in ('model', 'data', 'optimizer', 'recipe', 'accumulate', 'steps')}


def text_of(config: Config, data: Any = None) -> str:
  """What tells the text that runs of a configuration read, which no setting does; of `data` in place of its own."""
  return build.make_parts(config, data=data).data.fingerprint


def read_records(results: Path, text: str) -> list[dict[str, Any]]:
  """The records of a file to which those of runs that read a text are to be added; none where there is no file.

  Raises:
    ValueError: some are of another text, or do not say of which: a table would compare their losses.
  """
  found = json_lines.read(results) if results.exists() else []
  for others, fault in (
    ([r for r in found if 'text' not in r], 'lack text, which says what was read'),
    ([r for r in found if r.get('text') != text], f'are of another text than {text}'),
  ):
    if others:
      raise ValueError(f'{results}: {len(others)} of {len(found)} records {fault}: give another file')
  return found


def train_trial(
  config: Config, trial: Trial, folder: Path, text: str, *, head: Mapping[str, Any], data: Any = None,
  programs: list[Programs],
) -> dict[str, Any]:  # fmt: skip
  """Trains one trial, or finds it trained, and returns its record: losses, flip rates, settings; `head` is its end.

  Raises:
    ValueError: the folder holds a run of another text, or one that does not say of which.
  """
  try:
    train.train(config, folder, data=data, programs=programs)
  except train.TrainingDivergedError as error:
    print(f'{config.name}: {error}')
  run = records.read_run(folder)
  if run.summary is not None and run.summary.get('text') != text:
    raise ValueError(f'{folder} holds a run that does not say that its text is {text}; name another folder')
  loss = run.validation_loss if run.summary is not None else None
  steps, seconds = run.training_seconds()
  at = dict(zip(steps, seconds, strict=True))
  return {
    'title': config.label, 'rate': trial.rate, 'decay': trial.decay, 'seed': trial.seed, 'share': trial.share,
    'text': text, 'loss': loss, 'equal_steps': config.steps, 'seconds': None,
    'validation': [[r['step'], at.get(r['step']), r['loss']] for r in run.validation],
    'validation_columns': ['step', 'seconds', 'loss'], 'flip_rate': run.flip_summary(),
    'sparse_steps': run.sparse_steps,
    **describe(config), **head,
  }  # fmt: skip


class Comparison:
  """Methods, their trials and the file of their records.

  Args:
    folder: gets a folder a run.
    results: JSON-lines file of records.
    experiment: name or path of the experiment, see `experiment.load_config`.
    names: keys of `METHODS` or `GROUPS` of `method_table`.
    seeds: the first searches.
    trials: of each search.
    tiny: the experiment's tiny twin.
    overrides: 'section.key=value' strings.
    data: batches in place of the corpus.

  Raises:
    ValueError: see `methods.run_all` and `read_records`; nothing is trained then.
  """

  def __init__(
    self,
    folder: str | Path,
    results: Path,
    *,
    experiment: str,
    names: Sequence[str],
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    trials: int = 6,
    tiny: bool = False,
    overrides: Sequence[str] = (),
    data: Any = None,
  ):
    base = methods.load_checked(experiment, names, tiny=tiny, overrides=overrides)
    self.folder, self.results, self.data = Path(folder), results, data
    self.experiment, self.steps = base.name, base.steps
    self.configs = {name: methods.configure(base, name, seeds[0]) for name in method_table.expand(names)}
    self.firsts = {name: first_trial(config, seeds[0]) for name, config in self.configs.items()}
    self.budget = Budget(trials, tuple((seed, 1.0) for seed in seeds[1:]))
    self.head = environment.head()
    # The last programs of each method: trials that differ in seeds share them.
    self.programs: dict[str, tuple[tuple[float, float], list[Programs]]] = {}
    self.text = text_of(next(iter(self.configs.values())), data)
    found = read_records(results, self.text)
    self.records = [record for record in found if self._is_ours(record)]
    if others := len(found) - len(self.records):
      print(f'{results}: {others} records of other methods, settings or devices do not count here')

  def run(self) -> None:
    """Makes all trials that are missing, method after method."""
    self.results.parent.mkdir(parents=True, exist_ok=True)
    while todo := [(len(self._done(name)), i, name) for i, name in enumerate(self.configs) if self._next(name)]:
      self._run(min(todo)[-1])

  def folder_of(self, name: str, trial: Trial) -> Path:
    """Where a method's trial was trained."""
    return self.folder / configure(self.configs[name], trial).name

  def _done(self, name: str) -> dict[Trial, float]:
    return {_trial(r): or_inf(r['loss']) for r in self.records if r['contender'] == name}

  def _next(self, name: str) -> Trial | None:
    return next_trial(self._done(name), self.firsts[name], self.budget)

  def _run(self, name: str) -> None:
    trial = self._next(name)
    assert trial is not None  # or this method would not have been chosen
    config = configure(self.configs[name], trial)
    key = (trial.rate, trial.decay)
    if self.programs.get(name, (None,))[0] != key:
      self.programs[name] = (key, [])
    programs = self.programs[name][1]
    record = {
      'bench': 'tuned', 'experiment': self.experiment, 'contender': name, **train_trial(
        config, trial, self.folder / config.name, self.text, data=self.data, programs=programs, head=self.head
      ),
      'equal_steps': self.steps,  # of the comparison, of which a method may have a share
    }  # fmt: skip
    json_lines.append(self.results, record)
    self.records.append(record)

  def _is_ours(self, record: Mapping[str, Any]) -> bool:
    """Whether a record is of this comparison: of a trial with these very settings on this kind of device."""
    if record.get('bench') != 'tuned' or record['contender'] not in self.configs:
      return False
    wanted = {**describe(configure(self.configs[record['contender']], _trial(record))), 'device': self.head['device']}
    return wanted.items() <= record.items() and record['experiment'] == self.experiment


def _trial(record: Mapping[str, Any]) -> Trial:
  return Trial(record['rate'], record['decay'], record['seed'], record['share'])
