"""Images, sentence pairs and labelled texts: from folders and packages, and what is said when they are not there."""

import importlib.metadata
import json
import pathlib
import struct
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import numpy as np
import pytest

from experiments.runs.data import images, labelled, packages, pairs
from experiments.runs.data.batches import DataConfig
from experiments.runs.data.units import DataError


def write_mo(path, catalogue):
  """A message catalogue in GNU's binary format, written by its description."""
  messages = sorted(catalogue.items())
  count, ids, texts = len(messages), b'', b''
  rows, translated = [], []
  for message, translation in messages:
    rows.append((len(message.encode()), len(ids)))
    ids += message.encode() + b'\0'
    translated.append((len(translation.encode()), len(texts)))
    texts += translation.encode() + b'\0'
  first = 28 + 16 * count
  table = [value for size, at in rows for value in (size, first + at)]
  table += [value for size, at in translated for value in (size, first + len(ids) + at)]
  head = struct.pack('<7I', 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
  path.write_bytes(head + struct.pack(f'<{len(table)}I', *table) + ids + texts)


class FolderTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.data = {'data_dir': str(self.folder), 'manual_dir': str(self.folder / 'mine')}
    (self.folder / 'mine').mkdir()

  def write(self, name, text):
    path = self.folder / 'mine' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

  def pairs(self, **options):
    found = pairs.load(DataConfig(corpus='folder', **{'seq_len': 40, **self.data, **options}))
    decode = found.tokenizer.decode
    return found, {
      decode(e['source'][: e['length']]): decode([t for t in e['target'] if t < 255])
      for elements in found.splits.values() for e in elements
    }  # fmt: skip

  def test_pairs_of_three_formats(self):
    header = {'': 'Content-Type: text/plain; charset=UTF-8\n'}
    write_mo(
      self.folder / 'mine' / 'a.mo',
      {**header, 'Close': 'Schließen', 'menu\x04Open': 'Öffnen', 'file\0files': 'Datei\0Dateien', 'OK': 'OK'},
    )
    self.write('b.tsv', ''.join(f'line {i}\tZeile {i}\n' for i in range(60)) + 'Close\tzu\n')
    self.write('c/en.json', json.dumps({'a': {'title': 'Door  open', 'other': 'Left'}, 'b': 'Light'}))
    self.write('c/de.json', json.dumps({'a': {'title': 'Tür\noffen'}, 'b': 'Licht'}))
    found, by_source = self.pairs()
    expected = {'Close': 'Schließen', 'Open': 'Öffnen', 'file': 'Datei', 'Door open': 'Tür offen', 'Light': 'Licht'}
    expected |= {f'line {i}': f'Zeile {i}' for i in range(60)}
    self.assertEqual(by_source, expected)
    self.assertBetween(len(found.splits['validation']), 1, 12)  # a twentieth, by chance
    element = found.splits['train'][0]
    self.assertEqual(element['target'][np.flatnonzero(element['target'] == 256)[0] - 1], found.tokenizer.separator)

  def test_pairs_that_are_too_long_are_counted(self):
    self.write('b.tsv', ''.join(f'line {i}\tZeile {i}\n' for i in range(60)) + 'x' * 50 + '\ty\n')
    found, by_source = self.pairs(seq_len=9)
    self.assertEqual(sum(found.left_out.values()), 1 + 0)
    self.assertLen(by_source, 60)
    self.assertNotEqual(found.fingerprint, self.pairs(seq_len=10)[0].fingerprint)

  @parameterized.parameters(
    ({'b.tsv': 'one column\n'}, r'b.tsv:1: expected English and German with a tab between, found 1'),
    ({'en.json': '{', 'de.json': '{}'}, 'cannot be read as JSON'),
    ({'a.txt': 'x'}, 'holds no .mo, no .tsv and no en.json'),
  )
  def test_bad_pairs(self, files, message):
    for name, text in files.items():
      self.write(name, text)
    with self.assertRaisesRegex(DataError, message):
      self.pairs()

  def test_labelled_texts_and_pairs_of_them(self):
    lines = [{'text': 'good', 'label': 'yes'}, {'text': 'bad', 'second': 'worse', 'label': 'no'}]
    for split in ('train', 'validation'):
      self.write(f'{split}.jsonl', ''.join(json.dumps(line) + '\n' for line in lines))
    found = labelled.load(DataConfig(corpus='folder', seq_len=6, **self.data))
    self.assertEqual(found.classes, ['no', 'yes'])
    first, second = found.splits['train']
    self.assertEqual(bytes(first['tokens'].astype(np.uint8)), b'good\xff\xff')
    self.assertEqual((first['length'], first['label']), (4, 1))
    self.assertEqual(bytes(second['tokens'].astype(np.uint8)), b'bad\xffwo')  # cut
    self.assertEqual((second['length'], second['label']), (6, 0))

  def test_bad_labelled_texts(self):
    self.write('train.jsonl', '{"text": "a", "label": 1}\n')
    with self.assertRaisesRegex(DataError, 'validation.jsonl is missing'):
      labelled.load(DataConfig(corpus='folder', **self.data))
    self.write('validation.jsonl', '{"text": "a", "label": 2}\n')
    with self.assertRaisesRegex(DataError, 'validation has classes that train lacks: 2'):
      labelled.load(DataConfig(corpus='folder', **self.data))
    with self.assertRaisesRegex(DataError, "take 'bytes' or 'gpt2'"):
      labelled.load(DataConfig(corpus='folder', tokenizer='bpe:300', **self.data))
    with self.assertRaisesRegex(DataError, 'glue/sst2 is not prepared'):
      labelled.load(DataConfig(corpus='glue/sst2', **self.data))

  def test_images_are_cut_square(self):
    image = pytest.importorskip('PIL.Image')
    for split in ('train', 'validation'):
      for label, colour in enumerate(((255, 0, 0), (0, 0, 255))):
        path = self.folder / 'mine' / split / f'class{label}' / 'a.png'
        path.parent.mkdir(parents=True)
        picture = image.new('RGB', (60, 30), (0, 255, 0))
        picture.paste(colour, (15, 0, 45, 30))  # the middle
        picture.save(path)
    found = images.load(DataConfig(corpus='folder', **self.data))
    self.assertEqual((found.classes, found.size, found.channels), (['class0', 'class1'], 224, 3))
    element = found.splits['validation'][1]
    self.assertEqual((element['image'].shape, int(element['label'])), ((224, 224, 3), 1))
    np.testing.assert_array_equal(element['image'][10:-10, 10:-10].reshape(-1, 3).mean(axis=0), (0, 0, 255))
    (self.folder / 'mine' / 'train' / 'class0' / 'b.png').write_bytes(b'no picture')
    with self.assertRaisesRegex(DataError, r'b.png cannot be read as an image'):
      images.load(DataConfig(corpus='folder', **self.data)).splits['train'][1]

  def test_images_that_are_not_there(self):
    with self.assertRaisesRegex(DataError, 'holds no images for train and validation'):
      images.load(DataConfig(corpus='folder', **self.data))
    with self.assertRaisesRegex(DataError, 'cifar10 is not prepared'):
      images.load(DataConfig(corpus='cifar10', **self.data))

  @pytest.mark.skipif(not list(importlib.metadata.distributions(name='scikit-learn')), reason='no scikit-learn')
  def test_the_digits_of_the_package(self):
    found = images.load(DataConfig(corpus='digits'))
    self.assertEqual({split: len(x) for split, x in found.splits.items()}, {'train': 1438, 'validation': 359})
    self.assertEqual(found.classes, [str(i) for i in range(10)])
    # A person, or the nearest neighbour, reads them: image and label belong together.
    train, held_out = ([e['image'].ravel().astype(int) for e in found.splits[s]] for s in ('train', 'validation'))
    labels = np.array([e['label'] for e in found.splits['train']])
    right = [
      labels[np.square(np.array(train) - x).sum(1).argmin()] == e['label']
      for x, e in zip(held_out[:60], found.splits['validation'], strict=False)
    ]
    self.assertGreater(np.mean(right), 0.9)

  def test_a_package_that_is_not_installed_is_named(self):
    missing = importlib.metadata.PackageNotFoundError
    version = mock.patch.object(packages.importlib.metadata, 'version', side_effect=missing)
    with version, self.assertRaisesRegex(DataError, 'pip install scikit-learn'):
      images.load(DataConfig(corpus='digits'))


class ServicesTest(absltest.TestCase):
  def test_no_paragraph_is_of_two_services_or_both_splits(self):
    with mock.patch.multiple(labelled, _SERVICES=('sns', 'sqs', 'kms'), _PER_SERVICE=50):
      found = labelled._of_services()
    texts = {split: [text for text, _, _ in examples] for split, examples in found.items()}
    self.assertEmpty(set(texts['train']) & set(texts['validation']))
    self.assertLen(set(texts['train']), len(texts['train']))
    self.assertEqual({label for _, _, label in found['validation']}, {'sns', 'sqs', 'kms'})
    self.assertLen(texts['train'] + texts['validation'], 150)


if __name__ == '__main__':
  absltest.main()
