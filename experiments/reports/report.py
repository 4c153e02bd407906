"""One self-contained HTML page about any set of runs: no network, no script, pictures inline."""

from collections.abc import Mapping, Sequence
from html import escape
import json
from pathlib import Path

import numpy as np

from experiments.reports import claims, report_curves, svg
from experiments.runs import environment
from experiments.runs import records as runs_lib
from experiments.runs.records import Groups, RunRecord

_STYLE = """
:root { --ink: #1b1f24; --soft: #59636e; --rule: #dfe3e8; --panel: #f6f8fa }
* { box-sizing: border-box }
body { margin: 0; background: #fff; color: var(--ink); font: 15px/1.55 system-ui, 'Inter', 'DejaVu Sans', sans-serif }
main { max-width: 1240px; margin: 0 auto; padding: 40px 32px 72px }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -.01em }
h2 { font-size: 19px; margin: 44px 0 6px }
p, li { max-width: 92ch }
.lead { color: var(--soft); margin: 0 0 22px } .caption { color: var(--soft); margin: 0 0 14px }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 14px }
.cards { margin: 22px 0 8px }
.card { background: var(--panel); border-radius: 10px; padding: 14px 16px }
.card b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; line-height: 1.25 }
.card span { color: var(--soft); font-size: 13px }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 26px 30px }
.charts.small { grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)) }
figure { margin: 0 } figcaption { font-weight: 600; margin-bottom: 4px }
svg { width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, 'Inter', 'DejaVu Sans', sans-serif; fill: var(--soft) }
svg .legend { fill: var(--ink) } svg .note { font-size: 11px }
.grid { stroke: #e9ecef } .base { stroke: #8c959f } .mark { stroke: #8c959f; stroke-dasharray: 3 3 }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { text-align: left; font-size: 13px; color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--rule) }
th, td { padding: 8px 14px 8px 0; vertical-align: top } td { border-bottom: 1px solid var(--rule) }
th.n, td.n { text-align: right } td.n { white-space: nowrap } th:first-child { min-width: 15em }
td small { color: var(--soft); display: block }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 9px }
.finding { display: grid; grid-template-columns: 104px 1fr; gap: 16px }
.finding { padding: 13px 0; border-bottom: 1px solid var(--rule) }
.finding p { margin: 2px 0 0; color: var(--soft) } .finding cite { font-size: 13px; color: var(--soft) }
.verdict { font-weight: 600; font-size: 13px }
.agrees { color: #1a7f37 } .disagrees { color: #b3261e } .open { color: #7a5b00 }
.warn { border-left: 4px solid #d4a72c; background: #fff8e5; padding: 10px 16px; margin: 18px 0 }
details { margin: 10px 0; border: 1px solid var(--rule); border-radius: 8px; padding: 9px 14px }
summary { cursor: pointer }
pre { font: 12.5px/1.5 ui-monospace, 'DejaVu Sans Mono', monospace; overflow-x: auto; margin: 10px 0 0 }
"""


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
  colours = {label: svg.PALETTE[i % len(svg.PALETTE)] for i, label in enumerate(groups)}
  body = [
    _head(title, found, groups),
    _table(groups, colours),
    _findings(found),
    report_curves.losses(groups, colours),
    report_curves.loss_against_seconds(groups, colours),
    report_curves.loss_against_flops(groups, colours),
    report_curves.activation_sparsity(groups),
    report_curves.flip_rates(groups, colours),
    _settings(found),
  ]
  out = Path(out)
  out.parent.mkdir(parents=True, exist_ok=True)
  out.write_text(
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    f'<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>\n'
    + '\n'.join(body)
    + '\n</main></body></html>\n'
  )
  return out


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
  # Of several dense runs the best: groups come in order of loss.
  baselines = {g[0].baseline: g for g in [*groups.values()][::-1] if g[0].is_baseline}
  end = runs_lib.common_sparse_end(run for group in groups.values() for run in group)
  rows = []
  for label, group in groups.items():
    losses = [run.validation_loss for run in group]
    dense = baselines.get(group[0].baseline, ())
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
    (f'{len(found)}', f'runs of {len(groups)} methods'),
    (f'{max(run.train[-1]["step"] for run in found):,}', 'optimizer steps each at most'),
    (f'{tokens / 1e6:,.1f} M', 'tokens seen in all'),
    (f'{sum(run.seconds for run in found) / 60:,.1f} min', 'in all, compiling and evaluation too'),
  ]
  boxes = ''.join(f'<div class="card"><b>{value}</b><span>{text}</span></div>' for value, text in cards)
  model, data = config['model'], config['data']
  family = {'gpt2': 'GPT-2', 'llama': 'Llama'}.get(name := model.get('family', 'gpt2'), name)
  given = {'num_layers': '{} layers', 'embed_dim': 'width {}'}
  size = ''.join(f', {text.format(model[key])}' for key, text in given.items() if key in model)
  warning = ''
  if differing := runs_lib.settings_that_differ(found):
    lines = ''.join(f'<li>{escape(key)}: {escape(", ".join(values))}</li>' for key, values in differing.items())
    warning += f'<div class="warn">Not all runs have the same settings, so compare with care:<ul>{lines}</ul></div>'
  if unfinished:
    warning += f'<div class="warn">Unfinished, shown as far as they got: {escape(", ".join(unfinished))}.</div>'
  return (
    f'<h1>{escape(title)}</h1><p class="lead">{escape(family)} {escape(str(model["size"]))}{escape(size)}, '
    f'on {escape(data["corpus"])} with tokenizer {escape(data["tokenizer"])}; '
    f'{escape(str(data["batch_size"]))} sequences of {escape(str(data["seq_len"]))} tokens a step. '
    f'{escape(found[0].environment["device"])}.</p><div class="cards">{boxes}</div>{warning}'
  )


