"""Batches for training and validation, prepared on first use and resumable at any step.

  from experiments.runs.data import pipeline

  data = pipeline.load(corpus='aws_docs', tokenizer='bytes', seq_len=64, batch_size=16, seed=0)
  batches = data.train()
  batch = next(batches)                        # {'inputs': int32 [16, 64], 'targets': int32 [16, 64]}
  position = batches.get_state()               # plain JSON, goes into a checkpoint
  loss = [evaluate(batch) for batch in data.validation(num_batches=20)]

Stages, each kept in the data folder: documents (TFDS, array_record), then tokens (`packing`). Windows, shuffling and
batches are computed on the fly, from files mapped into memory: see `batches`.
"""

from collections.abc import Mapping, Sequence
import functools
import pathlib
from typing import Any

import numpy as np

from experiments.runs.data import corpora, packing, storage
from experiments.runs.data import tokenizer as tokenizer_lib
from experiments.runs.data.batches import Batch, Batches, DataConfig, needs_packages
from experiments.runs.data.units import DataError


def next_tokens(rows: np.ndarray, rng: np.random.Generator | None) -> Batch:
  """Cuts [B, T + 1] windows into inputs and targets, which are inputs one token on."""
  del rng
  rows = rows.astype(np.int32)
  return {'inputs': rows[:, :-1], 'targets': rows[:, 1:]}


class Data(Batches):
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
    windows = {split: packing.Windows(tokens, config.seq_len) for split, tokens in packed.splits.items()}
    elements = f'windows of {config.seq_len} tokens'
    fingerprint = f'{label}/{tokenizer.fingerprint}/T{config.seq_len}/{packed.digest}'
    super().__init__(config, windows, next_tokens, fingerprint, elements)
    self.tokenizer = tokenizer
    self.vocab_size = tokenizer.vocab_size
    self.num_tokens = {split: len(tokens) for split, tokens in packed.splits.items()}
    self.num_documents = dict(packed.documents)
    self.num_windows = {split: len(source) for split, source in windows.items()}


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
    with needs_packages(), storage.Progress(f'preparing {label} in {root}') as progress:
      from experiments.runs.data import sparse24_lm  # TFDS is imported only where something has to be prepared

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
    with needs_packages():
      from experiments.runs.data import sparse24_lm

    label = f'{config.corpus.replace("/", "_")}-{sparse24_lm.find_online_set(config.corpus, root).name}'
    return label, label
  version = corpora.version(config.corpus, config.manual_dir)
  key = f'{config.corpus}-{version}-reader{corpora.REVISION}'
  # A copied folder has other times but the same text, and must resume: there the digest of the tokens identifies it.
  return (config.corpus if corpora.get(config.corpus).needs_folder else f'{config.corpus}-{version}'), key
