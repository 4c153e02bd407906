"""The commands of `python -m experiments`: each calls its program and prints what it found.

A command imports what it needs when it runs, so that none waits for the libraries of another.
"""

import argparse
import importlib
from pathlib import Path
from typing import Any

from experiments.arguments import PROGRAMS, SEEDS, TUNED_SEEDS


def is_one_of_several(args: argparse.Namespace) -> bool:
  """Whether this process trains one run together with others."""
  return bool(getattr(args, 'distributed', False) or getattr(args, 'coordinator', None))


def _train(args: argparse.Namespace) -> None:
  from experiments.runs import experiment, hosts, methods, train

  config = experiment.load_config(args.config, args.overrides, tiny=args.tiny)
  if args.method:
    experiment.refuse_overrides(args.overrides, {**methods.SET_BY_METHOD, 'data.seed': 'a method has one, --set seed'})
    config = methods.configure(config, args.method, config.seed)
  alone = {f'--{name}': given for name in ('processes', 'process') if (given := getattr(args, name)) is not None}
  if alone and not is_one_of_several(args):
    raise ValueError(
      f'{" and ".join(alone)} without --coordinator or --distributed: this process would train a whole run by itself'
    )
  if is_one_of_several(args):
    hosts.join(args.coordinator, args.processes, args.process, args.heartbeat)
  said = args.method or any(override.startswith('recipe.name=') for override in args.overrides)
  if config.recipe.name == 'dense' and not said and hosts.first():
    print(
      f'{config.name} trains dense: its recipe is dense, and no --method was given (--method fst, say, or'
      ' --method dense, which reports compare with)', flush=True,
    )  # fmt: skip
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
  from experiments.runs import environment, inspection, json_lines, language, records

  for run in args.runs:
    loaded = inspection.load(run, step=args.step)
    data, step = loaded.parts.data, int(loaded.state.step)
    if args.file:
      items = language.read_items(args.file, data.tokenizer)
    else:
      items = list(language.held_out_items(data, args.questions))
    values = language.cloze(loaded, items)
    print(
      f'{run}: step {step}, {loaded.phase} phase: {values["accuracy"]:.3f} of {values["questions"]:.0f} '
      f'questions right, {values["accuracy_by_mean"]:.3f} by the mean of a token; chance is {values["chance"]:.3f}'
    )
    if args.results:
      of = records.read_run(run)
      known = {'bench': 'cloze', 'method': of.method, 'label': of.label, 'seed': of.seed, 'steps': step}
      if (loss := of.validation_loss_at(step)) is not None:  # of the checkpoint that was asked, or of none
        known['validation_loss'] = loss
      known |= {'measures': values, **environment.head()}
      json_lines.append(Path(args.results), known)


def _inspect(args: argparse.Namespace) -> None:
  from rich.console import Console

  from experiments.runs import inspection, terminal

  loaded = inspection.load(args.run, step=args.step)
  rows = [
    (w.path, ' x '.join(map(str, w.shape)), f'{w.density:.4f}', f'{w.flip_rate:.2e}', 'yes' if w.is_24 else 'no')
    for w in inspection.weight_table(loaded)
  ]
  table = terminal.table(('weight', 'shape', 'density', 'flip rate', '2:4'), rows, right=('density', 'flip rate'))
  console = Console(highlight=False)
  what = f'{args.run}: step {int(loaded.state.step)}, {loaded.phase} phase, recipe {loaded.parts.recipe.name}'
  console.print(what, soft_wrap=True)  # a long path is no reason to break the line
  console.print(table if rows else 'The recipe makes no weight sparse and watches none.')


def _flops(args: argparse.Namespace) -> None:
  from rich.console import Console

  from experiments.runs import experiment, flops, recipes, terminal
  import sparse24_jax as s24

  # What --set changes is changed of the named recipe.
  config = experiment.load_config(args.config, () if args.recipe else args.overrides, tiny=args.tiny)
  if args.recipe:
    experiment.refuse_overrides(args.overrides, {'recipe.name': '--recipe names it'})
    with config.unlocked():
      config.recipe = flops.named_recipe(args.recipe)
    for override in args.overrides:
      experiment.apply_override(config, override)
  recipe = recipes.make_recipe(config)
  vocab = args.vocab or flops.VOCABULARIES.get(config.data.tokenizer)
  if vocab is None:
    raise ValueError(f'the vocabulary of tokenizer {config.data.tokenizer!r} is not known here: give --vocab')
  counts = [flops.of_experiment(config, r, vocab_size=vocab) for r in (recipe, s24.recipes.dense())]
  figures = ('dense', recipe.name, 'times fewer')
  rows = [(part, f'{dense:.3e}', f'{ours:.3e}', f'{ratio:.2f}') for part, dense, ours, ratio in flops.table(*counts)]
  console = Console(highlight=False)
  console.print(
    f'{config.name}: {config.steps:,} steps of {config.data.batch_size} x {config.data.seq_len} tokens; forward and '
    'backward, causal attention; multiply and add are two operations'
  )
  console.print(terminal.table(('part', *figures), rows, right=figures))


