"""Injects faults into runs and writes what became of them: `make faults`. Started again, it goes on where it was.

Each case trains a tiny model on made-up text, harms it, and looks whether it ends with the bits of a run that was not
harmed (survived), whether it is refused with a message that names what is wrong (refused), or neither (lost).
"""

import argparse
from collections.abc import Callable
import contextlib
import io
import json
import multiprocessing
import os
from pathlib import Path
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from unittest import mock

if __name__ == '__main__':  # Before JAX is imported.
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  # Of its own, since its key does not know how much was optimized. The processes that cases start read it too.
  os.environ['JAX_COMPILATION_CACHE_DIR'] = '.jax_cache/faults'
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  from tests import simulated

  os.environ['XLA_FLAGS'] = simulated.flags()

from absl import logging
import jax
import orbax.checkpoint as ocp

from experiments.runs import bad_numbers, checkpoint, run_folder, train
from tests import fault_records
from tests.experiments import fakes
from tests.experiments.reports import report_test
from tests.experiments.runs import bad_numbers_test
from tests.fault_lab import command, files_of, flip, Lab, newest, Outcomes, raises, refused, STEPS
from tests.fault_processes import bad_batch_of_two, damaged_for_two, full_disk_of_one, lost_process, processes


def train_and_die(folder: str, step: int) -> None:
  """The body of a process that kills itself while it fetches the batch of a step."""
  jax.config.update('jax_disable_most_optimizations', True)
  fetch = fakes._Iterator.__next__

  def fetch_or_die(it):
    if it._position == step:
      os.kill(os.getpid(), signal.SIGKILL)
    return fetch(it)

  with mock.patch.object(fakes._Iterator, '__next__', fetch_or_die):
    Lab(Path(folder).parent, random.Random(0)).train(Path(folder))


def killed(lab: Lab) -> Outcomes:
  for _ in range(3):
    step, folder = lab.chance.randrange(3, STEPS - 1), lab.new()
    child = multiprocessing.get_context('spawn').Process(target=train_and_die, args=(str(folder), step))
    child.start()
    child.join()
    yield lab.survives(folder) if child.exitcode == -signal.SIGKILL else f'lost: {child.exitcode}'


def told_to_stop(lab: Lab) -> Outcomes:
  for _ in range(3):
    yield lab.survives(lab.cut(lab.chance.randrange(3, STEPS - 1)))


def bits(item: str) -> Callable[[Lab], Outcomes]:
  def case(lab: Lab) -> Outcomes:
    for _ in range(4):
      folder = lab.cut(25)
      flip(lab.chance.choice(files_of(newest(folder), item)), lab.chance)
      yield lab.survives(folder)

  return case


def removed(lab: Lab) -> Outcomes:
  for item in ('params', 'opt_state', 'meta'):
    folder = lab.cut(25)
    shutil.rmtree(newest(folder) / item)
    yield lab.survives(folder)


def cut_short(lab: Lab) -> Outcomes:
  for item in ('params', 'meta'):
    folder = lab.cut(25)
    for file in files_of(newest(folder), item):
      os.truncate(file, file.stat().st_size // 2)
    yield lab.survives(folder)


def all_bad(lab: Lab) -> Outcomes:
  folder = lab.cut(25)
  for meta in (folder / 'checkpoints').glob('*/meta/metadata'):
    meta.write_text('')
  yield raises(checkpoint.UnreadableError, 'cannot be read.*Nothing was changed', lambda: lab.train(folder))
  yield refused(('eval', str(folder)), 'cannot be read.*Nothing was changed')


def damaged_files(lab: Lab) -> Outcomes:
  for name, content in (('summary.json', ''), ('config.json', ''), ('summary.json', '{"a'), ('config.json', '\0' * 9)):
    folder = lab.new()
    shutil.copytree(lab.whole(), folder)
    (folder / name).write_text(content)
    yield refused(('report', str(folder), '--out', str(lab.folder / 'r.html')), f'{name} is')
    yield lab.survives(folder)


def damaged_metrics(lab: Lab) -> Outcomes:
  folder = lab.cut(25)
  with (folder / 'metrics.jsonl').open('ab') as file:
    file.write(b'\0' * 400)
  yield lab.survives(folder)
  lines = (folder / 'metrics.jsonl').read_bytes().splitlines(keepends=True)
  lines.insert(2, b'\0' * 40 + b'\n')
  (folder / 'metrics.jsonl').write_bytes(b''.join(lines))
  yield refused(('report', str(folder), '--out', str(lab.folder / 'r.html')), r'metrics\.jsonl, line 3 is no record')


def full_disk(lab: Lab) -> Outcomes:
  folder = lab.cut(12)
  limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
  try:
    yield raises(Exception, 'could not save step|File too large', lambda: lab.train(folder))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, handler)
  yield lab.survives(folder)


