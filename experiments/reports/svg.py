"""Line charts and dot plots as inline SVG: no network, no script, sharp at any size."""

from collections.abc import Sequence
import dataclasses
from html import escape
import math
import zlib

import numpy as np

# Colours that people with any colour vision can tell apart (Okabe and Ito), darkened where white needs it.
PALETTE = ('#1b1f24', '#0072b2', '#d55e00', '#009e73', '#b2629a', '#b38600', '#6a3d9a', '#8c564b', '#7f7f7f')


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
    dash: an SVG dash pattern.
  """

  label: str
  colour: str
  x: np.ndarray
  y: np.ndarray
  low: np.ndarray | None = None
  high: np.ndarray | None = None
  dash: str = ''


def ticks(low: float, high: float, count: int = 5) -> list[float]:
  """Round numbers inside [low, high], about `count` of them.

  >>> ticks(0, 4000)
  [0.0, 1000.0, 2000.0, 3000.0, 4000.0]
  """
  if not high > low:
    return [low]
  raw = (high - low) / count
  power = 10.0 ** math.floor(math.log10(raw))
  step = min((m * power for m in (1, 2, 2.5, 5, 10)), key=lambda s: abs(s - raw))
  first = math.ceil(low / step - 1e-9)
  last = math.floor(high / step + 1e-9)
  return [round(i * step, 12) + 0.0 for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
  """Powers of ten inside [low, high], with 2 and 5 times them where there are few."""
  powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
  few = math.log10(high / low) < 2
  values = [m * 10.0**p for p in powers for m in ((1, 2, 5) if few else (1,))]
  return [v for v in values if low * 0.999 <= v <= high * 1.001]


def number(value: float) -> str:
  """A short tick label.

  >>> number(4000.0), number(0.0002), number(1.25)
  ('4,000', '2e-4', '1.25')
  """
  if value == 0:
    return '0'
  if abs(value) < 1e-2:
    mantissa, exponent = f'{value:.1e}'.split('e')
    return f'{mantissa.removesuffix(".0")}e{int(exponent)}'
  return f'{value:,.0f}' if abs(value) >= 100 else f'{value:g}'


def line_chart(
  lines: Sequence[Line],
  *,
  title: str,
  y_label: str,
  x_label: str = 'optimizer step',
  log: bool = False,
  y_range: tuple[float, float] | None = None,
  marks: Sequence[tuple[float, str]] = (),
  legend: bool = True,
  width: int = 560,
  height: int = 330,
) -> str:
  """Draws curves.

  Args:
    lines: at least one, with at least one point.
    title: read out by screen readers.
    y_label: written above the axis.
    x_label: written below the axis.
    log: logarithmic y axis; values of zero are left out.
    y_range: lowest and highest y; curves are cut there. None fits all.
    marks: (x, text) vertical lines.
    legend: whether to draw one, above the plot.
    width: in CSS pixels at full size.
    height: of the plot without its legend.

  Returns:
    An `<svg>` element.
  """
  rows = _legend_rows([line for line in lines if line.label] if legend else [], width - 70)
  left, right, top, bottom = 62, 24, 26 + 20 * len(rows), 42
  height += 20 * len(rows)
  xs = np.concatenate([line.x for line in lines])
  x_low, x_high = float(min(xs.min(), 0)), float(max(xs.max(), 1))
  values = np.concatenate([v for line in lines for v in (line.y, line.low, line.high) if v is not None])
  values = values[np.isfinite(values) & (values > 0 if log else True)]
  y_low, y_high = y_range or (_padded(values, log) if len(values) else (1e-6, 1.0))
  scale = math.log10 if log else float

  def px(x: float) -> float:
    return left + (x - x_low) / (x_high - x_low) * (width - left - right)

  def py(y: float) -> float:
    share = (scale(y) - scale(y_low)) / (scale(y_high) - scale(y_low))
    return top + (1 - share) * (height - top - bottom)

  clip = f'clip{zlib.crc32(f"{title} {y_label} {xs} {values}".encode())}'
  out = [
    f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">',
    f'<clipPath id="{clip}"><rect x="{left}" y="{top - 1}" width="{width - left - right}" '
    f'height="{height - top - bottom + 2}"/></clipPath>',
    f'<text class="axis" x="0" y="{top - 12}">{escape(y_label)}</text>',
  ]
  for value in log_ticks(y_low, y_high) if log else ticks(y_low, y_high):
    y = py(value)
    out.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
    out.append(f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
  for value in ticks(x_low, x_high, 6 if width > 400 else 4):
    out.append(
      f'<text class="tick" x="{px(value):.1f}" y="{height - bottom + 18}" text-anchor="middle">{number(value)}</text>'
    )
  out.append(f'<line class="base" x1="{left}" x2="{width - right}" y1="{height - bottom}" y2="{height - bottom}"/>')
  out.append(f'<text class="axis" x="{width - right}" y="{height - 5}" text-anchor="end">{escape(x_label)}</text>')
  for x, text in marks:
    out.append(f'<line class="mark" x1="{px(x):.1f}" x2="{px(x):.1f}" y1="{top}" y2="{height - bottom}"/>')
    out.append(f'<text class="note" x="{px(x) - 5:.1f}" y="{top + 11}" text-anchor="end">{escape(text)}</text>')
  out.append(f'<g clip-path="url(#{clip})">')
  for line in lines:
    out += _curve(line, px, py, log)
  out.append('</g>')
  y = 12
  for row in rows:
    for x, line in row:
      out.append(
        f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{line.colour}" stroke-width="2.5" '
        f'stroke-dasharray="{line.dash}"/>'
      )
      out.append(f'<text class="legend" x="{x + 24}" y="{y}">{escape(line.label)}</text>')
    y += 20
  return '\n'.join([*out, '</svg>'])


def _curve(line: Line, px, py, log: bool) -> list[str]:
  keep = np.isfinite(line.y) & (line.y > 0 if log else True)
  x, y = line.x[keep], line.y[keep]
  out = []
  if line.low is not None and line.high is not None and len(x) > 1:
    floor = y.min() if log else -math.inf
    low, high = np.maximum(line.low[keep], floor), line.high[keep]
    edge = [*zip(x, high, strict=True), *reversed(list(zip(x, low, strict=True)))]
    points = ' '.join(f'{px(a):.1f},{py(b):.1f}' for a, b in edge)
    out.append(f'<polygon points="{points}" fill="{line.colour}" opacity="0.13"/>')
  points = ' '.join(f'{px(a):.1f},{py(b):.1f}' for a, b in zip(x, y, strict=True))
  name = f'<title>{escape(line.label)}</title>' if line.label else ''
  out.append(
    f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="1.8" '
    f'stroke-linejoin="round" stroke-dasharray="{line.dash}">{name}</polyline>'
  )
  if len(x) == 1:
    out.append(f'<circle cx="{px(x[0]):.1f}" cy="{py(y[0]):.1f}" r="3" fill="{line.colour}"/>')
  return out


def dot_plot(rows: Sequence[tuple[str, str, Sequence[float]]], *, title: str, x_label: str, width: int = 1140) -> str:
  """Draws one row a method: a dot a seed and a bar at the mean.

  Args:
    rows: (label, colour, values).
    title: read out by screen readers.
    x_label: written below the axis.
    width: in CSS pixels at full size.
  """
  values = np.array([v for _, _, row in rows for v in row])
  low, high = _padded(values, False)
  left, right, row_height = 210, 80, 30
  height = row_height * len(rows) + 44

  def px(x: float) -> float:
    return left + (x - low) / (high - low) * (width - left - right)

  out = [
    f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">'
  ]
  for value in ticks(low, high, 8):
    out.append(f'<line class="grid" x1="{px(value):.1f}" x2="{px(value):.1f}" y1="4" y2="{height - 38}"/>')
    out.append(f'<text class="tick" x="{px(value):.1f}" y="{height - 20}" text-anchor="middle">{number(value)}</text>')
  out.append(f'<text class="axis" x="{width - right}" y="{height - 3}" text-anchor="end">{escape(x_label)}</text>')
  for i, (label, colour, row) in enumerate(rows):
    y, mean = 4 + row_height * (i + 0.5), float(np.mean(row))
    out.append(f'<text class="legend" x="{left - 14}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    out.append(
      f'<line x1="{px(min(row)):.1f}" x2="{px(max(row)):.1f}" y1="{y}" y2="{y}" stroke="{colour}" '
      'stroke-width="2" opacity="0.35"/>'
    )
    for value in row:
      out.append(f'<circle cx="{px(value):.1f}" cy="{y}" r="5" fill="{colour}" opacity="0.65"/>')
    out.append(
      f'<line x1="{px(mean):.1f}" x2="{px(mean):.1f}" y1="{y - 9}" y2="{y + 9}" stroke="{colour}" stroke-width="2.5"/>'
    )
    out.append(f'<text class="tick" x="{width - right + 14}" y="{y + 4:.1f}">{mean:.4f}</text>')
  return '\n'.join([*out, '</svg>'])


def _padded(values: np.ndarray, log: bool) -> tuple[float, float]:
  low, high = float(values.min()), float(values.max())
  if log:
    return low / 1.3, high * 1.3
  pad = 0.06 * (high - low) or max(abs(high), 1.0) * 0.05
  return low - pad, high + pad


def _legend_rows(lines: Sequence[Line], width: int) -> list[list[tuple[int, Line]]]:
  rows: list[list[tuple[int, Line]]] = []
  x = width + 1
  for line in lines:
    space = 40 + 7 * len(line.label)
    if x + space > width:
      rows.append([])
      x = 0
    rows[-1].append((x, line))
    x += space
  return rows
