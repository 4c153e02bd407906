"""Parts of the page about benchmark records: what a record is called, bars, tables."""

from collections.abc import Mapping, Sequence
from html import escape
import math
from typing import Any

from experiments.reports import svg

_COLOURS = {'sparse': '#0072b2', 'dense': '#7f7f7f', 'dense_fp8': '#b38600', 'cusparselt': '#d55e00', 'xla': '#7f7f7f'}
_OTHER = '#b2629a'

type Record = Mapping[str, Any]

# Of neurons, in weight gradients.
_PUBLISHED_DENSE_SHARE = 0.05


def title(record: Record) -> str:
  """A record in a few words.

  >>> title({'bench': 'ffn', 'recipe': 's_ste', 'activation': 'gelu', 'shape': {'tokens': 8, 'd': 4, 'hidden': 16}})
  's_ste gelu 8 x 4 x 16'
  """
  if record['bench'] == 'mesh':
    where = f' on {math.prod(record["mesh"].values())} {record["device"].removeprefix("NVIDIA ")}'
    how = [record['sharding']] if record.get('sharding', 'whole') != 'whole' else []
    how += ['pipelined exchanges'] if 'pipelined' in record.get('xla_flags', '') else []
    return ', '.join([title({**record, 'bench': record['op']}) + where, *how])
  if record['bench'] == 'mesh_check':
    return f'{record["op"]} on {record["device"]}'
  shape = record['shape']
  if record['bench'] == 'attention':
    return f'{record["pattern"]}, window {record["window"]}, {shape["batch"]} x {shape["length"]}'
  if record['bench'] == 'tracking':
    return f'{record["model"]} of {shape["layers"]} layers'
  if isinstance(shape, Mapping):
    wanted = ('tokens', 'd', 'hidden') if 'hidden' in shape else ('tokens', 'd_in', 'd_out')
    wanted = ('batch', 'length') if record['bench'] in ('block', 'train_step') else wanted
    wanted = ('rows', 'columns') if 'rows' in shape else wanted
    shape = [shape[key] for key in wanted]
  match record['bench']:
    case 'ffn' | 'ffn_check' | 'ffn_pytorch':
      words = [record['recipe'], record['activation']]
    case 'block' | 'train_step':
      words = [record['model'], record['recipe']]
    case 'sparse_matmul' | 'float8_products' | 'cusparselt' | 'epilogue':
      words = [record['role'], record['dtype']]
    case 'vnm_matmul':
      words = [record['dtype']]
    case _:
      words = [record['op'], record['dtype']]
  words += [pattern(record)] if 'pattern' in record else []
  return ' '.join([*words, ' x '.join(map(str, shape))])


def pattern(record: Record) -> str:
  """The pattern of a record's activations, with that along tokens or the share of dense neurons where it is not usual.

  >>> pattern({'pattern': '128:2:8', 'dense_features': 0.2})
  '128:2:8 with 20% dense neurons'
  """
  if record.get('token_pattern'):
    return f'{record["pattern"]}, {record["token_pattern"]} along tokens'
  share = dense_features(record)
  return record['pattern'] + ('' if share == _PUBLISHED_DENSE_SHARE else f' with {share:.0%} dense neurons')


def dense_features(record: Record) -> float:
  """The share of neurons that are dense in the weight gradients; older records of steps leave out the usual one."""
  return record.get('dense_features', _PUBLISHED_DENSE_SHARE)


def milliseconds(record: Record) -> float:
  """The time that counts: with mask searches spread over their period where there are any."""
  return record.get('amortised_ms') or record['median_ms']


def ratios(record: Record) -> dict[str, float]:
  """Baseline -> how many times longer it takes."""
  return {name: row['median_ms'] / milliseconds(record) for name, row in record.get('baselines', {}).items()}


def bars(rows: Sequence[tuple[str, Mapping[str, float]]], *, label: str, unit: str = 'ms') -> str:
  """Horizontal bars: for each row one bar a name, on one scale.

  Args:
    rows: (what, name -> value).
    label: read out by screen readers.
    unit: written behind each value.

  Returns:
    An `<svg>` element.
  """
  longest = max(value for _, values in rows for value in values.values())
  left, right, thick = max(380, *(7 * len(what) for what, _ in rows)), 200, 15
  height = sum(thick * len(values) + 12 for _, values in rows) + 6
  out = [f'<svg viewBox="0 0 1000 {height}" role="img" aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg">']
  y = 4
  for what, values in rows:
    out.append(f'<text x="0" y="{y + 12}">{escape(what)}</text>')
    for name, value in values.items():
      width = max(1.0, value / longest * (1000 - left - right))
      colour = _COLOURS.get(name, _OTHER)
      out.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{thick - 3}" rx="2" fill="{colour}"/>')
      text = f'{value:.3g} {unit} {name.replace("_", " ")}'
      out.append(f'<text class="soft" x="{left + width + 7:.1f}" y="{y + 10.5}">{escape(text)}</text>')
      y += thick
    y += 12
  return '\n'.join([*out, '</svg>'])