def not_now(lab: Lab) -> Outcomes:
  """A disk, a permission or memory that fails while the newest checkpoint is read says nothing about it."""
  folder, restore = lab.cut(25), ocp.CheckpointManager.restore
  for error in (OSError(5, 'Input/output error'), PermissionError(13, 'denied'), MemoryError('no memory')):

    def fail(manager, step, args, error=error):
      if 'params' in args:
        raise error
      return restore(manager, step, args=args)

    with mock.patch.object(ocp.CheckpointManager, 'restore', fail):
      yield raises(type(error), str(error.args[-1]), lambda: lab.train(folder))
  yield 'lost: set aside' if (folder / 'checkpoints-set-aside').exists() else lab.survives(folder)


def jump_then_stop(lab: Lab) -> Outcomes:
  """The signal comes in the step after a jump, before its window of losses is due."""
  folder = lab.new()

  def limit(losses):
    return 0.0 if len(losses.latest) == 22 else float('inf')

  with mock.patch.object(bad_numbers.Losses, 'limit', limit):
    yield raises(train.TrainingDivergedError, 'jumped to .* at step 23', lambda: lab.train(lab.cut(23, folder)))
  yield lab.survives(folder)


def held_twice(lab: Lab) -> Outcomes:
  folder = lab.new()
  with run_folder.held(folder):
    yield raises(ValueError, 'trains in', lambda: lab.train(folder))


def moments(lab: Lab) -> Outcomes:
  every = {'optimizer__b2': 1.0, 'log_every': 1, 'checkpoint_every': 1}
  folder = lab.new()
  yield raises(train.TrainingDivergedError, 'is nan at step 1', lambda: lab.train(folder, **every))


def batches(lab: Lab) -> Outcomes:
  bad = bad_numbers_test.BadBatch
  yield raises(train.TrainingDivergedError, 'nan at step 17', lambda: lab.train(lab.new(), bad(17)))
  for policy in ('skip', 'roll_back'):
    summary = lab.train(lab.new(), bad(17), bad_numbers__policy=policy)
    yield 'survived' if summary['validation_loss'] < 3 else 'lost'


def rate(lab: Lab) -> Outcomes:
  """From step 24 on; then, as the error advises, with the old rate in the same folder."""
  folder, jump = lab.cut(23), lab.config(optimizer__peak_lr=1e5, optimizer__clip=0.0)
  options = {'data': fakes.FakeData(), 'quiet': True, 'accept_changes': True}
  with contextlib.redirect_stderr(io.StringIO()):
    advice = r'jumped to.*from step 24 .*--accept-changes|is (nan|inf).*from step 24'
    yield raises(train.TrainingDivergedError, advice, lambda: train.train(jump, folder, **options))
    yield lab.survives(folder)


def meshes(lab: Lab) -> Outcomes:
  for data, fsdp in ((1, 8), (2, 4), (8, 1), (1, 1)):
    folder = lab.new()
    summary = lab.train(folder, mesh__data=data, mesh__fsdp=fsdp)
    for arguments in ('eval', 'inspect'):
      status, output = command(arguments, str(folder))
      loss = re.search(r'loss ([\d.]+)', output)
      right = arguments == 'inspect' or (loss and abs(float(loss[1]) - summary['validation_loss']) < 1e-4)
      yield 'survived' if status == 0 and right else f'lost: {output[-300:]}'


