import json
import pathlib
import tempfile

from absl.testing import absltest, parameterized
import numpy as np

from experiments.runs.data import corpora, packing, tokenizer

DOCUMENTS = {'train': [f'document {i}' for i in range(200)], 'validation': ['held out', 'twice']}


class Wide(tokenizer.Bytes):
  vocab_size = 2**16 + 1
  separator = 2**16
  fingerprint = 'wide'


class PackingTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory())) / 'packed'

  def test_tokens_are_documents_with_separators(self):
    seen = []
    packing.write(self.folder, DOCUMENTS, tokenizer.Bytes(), on_documents=seen.append)
    packed = packing.open_packed(self.folder)
    self.assertEqual(bytes(packed.splits['validation'].astype(np.uint8)), b'held out\xfftwice\xff')
    self.assertEqual(
      tokenizer.Bytes().decode(packed.splits['train']), ''.join(f'{text}<|endoftext|>' for text in DOCUMENTS['train'])
    )
    self.assertEqual(packed.splits['train'].dtype, np.uint16)
    self.assertEqual(packed.documents, {'train': 200, 'validation': 2})
    self.assertEqual(sum(seen), 202)

  def test_large_vocabularies_take_uint32(self):
    packing.write(self.folder, DOCUMENTS, Wide())
    tokens = packing.open_packed(self.folder).splits['validation']
    self.assertEqual((tokens.dtype, tokens[8]), (np.uint32, 2**16))

  def test_max_tokens(self):
    packing.write(self.folder, DOCUMENTS, tokenizer.Bytes(), max_tokens=11)
    packed = packing.open_packed(self.folder)
    self.assertEqual(bytes(packed.splits['train'].astype(np.uint8)), b'document 0\xff')
    self.assertLen(packed.splits['validation'], 11)

  def test_digest_follows_the_text_alone(self):
    packing.write(self.folder, DOCUMENTS, tokenizer.Bytes())
    other, changed = self.folder.with_name('other'), self.folder.with_name('changed')
    packing.write(other, DOCUMENTS, tokenizer.Bytes())
    packing.write(changed, {**DOCUMENTS, 'validation': ['held OUT', 'twice']}, tokenizer.Bytes())
    digest = packing.open_packed(self.folder).digest
    self.assertEqual(digest, packing.open_packed(other).digest)
    self.assertNotEqual(digest, packing.open_packed(changed).digest)

  def test_an_error_leaves_nothing(self):
    def fail(count):
      raise KeyboardInterrupt

    with self.assertRaises(KeyboardInterrupt):
      packing.write(self.folder, DOCUMENTS, tokenizer.Bytes(), on_documents=fail)
    self.assertEmpty(list(self.folder.parent.iterdir()))

  @parameterized.named_parameters(
    ('truncated', 'train.bin', lambda raw: raw[:-2], r'train\.bin has [\d,]+ bytes, recorded are'),
    ('flipped', 'train.bin', lambda raw: raw[:50] + b'\x07' + raw[51:], r'train\.bin differs from its recorded digest'),
    ('missing', 'validation.bin', None, r'No such file'),
    ('no_meta', 'meta.json', None, r'No such file'),
    ('half_meta', 'meta.json', lambda raw: raw[:20], r'is damaged|are damaged'),
    ('foreign_meta', 'meta.json', lambda raw: b'{"format": 99}', r'format 99, expected 1'),
    ('text', 'meta.json', lambda raw: raw.replace(b' 256', b' "256"'), r"vocab_size is '256', expected a number"),
    ('other_json', 'meta.json', lambda raw: b'[]', r'are damaged'),
  )
  def test_damage_is_found(self, name, damage, message):
    packing.write(self.folder, DOCUMENTS, tokenizer.Bytes())
    path = self.folder / name
    if damage is None:
      path.unlink()
    else:
      path.write_bytes(damage(path.read_bytes()))
    with self.assertRaisesRegex(corpora.DataError, message) as caught:
      packing.open_packed(self.folder)
    self.assertIn(f'{self.folder} are damaged', str(caught.exception))
    self.assertIn('delete this folder', str(caught.exception))

  def test_meta_is_readable(self):
    packing.write(self.folder, DOCUMENTS, tokenizer.Bytes())
    meta = json.loads((self.folder / 'meta.json').read_text())
    self.assertEqual((meta['dtype'], meta['tokenizer'], meta['splits']['train']['documents']), ('uint16', 'bytes', 200))


class WindowsTest(parameterized.TestCase):
  @parameterized.product(tokens=[0, 1, 4, 5, 8, 9, 23], seq_len=[1, 4])
  def test_every_token_is_a_target_once(self, tokens, seq_len):
    windows = packing.Windows(np.arange(tokens, dtype=np.uint16), seq_len)
    self.assertLen(windows, max(0, tokens - 1) // seq_len)
    targets = [token for i in range(len(windows)) for token in windows[i][1:]]
    self.assertEqual(targets, list(range(1, len(windows) * seq_len + 1)))
    with self.assertRaises(IndexError):
      windows[len(windows)]


if __name__ == '__main__':
  absltest.main()