def _findings(found: Sequence[RunRecord]) -> str:
  findings = claims.findings(found)
  intro = '<h2>Where these runs agree with the papers, and where not</h2>'
  if not findings:
    return f'{intro}<p class="caption">These runs speak to none of the claims: that takes a dense and a sparse run.</p>'
  counts = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ('agrees', 'disagrees', 'open')}
  words = {'agrees': 'agrees', 'disagrees': 'disagrees', 'open': 'cannot tell'}
  rows = ''.join(
    f'<div class="finding"><span class="verdict {f.verdict}">{words[f.verdict]}</span><div><b>{escape(f.claim)}</b>'
    f'<p>{escape(f.evidence)}</p><cite>{escape(f.source)}</cite></div></div>'
    for f in findings
  )
  return (
    f'{intro}<p class="caption">Of {len(findings)} claims, the figures here agree with {counts["agrees"]}, disagree '
    f'with {counts["disagrees"]}, and cannot decide {counts["open"]}. They speak about this model and this budget; the '
    'papers trained models of 100 million parameters and more. A loss counts as different when the 95% interval of the '
    f'seed-by-seed difference leaves out zero.</p>{rows}'
  )


def _table(groups: Groups, colours: Mapping[str, str]) -> str:
  groups = finished(groups)
  end = runs_lib.common_sparse_end(run for group in groups.values() for run in group)
  heads = ['method', 'seeds', 'validation loss', 'spread', 'minus dense', 'seed by seed', 'peak flip rate',
           f'flip rate, steps {0.9 * end:,.0f} to {end:,}', 'seconds']  # fmt: skip
  numeric = [False] + [True] * (len(heads) - 1)
  head = ''.join(f'<th{" class=n" if n else ""}>{h}</th>' for h, n in zip(heads, numeric, strict=True))
  body = ''
  for label, *values in table_rows(groups):
    recipe = groups[label][0].config['recipe']
    kwargs = ', '.join(f'{k}={v}' for k, v in recipe['kwargs'].items() if k != 'path')
    name = (
      f'<span class="swatch" style="background:{colours[label]}"></span>{escape(label)}'
      f'<small>{escape(recipe["name"])}{escape(f" ({kwargs})" if kwargs else "")}</small>'
    )
    cells = zip([name, *map(escape, values)], numeric, strict=True)
    body += '<tr>' + ''.join(f'<td{" class=n" if n else ""}>{cell}</td>' for cell, n in cells) + '</tr>'
  dots = svg.dot_plot(
    [
      (report_curves.short(label), colours[label], [run.validation_loss for run in group])
      for label, group in groups.items()
    ],
    title='Final validation loss of every run',
    x_label='final validation loss, nats a token; one dot a seed',
  )
  side_by_side = any(run.side_by_side for group in groups.values() for run in group)
  shared = ' These runs shared a device with others, so their seconds say nothing about speed.' if side_by_side else ''
  return (
    '<h2>Comparison</h2><p class="caption">Final validation loss in nats a token (a byte, with the byte tokenizer): '
    'mean and sample standard deviation over seeds, and the difference to the dense run of the same seed. Flip rates '
    f'compare over the same steps, in which every sparse method is still sparse.{shared}</p>'
    f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    f'<figure style="margin-top:26px"><figcaption>Final validation loss</figcaption>{dots}</figure>'
  )


def _settings(found: Sequence[RunRecord]) -> str:
  blocks = []
  for run in found:
    state = f'validation loss {run.validation_loss:.4f}' if run.summary else 'unfinished'
    text = json.dumps({'config': run.config, 'environment': environment.without_folders(run.environment)}, indent=2)
    speed = '' if run.on_cpu else f' · {run.tokens_per_s / 1e3:,.1f} k tokens/s'
    blocks.append(
      f'<details><summary>{escape(run.folder.name)} · {escape(run.label)} · seed {escape(str(run.seed))} · {state}'
      f'{speed}</summary><pre>{escape(text)}</pre></details>'
    )
  versions = ', '.join(f'{name} {version}' for name, version in found[0].environment['versions'].items())
  return (
    f'<h2>Settings and environment</h2><p class="caption">{escape(found[0].environment["device"])}, Python '
    f'{escape(found[0].environment["python"])}, {escape(versions)}.</p>{"".join(blocks)}'
  )