def other_mesh(lab: Lab) -> Outcomes:
  for data, fsdp in ((2, 1), (1, 8), (2, 4)):
    folder = lab.cut(15)
    found = lab.train(folder, mesh__data=data, mesh__fsdp=fsdp)['validation_loss']
    expected = lab.train(lab.whole())['validation_loss']
    yield 'survived' if abs(found / expected - 1) < 0.02 else f'lost: {found}, {expected}'


def hostile(lab: Lab) -> Outcomes:
  nano = ('train', '--config', 'nano', '--tiny')
  for name in ('../../evil', '/evil', '..'):
    yield refused((*nano, '--set', f'name={name}'), 'it takes letters, digits')
  for pattern in ('(a+)+$', '(.*a)*b', 'a?' * 40):
    yield refused((*nano, '--set', 'recipe.name=ste', '--set', f'recipe.kwargs.path={pattern}'), 'take forever')


def scripts(lab: Lab) -> Outcomes:
  evil = '<script>alert(1)</script>'
  for keys in (('seed',), ('label',), ('model', 'embed_dim'), ('data', 'tokenizer')):
    folder = report_test.write_run(lab.new(), 'fst', 0, 1.4)
    config = json.loads((folder / 'config.json').read_text())
    (config[keys[0]] if len(keys) > 1 else config)[keys[-1]] = evil
    (folder / 'config.json').write_text(json.dumps(config))
    page = lab.folder / 'evil.html'
    page.unlink(missing_ok=True)
    status, _ = command('report', str(folder), '--out', str(page))
    quoted = status == 0 and '<script' not in page.read_text()
    yield 'survived' if quoted else ('refused' if status == 1 else 'lost')


def other_fields(lab: Lab) -> Outcomes:
  """Fields of another kind, or gone, each in a copy of a run."""
  for name, field, value in (
    ('config.json', 'steps', 10**12), ('config.json', 'model', []), ('config.json', 'label', None),
    ('summary.json', 'seconds', '9'), ('environment.json', 'versions', 3),
  ):
    folder = lab.new()
    shutil.copytree(lab.whole(), folder)
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {field: value}))
    told = rf'{folder / name}: {field} is .* must be'
    yield refused(('report', str(folder), '--out', str(lab.folder / 'r.html')), told)


def links(lab: Lab) -> Outcomes:
  """Links in a run from elsewhere, to a file of the user."""
  mine = lab.folder / 'mine'
  mine.write_text('mine')
  for name in ('.lock', 'events.jsonl'):
    folder = lab.cut(15)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(mine)
    outcome = raises(ValueError, f'{name} is a link', lambda folder=folder: lab.train(folder))
    yield outcome if mine.read_text() == 'mine' else f'lost: {mine.read_text()}'


def other_masks(lab: Lab) -> Outcomes:
  save = checkpoint.Checkpoints.save

  def save_another(checkpoints, step, params, opt_state, meta):
    ones = jax.tree.map(lambda x: jax.numpy.ones_like(x) if x.dtype == bool else x, opt_state)
    return save(checkpoints, step, params, ones, meta)

  with mock.patch.object(checkpoint.Checkpoints, 'save', save_another):
    folder = lab.cut(15)
  yield raises(ValueError, r'masks keep more than two of four: .* \(4 of four\)', lambda: lab.train(folder))
  yield refused(('eval', str(folder)), r'masks keep more than two of four: .* \(4 of four\)')


def code_as_data(lab: Lab) -> Outcomes:
  code, file, ran = lab.folder / 'evil.py', lab.folder / 'evil.toml', lab.folder / 'ran'
  code.write_text(f'open({str(ran)!r}, "w")')
  file.write_text(f'base = "{code}"')
  outcome = refused(('flops', '--config', str(file)), 'evil.toml: base is')
  yield outcome if not ran.exists() else 'lost: it ran'


