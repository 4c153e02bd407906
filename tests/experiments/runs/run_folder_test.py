"""One process trains in a folder, and a finished run is known there."""

import errno
import os
from pathlib import Path
import subprocess
import sys
import textwrap
from unittest import mock

from absl.testing import absltest
import jax

from experiments.runs import run_folder
from tests.experiments.fakes import temp_folder
from tests.experiments.runs.train_test import ROOT, run, tiny


class RunFolderTest(absltest.TestCase):
  def test_a_folder_belongs_to_one_process_until_that_ends(self):
    folder = Path(temp_folder(self), 'new')
    program = '''
      import pathlib, sys, time
      from experiments.runs import run_folder
      with run_folder.held(pathlib.Path(sys.argv[1])):
        print('held', flush=True)
        time.sleep(300)
    '''
    command = [sys.executable, '-c', textwrap.dedent(program), folder]
    variables = {**os.environ, 'PYTHONPATH': str(ROOT)}
    with subprocess.Popen(command, env=variables, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
      self.addCleanup(child.kill)
      self.assertEqual(child.stdout.readline(), 'held\n')
      with self.assertRaisesRegex(ValueError, rf'process {child.pid} on .* trains in {folder}; .*another folder'):
        run(tiny(), folder)
      with mock.patch.object(jax, 'process_index', return_value=1), run_folder.held(folder):
        pass  # of the run that process 0 holds the folder for
      child.kill()
    with run_folder.held(folder), self.assertRaisesRegex(ValueError, f'process {os.getpid()} on'):
      run(tiny(), folder)
    with run_folder.held(folder):
      pass

  def test_a_file_system_without_locks_trains_with_a_warning(self):
    missing = OSError(errno.ENOSYS, 'Function not implemented')
    refused = mock.patch.object(run_folder.fcntl, 'flock', side_effect=missing)
    warned = self.assertWarnsRegex(UserWarning, 'cannot be locked .*not implemented.*second process')
    with refused, warned, run_folder.held(Path(temp_folder(self))):
      pass

  def test_a_run_without_checkpoints_is_finished_or_starts_again(self):
    folder = Path(temp_folder(self))
    summary = run(tiny('ste', checkpoint_every=0), folder)
    self.assertEmpty(list(folder.glob('checkpoints/*')))
    before = (folder / 'metrics.jsonl').stat().st_mtime_ns
    self.assertEqual(run(tiny('ste', checkpoint_every=0), folder), summary)
    self.assertEqual((folder / 'metrics.jsonl').stat().st_mtime_ns, before)
    with self.assertRaisesRegex(ValueError, 'holds a run with other settings'):
      run(tiny('ste', checkpoint_every=0, seed=3), folder)
    (folder / 'summary.json').unlink()
    self.assertEqual(run(tiny('ste', checkpoint_every=0), folder)['validation_loss'], summary['validation_loss'])
    with self.assertRaisesRegex(ValueError, 'checkpoint_every is -1'):
      run(tiny('ste', checkpoint_every=-1), temp_folder(self))


if __name__ == '__main__':
  absltest.main()
