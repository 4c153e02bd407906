"""Several processes train as one does; a lost one ends all; a signal to one stops and saves all."""

import contextlib
import json
import os
from pathlib import Path
import re
import signal
import socket
import subprocess
import sys
import tempfile
from unittest import mock

from absl.testing import absltest, parameterized
import jax
from jax.experimental import multihost_utils
import numpy as np
import pytest

from experiments import arguments
from experiments.runs import experiment, hosts, inspection, meshes
from experiments.runs.checkpoint import Checkpoints
from experiments.runs.checkpoint_errors import CheckpointError
from experiments.runs.data import pipeline
import sparse24_jax as s24
from tests.experiments.fakes import FakeData, temp_folder
from tests.experiments.runs.train_test import ROOT

SETTINGS = (
  'model.num_layers=1', 'log_every=5', 'eval_every=10', 'checkpoint_every=10', 'eval_batches=2', 'recipe.name=ste',
  'mesh.data=2', 'mesh.fsdp=2',
)  # fmt: skip

# JAX takes one of the 4,096 ports from here on for a job of Slurm or Open MPI.
_FIRST_PORT = 65535 - 2**12 + 1


def under_slurm(port, processes, index):
  """What Slurm tells a task, from which JAX finds the others; the port is made of the job's number."""
  return {
    'SLURM_JOB_ID': str(port - _FIRST_PORT), 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': str(processes),
    'SLURM_PROCID': str(index), 'SLURM_LOCALID': str(index),
  }  # fmt: skip


def under_mpirun(port, processes, index):
  """What Open MPI tells a process."""
  return {
    'OMPI_MCA_orte_hnp_uri': f'{(port - _FIRST_PORT) * 2**12}.0;tcp://127.0.0.1:34911',
    'OMPI_COMM_WORLD_SIZE': str(processes), 'OMPI_COMM_WORLD_RANK': str(index),
    'OMPI_COMM_WORLD_LOCAL_RANK': str(index),
  }  # fmt: skip