CASES: dict[str, tuple[str, Callable[[Lab], Outcomes]]] = {
  'SIGKILL at a random step, then the same command': ('the bits of a run that was not killed', killed),
  'SIGTERM at a random step, then the same command': ('the same bits; the step was saved', told_to_stop),
  'one random bit of the newest checkpoint: parameters': ('from the one before, or a bit not used', bits('params')),
  'one random bit of the newest checkpoint: optimizer state': ('as above', bits('opt_state')),
  'one random bit of the newest checkpoint: metadata': ('as above', bits('meta')),
  'a part of the newest checkpoint removed': ('as above', removed),
  'files of the newest checkpoint cut in half': ('as above', cut_short),
  'all checkpoints damaged': ('train and eval name them, nothing is changed', all_bad),
  'summary.json, config.json empty, cut or NUL': ('report names the file; train writes it again', damaged_files),
  'NUL in metrics.jsonl: at the end, in the middle': ('left out; file and line are named', damaged_metrics),
  'disk full during a run': ('named; goes on once there is space, the same bits', full_disk),
  'no memory, no permission, a failing disk while it is read': ('named, not set aside; the same bits', not_now),
  'told to stop right after a jump of the loss': ('the jump is not saved; the same bits', jump_then_stop),
  'two runs in one folder': ('the second is refused', held_twice),
  'b2 = 1: a good loss makes bad parameters': ('nothing is saved', moments),
  'a batch whose loss is NaN: stop, skip, roll back': ('refused; the others go on', batches),
  'another rate at which the loss jumps': ('stopped; the old rate goes on, the same bits', rate),
  'checkpoints of 1x8, 2x4, 8x1, 1x1 devices: eval and inspect on one': ('the loss of the run', meshes),
  'one device to 2x1, 1x8 and 2x4 in the middle of a run': ('within 2% of the loss', other_mesh),
  '2 and 4 processes instead of one, 4 devices': ('losses within 1e-5', processes),
  'of 2 processes one killed, or told to stop; started again': ('statuses 76 or 134, and 75; goes on', lost_process),
  'the disk of one of 2 processes full: metrics, arrays; started again': ('named; the same losses', full_disk_of_one),
  'arrays cut in half for 2 processes; then --from-step': ('set aside; the same losses', damaged_for_two),
  'a NaN batch in one of 2 processes: stop, skip, roll back': ('refused; the others go on', bad_batch_of_two),
  'names that leave the folder, patterns that never end': ('refused', hostile),
  'a script in the configuration of a run': ('quoted in the report, or refused', scripts),
  'fields of another kind in the files of a run': ('refused, by file and field', other_fields),
  'links in the place of files that a run writes': ('refused, nothing is written', links),
  'masks that are not 2:4 in a checkpoint with right checksums': ('refused', other_masks),
  'a program as the base of an experiment in TOML': ('refused, not run', code_as_data),
}  # fmt: skip


def main() -> int:
  parser = argparse.ArgumentParser(prog='python -m tests.faults', description=__doc__)
  parser.add_argument('--keep', action='store_true', help='write docs/faults.md, and leave out what it has')
  parser.add_argument('--seed', type=int, default=0, help='of what is left to chance (default: 0)')
  parser.add_argument('--only', default='', help='a regular expression of the cases to try')
  args = parser.parse_args()
  logging.set_verbosity(logging.ERROR)  # of Orbax
  jax.config.update('jax_disable_most_optimizations', True)
  began, lost = time.monotonic(), 0
  left_out = fault_records.tried(args.seed) if args.keep else ()
  with tempfile.TemporaryDirectory() as folder:
    lab = Lab(Path(folder), random.Random())
    for name, (expected, case) in CASES.items():
      if not re.search(args.only, name) or name in left_out:
        continue
      lab.chance.seed(f'{args.seed} {name}')  # whatever was tried before
      try:
        outcomes = list(case(lab))
      except Exception as error:  # a fault that nothing caught is what is looked for
        outcomes = [f'lost: {type(error).__name__}: {error}']
      counts = {kind: sum(o.startswith(kind) for o in outcomes) for kind in fault_records.OUTCOMES}
      if args.keep:
        fault_records.keep({'name': name, **counts, 'expected': expected, 'seed': args.seed})
      lost += counts['lost']
      print(f'{time.monotonic() - began:6.0f} s  {name}: {counts}', flush=True)
      for outcome in outcomes:
        if outcome.startswith('lost'):
          print(f'    {outcome}', flush=True)
  return 1 if lost else 0


if __name__ == '__main__':
  sys.exit(main())
