"""The curves of the page about runs: losses, seconds, FLOPs, sparsity of activations, flip rates."""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import math
import textwrap

import numpy as np

from experiments.reports import charts, claims, page, reached
from experiments.runs import activations, flops
from experiments.runs.progress import SPENT_ON
from experiments.runs.records import dense_of, Groups, RunRecord


def short(label: str) -> str:
  """What fits beside a plot."""
  return textwrap.shorten(label, 32, placeholder=' …')


def _line(label: str, colour: str, curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> charts.Line | None:
  """The mean of the seeds at the steps that all have, with their range."""
  curves = [(x, y) for x, y in curves if len(x)]
  if not curves:
    return None
  steps = np.array(sorted(set.intersection(*(set(x.tolist()) for x, _ in curves))))
  if not len(steps):
    return None
  values = np.stack([y[np.isin(x, steps)] for x, y in curves])
  several = len(curves) > 1
  return charts.Line(
    label, colour, steps, values.mean(0), values.min(0) if several else None, values.max(0) if several else None
  )


def _marks(groups: Groups) -> list[tuple[float, str]]:
  """Marks where a dense phase first follows a sparse one."""
  ends: dict[int, set[str]] = {}
  for run in itertools.chain.from_iterable(groups.values()):
    if run.train[-1]['phase'] == 'dense' and any(record['phase'] == 'sparse' for record in run.train):
      ends.setdefault(run.sparse_end, set()).add(run.label)
  if not ends:
    return []
  first = min(ends)
  text = f'{len(ends[first])} methods turn dense' if len(ends[first]) > 1 else f'{short(*ends[first])} turns dense'
  return [(float(first), text)]


def _curves(group: Sequence[RunRecord], kind: str) -> list[tuple[np.ndarray, np.ndarray]]:
  return [
    (np.array([r['step'] for r in getattr(run, kind)]), np.array([r['loss'] for r in getattr(run, kind)]))
    for run in group
  ]


def _late_range(lines: Sequence[charts.Line]) -> tuple[float, float]:
  """The range of the losses after the first tenth: the first descent is steep and the same for all."""
  late = np.concatenate([line.y[line.x >= 0.1 * line.x.max()] for line in lines])
  low, high = float(late.min()), float(late.max())
  pad = 0.05 * (high - low) or 0.1
  return low - pad, high + pad


def losses(groups: Groups, colours: Mapping[str, str]) -> str:
  drawn = []
  for kind, name in (('validation', 'Validation loss'), ('train', 'Training loss, mean of each logged window')):
    lines = [line for label, group in groups.items() if (line := _line(label, colours[label], _curves(group, kind)))]
    if not lines:
      continue
    chart = charts.line_chart(
      lines, title=name, y_label='nats a token', y_range=_late_range(lines), marks=_marks(groups)
    )
    drawn.append(page.figure(chart, name))
  lead = 'Lines are means over seeds, bands their range; the first tenth of training may lie above the frame.'
  return page.heading('Loss', lead) + page.figures(drawn)


def _comparable_in_time(groups: Groups) -> dict[str, list[RunRecord]]:
  """Finished runs all of whose time was told apart; none unless each had one same device for itself."""
  groups = {label: [run for run in group if run.was_timed] for label, group in groups.items()}
  found = [*itertools.chain.from_iterable(groups.values())]
  if any(run.side_by_side for run in found) or len({run.environment['device'] for run in found}) != 1:
    return {}
  return {label: group for label, group in groups.items() if group}


def time_to_dense(groups: Groups) -> list[tuple[str, str, bool]]:
  """A card a method: after what share of dense's seconds of training it is at dense's final loss; none on a CPU.

  Where a run never is, how much higher it ends, and after what share of dense's seconds.
  """
  groups = _comparable_in_time(groups)
  cards = []
  for label, group in groups.items():
    dense = {run.seed: _seconds_and_losses(run) for run in dense_of(groups, label)}
    pairs = [(_seconds_and_losses(run), dense[run.seed]) for run in group if run.seed in dense]
    if group[0].is_baseline or group[0].on_cpu or not pairs:
      continue
    shares = [reached.share_of_time(own, theirs) for own, theirs in pairs]
    if math.inf not in shares:
      text = f"of dense's seconds of training until {label} is at dense's final loss"
      cards.append((_mean(shares, '.2f'), text, float(np.mean(shares)) > 1))
    else:
      behind = [own[-1][1] - theirs[-1][1] for own, theirs in pairs]
      ended = np.mean([own[-1][0] / theirs[-1][0] for own, theirs in pairs])
      text = f'nats: {label} minus dense at their ends, after {ended:.2f} of its time'
      cards.append((_mean(behind, '+.3f'), text, True))
  return cards


def _seconds_and_losses(run: RunRecord) -> list[tuple[float, float]]:
  """Seconds, of training alone, and loss at each evaluation."""
  seconds = np.interp([r['step'] for r in run.validation], *run.training_seconds())
  return [*zip(seconds.tolist(), (r['loss'] for r in run.validation), strict=True)]


def _mean(values: Sequence[float], digits: str) -> str:
  """The mean as text, with its 95% interval if there are several values."""
  mean = format(float(np.mean(values)), digits)
  return f'{mean} ± {format(claims.half_width(values), digits.lstrip("+"))}' if len(values) > 1 else mean


def loss_against_seconds(groups: Groups, colours: Mapping[str, str]) -> str:
  """What took time and, on an accelerator, validation loss against seconds; '' unless each run had one same device.

  Only finished runs count whose time was fully told apart.
  """
  groups = _comparable_in_time(groups)
  if not groups:
    return ''
  found = [*itertools.chain.from_iterable(groups.values())]
  spent = {label: [np.mean([run.spent[name] for run in group]) for name in SPENT_ON] for label, group in groups.items()}
  columns: dict[str, Sequence[str]] = {'method': list(groups)}
  if not found[0].on_cpu:
    seconds_per_step = {label: spent[label][0] / group[0].config['steps'] for label, group in groups.items()}
    dense = [[seconds_per_step[run.label] for run in dense_of(groups, label)] for label in groups]
    faster = [of[0] / own if of else math.nan for of, own in zip(dense, seconds_per_step.values(), strict=True)]
    speeds = [np.mean([run.tokens_per_s for run in group]) / 1e3 for group in groups.values()]
    columns['thousand tokens a second'] = [f'{speed:,.1f}' for speed in speeds]
    columns['times as fast as dense'] = ['' if math.isnan(ratio) else f'{ratio:.2f}' for ratio in faster]
  for i, name in enumerate(SPENT_ON):
    columns[f'{name}, s'] = [f'{spent[label][i]:,.1f}' for label in groups]
  lead = (
    'Means over seeds, of which the first may compile for all, one run after the other on one device. Evaluation has '
    'its own compiling in it. A method that compiles more programs, one a phase, takes longer to compile, whatever the '
    'length of the run.'
  )
  if found[0].on_cpu:  # which multiplies zeros like other numbers
    lead = f'{lead} On a CPU no method is faster than another.'
    return page.heading('What took time', lead) + page.columns(columns)
  lead = f'Seconds of the steps alone; the table has what else took time. {lead}'
  return page.heading('Loss against time', lead) + _against_seconds(groups, colours) + page.columns(columns)


def _against_seconds(groups: Groups, colours: Mapping[str, str]) -> str:
  lines = []
  for label, group in groups.items():
    if line := _line(label, colours[label], _curves(group, 'validation')):
      seconds = [np.interp(line.x, *run.training_seconds()) for run in group]
      lines.append(dataclasses.replace(line, x=np.mean(seconds, axis=0)))
  if not lines:
    return ''
  chart = charts.line_chart(
    lines,
    title='Validation loss against seconds of training',
    y_label='nats a token',
    x_label='seconds of training',
    y_range=_late_range(lines),
    width=1140,
    height=380,
  )
  return page.figure(chart)


def loss_against_flops(groups: Groups, colours: Mapping[str, str]) -> str:
  """Validation loss against training FLOPs, and which methods have none that can be counted."""
  lines, uncounted = [], ''
  for label, group in groups.items():
    line = _line(label, colours[label], _curves(group, 'validation'))
    try:
      curve = flops.of_run(group[0].config, head=False)
    except ValueError as error:
      uncounted += page.warning(f'Without {label}, whose FLOPs are not known: {error}.')
    else:
      if line and curve:
        lines.append(dataclasses.replace(line, x=curve.cumulative(head=False)[line.x.astype(int) - 1]))
  if not lines:
    return uncounted and page.heading('Loss against FLOPs') + uncounted
  power = 3 * int(np.log10(max(line.x.max() for line in lines)) // 3)
  lines = [dataclasses.replace(line, x=line.x / 10.0**power) for line in lines]
  chart = charts.line_chart(
    lines,
    title='Validation loss against training FLOPs',
    y_label='nats a token',
    x_label=f'training FLOPs, 1e{power}',
    y_range=_late_range(lines),
    width=1140,
    height=380,
  )
  lead = (
    'Counted from shapes, densities and phases: the matmuls of the blocks, forward and backward, and causal attention; '
    'without the language-model head, and as if the hardware skipped every zero.'
  )
  return page.heading('Loss against FLOPs', lead) + uncounted + page.figure(chart)


_MEASURES = {
  activations.ZEROS: 'share of zeros',
  activations.KEPT_SUM: 'share of the sum that the pattern keeps',
}


def activation_sparsity(groups: Groups) -> str:
  """Sparsity of squared ReLU over training, a chart a method and measure with a line a layer."""
  found: list[tuple[str, str, Sequence[RunRecord], list[charts.Line]]] = []
  for label, group in groups.items():
    for measure, name in _MEASURES.items():
      # A pattern in an order that the sparse phase keeps cannot be measured in a dense one.
      layers = dict.fromkeys(layer for record in group[0].validation for layer in record.get(measure, {}))
      curves = {layer: [run.activation_curve(measure, layer) for run in group] for layer in layers}
      if lines := _layer_lines(curves):
        found.append((label, name, group, lines))
  if not found:
    return ''
  # One range for all, so that heights compare; above it the phases have their names.
  low = min(0.9, math.floor(10 * min(float(line.y.min()) for *_, lines in found for line in lines)) / 10)
  y_range = (low, 1 + 0.12 * (1 - low))
  drawn = []
  for label, name, group, lines in found:
    title, marks = f'{label}: {name}', _phase_marks(group[0])
    chart = charts.line_chart(lines, title=title, y_label=name, y_range=y_range, marks=marks, width=380, height=230)
    drawn.append(page.figure(chart, title))
  lead = (
    'Squared ReLU on validation text, in the forward that the step trains with, '
    'each layer by itself: its share of zeros before any pattern, and how much of its sum the pattern keeps (in dense '
    'phases: would keep). Vertical lines part phases; axes need not begin at zero. Validation losses are taken with '
    'dense activations, since a pattern over a block of tokens sees later ones; training losses are not.'
  )
  return page.heading('Activations', lead) + page.figures(drawn, small=True)


def _phase_marks(run: RunRecord) -> list[tuple[float, str]]:
  """Marks where one phase follows another, as exactly as log lines tell, with the name of the one that ends."""
  ends = [(float(a['step']), a['phase']) for a, b in itertools.pairwise(run.train) if a['phase'] != b['phase']]
  # Left of an early line is no room for a name.
  return [(step, phase if step > 0.2 * run.train[-1]['step'] else '') for step, phase in ends]


def _layer_lines(curves: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]]) -> list[charts.Line]:
  """A line a layer; with names unless there are more layers than colours."""
  colours = charts.PALETTE[1:]
  lines = [
    _line(layer if len(curves) <= len(colours) else '', colours[i % len(colours)], seeds)
    for i, (layer, seeds) in enumerate(curves.items())
  ]
  return [line for line in lines if line]


