"""`python -m experiments COMMAND`: train, look at, tune and compare 2:4-sparse models. No command runs the main job."""

import argparse
from collections.abc import Sequence
import os
from pathlib import Path
import sys
import traceback

# Orbax and TFDS log through absl at INFO, and glog speaks up before Python can stop it.
os.environ.setdefault('GLOG_minloglevel', '2')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

try:
  from experiments.runs.experiment import known_experiments
except ModuleNotFoundError as missing:
  if (missing.name or 'experiments').startswith(('experiments', 'sparse24_jax', 'pallas_kernels')):
    raise
  sys.exit(f"error: the programs need {missing.name}: pip install -e '.[experiments,tasks]'")


def _experiment_arguments(
  parser: argparse.ArgumentParser, default: str | None, example: str = '--set steps=500'
) -> None:
  parser.add_argument(
    '--config',
    default=default,
    required=default is None,
    metavar='NAME',
    help=f'an experiment: {", ".join(known_experiments())}; or a path to a .py file like those in '
    'experiments/configs, which is run, or to a .json or .toml file, which is only read'
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


def _methods_arguments(parser: argparse.ArgumentParser, default: str) -> None:
  parser.add_argument(
    '--methods',
    nargs='+',
    default=[default],
    metavar='METHOD',
    help='keys of METHODS or GROUPS in experiments/runs/method_table.py, e.g. dense fst (default: %(default)s)',
  )
  parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], help='a run each (default: 0 1 2)')


def make_parser() -> argparse.ArgumentParser:
  """The command line, with the help of every command."""
  parser = argparse.ArgumentParser(prog='python -m experiments', description=__doc__)
  parser.add_argument('--debug', action='store_true', help='show tracebacks of errors that have a message')
  commands = parser.add_subparsers(dest='command', metavar='COMMAND')

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
  train.add_argument('--method', help='a key of METHODS in experiments/runs/method_table.py to put in (default: none)')
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
  cloze.add_argument('run', help='a run folder')
  cloze.add_argument(
    '--file', help='JSON lines with context, choices and answer, the number of the right one from 0 (default: made of '
    'held-out text, four choices each)',
  )  # fmt: skip
  cloze.add_argument('--questions', type=int, default=200, help='made of held-out text (default: %(default)s)')
  cloze.add_argument('--step', type=int, help='which checkpoint (default: the newest)')

  flops = commands.add_parser('flops', help='training FLOPs of an experiment against dense, counted from its shapes')
  _experiment_arguments(flops, None, '--set recipe.kwargs.density=0.1')
  flops.add_argument('--recipe', help="a recipe's name, with its default arguments (default: the experiment's recipe)")
  flops.add_argument('--vocab', type=int, default=0, help='tokens of the tokenizer (default: what its name implies)')

  tune = commands.add_parser('tune-decay', help='choose the masked-decay factor, by the loss of short runs')
  _experiment_arguments(tune, 'nano')
  tune.add_argument('--folder', default='runs/tune-decay', help='for runs and records (default: %(default)s)')
  tune.add_argument('--candidates', type=float, nargs='+', help='decay factors (default: a grid from 0 to 0.2)')
  tune.add_argument('--share', type=float, default=0.25, help='steps of a run, as a share (default: %(default)s)')
  tune.add_argument('--seeds', type=int, nargs='+', default=[0], help='a run each (default: 0)')
  tune.add_argument('--results', help='JSON-lines file of records (default: decays.jsonl in the folder)')
  tune.add_argument(
    '--by', choices=('loss', 'flips'), default='loss',
    help="flips: the FST paper's ratio of flip rates to a dense twin's at the end of the warm-up; it needs candidates"
    ' that are large enough',
  )  # fmt: skip
  tune.add_argument(
    '--steps', type=int, default=0, help='of a run by flips (default: the warm-up, or ten mask refreshes)'
  )

  report = commands.add_parser('report', help='write one HTML page about any set of runs')
  report.add_argument('runs', nargs='+', help='run folders, or folders that hold some')
  report.add_argument('--out', default='report.html', help='the page (default: %(default)s)')
  report.add_argument('--title', default='Runs compared', help='heading of the page (default: %(default)s)')

  pages = commands.add_parser('pages', help='tables and picture of the docs, and two pages, from records')
  pages.add_argument('--folder', type=Path, default=Path('site'), help='for the pages (default: %(default)s)')

  guide = commands.add_parser('guide', help='which recipe for a GPU, a size and a goal, from records')
  guide.add_argument('--tokens', type=int, required=True, help='tokens of a micro-batch on one device')
  guide.add_argument('--d', type=int, required=True, help='width of the model')
  guide.add_argument('--hidden', type=int, required=True, help='width of the hidden layer')
  guide.add_argument('--gated', action='store_true', help='a gate besides the up-projection')
  guide.add_argument('--device', help="folder of the GPU's records (default: the GPU at hand)")
  guide.add_argument('--goal', choices=('sooner', 'quality', 'sparse'), default='sooner', help='(default: %(default)s)')

  compare = commands.add_parser('compare', help='every method with every seed at equal steps, records and report')
  _experiment_arguments(compare, 'nano')
  compare.add_argument('--folder', default='runs/compare', help='for runs and report (default: %(default)s)')
  _methods_arguments(compare, 'equal-steps')
  compare.add_argument('--results', help='JSON-lines file for one record a run (default: none)')
  compare.add_argument(
    '--tune', type=int, nargs='?', const=6, metavar='TRIALS',
    help='search learning rate and decay of every method first, with the first seed and so many trials (default: 6)',
  )  # fmt: skip

  sweep = commands.add_parser('sweep', help='train methods side by side on one device; compare then reports')
  _experiment_arguments(sweep, 'small')
  sweep.add_argument('--folder', default='runs/sweep', help='for runs and logs (default: %(default)s)')
  _methods_arguments(sweep, 'equal-flops')
  sweep.add_argument('--minutes', type=float, default=0.0, help='stop after these (default: wait for all)')
  sweep.add_argument('--pack', type=Path, help='renew this .tar.gz of measurements as runs finish')
  return parser


