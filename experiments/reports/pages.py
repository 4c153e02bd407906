"""What is made of the committed records: tables and picture of the documents, and two pages that are not committed."""

from pathlib import Path
import re

from experiments.reports import provenance, quality, speed

DOCS = provenance.ROOT / 'docs'
PICTURE = DOCS / 'speed.svg'
_TABLES = DOCS / 'speed.md'
_BETWEEN = re.compile(r'(<!-- made: speed -->\n).*?(\n<!-- end -->)', re.DOTALL)


def quality_files() -> list[Path]:
  """Files that hold losses of runs."""
  return [path for path in sorted(provenance.RESULTS.glob('*.jsonl')) if quality.load(path)]


def document() -> str:
  """`docs/speed.md` with the tables that the records make."""
  text, count = _BETWEEN.subn(lambda found: f'{found[1]}\n{_markdown()}\n{found[2]}', _TABLES.read_text())
  if count != 1:
    raise ValueError(f'{_TABLES} has {count} places between <!-- made: speed --> and <!-- end -->; it needs one')
  return text


def write(folder: Path) -> list[Path]:
  """Writes documents and picture in place, and speed.html and quality.html into `folder`; returns what was written."""
  records = speed.load(provenance.RESULTS.glob('*.jsonl'))
  folder.mkdir(parents=True, exist_ok=True)
  content = {
    _TABLES: document(), PICTURE: speed.figure(records),
    folder / 'speed.html': speed.page(records), folder / 'quality.html': quality.write(quality_files()),
  }  # fmt: skip
  for path, text in content.items():
    path.write_text(text)
  return list(content)


def _markdown() -> str:
  return speed.markdown(speed.load(provenance.RESULTS.glob('*.jsonl')))
