import contextlib
import functools
import io
import itertools
import multiprocessing
import os
import pathlib
import signal
import tempfile
import threading
import time
from unittest import mock

from absl.testing import absltest, parameterized

from pallas_kernels import _processes

_VARIABLE = 'XLA_PYTHON_CLIENT_PREALLOCATE'


def _note(folder, i, turn):
  """Notes when it had its turn; the second fails."""
  if i == 1:
    raise ValueError('the second job')
  with turn:
    start = time.time()
    time.sleep(0.05)
    (folder / str(i)).write_text(f'{start} {time.time()}')


def _slow(folder, i, turn):
  """Fails as a socket might, says what it was started with, comes too late for its turn."""
  if i == 0:
    raise TimeoutError('no answer')
  if i == 1:
    (folder / 'environment').write_text(os.environ.get(_VARIABLE, 'unset'))
    return
  turn.deadline = 0.0
  with turn:
    pass


def _deaf(folder, i, turn):
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
  (folder / str(i)).touch()
  time.sleep(30)


def _dies(i, turn):
  os._exit(3)


class ProcessesTest(parameterized.TestCase):

  def _run(self, count, seconds):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    ended = _processes.run(functools.partial(_note, folder), count, 2, seconds)
    return ended, {int(p.name): [float(x) for x in p.read_text().split()] for p in folder.iterdir()}

  def test_every_job_is_done_once_and_turns_do_not_overlap(self):
    ended, turns = self._run(5, 60.0)
    self.assertEqual(ended, (1, 0))
    self.assertEqual(set(turns), {0, 2, 3, 4})
    spans = sorted(turns.values())
    for (_, end), (start, _) in itertools.pairwise(spans):
      self.assertLessEqual(end, start)

  def test_nothing_is_begun_when_time_is_up(self):
    self.assertEqual(self._run(3, -1.0), ((0, 3), {}))

  def test_a_late_turn_is_refused(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    with self.assertRaises(_processes.LateTurnError), _processes.Turn(folder / 'lock', time.time() - 1):
      self.fail('a turn after the deadline')

  @parameterized.parameters((None, 'false'), ('true', 'true'))
  def test_late_jobs_are_counted_apart_and_the_environment_comes_back(self, given, seen):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    with mock.patch.dict(os.environ, {} if given is None else {_VARIABLE: given}):
      if given is None:
        os.environ.pop(_VARIABLE, None)
      ended = _processes.run(functools.partial(_slow, folder), 5, 1, 60.0)
      self.assertEqual(os.environ.get(_VARIABLE), given)
    # The third waits for its turn in vain, the fourth and the fifth are not begun.
    self.assertEqual(ended, (1, 3))
    self.assertEqual((folder / 'environment').read_text(), seen)

  def test_jobs_that_no_process_is_left_for_failed(self):
    self.assertEqual(_processes.run(_dies, 3, 1, 60.0), (3, 0))

  def test_a_late_turn_is_told(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    taken, failed, late = (multiprocessing.Value('i', start) for start in (2, 0, 0))
    turn = _processes.Turn(folder / 'lock', time.time() + 60)
    with contextlib.redirect_stdout(io.StringIO()) as out, mock.patch('sys.argv', []):
      _processes._work(functools.partial(_slow, folder), 4, turn, taken, failed, late, [])
    self.assertEqual((failed.value, late.value, taken.value), (0, 1, 3))
    self.assertIn('job 2 left out: time ran out', out.getvalue())

  def test_an_interrupt_leaves_no_process(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))

    def interrupt():
      while not (folder / '0').exists():
        time.sleep(0.05)
      signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # Test runners with workers ignore the signal.
    self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))
    self.enter_context(mock.patch.object(_processes, '_STOP_SECONDS', 0.2))
    threading.Thread(target=interrupt, daemon=True).start()
    with self.assertRaises(KeyboardInterrupt):
      _processes.run(functools.partial(_deaf, folder), 1, 1, 60.0)
    self.assertEmpty(multiprocessing.active_children())


if __name__ == '__main__':
  absltest.main()