def _train(args: argparse.Namespace) -> None:
  from experiments.runs import experiment, hosts, methods, train

  config = experiment.load_config(args.config, args.overrides, tiny=args.tiny)
  if args.method:
    experiment.refuse_overrides(args.overrides, {**methods.SET_BY_METHOD, 'data.seed': 'a method has one, --set seed'})
    config = methods.configure(config, args.method, config.seed)
  if _is_one_of_several(args):
    hosts.join(args.coordinator, args.processes, args.process, args.heartbeat)
  folder = args.folder or f'runs/{config.name}-{config.method or config.recipe.name}-seed{config.seed}'
  before = 'finished before, ' if (Path(folder) / 'summary.json').exists() else ''
  summary = train.train(config, folder, from_step=args.from_step, accept_changes=args.accept_changes)
  if not hosts.first():
    return
  print(
    f'{folder}: {before}validation loss {summary["validation_loss"]:.4f} after {summary["steps"]} steps, '
    f'{summary["seconds"]:.0f} s'
  )


def _eval(args: argparse.Namespace) -> None:
  from experiments.runs import inspection

  loaded = inspection.load(args.run, step=args.step)
  values = inspection.evaluate(loaded, num_batches=args.batches)
  print(
    f'step {int(loaded.state.step)}, {loaded.phase} phase: '
    + ', '.join(f'{name} {value:.4f}' for name, value in values.items())
  )


def _generate(args: argparse.Namespace) -> None:
  from experiments.runs import inspection, language

  loaded = inspection.load(args.run, step=args.step)
  print(
    language.generate(
      loaded, args.prompt, tokens=args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed
    )
  )


def _cloze(args: argparse.Namespace) -> None:
  from experiments.runs import inspection, language

  loaded = inspection.load(args.run, step=args.step)
  data = loaded.parts.data
  if args.file:
    items = language.read_items(args.file, data.tokenizer)
  else:
    items = list(language.held_out_items(data, args.questions))
  values = language.cloze(loaded, items)
  print(
    f'step {int(loaded.state.step)}, {loaded.phase} phase: {values["accuracy"]:.3f} of {values["questions"]:.0f} '
    f'questions right, {values["accuracy_by_mean"]:.3f} by the mean of a token; chance is {values["chance"]:.3f}'
  )


