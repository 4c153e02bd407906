import functools
import itertools
import pathlib
import tempfile
import time

from absl.testing import absltest

from pallas_kernels import _processes


def _note(folder, count, i, turn):
  """Notes when it had its turn; the second fails."""
  if i >= count:
    return False
  if i == 1:
    raise ValueError('the second job')
  with turn:
    start = time.time()
    time.sleep(0.05)
    (folder / str(i)).write_text(f'{start} {time.time()}')
  return True


class ProcessesTest(absltest.TestCase):

  def _run(self, count, seconds):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    failed = _processes.run(functools.partial(_note, folder, count), 2, seconds)
    return failed, {int(p.name): [float(x) for x in p.read_text().split()] for p in folder.iterdir()}

  def test_every_job_is_done_once_and_turns_do_not_overlap(self):
    failed, turns = self._run(5, 60.0)
    self.assertEqual(failed, 1)
    self.assertEqual(set(turns), {0, 2, 3, 4})
    spans = sorted(turns.values())
    for (_, end), (start, _) in itertools.pairwise(spans):
      self.assertLessEqual(end, start)

  def test_nothing_is_begun_when_time_is_up(self):
    self.assertEqual(self._run(3, -1.0), (0, {}))

  def test_a_late_turn_is_refused(self):
    folder = pathlib.Path(self.enter_context(tempfile.TemporaryDirectory()))
    with self.assertRaises(TimeoutError), _processes.Turn(folder / 'lock', time.time() - 1):
      self.fail('a turn after the deadline')


if __name__ == '__main__':
  absltest.main()
