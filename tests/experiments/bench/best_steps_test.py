"""The search of dense and sparse steps: what is offered, what is chosen, and what a step's share of the peak is of."""

import argparse
import contextlib
import io
import json
import os
from pathlib import Path
import subprocess
import sys
from unittest import mock

from absl.testing import absltest, parameterized
import pytest

from experiments.bench import best_steps
from experiments.bench.best_steps import Job
from experiments.bench.step_cases import CASES, FLAGS, Layout
from experiments.bench.timed_step import Step
from tests.experiments.fakes import temp_folder


class BestStepsTest(parameterized.TestCase):
  @parameterized.parameters('rolled', 'scan-matmuls', 'unrolled+fast')
  def test_a_layout_that_there_is_not(self, name):
    with self.assertRaisesRegex(ValueError, 'known are scan and unrolled'):
      Layout.named(name)

  def test_every_case_has_layouts_and_a_dense_twin(self):
    for case in CASES.values():
      self.assertIn('dense', case.methods)
      for layout in case.layouts:
        Layout.named(layout)

  def test_xla_knows_every_flag(self):
    """It ends a process that names one it does not know."""
    env = os.environ | {'XLA_FLAGS': ' '.join(FLAGS.values()), 'JAX_PLATFORMS': 'cpu'}
    subprocess.run([sys.executable, '-c', 'import jax; jax.devices()'], env=env, check=True, timeout=120)

  def test_operations_of_a_step(self):
    step = Step(CASES['gpt2-124m'], 'dense', Layout.named('scan'), tiny=False)
    weights, tokens = 12 * 12 * 768**2 + 50304 * 768, 32 * 1024
    # Two matmuls of 2 d operations a pair of positions, of which there are half; three times that with gradients.
    attention = 12 * 3 * 2 * 2 * 768 * 1024 / 2
    self.assertEqual(step.flops, (6 * weights + attention) * tokens)

  def test_all_layouts_are_timed_once_and_the_best_of_each_method_again_in_both_orders(self):
    jobs = [Job('gpt2-124m', method, layout) for method in ('dense', 'fst') for layout in ('scan', 'unrolled')]
    seen = []

    def timed(chosen, options):
      seen.append([(job.method, job.layout) for job in chosen])
      for job in chosen:
        ms = {'scan': 2.0, 'unrolled': 1.0}[job.layout] + (job.method == 'fst') * 0.5
        yield job, dict(amortised_ms=ms, tokens_per_s=1e3, mfu=0.5)

    out = Path(temp_folder(self), 'new.jsonl')
    options = argparse.Namespace(processes=3, out=out, tiny=True)
    with mock.patch.object(best_steps, 'timed', timed), contextlib.redirect_stdout(io.StringIO()) as said:
      best_steps.run('gpt2-124m', jobs, options, {'device': 'a GPU'}, float('inf'))
    again = [('dense', 'unrolled'), ('fst', 'unrolled')]
    self.assertEqual(seen, [[(job.method, job.layout) for job in jobs], again[::-1], again])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    self.assertEqual([record['process'] for record in records], [0] * 4 + [1, 1, 2, 2])
    self.assertIn('fst at its best, unrolled: 1.50 ms, 0.667 of dense', said.getvalue())

  def _time(self, method, updates):
    """The times of a step of 2 ms whose updates took so long."""
    step = Step(CASES['gpt2-124m'], method, Layout.named('scan'), tiny=True)
    step.compiled, step.updates = lambda state, *inputs: (state, 1.0), updates
    with (
      mock.patch.multiple(step, _state=lambda: None, _updates_ms=lambda samples: samples),
      mock.patch.object(best_steps.Step, 'flops', 1.0),
      mock.patch.object(best_steps._bench, 'stream_ms', lambda *_, **__: [2.0]),
    ):
      return step.time(1, 1)

  def test_a_dense_step_searches_nothing(self):
    row = self._time('dense', {})
    self.assertNotIn('search_ms', row)
    self.assertEqual(row['amortised_ms'], 2.0)

  def test_a_search_that_seems_to_cost_less_than_nothing(self):
    row = self._time('fst', {False: [3.0, 5.0, 4.0], True: [4.0, 2.0, 1.0]})
    self.assertEqual((row['search_ms'], row['amortised_ms']), (0.0, 2.0))
    self.assertEqual((row['updates_ms'], row['updates_with_a_search_ms']), ([3.0, 5.0, 4.0], [4.0, 2.0, 1.0]))

  @pytest.mark.slow
  def test_in_processes(self):
    out = Path(temp_folder(self), 'new.jsonl')
    argv = ['--tiny', '--out', str(out), '--methods', 'fst', '--layouts', 'unrolled', '--processes', '1']
    with contextlib.redirect_stdout(io.StringIO()) as said:
      failed = best_steps.main([*argv, '--bursts', '1', '--parallel', '2'])
    self.assertEqual(failed, 0, said.getvalue())
    fst = json.loads(out.read_text())
    self.assertEqual(fst['recipe'], 'fst')
    self.assertAlmostEqual(fst['amortised_ms'], fst['median_ms'] + fst['search_ms'] / 40, places=3)


if __name__ == '__main__':
  absltest.main()