def _tune(args: argparse.Namespace) -> None:
  from experiments.runs import experiment, methods, tune_decay
  from experiments.runs.race import decays

  config = experiment.load_config(args.config, args.overrides, tiny=args.tiny)
  experiment.refuse_overrides(args.overrides, tune_decay.SET_BY_TUNING)
  if config.recipe.name == 'dense':
    experiment.refuse_overrides(args.overrides, tune_decay.SET_FOR_DENSE)
    config = methods.configure(config, 'fst', config.seed)
  names = {'loss': ('share', 'seeds', 'results'), 'flips': ('steps',)}
  given = {name: value for each in names.values() for name in each if (value := getattr(args, name)) is not None}
  if idle := [f'--{name}' for name in given if name not in names[args.by]]:
    raise ValueError(f'{", ".join(idle)}: no effect with --by {args.by}')
  if args.by == 'loss':
    results = Path(given.pop('results', f'{args.folder}/decays.jsonl'))
    chosen = decays.search(
      config, args.folder, results, candidates=args.candidates or decays.CANDIDATES, **given
    )
    print(f'choice: {chosen.decay:g} ({chosen.reason}); records: {results}')
    return
  choice = tune_decay.tune(config, args.folder, candidates=args.candidates or tune_decay.CANDIDATES, **given)
  for trial in choice.trials:
    print(f'  lambda {trial.decay:<8g} mu {trial.ratio:.3f}{"  feasible" if trial.feasible else ""}')
  print(f'choice: {choice.decay} ({choice.reason}); record and plot in {args.folder}')


def _report(args: argparse.Namespace) -> None:
  from experiments.reports import report

  print(f'report: {report.write_report(args.runs, args.out, title=args.title).resolve()}')


def _pages(_: argparse.Namespace) -> None:
  from experiments.reports import pages

  for path in pages.write():
    print(path)


def _guide(args: argparse.Namespace) -> None:
  from experiments.reports import guide

  options = {name: getattr(args, name) for name in ('tokens', 'd', 'hidden', 'gated', 'device', 'goal')}
  print(guide.guide(**options))


def _of_methods(args: argparse.Namespace) -> dict[str, Any]:
  """The arguments of all commands that train several methods."""
  names = {'experiment': 'config', 'names': 'methods'}
  return {name: getattr(args, names.get(name, name)) for name in ('experiment', 'names', 'seeds', 'tiny', 'overrides')}


def _compare(args: argparse.Namespace) -> None:
  args.seeds = args.seeds or list(SEEDS if args.tune is None else TUNED_SEEDS)
  if args.tune is not None:
    from experiments.runs.race import tuned

    comparison = tuned.Comparison(
      args.folder, Path(args.results or f'{args.folder}/trials.jsonl'), trials=args.tune, **_of_methods(args)
    )
    comparison.run()
    from experiments.reports import compare  # not before: trials need no Matplotlib

    print(f'records: {comparison.results}; report: {compare.report_tuned(comparison).resolve()}')
    return
  from experiments.reports import compare

  compare.compare(args.folder, results=Path(args.results) if args.results else None, **_of_methods(args))


def _grid(args: argparse.Namespace) -> None:
  from experiments.reports import race_table
  from experiments.runs.race import grid

  searched = {name: getattr(args, name) for name in ('rates', 'factors', 'search', 'population', 'share')}
  reported = {'seeds': ()} if args.grid_alone else {}
  made = grid.Grid(Path(args.results), **searched, **(_of_methods(args) | reported))
  records = made.run()
  if args.share == 1:
    print(race_table.steps_markdown(records))
  print(f'records: {made.results}')


def _sweep(args: argparse.Namespace) -> None:
  from experiments.runs import sweep

  unfinished = sweep.sweep(args.folder, minutes=args.minutes, **_of_methods(args))
  if unfinished:
    raise ValueError(f'{unfinished} methods are not finished; the same command goes on with them')


def _main_job(args: argparse.Namespace) -> None:
  from experiments.reports import main_job

  main_job.run(args.folder, seed=args.seed, tiny=args.tiny, overrides=args.overrides)


def _program(args: argparse.Namespace) -> int:
  return importlib.import_module(f'experiments.{PROGRAMS[args.command][0]}').main(args.rest) or 0


COMMANDS = {
  **dict.fromkeys(PROGRAMS, _program),
  'train': _train, 'eval': _eval, 'inspect': _inspect, 'generate': _generate,
  'cloze': _cloze, 'flops': _flops, 'tune-decay': _tune, 'report': _report, 'guide': _guide,
  'pages': _pages, 'compare': _compare, 'main-job': _main_job, 'sweep': _sweep, 'grid': _grid,
}  # fmt: skip
