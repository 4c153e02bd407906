"""Batches for training and validation, prepared on first use and resumable at any step.

  from experiments.data import pipeline

  data = pipeline.load(corpus='aws_docs', tokenizer='bytes', seq_len=64, batch_size=16, seed=0)
  batches = data.train()
  batch = next(batches)                        # {'inputs': int32 [16, 64], 'targets': int32 [16, 64]}
  position = batches.get_state()               # plain JSON, goes into a checkpoint
  loss = [evaluate(batch) for batch in data.validation(num_batches=20)]

Stages, each kept in the data folder: documents (TFDS, array_record), then tokens (`packing`). Windows, shuffling and
batches are computed on the fly by grain, from files mapped into memory.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from experiments.data import corpora, packing, storage
from experiments.data import tokenizer as tokenizer_lib
from experiments.data.units import DataError

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """What to train on and how it is cut into batches.

  Attributes:
    corpus: 'aws_docs', 'stdlib', 'google_docs'; 'brown', 'english', 'openwebtext', 'folder' (with `manual_dir`); or a
      set that TFDS prepared beforehand: 'lm1b', 'c4/en', 'pg19', 'wiki40b/en'.
    tokenizer: 'bytes', 'bpe', 'bpe:<vocabulary size>' or 'gpt2'.
    seq_len: Tokens a sequence, T.
    batch_size: Sequences a batch over all processes, B.
    seed: Decides the order of the training windows, and nothing else.
    data_dir: Existing folder for prepared data; None means the environment variable SPARSE24_DATA_DIR, or
      `sparse24_jax` in the user's cache folder.
    manual_dir: The user's own text, for the corpora that need it.
    max_tokens: Prepare only this many tokens of each split, for a trial on a large corpus; None prepares all.
    process_index: Which share of each batch this process gets.
    process_count: Number of shares; processes whose devices split a tensor and not the batch have the same one.
    micro_batches: How many equal parts, one after another, a batch is trained in: a share is the same rows of each.
  """

  corpus: str = 'aws_docs'
  tokenizer: str = 'bytes'
  seq_len: int = 64
  batch_size: int = 16
  seed: int = 0
  data_dir: str | None = None
  manual_dir: str | None = None
  max_tokens: int | None = None
  process_index: int = 0
  process_count: int = 1
  micro_batches: int = 1

  def __post_init__(self):
    lowest = {'seq_len': 1, 'batch_size': 1, 'seed': 0, 'process_index': 0, 'process_count': 1, 'max_tokens': 2}
    lowest['micro_batches'] = 1
    for name, low in lowest.items():
      value = getattr(self, name)
      if value is None and name == 'max_tokens':
        continue
      if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise DataError(f'{name} must be an integer of at least {low}, got {value!r}')
    if self.seed >= 2**32:
      raise DataError(f'seed must be below 2**32, got {self.seed}')
    if self.process_index >= self.process_count:
      raise DataError(f'process_index is {self.process_index}, but process_count is {self.process_count}')
    if self.batch_size % (self.process_count * self.micro_batches):
      raise DataError(
        f'batch_size {self.batch_size} does not divide among process_count {self.process_count} x micro_batches '
        f'{self.micro_batches}'
      )

  @property
  def rows(self) -> np.ndarray:
    """The rows of each batch that this process gets, in order.

    >>> DataConfig(batch_size=8, process_index=1, process_count=2, micro_batches=2).rows
    array([2, 3, 6, 7])
    """
    return np.arange(self.batch_size).reshape(self.micro_batches, self.process_count, -1)[:, self.process_index].ravel()


class TrainIterator(Iterator[Batch]):
  """Endless training batches, whose position can be saved and restored exactly.

  Every epoch visits each window once, in an order drawn from the seed and the epoch. The rows of a batch do not depend
  on the number of processes, so a run may go on with another number.
  """

  def __init__(self, iterator: Any, identity: Mapping[str, Any]):
    self._iterator = iterator
    self._identity = dict(identity)

  def __next__(self) -> Batch:
    return next(self._iterator)

  def get_state(self) -> dict[str, Any]:
    """Returns the position after the last batch, as a dictionary of JSON values."""
    return {'position': self._iterator.get_state(), **self._identity}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes to a position from `get_state`, of this iterator or of an equal one in another process.

    Raises:
      DataError: The state belongs to other data, another batch size or another seed, and would mean other batches.
    """
    if not isinstance(state, Mapping) or 'position' not in state:
      raise DataError(f'not a state of the training data: {state!r}')
    for name, mine in self._identity.items():
      if state.get(name) != mine:
        raise DataError(
          f'the saved data position was taken with {name}={state.get(name)!r}, this run has {name}={mine!r};'
          f' resume with the same {name}, or start a new run'
        )
    self._iterator.set_state(dict(state['position']))


