"""Sentence pairs, English and German: inside a package, in a folder of the user's, or a set that TFDS prepared.

  'jupyterlab_de'   about a thousand short messages in the package jupyterlab-language-pack-de-DE (BSD); the default
  'folder'          below manual_dir: .mo message catalogues of German, .tsv with English and German in two columns,
                    and pairs of en.json and de.json in one folder, whose strings stand under the same keys
  another name such as 'wmt14_translate/de-en': prepared by TFDS

Home Assistant's messages, 36,000 pairs (Apache-2.0), are a folder of the last kind:

  pip download --no-deps --ignore-requires-python --only-binary=:all: homeassistant
  unzip -q 'homeassistant-*.whl' '*/translations/en.json' '*/translations/de.json' -d messages

An English sentence that occurs twice keeps its first translation. Held out is every twentieth, by a checksum of the
English side, so that no sentence is on both sides.
"""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import gettext
import hashlib
import json
import pathlib
from typing import Any
import zlib

import numpy as np

from experiments.runs.data import packages, storage
from experiments.runs.data import tokenizer as tokenizer_lib
from experiments.runs.data.batches import DataConfig, online_set
from experiments.runs.data.folders import listing_digest
from experiments.runs.data.units import DataError, HOLD_OUT

type Pair = tuple[str, str]

