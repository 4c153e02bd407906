"""The charts of every page and of the README, by Matplotlib, as SVG that stands in a page without network or script."""

from collections.abc import Mapping, Sequence
import dataclasses
from html import escape
import io
import json
import re
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
import numpy as np

from experiments.reports.page import Html

# Colours that people with any colour vision can tell apart (Okabe and Ito), darkened where white needs it.
PALETTE = ('#1b1f24', '#0072b2', '#d55e00', '#009e73', '#b2629a', '#b38600', '#6a3d9a', '#8c564b', '#7f7f7f')
COLOURS = {'faster': '#0072b2', 'slower': '#d55e00', 'dense': '#7f7f7f'}
_INK, _SOFT, _GRID = '#1b1f24', '#59636e', '#e9ecef'
_STYLE = {
  'svg.fonttype': 'none', 'svg.hashsalt': 'sparse24', 'font.family': 'DejaVu Sans', 'font.size': 10,
  'axes.edgecolor': '#8c959f', 'axes.labelcolor': _SOFT, 'xtick.color': _SOFT, 'ytick.color': _SOFT,
  'axes.spines.top': False, 'axes.spines.right': False, 'axes.spines.left': False, 'ytick.left': False,
  'axes.grid': True, 'grid.color': _GRID, 'axes.axisbelow': True, 'lines.linewidth': 1.8, 'legend.frameon': False,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Line:
  """One curve, with the range of its seeds around it.

  Attributes:
    label: name in the legend; curves with an empty label get none.
    colour: CSS colour.
    x: steps.
    y: values.
    low: lower edge of the band, or None.
    high: upper edge of the band, or None.
  """

  label: str
  colour: str
  x: np.ndarray
  y: np.ndarray
  low: np.ndarray | None = None
  high: np.ndarray | None = None


def line_chart(
  lines: Sequence[Line],
  *,
  title: str,
  y_label: str,
  x_label: str = 'optimizer step',
  log: bool = False,
  y_range: tuple[float, float] | None = None,
  marks: Sequence[tuple[float, str]] = (),
  width: int = 560,
  height: int = 330,
  opaque: bool = False,
) -> Html:
  """Draws curves.

  Args:
    lines: at least one, with at least one point.
    title: read out by screen readers.
    y_label: written beside the axis.
    x_label: written below the axis.
    log: logarithmic y axis; values of zero are left out.
    y_range: lowest and highest y; curves are cut there. None fits all.
    marks: (x, text) vertical lines.
    width: in CSS pixels.
    height: of the plot without its legend.
    opaque: on white, for a file of its own.
  """
  named = [line for line in lines if line.label]
  per_row = max(1, width // (60 + 7 * max((len(line.label) for line in named), default=1)))
  height += 20 * -(-len(named) // per_row)
  with matplotlib.rc_context(_STYLE):
    chart, axes = _figure(width, height)
    if log:
      axes.set_yscale('log', nonpositive='mask')
    for line in lines:
      keep = np.isfinite(line.y) & (line.y > 0 if log else True)
      x, y = line.x[keep], line.y[keep]
      axes.plot(x, y, color=line.colour, label=line.label or None, marker='o' if len(x) == 1 else None, markersize=4)
      if line.low is not None and line.high is not None and len(x) > 1:
        low = np.maximum(line.low[keep], y.min()) if log else line.low[keep]
        axes.fill_between(x, low, line.high[keep], color=line.colour, alpha=0.13, linewidth=0)
    axes.set_xlim(left=min(0.0, *(float(line.x.min()) for line in lines)))
    if y_range:
      axes.set_ylim(y_range)
    axes.set_xlabel(x_label, loc='right')
    axes.set_ylabel(y_label)
    for x, text in marks:
      axes.axvline(x, color='#8c959f', linestyle=(0, (3, 3)), linewidth=1)
      place = dict(xytext=(-5, -3), textcoords='offset points', ha='right', va='top', color=_SOFT, fontsize=9)
      axes.annotate(text, (x, 1), xycoords=('data', 'axes fraction'), **place)
    if named:
      chart.legend(loc='outside upper left', ncols=min(per_row, len(named)))
    return _svg(chart, title, opaque=opaque)


def dot_plot(rows: Sequence[tuple[str, str, Sequence[float]]], *, title: str, x_label: str) -> Html:
  """Draws one row a method, (label, colour, values): a dot a seed, and a bar and a figure at the mean."""
  with matplotlib.rc_context(_STYLE):
    chart, axes = _figure(1140, 30 * len(rows) + 60)
    places = range(len(rows))[::-1]
    for place, (_, colour, values) in zip(places, rows, strict=True):
      mean, row = float(np.mean(values)), [place] * len(values)
      axes.hlines(place, min(values), max(values), color=colour, alpha=0.35)
      axes.scatter(values, row, color=colour, alpha=0.65, s=36, linewidths=0)
      axes.plot([mean], [place], marker='|', markersize=16, markeredgewidth=2.2, color=colour)
      _note(axes, f'{mean:.4f}', (1.0, place), xycoords=('axes fraction', 'data'))
    axes.set_yticks([*places], [label for label, _, _ in rows])
    axes.tick_params('y', labelcolor=_INK)
    axes.grid(visible=False, axis='y')
    axes.margins(y=0.5 / max(1, len(rows)))
    axes.set_xlabel(x_label, loc='right')
    return _svg(chart, title)


def speedups(groups: Mapping[str, Sequence[tuple[str, float]]], *, label: str) -> Html:
  """Bars of how many times faster than dense, heading -> (what, times), with a line at 1; for a white page."""
  with matplotlib.rc_context(_STYLE):
    rows = sum(len(group) for group in groups.values())
    chart, axes = _figure(900, 22 * rows + 30 * len(groups) + 30)
    at, ticks, names = 0.0, [], []
    for heading, group in groups.items():
      axes.annotate(
        heading, (0, at), xycoords=('figure fraction', 'data'), va='center', fontweight='bold', color=_INK
      )
      at -= 1.1
      for what, value in group:
        kind = 'dense' if what.startswith('dense,') else 'faster' if value >= 1 else 'slower'
        axes.barh(at, value, height=0.7, color=COLOURS[kind])
        _note(axes, f'{value:.2f}', (value, at))
        ticks.append(at)
        names.append(what)
        at -= 1
      at -= 0.3
    _as_table(axes, ticks, names)
    axes.axvline(1, color=_INK, linestyle=(0, (3, 3)), linewidth=1)
    _note(axes, 'as fast as dense', (1, at + 0.45))  # beside the line, below the last bar
    axes.set_ylim(at, 0.6)
    axes.margins(x=0.08)
    return _svg(chart, label, opaque=True)


def described(drawn: Html, rows: Any) -> str:
  """A file of a picture, whose `<desc>` says as JSON what it shows."""
  start = drawn.index('>') + 1
  return f'{drawn[:start]}\n <desc>{escape(json.dumps(rows), quote=False)}</desc>{drawn[start:]}\n'


def _figure(width: int, height: int) -> tuple[Figure, Any]:
  """A figure of a size in points, which stand for CSS pixels, and its axes."""
  chart = Figure(figsize=(width / 72, height / 72), layout='constrained')
  FigureCanvasSVG(chart)
  return chart, chart.add_subplot()


def _note(axes: Any, text: str, place: tuple[float, float], xycoords: Any = 'data') -> None:
  """A figure behind a bar, or words beside a line."""
  axes.annotate(text, place, xycoords=xycoords, xytext=(5, 0), textcoords='offset points', va='center', color=_SOFT)


def _as_table(axes: Any, ticks: Sequence[float], names: Sequence[str]) -> None:
  """Rows have names, and bars their figures, so that there is no axis to read them by."""
  axes.set_yticks(ticks, names)
  axes.tick_params('y', labelcolor=_INK)
  axes.set_xticks([])
  axes.grid(visible=False)
  axes.spines.bottom.set_visible(False)


def _svg(chart: Figure, title: str, *, opaque: bool = False) -> Html:
  """An `<svg>` element: without a date, names of groups, or digits that nobody sees."""
  out = io.StringIO()
  chart.savefig(out, format='svg', transparent=not opaque, metadata={'Date': None, 'Creator': None})
  text = out.getvalue()
  text = text[text.index('<svg') :]
  text = re.sub(r'\s*<metadata>.*?</metadata>', '', text, flags=re.DOTALL)
  text = re.sub(r'<g id="[A-Za-z_0-9.]+">', '<g>', text)
  text = re.sub(r' (d|x|y|points|transform)="[^"]*"', lambda found: re.sub(r'(\.\d\d)\d+', r'\1', found[0]), text)
  text = text.replace('<svg ', f'<svg role="img" aria-label="{escape(title)}" ', 1)
  return Html(re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', text, count=2).strip())