def speedups(groups: Mapping[str, Sequence[tuple[str, float]]], *, label: str) -> str:
  """Bars of how many times faster than dense, with a line at 1; a picture of its own, on white.

  Args:
    groups: heading -> (what, times faster).
    label: read out by screen readers.

  Returns:
    An `<svg>` element.
  """
  longest = max(1.2, *(value for rows in groups.values() for _, value in rows))
  left, thick, top = 330, 22, 30
  scale = (900 - left - 60) / longest
  height = sum(top + thick * len(rows) for rows in groups.values()) + 22
  out = [
    f'<svg viewBox="0 0 900 {height}" role="img" aria-label="{escape(label)}" xmlns="http://www.w3.org/2000/svg"'
    ' font-family="system-ui, \'DejaVu Sans\', sans-serif" font-size="13">',
    '<rect width="900" height="100%" fill="#ffffff"/>',
  ]
  y = 0
  for heading, rows in groups.items():
    y += top
    out.append(f'<text x="12" y="{y - 8}" font-weight="600" fill="#1b1f24">{escape(heading)}</text>')
    for what, value in rows:
      colour, width = _COLOURS['sparse' if value >= 1 else 'cusparselt'], value * scale
      out.append(f'<text x="12" y="{y + 15}" fill="#1b1f24">{escape(what)}</text>')
      out.append(f'<rect x="{left}" y="{y + 3}" width="{width:.1f}" height="{thick - 7}" rx="2" fill="{colour}"/>')
      out.append(f'<text x="{left + width + 7:.1f}" y="{y + 15}" fill="#59636e">{value:.2f}</text>')
      y += thick
  x = left + scale  # of 1
  out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{y}" stroke="#1b1f24" stroke-dasharray="3 3"/>')
  out.append(f'<text x="{x:.1f}" y="{y + 14}" text-anchor="middle" fill="#59636e">as fast as dense</text>')
  return '\n'.join([*out, '</svg>\n'])


def stacked(profile: Mapping[str, Mapping[str, Any]], *, label: str) -> str:
  """Device time of a step by kind of kernel, one bar a twin."""
  kinds = [kind for kind in next(iter(profile.values()))['by_kind_ms']]
  colours = dict(zip(kinds, svg.PALETTE[1:] + svg.PALETTE[:1] + ('#bbbbbb',), strict=False))
  totals = {twin: sum(summary['by_kind_ms'].values()) + summary['idle_ms'] for twin, summary in profile.items()}
  scale = 830 / max(totals.values())
  out = [
    f'<svg viewBox="0 0 1000 {34 * len(profile) + 46}" role="img" aria-label="{escape(label)}"'
    ' xmlns="http://www.w3.org/2000/svg">'
  ]
  for i, (twin, summary) in enumerate(profile.items()):
    x, y = 80.0, 34 * i + 4
    out.append(f'<text x="0" y="{y + 16}">{escape(twin.replace("_", " "))}</text>')
    for kind, ms in summary['by_kind_ms'].items():
      width = ms * scale
      out.append(
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="24" fill="{colours[kind]}">'
        f'<title>{escape(kind)}: {ms:.3f} ms</title></rect>'
      )
      x += width
    out.append(f'<text class="soft" x="{x + 6:.1f}" y="{y + 16}">{totals[twin]:.2f} ms</text>')
  used = [kind for kind in kinds if any(summary['by_kind_ms'][kind] for summary in profile.values())]
  x, y = 80.0, 34 * len(profile) + 22
  for kind in used:
    out.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{colours[kind]}"/>')
    out.append(f'<text class="soft" x="{x + 15}" y="{y}">{escape(kind)}</text>')
    x += 30 + 7.6 * len(kind)
  return '\n'.join([*out, '</svg>'])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A `<table>` that scrolls sideways where it is too wide."""

  def row(tag: str, cells: Sequence[str]) -> str:
    texts = (f'<{tag}{"" if i == 0 else " class=n"}>{escape(cell)}</{tag}>' for i, cell in enumerate(cells))
    return '<tr>' + ''.join(texts) + '</tr>'

  body = '\n'.join(row('td', cells) for cells in rows)
  return f'<div class="scroll"><table><thead>{row("th", heads)}</thead><tbody>\n{body}\n</tbody></table></div>'
