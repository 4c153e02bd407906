"""Labelled texts: inside a package, in a folder of the user's, or a task of GLUE that TFDS prepared beforehand.

  'aws_services'   paragraphs of the package botocore and which of twenty services they document; the default
  'folder'         manual_dir/train.jsonl and validation.jsonl, a line each: {"text": ..., "label": ...}, with a
                   "second" text where it is about pairs
  'glue/sst2' and the other tasks of GLUE with classes: prepared by TFDS

Texts longer than the sequences are cut. Pairs are joined by the tokenizer's separator.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import hashlib
import json
import pathlib
from typing import Any
import zlib

import numpy as np

from experiments.runs.data import packages, storage
from experiments.runs.data import tokenizer as tokenizer_lib
from experiments.runs.data.batches import DataConfig, online_set
from experiments.runs.data.units import DataError

# (text, second text or '', class)
type Example = tuple[str, str, str]

_SERVICES = (
  'cloudfront', 'cognito-idp', 'connect', 'dynamodb', 'ec2', 'ecs', 'eks', 'glue', 'iam', 'kms', 'lambda', 'quicksight',
  'rds', 'redshift', 'route53', 's3', 'sagemaker', 'sns', 'sqs', 'ssm',
)  # fmt: skip
_PER_SERVICE = 400
_HOLD_OUT = 5
_GLUE: Mapping[str, tuple[str, ...]] = {
  'glue/cola': ('sentence',),
  'glue/sst2': ('sentence',),
  'glue/mrpc': ('sentence1', 'sentence2'),
  'glue/rte': ('sentence1', 'sentence2'),
  'glue/wnli': ('sentence1', 'sentence2'),
  'glue/qqp': ('question1', 'question2'),
  'glue/qnli': ('question', 'sentence'),
  'glue/mnli': ('premise', 'hypothesis'),
}


@dataclasses.dataclass(frozen=True)
class Labelled:
  """Labelled texts as tokens.

  Attributes:
    splits: 'train' and 'validation', elements {'tokens': int32 [T], 'length': int32, 'label': int32}.
    classes: their names.
    vocab_size: tokens are below it.
    fingerprint: differs whenever the tokens do.
  """

  splits: Mapping[str, list[dict[str, Any]]]
  classes: Sequence[str]
  vocab_size: int
  fingerprint: str


def load(config: DataConfig) -> Labelled:
  """Opens the texts of `config.corpus`.

  Raises:
    DataError: a package, a folder or a prepared set is missing or not as it has to be; says what to do.
  """
  root = storage.data_root(config.data_dir)
  if config.corpus == 'aws_services':
    splits = _of_services()
  elif config.corpus == 'folder':
    splits = _in_folder(config.manual_dir)
  elif config.corpus in _GLUE:
    splits = _of_tfds(config.corpus, root)
  else:
    raise DataError(f'unknown labelled texts {config.corpus!r}. Known: aws_services, folder, {", ".join(_GLUE)}')
  # The pre-trained model's: a tokenizer that these texts trained would be another.
  if config.tokenizer.startswith('bpe'):
    raise DataError(f"tokenizer {config.tokenizer!r} is trained on the corpus; labelled texts take 'bytes' or 'gpt2'")
  tokenizer = tokenizer_lib.load(config.tokenizer, root / 'tokenizers', config.corpus, tuple)
  classes = sorted({label for _, _, label in splits['train']})
  if others := {label for _, _, label in splits['validation']} - set(classes):
    raise DataError(f'{config.corpus}: validation has classes that train lacks: {", ".join(sorted(others))}')
  digest, made = hashlib.sha256(), {}
  for split, examples in splits.items():
    made[split] = [_element(example, tokenizer, classes, config.seq_len) for example in examples]
    for element in made[split]:
      digest.update(element['tokens'].tobytes() + element['label'].tobytes())
  fingerprint = f'{config.corpus}/{tokenizer.fingerprint}/T{config.seq_len}/{digest.hexdigest()[:12]}'
  return Labelled(made, classes, tokenizer.vocab_size, fingerprint)


def _element(example: Example, tokenizer: Any, classes: Sequence[str], length: int) -> dict[str, Any]:
  first, second, label = example
  tokens = tokenizer.encode(first).astype(np.int32)
  if second:
    tokens = np.concatenate([tokens, [tokenizer.separator], tokenizer.encode(second).astype(np.int32)])
  tokens = tokens[:length]
  row = np.full(length, tokenizer.separator, np.int32)
  row[: len(tokens)] = tokens
  return {'tokens': row, 'length': np.int32(len(tokens)), 'label': np.int32(classes.index(label))}


def _of_services() -> dict[str, list[Example]]:
  """Paragraphs of each service up to the limit, chosen and held out by checksums; none that two services share."""
  pattern = rf'botocore/data/({"|".join(_SERVICES)})/([^/]+)/service-2\.json(?:\.gz)?'
  owners: dict[str, set[str]] = {}
  for name, paragraphs in packages.documentation_reader('botocore', pattern, 'documentation')(None, lambda _: True):
    for text in paragraphs:
      owners.setdefault(text, set()).add(name.split('/')[0])
  splits: dict[str, list[Example]] = {'train': [], 'validation': []}
  found: dict[str, int] = dict.fromkeys(_SERVICES, 0)
  for text in sorted(owners, key=lambda text: zlib.crc32(text.encode())):
    (service, *others) = owners[text]
    if not others and found[service] < _PER_SERVICE:
      found[service] += 1
      splits['train' if found[service] % _HOLD_OUT else 'validation'].append((text, '', service))
  return splits


def _in_folder(manual_dir: str | None) -> dict[str, list[Example]]:
  if manual_dir is None:
    raise DataError("corpus 'folder' of labelled texts needs manual_dir, with train.jsonl and validation.jsonl")
  folder = pathlib.Path(manual_dir).expanduser()
  return {split: list(_read_jsonl(folder / f'{split}.jsonl')) for split in ('train', 'validation')}


def _read_jsonl(file: pathlib.Path) -> Iterator[Example]:
  if not file.is_file():
    raise DataError(f'{file} is missing; it has a line for each text: {{"text": ..., "label": ...}}')
  for number, line in enumerate(file.read_text(encoding='utf-8').splitlines(), 1):
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get('text'), str) or 'label' not in record:
      raise DataError(f"{file}:{number}: expected an object with 'text' and 'label', got {line[:60]!r}")
    yield record['text'], record.get('second', ''), str(record['label'])


def _of_tfds(name: str, root: pathlib.Path) -> dict[str, list[Example]]:
  builder = online_set(name, root)
  held_out = 'validation_matched' if name == 'glue/mnli' else 'validation'

  def examples(split: str) -> Iterator[Example]:
    source = builder.as_data_source(split)
    for i in range(len(source)):
      element = source[i]
      texts = [x.decode() if isinstance(x, bytes) else str(x) for x in (element[field] for field in _GLUE[name])]
      yield texts[0], ''.join(texts[1:]), str(int(element['label']))

  return {'train': list(examples('train')), 'validation': list(examples(held_out))}
