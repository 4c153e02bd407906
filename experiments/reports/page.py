"""One self-contained HTML page: no network, no script, pictures inline."""

from collections.abc import Mapping, Sequence
from html import escape

_STYLE = """
:root { --ink: #1b1f24; --soft: #59636e; --rule: #dfe3e8; --panel: #f6f8fa; --bad: #b3261e }
* { box-sizing: border-box }
body { margin: 0; background: #fff; color: var(--ink); font: 15px/1.55 system-ui, 'Inter', 'DejaVu Sans', sans-serif }
main { max-width: 1240px; margin: 0 auto; padding: 40px 32px 72px }
h1 { font-size: 30px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -.01em }
h2 { font-size: 19px; margin: 44px 0 6px } h3 { font-size: 15px; margin: 26px 0 6px }
p, li { max-width: 92ch }
.soft { color: var(--soft); margin: 0 0 14px }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin: 22px 0 8px }
.card { background: var(--panel); border-radius: 10px; padding: 14px 16px; overflow-wrap: anywhere }
.card b { display: block; font-size: 24px; font-variant-numeric: tabular-nums; line-height: 1.25 }
.card span { color: var(--soft); font-size: 13px } .card.below b { color: var(--bad) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(460px, 1fr)); gap: 26px 30px }
.charts.small { grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)) }
figure { margin: 0 0 26px } figcaption { font-weight: 600; margin-bottom: 4px }
svg { max-width: 100%; height: auto; display: block }
.scroll { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th { text-align: left; font-size: 13px; color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--rule) }
th, td { padding: 8px 14px 8px 0; vertical-align: top } td { border-bottom: 1px solid var(--rule) }
th.n, td.n { text-align: right } td.n { white-space: pre } th:first-child { min-width: 15em }
td small { color: var(--soft); display: block }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 9px }
.finding { display: grid; grid-template-columns: 104px 1fr; gap: 16px; padding: 13px 0 }
.finding { border-bottom: 1px solid var(--rule) }
.finding p { margin: 2px 0 0; color: var(--soft) } .finding cite { font-size: 13px; color: var(--soft) }
.verdict { font-weight: 600; font-size: 13px }
.agrees { color: #1a7f37 } .disagrees { color: var(--bad) } .open { color: #7a5b00 }
.warn { border-left: 4px solid #d4a72c; background: #fff8e5; padding: 10px 16px; margin: 18px 0 }
details { margin: 10px 0; border: 1px solid var(--rule); border-radius: 8px; padding: 9px 14px }
summary { cursor: pointer }
pre { font: 12.5px/1.5 ui-monospace, 'DejaVu Sans Mono', monospace; overflow-x: auto; margin: 10px 0 0 }
"""


class Html(str):
  """Text that is markup already; all other text is escaped."""


def html(text: str) -> Html:
  """Markup of a text.

  >>> html('a < b'), html(Html('<b>c</b>'))
  ('a &lt; b', '<b>c</b>')
  """
  return text if isinstance(text, Html) else Html(escape(text))


def page(name: str, parts: Sequence[str]) -> str:
  """The whole page, from the markup of its parts."""
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    f'<title>{escape(name)}</title><style>{_STYLE}</style></head><body><main>\n'
    + '\n'.join(part for part in parts if part)
    + '\n</main></body></html>\n'
  )


def title(text: str, lead: str) -> Html:
  """The head of the page."""
  return Html(f'<h1>{html(text)}</h1><p class="soft">{html(lead)}</p>')


def heading(text: str, lead: str = '') -> Html:
  """A section's head, with what has to be known to read it."""
  return Html(f'<h2>{html(text)}</h2>' + (f'<p class="soft">{html(lead)}</p>' if lead else ''))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
  """A table that scrolls sideways where it is too wide; all columns but the first are numbers."""

  def row(tag: str, cells: Sequence[str]) -> str:
    texts = (f'<{tag}{" class=n" if i else ""}>{html(cell)}</{tag}>' for i, cell in enumerate(cells))
    return '<tr>' + ''.join(texts) + '</tr>'

  body = '\n'.join(row('td', cells) for cells in rows)
  return Html(f'<div class="scroll"><table><thead>{row("th", heads)}</thead><tbody>\n{body}\n</tbody></table></div>')


def cards(figures: Sequence[tuple[str, str, bool]]) -> Html:
  """Figures in large print: (figure, what it is, whether it is a loss)."""
  boxes = ''.join(
    f'<div class="card{" below" if loss else ""}"><b>{html(value)}</b><span>{html(text)}</span></div>'
    for value, text, loss in figures
  )
  return Html(f'<div class="cards">{boxes}</div>' if boxes else '')


def figure(picture: Html, caption: str = '') -> Html:
  """A picture under its name."""
  return Html(f'<figure>{f"<figcaption>{html(caption)}</figcaption>" if caption else ""}{picture}</figure>')


def figures(pictures: Sequence[Html], *, small: bool = False) -> Html:
  """Pictures side by side."""
  return Html(f'<div class="charts{" small" if small else ""}">{"".join(pictures)}</div>')


def warning(text: str, items: Sequence[str] = ()) -> Html:
  """What a reader must not miss."""
  listed = f'<ul>{"".join(f"<li>{html(item)}</li>" for item in items)}</ul>' if items else ''
  return Html(f'<div class="warn">{html(text)}{listed}</div>')


def finding(kind: str, verdict: str, claim: str, evidence: str, source: str) -> Html:
  """A claim with its verdict; `kind` is 'agrees', 'disagrees' or 'open'."""
  return Html(
    f'<div class="finding"><span class="verdict {kind}">{html(verdict)}</span><div><b>{html(claim)}</b>'
    f'<p>{html(evidence)}</p><cite>{html(source)}</cite></div></div>'
  )


def preformatted(text: str) -> Html:
  """Text whose lines stay as they are."""
  return Html(f'<pre>{html(text)}</pre>')


def folded(summary: str, content: str) -> Html:
  """Content that is shown when its summary is clicked."""
  return Html(f'<details><summary>{html(summary)}</summary>{html(content)}</details>')


def swatch(colour: str, label: str, small: str) -> Html:
  """A name beside the colour that it has in the charts."""
  return Html(
    f'<span class="swatch" style="background:{html(colour)}"></span>{html(label)}<small>{html(small)}</small>'
  )


def columns(named: Mapping[str, Sequence[str]]) -> Html:
  """A table by its columns."""
  return table(list(named), [*zip(*named.values(), strict=True)])