def start(
  folder, processes, *settings, devices=4, fault=None, full_disk=None, bad_batch=None, late=None, options=(),
  scheduler=None,
):  # fmt: skip
  """Starts the processes of a run over 4 devices; returns them.

  Args:
    folder: of the run.
    processes: how many.
    *settings: of `--set`.
    devices: of all together.
    fault: (process, signal, step).
    full_disk: (process, what it cannot write: see `several`).
    bad_batch: (process, step) at which its rows are no tokens.
    late: a process that waits eight seconds before it builds the run.
    options: of the command, beside settings.
    scheduler: (port, processes, process) -> variables by which JAX finds the others; None: the command tells it.
  """
  port = _free_port(_FIRST_PORT if scheduler else 0)
  overrides = [word for setting in (*SETTINGS, *settings) for word in ('--set', setting)]
  started = []
  for index in range(processes):
    command = [sys.executable, '-m', 'tests.experiments.runs.several', str(devices // processes), 'train', '--config',
               'nano', '--tiny', '--folder', str(folder), *overrides, *options]  # fmt: skip
    variables = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    if scheduler:
      command += ['--distributed', '--heartbeat', '15']
      variables |= scheduler(port, processes, index)
    elif processes > 1:
      command += ['--coordinator', f'localhost:{port}', '--processes', str(processes), '--process', str(index),
                  '--heartbeat', '15']  # fmt: skip
    if fault and fault[0] == index:
      variables |= {'KILL_BY': str(int(fault[1])), 'KILL_AT': str(fault[2])}
    if full_disk and full_disk[0] == index:
      variables['FULL_DISK'] = full_disk[1]
    if bad_batch and bad_batch[0] == index:
      variables['BAD_BATCH'] = str(bad_batch[1])
    if late == index:
      variables['LATE'] = '8'
    log = tempfile.TemporaryFile('w+')  # noqa: SIM115
    child = subprocess.Popen(command, env=variables, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, text=True)
    started.append((child, log))
  return started


def _free_port(first):
  """A port that nobody listens at, from `first` on; any if that is 0."""
  for port in range(first, first + 2**12):
    with socket.socket() as free, contextlib.suppress(OSError):
      free.bind(('localhost', port))
      return free.getsockname()[1]
  raise OSError(f'no free port from {first} on')


def finish(started):
  """Waits for processes; returns (status, output) of each."""
  found = []
  try:
    for child, log in started:
      child.wait(timeout=400)
      log.seek(0)
      found.append((child.returncode, log.read()))
  finally:
    for child, log in started:
      child.kill()
      child.wait()
      log.close()
  return found


OF_ALL = ('steps=10', 'accumulate=2')


def records_of(folder):
  return [json.loads(line) for line in Path(folder, 'metrics.jsonl').read_text().splitlines()]


class RowsTest(parameterized.TestCase):
  @parameterized.parameters((1, 1), (2, 1), (4, 1), (2, 2), (4, 3))
  def test_shares_make_up_each_micro_batch(self, processes, parts):
    size = 4 * processes * parts
    shares = [
      pipeline.DataConfig(batch_size=size, process_index=i, process_count=processes, micro_batches=parts).rows
      for i in range(processes)
    ]
    whole = np.arange(size).reshape(parts, -1)
    np.testing.assert_array_equal(np.concatenate([s.reshape(parts, -1) for s in shares], axis=1), whole)

  def test_the_rows_of_this_process_are_those_of_its_devices(self):
    mesh = meshes.make_mesh(experiment.load_config('nano', ['mesh.data=2', 'mesh.fsdp=4']))
    self.assertEqual(meshes.rows_of_this_process(mesh), (0, 1))
    self.assertEqual(meshes.rows_of_this_process(None), (0, 1))

  def test_all_devices_of_several_processes_are_used(self):
    with (
      mock.patch.object(jax, 'process_count', return_value=2),
      self.assertRaisesRegex(ValueError, 'mesh 2 x 1 takes 2 devices, but 2 processes have 8 together'),
    ):
      meshes.make_mesh(experiment.load_config('nano', ['mesh.data=2']))

  def test_processes_that_cannot_be_found(self):
    with self.assertRaisesRegex(ValueError, 'did not meet: .*srun, mpirun.*--coordinator'):
      hosts.join(None, None, None, 10)


class RecipesTest(absltest.TestCase):
  """The recipes of docs/hosts.md start as many processes as their mesh has devices."""

  def test_commands(self):
    text = (ROOT / 'docs' / 'hosts.md').read_text()
    slurm, job = re.findall(r'```(?:bash|yaml)\n(.*?)```', text, re.DOTALL)
    numbers = {name: int(n) for name, n in re.findall(r'([\w./-]+)[=:] ?(\d+)', slurm + job)}
    self.assertEqual(numbers['--nodes'] * numbers['--gpus-per-node'], self._devices(slurm)[0])
    self.assertEqual(numbers['--ntasks-per-node'], numbers['--gpus-per-node'])
    devices, args = self._devices(job)
    self.assertEqual(numbers['completions'] * numbers['nvidia.com/gpu'], devices)
    self.assertEqual({args.processes, numbers['completions'], numbers['parallelism']}, {4})
    name, of = re.findall(r'(?:metadata: \{|- )name: (\w+)', job)[:2]
    self.assertTrue(args.coordinator.startswith(f'{name}-{of}-0-0.{name}:'))

  def _devices(self, recipe):
    """How many a recipe's mesh takes, and the arguments of its command."""
    (command,) = re.findall(r'python -m experiments (.*?)\n(?=\w|\s+resources)', recipe, re.DOTALL)
    words = command.replace('\\\n', ' ').replace('$JOB_COMPLETION_INDEX', '3').split()
    args = arguments.make_parser().parse_args(words)
    config = experiment.load_config(args.config, args.overrides)
    return config.mesh.data * config.mesh.fsdp * config.mesh.get('model', 1), args


class AgreeTest(parameterized.TestCase):
  """What two processes agree on, with the part of the other one made up."""

  def _of_two(self, mine, other):
    """Does something as process 0 of 2, where the other one tells an error."""
    told = np.frombuffer(other.encode().ljust(hosts._TOLD, b'\0'), np.uint8)
    with (
      mock.patch.object(jax, 'process_count', return_value=2),
      mock.patch.object(multihost_utils, 'process_allgather', lambda x: np.stack([x, told])),
    ):
      return hosts.together('write it', mine)

  def test_what_fails_in_one_fails_in_all(self):
    self.assertEqual(self._of_two(lambda: 5, ''), 5)
    with self.assertRaisesRegex(hosts.OtherProcessError, 'process 1 of 2 could not write it: OSError: disk full'):
      self._of_two(lambda: 5, 'OSError: disk full')

  def test_the_others_are_told_before_an_error_is_raised(self):
    told = []
    with (
      mock.patch.object(jax, 'process_count', return_value=2),
      mock.patch.object(multihost_utils, 'process_allgather', lambda x: told.append(x.tobytes())),
      mock.patch.object(Path, 'rename', side_effect=OSError('no space')),
      self.assertRaisesRegex(OSError, 'no space'),
    ):
      Checkpoints.set_aside(mock.Mock(directory=Path(temp_folder(self), 'checkpoints')), [3])
    self.assertRegex(told[0], b'OSError: no space')

  @parameterized.parameters(
    ('UNKNOWN: Gloo all-reduce failed: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [::]:1', True),
    ('INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there was a network error', True),
    ('DEADLINE_EXCEEDED: Barrier timed out. Id: q::0.\n\nRPC: /xla.coordination.CoordinationService/Barrier', True),
    ('INTERNAL: Barrier failed because: Task 1 heartbeat timeout. [tensorflow.CoordinationServiceError]', True),
    ('UNAVAILABLE: failed to connect to all addresses; remote target coordination_service', True),
    ('UNAVAILABLE: Error reading gs://bucket/params/manifest.ocdbt', False),
    ('RESOURCE_EXHAUSTED: Out of memory allocating 140737488355328 bytes.', False),
    ('INTERNAL: CpuCallback error calling callback: ValueError: my own', False),
    ('INTERNAL: NCCL operation ncclCommInit failed: unhandled cuda error: out of memory', False),
  )
  def test_only_what_a_lost_process_looks_like_is_one(self, message, lost):
    with mock.patch.object(jax, 'process_count', return_value=2):
      for kind in (jax.errors.JaxRuntimeError, ValueError):  # of reading a result
        self.assertEqual(hosts.lost_another(kind(message)), lost)
      try:
        raise CheckpointError('could not save') from ValueError(message)
      except CheckpointError as error:
        self.assertEqual(hosts.lost_another(error), lost)
    self.assertFalse(hosts.lost_another(ValueError(message)))  # there is no other


@pytest.mark.slow
class SeveralTest(parameterized.TestCase):
  def test_several_processes_train_as_one(self):
    one, four = temp_folder(self), temp_folder(self)
    for processes, folder, scheduler in ((1, one, None), (4, four, under_mpirun)):
      for status, output in finish(start(folder, processes, *OF_ALL, scheduler=scheduler)):
        self.assertEqual(status, 0, output)
    for found, expected in zip(records_of(four), records_of(one), strict=True):
      # gloo adds in another order than one process does; masks do not differ, so neither do flips.
      self.assertEqual(found.get('flip_rates'), expected.get('flip_rates'))
      np.testing.assert_allclose(found['loss'], expected['loss'], rtol=1e-5)
    loaded = [inspection.load(folder, data=FakeData()) for folder in (one, four)]
    rows = [inspection.weight_table(each) for each in loaded]
    self.assertEqual(*rows)
    masks = [jax.tree.map(lambda w: np.asarray(w) != 0, _projected(each)) for each in loaded]
    jax.tree.map(np.testing.assert_array_equal, *masks)

  def test_a_lost_process_ends_all_and_a_restart_goes_on(self):
    folder = temp_folder(self)
    (status, output), (killed, _) = finish(start(folder, 2, 'steps=30', fault=(1, signal.SIGKILL, 25)))
    self.assertEqual(killed, -signal.SIGKILL)
    if status == -signal.SIGABRT:  # It was waiting for the other to commit a checkpoint, where JAX ends it.
      self.assertIn('JAX distributed service detected fatal errors', output)
    else:
      self.assertEqual(status, hosts.LOST, output)
      self.assertIn('process 0 of 2 cannot reach the others any more', output)
      self.assertNotIn('Traceback', output)
    with Checkpoints(Path(folder, 'checkpoints'), read_only=True) as checkpoints:
      self.assertGreaterEqual(checkpoints.latest() or 0, 10)
    # With one process, which resumes what two began.
    ((status, output),) = finish(start(folder, 1, 'steps=30'))
    self.assertEqual(status, 0, output)
    self.assertEqual(records_of(folder)[-1]['step'], 30)

  def test_what_the_first_cannot_write_ends_all_with_the_same_error(self):
    found = finish(start(temp_folder(self), 2, 'steps=10', full_disk=(0, 'settings')))
    self.assertEqual([status for status, _ in found], [1, 1], found)
    self.assertRegex(found[0][1], r'error: \[Errno 28\] No space left on device: .*config.json')
    self.assertRegex(found[1][1], r'error: process 0 of 2 could not write config.json.*: OSError: .* No space left')

  def test_an_error_that_all_have_is_told_by_all(self):
    # A scheduler must not take this for a lost process and start the same again.
    found = finish(start(temp_folder(self), 2, 'eval_every=7', late=1))
    for status, output in found:
      self.assertEqual(status, 1, output)
      self.assertIn('error: eval_every 7 is not a multiple of log_every 5', output)

  def test_a_signal_to_one_stops_and_saves_all(self):
    folder = temp_folder(self)
    settings = 'steps=2000', 'eval_every=2000'
    found = finish(start(folder, 2, *settings, fault=(1, signal.SIGTERM, 16), scheduler=under_slurm))
    self.assertEqual([status for status, _ in found], [75, 75], found)
    self.assertRegex(found[0][1], r'stopped by SIGTERM; step \d+ is saved')
    self.assertNotIn('stopped by', found[1][1])


def _projected(loaded):
  return s24.project(loaded.state.params, loaded.state.opt_state, loaded.parts.recipe, phase=loaded.phase)


if __name__ == '__main__':
  absltest.main()