def flip_rates(groups: Groups, colours: Mapping[str, str]) -> str:
  lines = [
    line
    for label, group in groups.items()
    if (line := _line(label, colours[label], [run.flip_curve() for run in group]))
  ]
  if not lines:
    return page.heading('Flip rate', 'No run watched its masks.')
  modes = {run.config['recipe']['flip_rate'] for group in groups.values() for run in group}
  unit = (
    'Per optimizer step: what a search would choose before and after the step, whatever mask is in use.'
    if modes == {'step'}
    else 'Between two mask refreshes, whose distance differs between recipes: compare shapes, not heights, across them.'
  )
  overall = charts.line_chart(
    lines,
    title='Flip rate',
    y_label='share of mask entries that flip, log scale',
    log=True,
    marks=_marks(groups),
    width=1140,
    height=380,
  )
  small = []
  for label, group in groups.items():
    by_layer: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name in group[0].train[-1]['flip_rates']:
      for run in group:
        start = int(run.flip_curve()[0][0]) if len(run.flip_curve()[0]) else 0
        records = [r for r in run.train if r['step'] >= start and r['flip_rates'].get(name) is not None]
        curve = np.array([r['step'] for r in records]), np.array([r['flip_rates'][name] for r in records])
        by_layer.setdefault(name.removesuffix('/kernel'), []).append(curve)
    if layers := _layer_lines(by_layer):
      chart = charts.line_chart(
        layers,
        title=f'Flip rate of each layer, {label}',
        y_label='flip rate, log scale',
        log=True,
        width=380,
        height=230,
      )
      small.append(page.figure(chart, label))
  lead = (
    f'The share of mask entries that change. {unit} A dense run that is watched has masks chosen and compared, and '
    'nothing made sparse. Rates of zero have no place on the log scale.'
  )
  layers = 'Lines have names where a model has at most eight such layers.'
  return (
    page.heading('Flip rate', lead) + page.figure(overall)
    + page.heading('Flip rate of each layer', layers) + page.figures(small, small=True)
  )  # fmt: skip
