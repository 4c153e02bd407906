"""The data of a task: one source of elements per split, cut into batches that resume at any step.

  data = Batches(config, {'train': windows, 'validation': held_out}, make, fingerprint='digits')
  batches = data.train()
  batch = next(batches)                        # arrays by name, with the rows of this process
  position = batches.get_state()               # plain JSON, goes into a checkpoint

Shuffling and batches are computed on the fly by grain. Random draws for a batch (which words are masked, how a picture
is moved) depend on the seed and the number of the batch alone, not on processes or on where a run was cut.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import copy
import dataclasses
import pathlib
from typing import Any

import numpy as np

from experiments.runs.data.units import DataError

Batch = dict[str, np.ndarray]
# Elements of a batch, stacked, and a generator; None in validation, where nothing is left to chance.
type Make = Callable[[Any, np.random.Generator | None], Batch]


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The data to train on, and how it is cut into batches.

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


class Batches:
  """Batches of any source.

  Args:
    config: batch size, seed and this process' share.
    sources: 'train' and 'validation', elements by index: arrays, or dictionaries of arrays.
    make: see `Make`.
    fingerprint: equal for runs that see the same data; goes into checkpoints.
    elements: what messages call them.
  """

  def __init__(
    self,
    config: DataConfig,
    sources: Mapping[str, Any],
    make: Make,
    fingerprint: str,
    elements: str = 'examples',
  ):
    self.config = config
    self.fingerprint = fingerprint
    self._sources, self._make, self._elements = dict(sources), make, elements

  def made(self, make: Make) -> 'Batches':
    """Returns the same data with batches made in another way."""
    other = copy.copy(self)
    other._make = make
    return other

  def train(self) -> TrainIterator:
    """Returns a new iterator over the training batches, at its beginning.

    Raises:
      DataError: The train split has fewer elements than one batch.
    """
    with needs_packages():
      import grain  # takes JAX and Orbax along

    config, source = self.config, self._sources['train']
    if len(source) < config.batch_size:
      raise DataError(
        f'the train split of {config.corpus} holds {len(source)} {self._elements}, fewer than batch_size '
        f'{config.batch_size}; lower batch_size or seq_len'
      )
    dataset = grain.MapDataset.source(source).shuffle(seed=config.seed).repeat()
    # There is no remainder, but without the flag grain computes the endless length in floats and overflows for batch 1.
    dataset = dataset.batch(config.batch_size, drop_remainder=True)
    share = config.rows
    dataset = dataset.random_map(lambda rows, rng: _rows(self._make(rows, rng), share), seed=config.seed)
    # Zero threads: the file is mapped into memory, and threads would only compete with the training step.
    iterator = iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
    identity = {'data': self.fingerprint, 'split': 'train', 'batch_size': config.batch_size, 'seed': config.seed}
    return TrainIterator(iterator, identity)

  def validation(self, num_batches: int | None = None) -> list[Batch]:
    """Returns the fixed validation set, the same for every seed.

    Args:
      num_batches: Batches wanted, spread evenly over what is held out; None takes all that fit.

    Raises:
      DataError: The validation split has fewer elements than asked for.
    """
    source, size = self._sources['validation'], self.config.batch_size
    available = len(source) // size
    wanted = available if num_batches is None else num_batches
    if not 1 <= wanted <= available:
      raise DataError(
        f'validation(num_batches={num_batches}): the validation split of {self.config.corpus} holds {available} batches'
        f' of {size} {self._elements}; ask for at least 1 and no more, or lower batch_size or seq_len'
      )
    count = wanted * size
    rows = [source[i * len(source) // count] for i in range(count)]
    # Validated in one piece, whatever the micro-batches of training.
    share = dataclasses.replace(self.config, micro_batches=1).rows
    return [_rows(self._make(_stack(rows[i : i + size]), None), share) for i in range(0, count, size)]


def _rows(batch: Batch, share: np.ndarray) -> Batch:
  return {name: x[share] for name, x in batch.items()}


def _stack(rows: Sequence[Any]) -> Any:
  if isinstance(rows[0], Mapping):
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
  return np.stack(rows)


@contextlib.contextmanager
def needs_packages():
  """An import that fails inside says what to install."""
  try:
    yield
  except ImportError as e:
    raise DataError(f"a package of the experiments is missing ({e}): pip install -e '.[experiments]'") from e


def online_set(name: str, root: pathlib.Path) -> Any:
  """The builder, whose types the decorators of TFDS defeat, of a set that was prepared; see `find_online_set`."""
  with needs_packages():
    import tensorflow_datasets as tfds

    from experiments.runs.data import sparse24_lm
  return tfds.builder_from_directory(sparse24_lm.find_online_set(name, root))
