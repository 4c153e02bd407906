"""A killed run goes on and ends with the bits of one that was not, for every recipe that keeps state."""

import json
import os
from pathlib import Path
import random
import shutil
import subprocess
import sys
import tempfile
import textwrap

from absl.testing import absltest, parameterized
import pytest

from experiments.runs import recipes
from experiments.runs.checkpoint import Checkpoints
from tests.experiments.fakes import temp_folder
from tests.experiments.runs.train_test import FFN, final_arrays, RECIPES, ROOT, run, tiny

# Name of a killed run: its recipe, the arguments of that, and other settings. It goes on from step 10 or 20 of 30, both
# between two changes of a topology, each third step. The stages of mixed sparsity meet at steps 6 and 24; neurons are
# clustered at step 10, right after the checkpoint, and the dense tail takes projected weights at step 24.
_STAGES = {'density': 0.3, 'warm_up': 0.2, 'restoration': 0.2, 'refresh_every': 3}
KILLED = {name: (name, kwargs, {}) for name, kwargs in RECIPES.items()} | {
  'mixed_sparsity_transposable': (
    'mixed_sparsity', {'path': FFN, 'mvue_path': recipes.FFN_UP, 'structure': 'transposable', **_STAGES}, {}
  ),
  'neuron_level': (
    'neuron_level',
    {'policy': {'features': '16:2:8', 'tokens': '16:2:8', 'clusters': {'number': 4}}, 'warmup_fraction': 1 / 3,
     'dense_fraction': 0.2},
    {'model__mlp': 'relu2', 'recipe__dense_from': 'projected'},
  ),
}  # fmt: skip

# What these keep others keep too: `transposable_srste` has the masks and the decay of `sr_ste` and a dense phase,
# `s_ste_fp8` the scale, `mixed_sparsity_transposable` the links of `rigl` that move, and the stages.
COVERED = ('dense', 'ste', 'sr_ste', 's_ste')


def killed(name):
  recipe, kwargs, overrides = KILLED[name]
  return tiny(recipe, kwargs, **overrides)


# Forks one child a recipe, so that the imports are paid for once; each child kills itself while it fetches a batch.
_CHILD = """
  import json, os, pathlib, signal, sys, time
  from experiments.runs import train
  from tests.experiments import fakes
  from tests.experiments.runs import resume_test

  def train_until(step, config, folder):
    fetch = fakes._Iterator.__next__
    def fetch_or_die(self):
      if self._position == step:
        saved = pathlib.Path(folder, 'checkpoints', str(step // 10 * 10))
        while not saved.exists():  # It is written while the run goes on.
          time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
      return fetch(self)
    fakes._Iterator.__next__ = fetch_or_die
    resume_test.run(config, folder)

  folder, jobs = sys.argv[1], json.loads(sys.argv[2])
  for name, step in jobs.items():
    child = os.fork()
    if not child:
      train_until(step, resume_test.killed(name), f'{folder}/{name}')
      os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (name, status)
"""


@pytest.mark.slow
class ResumeTest(parameterized.TestCase):
  """Kills runs, and compares what they end with when they go on; of one that is told to stop, see `stopping_test`."""

  names = tuple(name for name in KILLED if name not in COVERED)

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = tempfile.mkdtemp(prefix='killed-')
    cls.addClassCleanup(shutil.rmtree, cls.folder)
    cls.steps = {name: random.randrange(11, 30) for name in cls.names}
    variables = {**os.environ, 'PYTHONPATH': str(ROOT)}
    command = [sys.executable, '-c', textwrap.dedent(_CHILD), cls.folder, json.dumps(cls.steps)]
    subprocess.run(command, env=variables, cwd=ROOT, check=True, timeout=500)

  @parameterized.parameters(*names)
  def test_a_killed_run_resumes_bit_for_bit(self, name):
    config, resumed = killed(name), f'{self.folder}/{name}'
    with Checkpoints(f'{resumed}/checkpoints', read_only=True) as checkpoints:
      resumed_from = checkpoints.latest()
    self.assertEqual(resumed_from, self.steps[name] // 10 * 10, f'killed at step {self.steps[name]}')
    whole = temp_folder(self)
    validation = [run(config, folder)['validation_loss'] for folder in (resumed, whole)]
    self.assertEqual(*validation)
    for file in ('metrics.jsonl', 'config.json'):
      self.assertEqual(Path(resumed, file).read_bytes(), Path(whole, file).read_bytes(), file)
    (found, found_meta), (expected, meta) = final_arrays(config, resumed), final_arrays(config, whole)
    self.assertEqual(found.keys(), expected.keys())
    for path, array in expected.items():
      self.assertEqual(found[path].tobytes(), array.tobytes(), f'{path}, killed at step {self.steps[name]}')
    self.assertEqual(found_meta['data_state'], meta['data_state'])


if __name__ == '__main__':
  absltest.main()