def _inspect(args: argparse.Namespace) -> None:
  from rich.console import Console
  from rich.table import Table

  from experiments.runs import inspection

  loaded = inspection.load(args.run, step=args.step)
  table = Table(box=None, padding=(0, 2), header_style='bold')
  for head in ('weight', 'shape', 'density', 'flip rate', '2:4'):
    table.add_column(head, justify='right' if head in ('density', 'flip rate') else 'left')
  for row in inspection.weight_table(loaded):
    shape = ' x '.join(map(str, row.shape))
    table.add_row(row.path, shape, f'{row.density:.4f}', f'{row.flip_rate:.2e}', 'yes' if row.is_24 else 'no')
  console = Console(highlight=False)
  what = f'{args.run}: step {int(loaded.state.step)}, {loaded.phase} phase, recipe {loaded.parts.recipe.name}'
  console.print(what, soft_wrap=True)  # a long path is no reason to break the line
  console.print(table if table.row_count else 'The recipe makes no weight sparse and watches none.')


def _flops(args: argparse.Namespace) -> None:
  from rich.console import Console
  from rich.table import Table

  from experiments.runs import build, experiment, flops
  import sparse24_jax as s24

  config = experiment.load_config(args.config, args.overrides, tiny=args.tiny)
  if args.recipe:
    with config.unlocked():
      config.recipe = flops.named_recipe(args.recipe)
  recipe = build.make_recipe(config)
  vocab = args.vocab or flops.VOCABULARIES.get(config.data.tokenizer)
  if vocab is None:
    raise ValueError(f'the vocabulary of tokenizer {config.data.tokenizer!r} is not known here: give --vocab')
  counts = [flops.of_experiment(config, r, vocab_size=vocab) for r in (recipe, s24.recipes.dense())]
  table = Table(box=None, padding=(0, 2), header_style='bold')
  for head in ('part', 'dense', recipe.name, 'times fewer'):
    table.add_column(head, justify='left' if head == 'part' else 'right')
  for part, dense, ours, ratio in flops.table(*counts):
    table.add_row(part, f'{dense:.3e}', f'{ours:.3e}', f'{ratio:.2f}')
  console = Console(highlight=False)
  console.print(
    f'{config.name}: {config.steps:,} steps of {config.data.batch_size} x {config.data.seq_len} tokens; forward and '
    'backward, causal attention; multiply and add are two operations'
  )
  console.print(table)


def _tune(args: argparse.Namespace) -> None:
  from experiments.race import decays
  from experiments.runs import experiment, methods, tune_decay

  config = experiment.load_config(args.config, args.overrides, tiny=args.tiny)
  experiment.refuse_overrides(args.overrides, tune_decay.SET_BY_TUNING)
  if config.recipe.name == 'dense':
    experiment.refuse_overrides(args.overrides, tune_decay.SET_FOR_DENSE)
    config = methods.configure(config, 'fst', config.seed)
  if args.by == 'loss':
    results = Path(args.results or f'{args.folder}/decays.jsonl')
    chosen = decays.search(
      config, args.folder, results, candidates=args.candidates or decays.CANDIDATES, share=args.share, seeds=args.seeds
    )
    print(f'choice: {chosen.decay:g} ({chosen.reason}); records: {results}')
    return
  choice = tune_decay.tune(config, args.folder, candidates=args.candidates or tune_decay.CANDIDATES, steps=args.steps)
  for trial in choice.trials:
    print(f'  lambda {trial.decay:<8g} mu {trial.ratio:.3f}{"  feasible" if trial.feasible else ""}')
  print(f'choice: {choice.decay} ({choice.reason}); record and plot in {args.folder}')


def _report(args: argparse.Namespace) -> None:
  from experiments.reports import report

  print(f'report: {report.write_report(args.runs, args.out, title=args.title).resolve()}')


def _pages(args: argparse.Namespace) -> None:
  from experiments.reports import pages

  for path in pages.write(args.folder):
    print(path)


def _guide(args: argparse.Namespace) -> None:
  from experiments.reports import guide

  options = {name: getattr(args, name) for name in ('tokens', 'd', 'hidden', 'gated', 'device', 'goal')}
  print(guide.guide(**options))


