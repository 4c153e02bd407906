import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

from absl.testing import absltest, parameterized
import hypothesis
from hypothesis import strategies as st
import numpy as np

from experiments.runs.data import corpora, packing, pipeline
from experiments.runs.data import main as command

ROOT = pathlib.Path(__file__).parents[4]


def write_texts(folder, count=60):
  folder.mkdir(exist_ok=True)
  rng = random.Random(0)
  texts = [' '.join(rng.choices(['mask', 'weight', 'group', 'sparse'], k=90)) + f' {i}' for i in range(count)]
  (folder / 'a.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
  return str(folder)


class PipelineTestCase(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = pathlib.Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.data_dir = str(cls.folder)
    cls.manual_dir = write_texts(cls.folder / 'mine')
    cls.load()

  @classmethod
  def load(cls, **options):
    defaults = {'corpus': 'folder', 'seq_len': 16, 'batch_size': 8, 'data_dir': cls.data_dir}
    return pipeline.load(**{**defaults, 'manual_dir': cls.manual_dir, **options})

  def assert_batches_equal(self, left, right):
    self.assertEqual(left.keys(), right.keys())
    for name in left:
      np.testing.assert_array_equal(left[name], right[name])


class BatchTest(PipelineTestCase):
  @parameterized.parameters('bytes', 'bpe:300')
  def test_batches_are_shifted_int32(self, tokenizer):
    data = self.load(tokenizer=tokenizer)
    for batch in [next(data.train()), *data.validation(2)]:
      self.assertEqual(
        {name: (x.dtype, x.shape) for name, x in batch.items()},
        {name: (np.int32, (8, 16)) for name in ('inputs', 'targets')},
      )
      np.testing.assert_array_equal(batch['inputs'][:, 1:], batch['targets'][:, :-1])
      self.assertBetween(batch['inputs'].max(), 0, data.vocab_size - 1)

  def test_an_epoch_visits_each_window_once_in_a_new_order(self):
    data = self.load(batch_size=1)
    epoch = data.num_windows['train']
    batches = data.train()
    first, second = ([next(batches)['inputs'].tobytes() for _ in range(epoch)] for _ in range(2))
    windows = packing.Windows(self.tokens(data), 16)
    expected = sorted(windows[i][:-1].astype(np.int32).tobytes() for i in range(epoch))
    self.assertEqual(sorted(first), expected)
    self.assertEqual(sorted(second), expected)
    self.assertNotEqual(first, second)

  def tokens(self, data):
    (folder,) = (self.folder / 'tokens').glob('*bytes')
    tokens = packing.open_packed(folder).splits['train']
    self.assertLen(tokens, data.num_tokens['train'])
    return tokens

  def test_order_follows_the_seed_and_validation_does_not(self):
    first, again, other = self.load(seed=3), self.load(seed=3), self.load(seed=4)
    self.assert_batches_equal(next(first.train()), next(again.train()))
    self.assertFalse(np.array_equal(next(first.train())['inputs'], next(other.train())['inputs']))
    for left, right in zip(first.validation(3), other.validation(3), strict=True):
      self.assert_batches_equal(left, right)

  def test_processes_share_each_batch(self):
    whole = self.load()
    parts = [self.load(process_index=i, process_count=4) for i in range(4)]
    batches = [next(part.train()) for part in parts]
    self.assertEqual(batches[0]['inputs'].shape, (2, 16))
    for name, expected in next(whole.train()).items():
      np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), expected)
    held_out = [part.validation(1)[0]['targets'] for part in parts]
    np.testing.assert_array_equal(np.concatenate(held_out), whole.validation(1)[0]['targets'])

  def test_validation_is_spread_over_the_held_out_text(self):
    data = self.load(batch_size=1)
    windows = [batch['inputs'].tobytes() for batch in data.validation()]
    self.assertLen(windows, data.num_windows['validation'])
    some = [windows.index(batch['inputs'].tobytes()) for batch in data.validation(4)]
    self.assertEqual(some, [i * len(windows) // 4 for i in range(4)])


class ResumeTest(PipelineTestCase):
  @hypothesis.settings(deadline=None, max_examples=15, database=None)
  @hypothesis.given(before=st.integers(0, 120), after=st.integers(1, 5), consumed=st.integers(0, 3))
  def test_resumes_exactly_through_json(self, before, after, consumed):
    straight = self.load(seed=1).train()
    for _ in range(before):
      next(straight)
    state = json.dumps(straight.get_state())
    resumed = self.load(seed=1).train()
    for _ in range(consumed):
      next(resumed)
    resumed.set_state(json.loads(state))
    for _ in range(after):
      self.assert_batches_equal(next(straight), next(resumed))
    self.assertEqual(straight.get_state(), resumed.get_state())

  def test_resumes_with_another_number_of_processes(self):
    straight = self.load().train()
    next(straight)
    state = straight.get_state()
    expected = next(straight)
    halves = [self.load(process_index=i, process_count=2).train() for i in range(2)]
    for half in halves:
      half.set_state(state)
    np.testing.assert_array_equal(np.concatenate([next(half)['inputs'] for half in halves]), expected['inputs'])

  @parameterized.parameters(
    ({'seed': 7}, 'seed=0, this run has seed=7'),
    ({'batch_size': 4}, 'batch_size=8, this run has batch_size=4'),
    ({'seq_len': 8}, 'data=.*T16.*this run has data=.*T8'),
    ({'tokenizer': 'bpe:300'}, 'data=.*bytes.*this run has data=.*bpe300'),
  )
  def test_foreign_state(self, change, message):
    with self.assertRaisesRegex(corpora.DataError, message):
      self.load(**change).train().set_state(self.load().train().get_state())

  @parameterized.parameters(({},), ([1],), (None,))
  def test_no_state(self, state):
    with self.assertRaisesRegex(corpora.DataError, 'not a state of the training data'):
      self.load().train().set_state(state)


class FingerprintTest(PipelineTestCase):
  def test_names_corpus_tokenizer_and_length(self):
    self.assertRegex(self.load().fingerprint, r'^folder/bytes/T16/[0-9a-f]{12}$')
    different = [self.load(), self.load(seq_len=8), self.load(tokenizer='bpe:300'), self.load(max_tokens=500)]
    self.assertLen({data.fingerprint for data in different}, 4)

  def test_a_copy_of_the_text_is_the_same_data(self):
    copy = self.folder / 'copy'
    shutil.copytree(self.manual_dir, copy, copy_function=shutil.copy)  # with new times
    self.assertEqual(self.load(manual_dir=str(copy)).fingerprint, self.load().fingerprint)

  def test_another_sequence_length_prepares_nothing(self):
    with mock.patch.object(packing, 'write', side_effect=AssertionError):
      self.assertEqual(self.load(seq_len=5).num_windows['train'], (self.load().num_tokens['train'] - 1) // 5)


class PreparationTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.manual_dir = write_texts(self.folder / 'mine')

  def start(self, before=''):
    code = f"""
import os, signal, time
from experiments.runs.data import folders, pipeline, tokenizer
encode, read = tokenizer.Bytes.encode_batch, folders.file_documents
def slow_encode(self, texts):
  time.sleep(0.3)
  return encode(self, texts)
def die_encoding(self, texts):
  os.kill(os.getpid(), signal.SIGKILL)
def die_reading(path):
  for i, text in enumerate(read(path)):
    if i == 30:
      os.kill(os.getpid(), signal.SIGKILL)
    yield text
{before}
print(pipeline.load(corpus='folder', manual_dir={self.manual_dir!r}, data_dir={str(self.folder)!r}).fingerprint)
"""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)

  def test_a_killed_preparation_is_made_good(self):
    patches = ('tokenizer.Bytes.encode_batch = die_encoding', 'folders.file_documents = die_reading')
    for patch in patches:
      process = self.start(patch)
      process.communicate()
      self.assertEqual(process.returncode, -signal.SIGKILL)
      self.assertEmpty(list((self.folder / 'tokens').glob('[!.]*')))
      shutil.rmtree(self.folder / 'reader1', ignore_errors=patch == patches[-1])
    data = pipeline.load(corpus='folder', manual_dir=self.manual_dir, data_dir=str(self.folder))
    self.assertEqual(data.num_documents, {'train': 57, 'validation': 3})
    left_over = [path for path in self.folder.rglob('*') if 'partial' in path.name or 'incomplete' in path.name]
    self.assertEmpty(left_over)

  def test_two_processes_prepare_once(self):
    first = self.start('tokenizer.Bytes.encode_batch = slow_encode')
    while not (self.folder / 'tokens').exists() and first.poll() is None:
      time.sleep(0.02)
    second = self.start('tokenizer.Bytes.encode_batch = die_encoding')
    (fingerprint, _), (other, messages) = first.communicate(), second.communicate()
    self.assertEqual((first.returncode, second.returncode), (0, 0), messages)
    self.assertEqual(fingerprint, other)

  def test_missing_package(self):
    packages = ('tensorflow_datasets', 'array_record', 'importlib_resources')
    code = f"""
import os, sys
from experiments.runs.data import pipeline
for package in {packages!r}:
  if not os.fork():  # nothing is imported twice
    sys.modules[package] = None
    try:
      pipeline.load(corpus='folder', manual_dir={self.manual_dir!r}, data_dir={str(self.folder)!r})
    except pipeline.DataError as e:
      print(e, end='<end>', flush=True)
    os._exit(0)
  os.wait()
"""
    result = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True)
    for package, said in zip(packages, result.stdout.split('<end>')[:-1], strict=True):
      self.assertRegex(said, rf"is missing \((.|\n)*{package}(.|\n)*: pip install -e '\.\[experiments\]'")

  def test_damaged_tokens(self):
    def load():
      return pipeline.load(corpus='folder', manual_dir=self.manual_dir, data_dir=str(self.folder))

    before = load().fingerprint
    (path,) = self.folder.glob('tokens/*/train.bin')
    os.truncate(path, 100)
    with self.assertRaisesRegex(corpora.DataError, f'{path.parent} are damaged .*delete this folder'):
      load()
    shutil.rmtree(path.parent)
    self.assertEqual(load().fingerprint, before)

  def test_full_disk(self):
    with (
      mock.patch.object(packing, 'write', side_effect=OSError(28, 'No space left on device')),
      self.assertRaisesRegex(corpora.DataError, f'{self.folder} .No space left on device.; free space'),
    ):
      pipeline.load(corpus='folder', manual_dir=self.manual_dir, data_dir=str(self.folder))

  def test_an_upgraded_package_is_read_again(self):
    from experiments.runs.data import sparse24_lm

    def load(version, text):
      def reader(folder, wanted):
        return ((str(i), [f'{text} {i} ' * 50]) for i in range(40) if wanted(i))

      changed = dataclasses.replace(corpora.CORPORA['stdlib'], reader=reader, version=lambda folder: version)
      # The builder's list of versions is made when its module is imported: as after a restart.
      (config,) = (config for config in sparse24_lm.Sparse24Lm.BUILDER_CONFIGS if config.name == 'stdlib')
      with mock.patch.dict(corpora.CORPORA, stdlib=changed), mock.patch.object(config, 'version', version):
        return pipeline.load(corpus='stdlib', data_dir=str(self.folder))

    before, after = load('3.12.1', 'old text'), load('3.12.2', 'new text, more of it')
    self.assertStartsWith(before.fingerprint, 'stdlib-3.12.1/bytes/T64/')
    self.assertStartsWith(after.fingerprint, 'stdlib-3.12.2/bytes/T64/')
    self.assertNotEqual(before.num_tokens, after.num_tokens)


class ErrorTest(PipelineTestCase):
  @parameterized.parameters(
    ({'corpus': 'wikitext'}, r"unknown corpus 'wikitext'"),
    ({'tokenizer': 'char'}, r"unknown tokenizer 'char'"),
    ({'seq_len': 0}, r'seq_len must be an integer of at least 1, got 0'),
    ({'seq_len': 16.0}, r'seq_len must be an integer of at least 1, got 16\.0'),
    ({'batch_size': -1}, r'batch_size must be an integer of at least 1, got -1'),
    ({'batch_size': True}, r'batch_size must be an integer'),
    ({'seed': -1}, r'seed must be an integer of at least 0'),
    ({'seed': 2**32}, r'seed must be below 2\*\*32'),
    ({'max_tokens': 1}, r'max_tokens must be an integer of at least 2'),
    ({'process_count': 3}, r'batch_size 8 does not divide among process_count 3'),
    ({'process_index': 2, 'process_count': 2}, r'process_index is 2, but process_count is 2'),
    ({'data_dir': '/no/such/place'}, r'data_dir is not an existing folder: /no/such/place\. Create it'),
    ({'manual_dir': '/no/such/place'}, r'is not a folder: /no/such/place'),
    ({'manual_dir': None}, r"corpus 'folder' needs manual_dir"),
    ({'seq_len': 100_000}, r'seq_len 100000 is too long for folder: its train split has [0-9]+ tokens, so at most'),
    ({'seq_len': 2500}, r'seq_len 2500 is too long for folder: its validation split has [0-9]+ tokens'),
  )
  def test_bad_arguments(self, change, message):
    with self.assertRaisesRegex(corpora.DataError, message):
      self.load(**change)

  @parameterized.parameters(0, -1, 1000)
  def test_bad_number_of_validation_batches(self, count):
    with self.assertRaisesRegex(
      corpora.DataError, f'num_batches={count}.*holds [0-9]+ batches of 8 windows of 16 tokens; ask for'
    ):
      self.load().validation(count)

  def test_batch_larger_than_the_corpus(self):
    with self.assertRaisesRegex(corpora.DataError, 'train split of folder holds [0-9]+ windows .* batch_size 100000'):
      self.load(batch_size=100_000).train()


class CommandTest(PipelineTestCase):
  def run_command(self, *arguments):
    with mock.patch('sys.stdout') as out, mock.patch('sys.stderr') as err:
      code = command.main(list(arguments))
    return code, *(''.join(call.args[0] for call in stream.write.call_args_list) for stream in (out, err))

  def test_shows_sizes_and_a_sample(self):
    data = f'--data-dir={self.data_dir}'
    code, out, _ = self.run_command('--corpus=folder', f'--manual-dir={self.manual_dir}', data, '--seq-len=16')
    self.assertEqual(code, 0)
    self.assertIn('57 documents', out)
    self.assertIn(self.load().fingerprint, out)

  def test_errors_end_with_a_message(self):
    code, out, err = self.run_command('--corpus=folder', f'--data-dir={self.data_dir}')
    self.assertEqual((code, out), (1, ''))
    self.assertStartsWith(err, "error: corpus 'folder' needs manual_dir")


if __name__ == '__main__':
  absltest.main()
