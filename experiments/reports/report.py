"""One self-contained HTML page about any set of runs: no network, no script, pictures inline."""

from collections import Counter
from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import re

import numpy as np

from experiments.reports import charts, claims, page, report_curves
from experiments.runs import environment
from experiments.runs import records as runs_lib
from experiments.runs.records import Groups, RunRecord


def write_report(folders: Sequence[str | Path], out: str | Path, *, title: str = 'Runs compared') -> Path:
  """Writes the page.

  Args:
    folders: run folders, or folders that hold some.
    out: the HTML file to write.
    title: its heading.

  Returns:
    The path written.

  Raises:
    ValueError: a folder without runs.
  """
  found = runs_lib.find_runs(folders)
  groups = runs_lib.group(found)
  colours = colours_of(groups)
  body = [
    _head(title, found, groups),
    _table(groups, colours),
    findings(found),
    report_curves.losses(groups, colours),
    report_curves.loss_against_seconds(groups, colours),
    report_curves.loss_against_flops(groups, colours),
    report_curves.activation_sparsity(groups),
    report_curves.flip_rates(groups, colours),
    _events(found),
    _settings(found),
  ]
  out = Path(out)
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(page.page(title, body))
  return out


def colours_of(groups: Groups) -> dict[str, str]:
  """A colour for each label."""
  return {label: charts.PALETTE[i % len(charts.PALETTE)] for i, label in enumerate(groups)}


def finished(groups: Groups) -> dict[str, list[RunRecord]]:
  """The groups without their unfinished runs; all of them where nothing is finished yet."""
  done = {label: [run for run in group if run.summary is not None] for label, group in groups.items()}
  done = {label: group for label, group in done.items() if group}
  return done or {label: list(group) for label, group in groups.items()}


def table_rows(groups: Groups) -> list[list[str]]:
  """The comparison as text, one row a method.

  Returns:
    Rows of: label, seeds, validation loss, its spread, difference to dense, the same seed by seed, peak flip rate,
    flip rate in the tenth before the common end of the sparse phases, seconds.
  """
  end = runs_lib.common_sparse_end(run for group in groups.values() for run in group)
  rows = []
  for label, group in groups.items():
    losses = [run.validation_loss for run in group]
    dense = runs_lib.dense_of(groups, label)
    differences = claims.paired(group, dense) if group is not dense else []
    flips = [summary for run in group if (summary := run.flip_summary(end))]
    rows.append(
      [
        label,
        str(len(group)),
        f'{np.mean(losses):.4f}',
        f'± {np.std(losses, ddof=1):.4f}' if len(losses) > 1 else '',
        f'{np.mean(differences):+.4f}' if differences else '',
        ', '.join(f'{d:+.4f}' for d in differences),
        *((f'{np.mean([f[key] for f in flips]):.2g}' if flips else '') for key in ('peak', 'tail')),
        f'{np.mean([run.seconds for run in group]):,.0f}',
      ]
    )
  return rows


def _head(title: str, found: Sequence[RunRecord], groups: Groups) -> str:
  config, tokens = found[0].config, 0
  for run in found:
    tokens += run.config['data']['batch_size'] * run.config['data']['seq_len'] * run.train[-1]['step']
  unfinished = [run.folder.name for run in found if run.summary is None]
  cards = [
    *report_curves.time_to_dense(groups),
    (f'{len(found)}', f'{_counted(len(found), "run")} of {len(groups)} {_counted(len(groups), "method")}', False),
    (f'{max(run.train[-1]["step"] for run in found):,}', 'optimizer steps each at most', False),
    (f'{tokens / 1e6:,.1f} M' if tokens >= 1e5 else f'{tokens:,}', 'tokens seen in all', False),
    (f'{sum(run.seconds for run in found) / 60:,.1f} min', 'in all, compiling and evaluation too', False),
  ]
  model, data = config['model'], config['data']
  family = {'gpt2': 'GPT-2', 'llama': 'Llama'}.get(name := model.get('family', 'gpt2'), name)
  given = {'num_layers': '{} layers', 'embed_dim': 'width {}'}
  size = ''.join(f', {text.format(model[key])}' for key, text in given.items() if key in model)
  warnings = []
  if differing := runs_lib.settings_that_differ(found):
    lines = [f'{key}: {", ".join(values)}' for key, values in differing.items()]
    warnings.append(page.warning('Not all runs have the same settings, so compare with care:', lines))
  if unfinished:
    warnings.append(page.warning(f'Unfinished, shown as far as they got: {", ".join(unfinished)}.'))
  lead = (
    f'{family} {model["size"]}{size}, on {data["corpus"]} with tokenizer {data["tokenizer"]}; {data["batch_size"]} '
    f'sequences of {data["seq_len"]} tokens a step. {found[0].environment["device"]}.'
  )
  return page.title(title, lead) + page.cards(cards) + ''.join(warnings)


def _counted(count: int, what: str) -> str:
  return what if count == 1 else f'{what}s'


