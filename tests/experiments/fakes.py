"""A learnable data source for tests of the loop: no corpus, no preparation, the interface of the real pipeline."""

import shutil
import tempfile
import unittest

import jax
import numpy as np


def compile_quickly():
  """Compiling is most of these tests' time: optimize little in this module.

  Returns:
    Environment variables that give a child process the same settings.
  """
  if not jax.config.read('jax_disable_most_optimizations'):  # as fast tests set it for all
    jax.config.update('jax_disable_most_optimizations', True)

    def restore():
      jax.config.update('jax_disable_most_optimizations', False)
      jax.clear_caches()  # their key does not know how much was optimized

    unittest.addModuleCleanup(restore)
  return {'JAX_DISABLE_MOST_OPTIMIZATIONS': 'True'}


def temp_folder(case):
  """A folder that goes away with the test; absl's own needs flags that pytest does not parse."""
  folder = tempfile.mkdtemp()
  case.addCleanup(shutil.rmtree, folder)
  return folder


class FakeData:
  """Sequences of a noisy counter: token t + 1 is token t plus one, except for one in eight.

  Args:
    seq_len: positions.
    batch_size: sequences a batch.
    seed: decides everything.
    rows: of every batch, those that this process gets; None are all.
  """

  vocab_size = 32
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
  def __init__(self, data):
    self._data, self._position = data, 0

  def __iter__(self):
    return self

  def __next__(self):
    self._position += 1
    return self._data.batch(0, self._position)

  def get_state(self):
    return {'position': self._position}

  def set_state(self, state):
    self._position = state['position']
