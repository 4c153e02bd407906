"""A learnable data source for tests of the loop: no corpus, no preparation, the interface of the real pipeline."""

import functools
import shutil
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from experiments.runs.data import batches
from experiments.runs.tasks import language, translation

VOCAB = 32

# As much as a race with tiny models reads.
TEXT = 'sparse weights, dense gradients; ' * 60


def parameters(model, tokens):
  """Parameters of the size of the first ones, drawn by NumPy: the model's own take a second or two to compile."""
  rng, start = np.random.default_rng(0), {'scale': 1.0, 'bias': 0.0}

  def draw(path, leaf):
    first = start.get(path[-1].key)
    values = 0.02 * rng.standard_normal(leaf.shape) if first is None else np.full(leaf.shape, first)
    return jnp.asarray(values.astype(leaf.dtype))

  shapes = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
  return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def _program(model):
  return jax.jit(model.apply)


def apply(model, variables, tokens):
  """`model.apply` as one program, which is compiled in a fraction of the time of its operations one by one."""
  return _program(model)(variables, tokens)


def temp_folder(case):
  """A folder that goes away with the test; absl's own needs flags that pytest does not parse."""
  folder = tempfile.mkdtemp()
  case.addCleanup(shutil.rmtree, folder)
  return folder


def fake_data(config):
  """Learnable data for the task of a configuration; of a language model, `FakeData`."""
  data = FakeData(seq_len=config.data.seq_len, batch_size=config.data.batch_size)
  make = {
    'language_model': lambda: data,
    'masked_lm': lambda: _masked(data),
    'image_classification': lambda: _classified(config, 'images'),
    'text_classification': lambda: _classified(config, 'inputs'),
    'translation': lambda: _translated(config),
  }
  return make.get(config.task, lambda: data)()


def _batches(config, elements, make):
  """Batches of elements made by a generator: 256 to train and 64 held out."""
  rng = np.random.default_rng(0)
  sources = {split: [elements(rng) for _ in range(n)] for split, n in (('train', 256), ('validation', 64))}
  data = batches.Batches(batches.DataConfig(batch_size=config.data.batch_size), sources, make, 'fake-1')
  data.vocab_size = VOCAB
  return data


def _masked(data):
  """The counter with masked tokens."""

  def masked(batch, rng=None):
    rows = np.concatenate([batch['inputs'], batch['targets'][:, -1:]], axis=1)
    return language.mask_tokens(rows, rng, vocab_size=data.vocab_size)

  held_out = data.validation
  data.validation = lambda count: [masked(batch) for batch in held_out(count)]
  data.train = lambda: _Iterator(data, lambda batch, position: masked(batch, np.random.default_rng(position)))
  return data


def _classified(config, name):
  """Four classes that the mean tells apart: of an image, or of tokens."""

  def element(rng):
    label = rng.integers(4)
    if name == 'images':
      size = config.model.patch * round((config.model.seq_len - 1) ** 0.5)
      return {name: np.float32(label / 2 - 0.75 + rng.normal(0, 0.1, (size, size, 1))), 'labels': np.int32(label)}
    tokens = np.int32(8 * label + rng.integers(0, 8, config.data.seq_len))
    return {name: tokens, 'labels': np.int32(label), 'lengths': np.int32(rng.integers(4, config.data.seq_len))}

  data = _batches(config, element, lambda rows, rng: rows)
  data.sizes = {'classes': 4}
  if name == 'images':
    size = config.model.patch * round((config.model.seq_len - 1) ** 0.5)
    data.sizes |= {'image_size': size, 'channels': 1}
  else:
    data.sizes['vocab_size'] = data.vocab_size
  return data


class _Letters:
  """Tokens as letters, with the last as the separator."""

  separator = VOCAB - 1

  def decode(self, tokens):
    return ''.join(chr(65 + token) for token in tokens)


def _translated(config):
  """Every word of the source again: words are single tokens, and there are few."""
  vocab, length = VOCAB, config.data.seq_len

  def element(rng):
    target = np.full(length, vocab, np.int32)
    source = target.copy()
    count = rng.integers(2, 5)
    source[:count] = target[:count] = rng.integers(0, 3, count)
    target[count] = _Letters.separator
    return {'source': source, 'length': np.int32(count), 'target': target}

  data = _batches(config, element, functools.partial(translation.teach, vocab_size=vocab))
  data.tokenizer = _Letters()
  return data


class FakeData:
  """Sequences of a noisy counter: token t + 1 is token t plus one, except for one in eight.

  Args:
    seq_len: positions.
    batch_size: sequences a batch.
    seed: decides everything.
    rows: of every batch, those that this process gets; None are all.
  """

  vocab_size = VOCAB
  tokenizer = None

  def __init__(self, *, seq_len=16, batch_size=16, seed=0, fingerprint='fake-1', rows=None):
    self._shape, self._seed, self.fingerprint = (batch_size, seq_len + 1), seed, fingerprint
    self._rows = slice(None) if rows is None else rows

  def batch(self, *key):
    rng = np.random.default_rng((self._seed, *key))
    steps = np.where(rng.random(self._shape) < 1 / 8, rng.integers(0, self.vocab_size, self._shape), 1)
    tokens = (np.cumsum(steps, axis=1) % self.vocab_size).astype(np.int32)
    tokens = tokens[self._rows]
    return {'inputs': tokens[:, :-1], 'targets': tokens[:, 1:]}

  def train(self):
    return _Iterator(self)

  def validation(self, num_batches):
    return [self.batch(1, i) for i in range(num_batches)]


class _Iterator:
  def __init__(self, data, make=lambda batch, position: batch):
    self._data, self._make, self._position = data, make, 0

  def __iter__(self):
    return self

  def __next__(self):
    self._position += 1
    return self._make(self._data.batch(0, self._position), self._position)

  def get_state(self):
    return {'position': self._position}

  def set_state(self, state):
    self._position = state['position']