def findings(found: Sequence[RunRecord]) -> str:
  """What the papers claim beside what these runs show."""
  judged = claims.findings(found)
  title = 'Where these runs agree with the papers, and where not'
  if not judged:
    which = 'a sparse run made by train --method, compare or grid, and one to compare it with'
    return page.heading(title, f'These runs speak to none of the claims: that takes {which}.')
  counts = {verdict: sum(f.verdict == verdict for f in judged) for verdict in ('agrees', 'disagrees', 'open')}
  lead = (
    f'Of {len(judged)} findings, the figures here agree in {counts["agrees"]}, disagree in {counts["disagrees"]}, and '
    f'cannot decide {counts["open"]}. They speak about this model and this budget; the papers trained models of 100 '
    'million parameters and more. A loss counts as different when the 95% interval of the seed-by-seed difference '
    'leaves out zero.'
  )
  words = {'agrees': 'agrees', 'disagrees': 'disagrees', 'open': 'cannot tell'}
  return page.heading(title, lead) + ''.join(
    page.finding(f.verdict, words[f.verdict], f.claim, f.evidence, f.source) for f in judged
  )


def _table(groups: Groups, colours: Mapping[str, str]) -> str:
  groups = finished(groups)
  end = runs_lib.common_sparse_end(run for group in groups.values() for run in group)
  heads = ['method', 'seeds', 'validation loss', 'spread', 'minus dense', 'seed by seed', 'peak flip rate',
           f'flip rate, steps {0.9 * end:,.0f} to {end:,}', 'seconds']  # fmt: skip
  rows = []
  for label, *values in table_rows(groups):
    recipe = groups[label][0].config['recipe']
    kwargs = ', '.join(f'{k}={v}' for k, v in recipe['kwargs'].items() if k != 'path')
    name = page.swatch(colours[label], label, recipe['name'] + (f' ({kwargs})' if kwargs else ''))
    rows.append([name, *values])
  side_by_side = any(run.side_by_side for group in groups.values() for run in group)
  shared = ' These runs shared a device with others, so their seconds say nothing about speed.' if side_by_side else ''
  runs = [run for group in groups.values() for run in group]
  compared = len(groups) < 2 or any(one.is_dense_of(other) for one in runs for other in runs if one is not other)
  alone = '' if compared else ' No run here is the dense one of another, by its method: train one with --method dense.'
  lead = (
    'Final validation loss in nats a token (a byte, with the byte tokenizer): mean and sample standard deviation over '
    'seeds, and the difference to the dense run of the same seed. Flip rates compare over the same steps, in which '
    f'every sparse method is still sparse.{shared}{alone}'
  )
  return page.heading('Comparison', lead) + page.table(heads, rows) + dots(groups, colours)


def dots(groups: Groups, colours: Mapping[str, str]) -> str:
  """The final loss of every run."""
  chart = charts.dot_plot(
    [(label, colours[label], [run.validation_loss for run in group]) for label, group in groups.items()],
    title='Final validation loss of every run',
    x_label='final validation loss, nats a token; one dot a seed',
  )
  return page.figure(chart, 'Final validation loss')


def _events(found: Sequence[RunRecord]) -> str:
  """What happened to the runs on the way; '' if nothing did."""
  disturbed = [run for run in found if run.events]
  if not disturbed:
    return ''
  kinds = [*dict.fromkeys(event['event'] for run in disturbed for event in run.events)]
  rows, blocks = [], []
  for run in disturbed:
    counts = Counter(event['event'] for event in run.events)
    rows.append([run.folder.name, *(str(counts[kind] or '') for kind in kinds)])
    # The last name of a path is enough; its folders are those of a machine.
    lines = [re.sub(r'(/[^\s/]+)+/', '', f'step {event["step"]}: {event.get("what", "")}') for event in run.events]
    blocks.append(page.folded(f'{run.folder.name}: {len(lines)} events', page.preformatted('\n'.join(lines))))
  lead = (
    'Interruptions, and numbers that were bad: how often each run was resumed, skipped a step, was rolled back or had '
    'its settings changed. A resumed run has the bits of one that was not; one of which anything else is told has not.'
  )
  return page.heading('What happened on the way', lead) + page.table(['run', *kinds], rows) + ''.join(blocks)


def _settings(found: Sequence[RunRecord]) -> str:
  blocks = []
  for run in found:
    state = f'validation loss {run.validation_loss:.4f}' if run.summary else 'unfinished'
    text = json.dumps({'config': run.config, 'environment': environment.without_folders(run.environment)}, indent=2)
    speed = '' if run.on_cpu else f' · {run.tokens_per_s / 1e3:,.1f} k tokens/s'
    summary = f'{run.folder.name} · {run.label} · seed {run.seed} · {state}{speed}'
    blocks.append(page.folded(summary, page.preformatted(text)))
  versions = ', '.join(f'{name} {version}' for name, version in found[0].environment['versions'].items())
  lead = f'{found[0].environment["device"]}, Python {found[0].environment["python"]}, {versions}.'
  return page.heading('Settings and environment', lead) + ''.join(blocks)