def _compare(args: argparse.Namespace) -> None:
  from experiments.race import tuned

  if args.tune is not None:
    comparison = tuned.Comparison(
      args.folder,
      Path(args.results or f'{args.folder}/trials.jsonl'),
      experiment=args.config,
      names=args.methods,
      seeds=args.seeds,
      trials=args.tune,
      tiny=args.tiny,
      overrides=args.overrides,
    )
    print(f'records: {comparison.results}; report: {comparison.run().resolve()}')
    return
  from experiments.reports import compare

  compare.compare(
    args.folder,
    experiment=args.config,
    names=args.methods,
    seeds=args.seeds,
    tiny=args.tiny,
    overrides=args.overrides,
    results=Path(args.results) if args.results else None,
  )


def _sweep(args: argparse.Namespace) -> None:
  from experiments.runs import sweep

  unfinished = sweep.sweep(
    args.folder,
    experiment=args.config,
    names=args.methods,
    seeds=args.seeds,
    minutes=args.minutes,
    tiny=args.tiny,
    overrides=args.overrides,
    pack=args.pack,
  )
  if unfinished:
    raise ValueError(f'{unfinished} methods are not finished; the same command goes on with them')


def _main_job(args: argparse.Namespace) -> None:
  from experiments.reports import main_job

  main_job.run(args.folder, seed=args.seed, tiny=args.tiny, overrides=args.overrides)


_COMMANDS = {
  'train': _train, 'eval': _eval, 'inspect': _inspect, 'generate': _generate,
  'cloze': _cloze, 'flops': _flops, 'tune-decay': _tune, 'report': _report, 'guide': _guide,
  'pages': _pages, 'compare': _compare, 'main-job': _main_job, 'sweep': _sweep,
}  # fmt: skip

_RESUMABLE = ('train', 'main-job', 'compare', 'sweep')


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command; errors that say what to do are printed without a traceback.

  Returns:
    The exit status: 0; 1 after an error; of a run that was told to stop and is saved, 75 after SIGTERM or a notice of
    preemption and 130 after Ctrl-C; 76 where another process of the run is lost.
  """
  parser = make_parser()
  argv = list(sys.argv[1:] if argv is None else argv)
  args = parser.parse_args(argv)
  if args.command is None:
    args = parser.parse_args([*argv, 'main-job'])

  status = _status_of(args)
  if status and _is_one_of_several(args):
    from experiments.runs import hosts

    if status != hosts.LOST:
      hosts.end_together()
    # At its usual end a process waits for the others, which may be gone, or wait for this one in the middle of a step.
    sys.stderr.flush()
    os._exit(status)
  return status


def _status_of(args: argparse.Namespace) -> int:
  """Runs the command of parsed arguments, and tells its errors."""
  from absl import logging
  from jax.errors import JaxRuntimeError

  from experiments.runs import hosts
  from experiments.runs.checkpoint_errors import CheckpointError
  from experiments.runs.stopping import StoppedError
  from experiments.runs.train import TrainingDivergedError

  logging.set_verbosity(logging.ERROR)
  try:
    _COMMANDS[args.command](args)
  except StoppedError as stopped:
    if hosts.first():
      print(stopped, file=sys.stderr)
    return stopped.status
  except KeyboardInterrupt:
    resumes = '; the same command resumes from the last checkpoint' if args.command in _RESUMABLE else ''
    print(f'\nstopped{resumes}', file=sys.stderr)
    return 130
  except Exception as error:
    several = _is_one_of_several(args)
    if several and hosts.lost_another(error):
      print(f'error: {hosts.tell_lost(error)}', file=sys.stderr)
      return hosts.LOST
    known = isinstance(error, ValueError | OSError | CheckpointError | TrainingDivergedError | hosts.OtherProcessError)
    if known and not args.debug and not isinstance(error, JaxRuntimeError):
      print(f'error: {error}', file=sys.stderr)
    elif several:
      traceback.print_exc()
    else:
      raise
    return 1
  return 0


def _is_one_of_several(args: argparse.Namespace) -> bool:
  return bool(getattr(args, 'distributed', False) or getattr(args, 'coordinator', None))


if __name__ == '__main__':
  sys.exit(main())