_IN_PACKAGES = {'jupyterlab_de': ('jupyterlab-language-pack-de-DE', r'(.+/de_DE/LC_MESSAGES)/([^/]+)\.mo')}


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Sentence pairs as tokens.

  Attributes:
    splits: 'train' and 'validation', elements {'source': int32 [T], 'length': int32, 'target': int32 [T]}; a target has
      the separator at its end, and both sides are filled up with the token `tokenizer.vocab_size`.
    tokenizer: of both sides.
    fingerprint: differs whenever the tokens do.
    left_out: pairs of each split of which a side is longer than the sequences.
  """

  splits: Mapping[str, list[dict[str, Any]]]
  tokenizer: tokenizer_lib.Tokenizer
  fingerprint: str
  left_out: Mapping[str, int]


def load(config: DataConfig) -> Pairs:
  """Opens the sentence pairs of `config.corpus`.

  Raises:
    DataError: a package, a folder or a prepared set is missing or not as it has to be; says what to do.
  """
  root = storage.data_root(config.data_dir)
  label, read = _source(config, root)
  splits = _split(read())
  key = f'pairs-{label.replace("/", "_")}'
  tokenizer = tokenizer_lib.load(
    config.tokenizer, root / 'tokenizers', key, lambda: (side for pair in splits['train'] for side in pair)
  )
  digest, made, left_out = hashlib.sha256(), {}, {}
  for split, found in splits.items():
    sides = [tokenizer.encode_batch([pair[i] for pair in found]) for i in range(2)]
    short = [i for i in range(len(found)) if len(sides[0][i]) <= config.seq_len > len(sides[1][i])]
    left_out[split] = len(found) - len(short)
    if config.max_tokens:
      short = short[: max(1, config.max_tokens // config.seq_len)]
    made[split] = [_element(sides[0][i], sides[1][i], tokenizer, config.seq_len) for i in short]
    for element in made[split]:
      digest.update(element['source'].tobytes() + element['target'].tobytes())
    if left_out[split]:
      storage.tell(f'{config.corpus}: {left_out[split]} of {len(found)} {split} pairs are longer and left out')
    if not made[split]:
      raise DataError(f'{config.corpus} has no {split} pair of at most {config.seq_len} tokens a side; raise seq_len')
  fingerprint = f'{config.corpus}/{tokenizer.fingerprint}/T{config.seq_len}/{digest.hexdigest()[:12]}'
  return Pairs(made, tokenizer, fingerprint, left_out)


def _element(source: np.ndarray, target: np.ndarray, tokenizer: Any, length: int) -> dict[str, Any]:
  def filled(tokens: np.ndarray) -> np.ndarray:
    row = np.full(length, tokenizer.vocab_size, np.int32)
    row[: len(tokens)] = tokens
    return row

  target = np.append(target.astype(np.int32), tokenizer.separator)
  return {'source': filled(source), 'length': np.int32(len(source)), 'target': filled(target)}


def _split(found: Iterator[Pair]) -> dict[str, list[Pair]]:
  unique: dict[str, str] = {}
  for pair in found:
    english, german = (' '.join(side.split()) for side in pair)
    # A pair that is the same in both languages is a name, or was not translated.
    if english and german and english != german:
      unique.setdefault(english, german)
  splits: dict[str, list[Pair]] = {'train': [], 'validation': []}
  for pair in unique.items():
    splits['train' if zlib.crc32(pair[0].encode('utf-8', 'replace')) % HOLD_OUT else 'validation'].append(pair)
  return splits


def _source(config: DataConfig, root: pathlib.Path) -> tuple[str, Callable[[], Iterator[Pair]]]:
  """A label with the version, and the reader."""
  if config.corpus in _IN_PACKAGES:
    package, pattern = _IN_PACKAGES[config.corpus]
    files = [path for unit in packages.package_units(package, pattern) for _, path in unit]
    return f'{config.corpus}-{packages.package_version(package)}', lambda: (p for f in files for p in _read_mo(f))
  if config.corpus != 'folder':
    return config.corpus, lambda: _of_tfds(config.corpus, root)
  if config.manual_dir is None:
    raise DataError("corpus 'folder' of sentence pairs needs manual_dir, with .mo, .tsv or en.json and de.json")
  folder = pathlib.Path(config.manual_dir).expanduser()
  files = sorted(path for path in folder.rglob('*') if path.suffix in ('.mo', '.tsv') or path.name == 'en.json')
  if not files:
    raise DataError(f'manual_dir {folder} holds no .mo, no .tsv and no en.json')
  return listing_digest(folder), lambda: (pair for file in files for pair in _read(file))


def _read(file: pathlib.Path) -> Iterator[Pair]:
  if file.suffix == '.mo':
    return _read_mo(file)
  return _read_tsv(file) if file.suffix == '.tsv' else _read_json(file, file.with_name('de.json'))


def _read_mo(file: pathlib.Path) -> Iterator[Pair]:
  try:
    with file.open('rb') as opened:
      catalogue: Mapping[Any, str] = gettext.GNUTranslations(opened)._catalog  # pyright: ignore
  except (OSError, ValueError) as e:
    raise DataError(f'{file} cannot be read as a message catalogue ({e})') from e
  for message, translation in catalogue.items():
    # Plural forms have a key (message, number): the first is enough. A context stands before the message.
    text = message[0] if isinstance(message, tuple) and message[1] == 0 else message
    if isinstance(text, str) and text:
      yield text.rpartition('\x04')[2], translation


def _read_tsv(file: pathlib.Path) -> Iterator[Pair]:
  for number, line in enumerate(file.read_text(encoding='utf-8').splitlines(), 1):
    sides = line.split('\t')
    if len(sides) != 2:
      raise DataError(f'{file}:{number}: expected English and German with a tab between, found {len(sides)} columns')
    yield sides[0], sides[1]


def _read_json(english: pathlib.Path, german: pathlib.Path) -> Iterator[Pair]:
  if not german.exists():
    return
  try:
    ours, theirs = (dict(_strings(json.loads(path.read_text(encoding='utf-8')))) for path in (english, german))
  except (OSError, ValueError) as e:
    raise DataError(f'{english} or {german} cannot be read as JSON ({e})') from e
  for key in (key for key in ours if key in theirs):  # in the order of the file
    yield ours[key], theirs[key]


def _strings(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
  if isinstance(node, str):
    yield path, node
  elif isinstance(node, dict):
    for key, value in node.items():
      yield from _strings(value, (*path, key))


def _of_tfds(name: str, root: pathlib.Path) -> Iterator[Pair]:
  builder = online_set(name, root)
  if not builder.info.features or not {'en', 'de'} <= set(builder.info.features):
    raise DataError(f'{name} is not of English and German')
  source = builder.as_data_source('train')
  for i in range(len(source)):
    element = source[i]
    yield tuple(x.decode() if isinstance(x, bytes) else str(x) for x in (element['en'], element['de']))  # pyright: ignore
