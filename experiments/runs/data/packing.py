"""Packed tokens on disk: a split's documents one after the other, each ended by a separator.

A folder holds `train.bin` and `validation.bin`, raw little-endian uint16 or uint32, and `meta.json`. It appears under
its name in one step when it is complete. Windows of any length are views of the same file, so a change of the sequence
length costs nothing:

>>> windows = Windows(np.arange(10, dtype=np.uint16), seq_len=4)
>>> len(windows), windows[1]
(2, array([4, 5, 6, 7, 8], dtype=uint16))
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import shutil
from typing import Any

import numpy as np

from experiments.runs.data.corpora import SPLITS
from experiments.runs.data.tokenizer import dtype_for, Tokenizer
from experiments.runs.data.units import DataError

_FORMAT = 1
_BATCH = 64  # documents tokenized together
_VERIFY_BELOW = 2**28  # bytes; larger files are checked by size only, so that opening stays instant


@dataclasses.dataclass(frozen=True)
class Packed:
  """Opened token files.

  Attributes:
    splits: Tokens of each split, shape [n], uint16 or uint32, read from disk on demand.
    documents: Number of documents of each split.
    digest: Short digest of all tokens of both splits.
    vocab_size: Tokens are in [0, vocab_size).
  """

  splits: Mapping[str, np.ndarray]
  documents: Mapping[str, int]
  digest: str
  vocab_size: int


class Windows:
  """Random access to the windows of `seq_len + 1` tokens of a split; neighbours share one token.

  Window i is tokens[i * seq_len : (i + 1) * seq_len + 1], so each token but the first is the target of exactly one
  position; what is left over at the end belongs to none.
  """

  def __init__(self, tokens: np.ndarray, seq_len: int):
    self._tokens = tokens.view(np.ndarray)  # a memmap's own slicing is slower
    self._seq_len = seq_len

  def __len__(self) -> int:
    return max(0, len(self._tokens) - 1) // self._seq_len

  def __getitem__(self, index: int) -> np.ndarray:
    if not 0 <= index < len(self):
      raise IndexError(f'window {index} of {len(self)}')
    start = int(index) * self._seq_len
    return self._tokens[start : start + self._seq_len + 1]


def write(
  folder: pathlib.Path,
  documents: Mapping[str, Sequence[str]],
  tokenizer: Tokenizer,
  *,
  max_tokens: int | None = None,
  on_documents: Callable[[int], Any] = lambda count: None,
) -> None:
  """Tokenizes documents into `folder`, which appears only when it is complete.

  Args:
    folder: Result; must not exist. Call with the data folder's lock held.
    documents: Texts of 'train' and 'validation'.
    tokenizer: Encodes the texts and names the separator.
    max_tokens: A split stops after this many tokens; None takes all.
    on_documents: Called with the number of documents after each batch.
  """
  partial = folder.with_name(f'.{folder.name}.partial')
  shutil.rmtree(partial, ignore_errors=True)  # left by a preparation that was killed
  partial.mkdir(parents=True)
  try:
    splits = {}
    for split in SPLITS:
      blocks = _blocks(documents[split], tokenizer, max_tokens, on_documents)
      splits[split] = _write_tokens(partial / f'{split}.bin', blocks)
    dtype = np.dtype(dtype_for(tokenizer.vocab_size)).name
    meta = {
      'format': _FORMAT, 'dtype': dtype, 'tokenizer': tokenizer.fingerprint, 'vocab_size': tokenizer.vocab_size,
      'splits': splits,
    }  # fmt: skip
    with (partial / 'meta.json').open('w') as file:
      json.dump(meta, file, indent=2)
      _flush(file)
    partial.rename(folder)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def _blocks(documents, tokenizer, max_tokens, on_documents) -> Iterator[tuple[int, np.ndarray]]:
  """Yields (number of documents, their tokens with separators), cut after `max_tokens`."""
  dtype = np.dtype(dtype_for(tokenizer.vocab_size)).newbyteorder('<')
  separator = np.array([tokenizer.separator], dtype)
  left = max_tokens
  texts = (documents[i] for i in range(len(documents)))
  for batch in itertools.batched(texts, _BATCH):
    block = np.concatenate([part for tokens in tokenizer.encode_batch(batch) for part in (tokens, separator)])
    if left is not None:
      block = block[:left]
      left -= len(block)
    on_documents(len(batch))
    yield len(batch), block.astype(dtype, copy=False)
    if left == 0:
      return


def _write_tokens(path: pathlib.Path, blocks: Iterator[tuple[int, np.ndarray]]) -> dict[str, Any]:
  digest, tokens, documents = hashlib.sha256(), 0, 0
  with path.open('wb') as file:
    for count, block in blocks:
      raw = block.tobytes()
      file.write(raw)
      digest.update(raw)
      tokens += len(block)
      documents += count
    _flush(file)
  return {'tokens': tokens, 'documents': documents, 'sha256': digest.hexdigest()}


def _flush(file) -> None:
  file.flush()
  os.fsync(file.fileno())  # before the rename, or a power cut could leave a complete name over empty files


def open_packed(folder: pathlib.Path) -> Packed:
  """Opens what `write` left.

  Raises:
    DataError: A file is missing, has another size than recorded or (below 256 MiB) another content.
  """
  try:
    meta = json.loads((folder / 'meta.json').read_text())
    if meta['format'] != _FORMAT:
      raise ValueError(f'format {meta["format"]}, expected {_FORMAT}')
    dtype = np.dtype(meta['dtype']).newbyteorder('<')
    splits = {split: _open_tokens(folder / f'{split}.bin', dtype, meta['splits'][split]) for split in SPLITS}
    documents = {split: meta['splits'][split]['documents'] for split in SPLITS}
    vocab_size = meta['vocab_size']
    if not isinstance(vocab_size, int):
      raise ValueError(f'vocab_size is {vocab_size!r}, expected a number')
    content = ''.join(meta['splits'][split]['sha256'] for split in SPLITS)
  except (OSError, ValueError, KeyError, TypeError) as e:
    raise DataError(f'prepared tokens in {folder} are damaged ({e}); delete this folder and they are made anew') from e
  return Packed(splits, documents, hashlib.sha256(content.encode()).hexdigest()[:12], vocab_size)


def _open_tokens(path: pathlib.Path, dtype: np.dtype, recorded: Mapping[str, Any]) -> np.ndarray:
  size = path.stat().st_size
  expected = recorded['tokens'] * dtype.itemsize
  if size != expected:
    raise ValueError(f'{path.name} has {size:,} bytes, recorded are {expected:,}')
  if size == 0:
    return np.zeros(0, dtype)  # an empty file cannot be mapped
  if size < _VERIFY_BELOW:
    with path.open('rb') as file:
      if hashlib.file_digest(file, 'sha256').hexdigest() != recorded['sha256']:
        raise ValueError(f'{path.name} differs from its recorded digest')
  return np.memmap(path, dtype, mode='r')
