"""examples/finetune_hf.py against PyTorch, on checkpoints made by `transformers`.

PyTorch is asked in a process of its own, of the Python that TORCH_PYTHON names, or of this one; `make test-hf` has one.
"""

import functools
import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import unittest

from absl.testing import absltest, parameterized
import numpy as np
import pytest

import sparse24_jax as s24

pytest.importorskip('safetensors')
tokenizers = pytest.importorskip('tokenizers')

ROOT = Path(__file__).resolve().parents[2]
TORCH_PYTHON = os.environ.get('TORCH_PYTHON', sys.executable)
# Rounded to bfloat16, in other orders of summation.
TOLERANCE = {'float32': 2e-5, 'bfloat16': 4e-2}


@functools.cache
def program():
  spec = importlib.util.spec_from_file_location('finetune_hf', ROOT / 'examples' / 'finetune_hf.py')
  module = importlib.util.module_from_spec(spec)
  sys.modules['finetune_hf'] = module
  spec.loader.exec_module(module)
  return module


@functools.cache
def has_torch():
  found = 'import importlib.util as u; exit(not (u.find_spec("torch") and u.find_spec("transformers")))'
  return subprocess.run([TORCH_PYTHON, '-c', found], check=False).returncode == 0


def torch(*arguments):
  command = [TORCH_PYTHON, str(ROOT / 'tests' / 'examples' / 'hf_torch.py'), *map(str, arguments)]
  done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, 'HF_HUB_OFFLINE': '1'})
  if done.returncode:
    raise AssertionError(done.stderr)


def write_tokenizer(folder):
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=160, show_progress=False)
  tokenizer.train([str(ROOT / 'LICENSE')], trainer)
  tokenizer.save(str(folder / 'tokenizer.json'))


@pytest.mark.slow
class FinetuneHFTest(parameterized.TestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    if not has_torch():
      raise unittest.SkipTest(f'{TORCH_PYTHON} has no torch and transformers; `make test-hf` does')
    cls.folder = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
    cls.tokens = np.random.default_rng(0).integers(0, 160, (2, 48))
    np.save(cls.folder / 'tokens.npy', cls.tokens)
    torch('make', cls.folder / 'tokens.npy', cls.folder)

  def assert_same(self, found, expected, dtype):
    found = np.asarray(found, np.float32)
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE[dtype] * np.abs(expected).max())

  @parameterized.parameters(
    ('llama', 'transposable_srste'), ('qwen2', 'transposable_srste'), ('qwen3', 's_ste'), ('gemma', 's_ste')
  )
  def test_from_a_checkpoint_and_back(self, kind, recipe):
    hf, before, after = program(), self.folder / kind, self.folder / f'{kind}-2of4'
    write_tokenizer(before)
    config, tensors = hf.read(before)
    dtype = tensors['model.norm.weight'].dtype.name
    dense = np.load(self.folder / f'{kind}.npy')
    self.assert_same(hf.logits(tensors, self.tokens, config), dense, dtype)

    trained = hf.main(
      before, ROOT / 'LICENSE', after, length=32, recipe=recipe, steps=20, batch=8, learning_rate=1e-2
    )
    self.assertLess(trained.losses['2:4, after'], 0.95 * trained.losses['2:4, before'])

    # PyTorch reads from the files what our sparse matmuls computed with.
    others = {name: w for name, w in tensors.items() if name not in trained.weights}
    sparse = s24.sparsify(lambda weights, tokens: hf.logits({**others, **weights}, tokens, config), trained.bound)
    variables = s24.sparse_variables(trained.weights, trained.opt_state, trained.bound)
    torch('logits', self.folder / 'tokens.npy', after)
    expected = np.load(self.folder / f'{kind}-2of4.npy')
    self.assert_same(sparse(trained.weights, variables, None, self.tokens), expected, dtype)
    self.assertGreater(np.abs(expected - dense).max(), 0.1 * np.abs(dense).max())

    self.assertEqual(sorted(p.name for p in before.iterdir()), sorted(p.name for p in after.iterdir()))
    self.assertEqual(json.loads((after / 'config.json').read_text()), config)
    _, written = hf.read(after)
    self.assertEqual(list(written), list(tensors))
    self.assertLen(trained.weights, 7)
    for name, w in written.items():
      self.assertEqual(w.dtype, tensors[name].dtype, name)
      if name in trained.weights:
        kept = (w.reshape(w.shape[0], -1, 4) != 0).sum(axis=-1)  # [out, in]: groups along the last axis
        self.assertLessEqual(kept.max(), 2, name)
        self.assertGreater(kept.mean(), 1.5, name)
      else:
        np.testing.assert_array_equal(w, tensors[name], name)


class ConfigTest(parameterized.TestCase):

  @parameterized.parameters(
    ({'model_type': 'gemma2'}, "model_type is 'gemma2'"),
    ({'rope_scaling': {'type': 'yarn', 'factor': 2.0}}, "rope_type is 'yarn'"),
    ({'rope_parameters': {'rope_type': 'linear', 'rope_theta': 1e4}}, "rope_type is 'linear'"),
    ({'use_sliding_window': True}, 'use_sliding_window is True'),
    ({'quantization_config': {'quant_method': 'gptq'}}, 'quantization_config is'),
  )
  def test_refuses_what_it_does_not_compute(self, settings, message):
    program().check_config({'model_type': 'qwen2'})
    with self.assertRaisesRegex(ValueError, f'config.json: {message}'):
      program().check_config({'model_type': 'qwen2', **settings})


if __name__ == '__main__':
  absltest.main()
