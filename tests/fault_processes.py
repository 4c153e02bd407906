"""Faults of runs of several processes, see `tests.faults`."""

import os
import re
import signal

import numpy as np

from tests.experiments.runs.hosts_test import finish, records_of, start
from tests.fault_lab import files_of, Lab, newest, Outcomes

# What a process ends with when it has lost another one.
_LOST = (76, -signal.SIGABRT)


def processes(lab: Lab) -> Outcomes:
  folders = []
  for count in (1, 2, 4):
    folders.append(lab.new())
    for status, output in finish(start(folders[-1], count, 'steps=10')):
      if status:
        yield f'lost: {output[-500:]}'
  one, *others = ([r['loss'] for r in records_of(f)] for f in folders)
  for other in others:
    yield 'survived' if all(abs(a / b - 1) < 1e-5 for a, b in zip(one, other, strict=True)) else 'lost'


def lost_process(lab: Lab) -> Outcomes:
  stop, stopped = signal.SIGTERM, (75,)
  for number, statuses, index in ((signal.SIGKILL, _LOST, 1), (stop, stopped, 1), (stop, stopped, 0)):
    folder, settings = lab.new(), ('steps=400', 'eval_every=400')
    found = finish(start(folder, 2, *settings, fault=(index, number, 35)))
    if found[1 - index][0] not in statuses:
      yield f'lost: {found}'
      continue
    again = finish(start(folder, 2, *settings))
    yield 'survived' if [s for s, _ in again] == [0, 0] else f'lost: {again}'


def _losses(folder):
  return [record['loss'] for record in records_of(folder)]


def _same(folder, expected) -> str:
  """Whether a run has the losses of another one; gloo adds in the same order in both."""
  found = _losses(folder)
  return 'survived' if found == expected else f'lost: {found}, {expected}'


def _whole(lab: Lab) -> list[float]:
  """Losses of a run of two processes that nothing happened to."""
  folder = lab.folder / 'whole_of_two'
  if not folder.exists() and [s for s, _ in finish(start(folder, 2, 'steps=30'))] != [0, 0]:
    raise RuntimeError('two processes do not train')
  return _losses(folder)


def full_disk_of_one(lab: Lab) -> Outcomes:
  arrays = r'could not save step 10 to .*No space left.*start the same command again'
  for index, what, names in (
    (0, 'metrics', "No space left on device: '/dev/full'"), (0, 'arrays', arrays), (1, 'arrays', arrays)
  ):
    folder = lab.new()
    found = finish(start(folder, 2, 'steps=30', full_disk=(index, what)))
    (status, output), (other, _) = found[index], found[1 - index]
    if (status, other in _LOST) != (1, True) or not re.search(names, output):
      yield f'lost: {found}'
      continue
    again = finish(start(folder, 2, 'steps=30'))
    yield _same(folder, _whole(lab)) if [s for s, _ in again] == [0, 0] else f'lost: {again}'


def damaged_for_two(lab: Lab) -> Outcomes:
  """Arrays of the newest checkpoint cut in half; then back to an older one, which is named."""
  folder = lab.new()
  settings = 'steps=30', 'keep_checkpoints=3'
  done = finish(start(folder, 2, *settings))
  if [s for s, _ in done] != [0, 0]:
    yield f'lost: {done}'
    return
  (folder / 'summary.json').unlink()  # as if it was killed before it wrote this
  for file in files_of(newest(folder), 'params'):
    os.truncate(file, file.stat().st_size // 2)
  for options in ((), ('--from-step', '10')):
    again = finish(start(folder, 2, *settings, options=options))
    good = 'set-aside' in again[0][1] and [s for s, _ in again] == [0, 0]
    yield _same(folder, _whole(lab)) if good else f'lost: {again}'


def bad_batch_of_two(lab: Lab) -> Outcomes:
  """The bad rows are those of the second process."""
  for policy, statuses in (('stop', [1, 1]), ('skip', [0, 0]), ('roll_back', [0, 0])):
    folder = lab.new()
    found = finish(start(folder, 2, 'steps=30', f'bad_numbers.policy={policy}', bad_batch=(1, 17)))
    if [s for s, _ in found] != statuses:
      yield f'lost: {found}'
    elif policy == 'stop':
      yield 'refused' if 'nan at step 17' in found[0][1] else f'lost: {found}'
    else:
      yield 'survived' if np.isfinite(_losses(folder)).all() and _losses(folder)[-1] < 3 else 'lost'
