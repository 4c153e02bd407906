"""The comparison of kernels and reference op over a training run: it runs tiny, and its verdict is what it says."""

import contextlib
import io
import json
import os
import pathlib
import signal
import tempfile
import time
from unittest import mock

from absl.testing import absltest, parameterized
import numpy as np
import pytest

from experiments.bench import byte_model, tracking
from tests.experiments.fakes import compile_quickly


def setUpModule():
  compile_quickly()


class CompareTest(parameterized.TestCase):
  @parameterized.parameters(
    ([1.0, 1.2], [1.1, 1.2], True),
    ([1.0, 1.5], [1.1, 1.2], False),  # further apart at one seed than the seeds are
    ([1.0], [1.0], False),  # one seed has no spread
    ([float('nan'), 1.2], [1.1, 1.2], False),
  )
  def test_verdict(self, kernels, plain, tracks):
    curves = [[2.0, 1.0]] * len(plain)
    self.assertEqual(tracking.compare((curves, kernels), (curves, plain))['tracks'], tracks)

  def test_distances_of_the_curves(self):
    kernels, plain = [[3.0, 2.0, 1.0], [3.0, 2.0, 1.5]], [[3.0, 2.5, 1.0], [3.5, 2.0, 1.0]]
    found = tracking.compare((kernels, [1.0, 1.0]), (plain, [1.0, 1.25]))
    self.assertEqual(found['difference'], [0.0, -0.25])
    self.assertEqual(found['spread'], 0.25)
    self.assertEqual(found['curve_difference'], 0.5)  # of 0.5, 0.5, 0.5
    self.assertEqual(found['curve_spread'], 0.5)  # of 0.5, 0.5, 0.0


class MainTest(parameterized.TestCase):
  @parameterized.parameters(
    (True, True, 0, 'verdict: tracks$'),
    (True, False, 1, 'verdict: tracks, but incomplete'),
    (False, True, 1, 'verdict: does not track$'),
  )
  def test_what_is_missing_is_no_success(self, tracks, complete, code, verdict):
    record = dict(comparisons={}, tracks=tracks, complete=complete)
    with (
      tempfile.TemporaryDirectory() as folder,
      mock.patch.object(tracking, 'run', return_value=record),
      contextlib.redirect_stdout(io.StringIO()) as out,
    ):
      argv = ['--tiny', '--steps', '20', '--out', f'{folder}/records.jsonl', '--tokens', 'none.npy']
      self.assertEqual(tracking.main(argv), code)
    self.assertRegex(out.getvalue().strip(), verdict)


class RunTest(parameterized.TestCase):
  def test_evaluation_is_of_bytes_that_no_step_sees(self):
    size = 10_000
    train, held_out = byte_model.offsets(size, byte_model.TINY, 50)
    self.assertEqual(train.shape, (50, 4))
    self.assertLessEqual(train.max() + byte_model.TINY.length + 1, size - size // byte_model.HELD_OUT)
    self.assertGreaterEqual(held_out.min(), size - size // byte_model.HELD_OUT)
    self.assertLessEqual(held_out.max() + byte_model.TINY.length + 1, size)
    with self.assertRaisesRegex(ValueError, 'too small'):
      byte_model.offsets(100, byte_model.TINY, 50)

  @pytest.mark.slow
  def test_tiny_run_on_the_kernels_path(self):
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
      tokens, records = pathlib.Path(folder) / 'tokens.npy', pathlib.Path(folder) / 'records.jsonl'
      # Bytes with something to learn: 16 of 256 occur.
      np.save(tokens, np.random.default_rng(1).integers(0, 16, 20_000).astype(np.uint8))
      argv = ['--tiny', '--steps', '20', '--seeds', '2', '--kernels', 'dense', '--recipes', 'transposable_srste']
      code = tracking.main([*argv, '--out', str(records), '--tokens', str(tokens)])
      record = json.loads(records.read_text())
    self.assertEqual(code, 0, out.getvalue())
    self.assertTrue(record['complete'])
    self.assertEqual(set(record['final']), {'dense', 'transposable_srste dense', 'transposable_srste reference'})
    for name, curves in record['curves'].items():
      self.assertEqual([len(curve) for curve in curves], [2, 2])
      for curve, final in zip(curves, record['final'][name], strict=True):
        self.assertLess(final, curve[0])  # it learns
      self.assertNotEqual(*record['final'][name])  # seeds differ
    self.assertNotEqual(record['final']['dense'], record['final']['transposable_srste reference'])

  @parameterized.named_parameters(
    ('time_for_all', 1000, None, 3),
    ('time_for_two', 189, None, 2),  # 160 s have passed after two, and a third would end at 190 s
    ('a_signal_in_the_second', 1000, 5, 1),
  )
  def test_a_seed_counts_when_all_methods_have_ended(self, limit, stopped_at, seeds):
    names = ('dense', 'transposable_srste dense', 'transposable_srste reference')
    clock, began = mock.Mock(passed=100.0), []

    def one(name, programs, chunks, data, held_out, i):
      began.append(name)
      clock.passed += 10
      if len(began) == stopped_at:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)  # until the signal is handled
      return [1.0], i + len(name), 10.0

    options = mock.Mock(tiny=True, steps=10, seeds=3, seconds=limit, recipes=['transposable_srste'], kernels='dense')
    with (
      mock.patch.object(tracking, '_compiled', return_value=dict.fromkeys(names)),
      mock.patch.object(tracking, '_one_seed', one),
      mock.patch.object(np, 'load', return_value=np.zeros(20_000, np.uint8)),
      contextlib.redirect_stdout(io.StringIO()),
    ):
      record = tracking.run(options, {}, clock)
    self.assertEqual(record['seeds'], seeds)
    self.assertEqual({name: len(found) for name, found in record['final'].items()}, dict.fromkeys(names, seeds))
    self.assertEqual(record['complete'], seeds == 3)
    self.assertLen(began, stopped_at or 3 * seeds)


if __name__ == '__main__':
  absltest.main()