class Data:
  """A prepared corpus: made by `load`.

  Attributes:
    config: The configuration it was opened with.
    tokenizer: See `tokenizer.Tokenizer`.
    vocab_size: Tokens are in [0, vocab_size).
    num_tokens: Tokens of each split.
    num_documents: Documents of each split.
    num_windows: Sequences of each split.
    fingerprint: Corpus with version, tokenizer, sequence length and a digest of the tokens; two runs with equal
      fingerprints see the same text. Goes into checkpoints.
  """

  def __init__(self, config: DataConfig, tokenizer: tokenizer_lib.Tokenizer, packed: packing.Packed, label: str):
    self.config = config
    self.tokenizer = tokenizer
    self.vocab_size = tokenizer.vocab_size
    self._windows = {split: packing.Windows(tokens, config.seq_len) for split, tokens in packed.splits.items()}
    self.num_tokens = {split: len(tokens) for split, tokens in packed.splits.items()}
    self.num_documents = dict(packed.documents)
    self.num_windows = {split: len(windows) for split, windows in self._windows.items()}
    self.fingerprint = f'{label}/{tokenizer.fingerprint}/T{config.seq_len}/{packed.digest}'

  def train(self) -> TrainIterator:
    """Returns a new iterator over the training windows, at its beginning.

    Returns:
      Iterator of {'inputs', 'targets'}, int32 [batch_size / process_count, seq_len]; targets are inputs one token on.

    Raises:
      DataError: The train split has fewer windows than one batch.
    """
    with _needs_packages():
      import grain  # takes JAX and Orbax along

    config, windows = self.config, self._windows['train']
    if len(windows) < config.batch_size:
      raise DataError(
        f'the train split of {config.corpus} holds {len(windows)} windows of {config.seq_len} tokens, fewer than'
        f' batch_size {config.batch_size}; lower batch_size or seq_len'
      )
    dataset = grain.MapDataset.source(windows).shuffle(seed=config.seed).repeat()
    # There is no remainder, but without the flag grain computes the endless length in floats and overflows for batch 1.
    dataset = dataset.batch(config.batch_size, drop_remainder=True)
    dataset = dataset.map(functools.partial(_to_batch, share=self.config.rows))
    # Zero threads: the file is mapped into memory, and threads would only compete with the training step.
    iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
    identity = {'data': self.fingerprint, 'split': 'train', 'batch_size': config.batch_size, 'seed': config.seed}
    return TrainIterator(iterator, identity)

  def validation(self, num_batches: int | None = None) -> list[Batch]:
    """Returns the fixed validation set, the same for every seed.

    Args:
      num_batches: Batches wanted, spread evenly over the held-out documents; None takes all that fit.

    Returns:
      List of batches as in `train`.

    Raises:
      DataError: The validation split has fewer windows than asked for.
    """
    windows = self._windows['validation']
    size = self.config.batch_size
    available = len(windows) // size
    wanted = available if num_batches is None else num_batches
    if not 1 <= wanted <= available:
      raise DataError(
        f'validation(num_batches={num_batches}): the validation split of {self.config.corpus} holds {available} batches'
        f' of {size} x {self.config.seq_len} tokens; ask for at least 1 and no more, or lower batch_size or seq_len'
      )
    count = wanted * size
    rows = [windows[i * len(windows) // count] for i in range(count)]
    # Validated in one piece, whatever the micro-batches of training.
    share = dataclasses.replace(self.config, micro_batches=1).rows
    return [_to_batch(np.stack(rows[i : i + size]), share) for i in range(0, count, size)]


def _to_batch(rows: np.ndarray, share: np.ndarray) -> Batch:
  """Cuts this process' share of [B, T + 1] windows into inputs and targets."""
  rows = rows[share].astype(np.int32)
  return {'inputs': rows[:, :-1], 'targets': rows[:, 1:]}


def load(
  *,
  corpus: str = 'aws_docs',
  tokenizer: str = 'bytes',
  seq_len: int = 64,
  batch_size: int = 16,
  seed: int = 0,
  data_dir: str | None = None,
  **options: Any,
) -> Data:
  """Opens a corpus, preparing it on first use.

  Args:
    corpus: See `DataConfig`, as for all arguments.
    tokenizer: Name of the tokenizer.
    seq_len: Tokens a sequence.
    batch_size: Sequences a batch over all processes.
    seed: Order of the training windows.
    data_dir: Existing folder for prepared data, or None.
    **options: `manual_dir`, `max_tokens`, `process_index`, `process_count`, `micro_batches`.

  Returns:
    The prepared data.

  Raises:
    DataError: A ValueError that names the argument, path or package at fault and the remedy.
  """
  config = DataConfig(
    corpus=corpus,
    tokenizer=tokenizer,
    seq_len=seq_len,
    batch_size=batch_size,
    seed=seed,
    data_dir=data_dir,
    **options,
  )
  return open_data(config)


def open_data(config: DataConfig) -> Data:
  """Does what `load` does, for a configuration."""
  root = storage.data_root(config.data_dir)
  label, key = _corpus_key(config, root)

  @functools.cache
  def documents() -> Mapping[str, Sequence[str]]:
    with _needs_packages(), storage.Progress(f'preparing {label} in {root}') as progress:
      from experiments.data import sparse24_lm  # TFDS is imported only where something has to be prepared

      return sparse24_lm.open_documents(config.corpus, root, config.manual_dir, progress.advance)

  tokenizer = tokenizer_lib.load(config.tokenizer, root / 'tokenizers', key, lambda: documents()['train'])
  limit = f'-first{config.max_tokens}' if config.max_tokens else ''
  folder = root / 'tokens' / f'{key}-{tokenizer.fingerprint}{limit}'
  if not folder.exists():
    with storage.preparing(root):
      if not folder.exists():  # another process may have been faster
        total = sum(len(documents()[split]) for split in corpora.SPLITS)
        with storage.Progress(f'tokenizing {label} with {config.tokenizer}', total) as progress:
          packing.write(folder, documents(), tokenizer, max_tokens=config.max_tokens, on_documents=progress.advance)
  packed = packing.open_packed(folder)
  for split, tokens in packed.splits.items():
    if len(tokens) <= config.seq_len:
      raise DataError(
        f'seq_len {config.seq_len} is too long for {config.corpus}: its {split} split has {len(tokens)} tokens, so at'
        f' most seq_len {max(0, len(tokens) - 1)} fits'
      )
  return Data(config, tokenizer, packed, label)


def _corpus_key(config: DataConfig, root: pathlib.Path) -> tuple[str, str]:
  """Returns the name of a corpus for fingerprints, and the one for its files, which tells a user's folders apart."""
  if config.corpus in corpora.ONLINE_SETS:
    with _needs_packages():
      from experiments.data import sparse24_lm

    label = f'{config.corpus.replace("/", "_")}-{sparse24_lm.find_online_set(config.corpus, root).name}'
    return label, label
  version = corpora.version(config.corpus, config.manual_dir)
  key = f'{config.corpus}-{version}-reader{corpora.REVISION}'
  # A copied folder has other times but the same text, and must resume: there the digest of the tokens identifies it.
  return (config.corpus if corpora.get(config.corpus).needs_folder else f'{config.corpus}-{version}'), key


@contextlib.contextmanager
def _needs_packages():
  try:
    yield
  except ImportError as e:
    raise DataError(f"a package of the experiments is missing ({e}): pip install -e '.[experiments]'") from e
