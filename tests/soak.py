"""A long run that is killed again and again: `make soak`, or `python -m tests.soak --steps 20000 --kills 20`.

A tiny model with transposable masks, refreshed every fourth step, and a dense end, on made-up text. Checkpoints are
written every 200 steps; at random times the process gets SIGKILL or SIGTERM, and is started again. At the end: every
process compiled in its first steps only, its memory did not grow, and metrics and the last checkpoint are those of a
run that nobody disturbed.
"""

import argparse
import json
import multiprocessing
import os
from pathlib import Path
import random
import signal
import sys
import tempfile
import time
from typing import Any

# Steps at the begin of a process, and after a change of phase, in which it may compile.
_SETTLED = 450
_EVERY = 100
# What an allocator may keep, of 200 to 400 MiB.
_GROWTH_MIB = 40


def _config(steps: int):
  from tests.experiments.runs import train_test

  recipe = {'path': train_test.FFN, 'masked_decay': 2e-4, 'refresh_every': 4, 'dense_fraction': 0.2}
  # An evaluation, which compiles, comes before a process is taken to have settled.
  return train_test.tiny('transposable_srste', recipe, steps=steps, log_every=50, eval_every=400, checkpoint_every=200)


def _child(steps: int, folder: str, log: str) -> None:
  """Trains; writes step, memory and number of compilations every so many steps."""
  os.environ['JAX_PLATFORMS'] = 'cpu'
  from unittest import mock

  import jax
  import jax.monitoring

  from experiments.runs import stopping, train
  from tests.experiments import fakes

  jax.config.update('jax_disable_most_optimizations', True)
  jax.config.update('jax_compilation_cache_dir', f'{log}.cache')
  compiled = 0

  def count(event: str, *_, **__) -> None:
    nonlocal compiled
    compiled += event == '/jax/core/compile/backend_compile_duration'

  jax.monitoring.register_event_duration_secs_listener(count)
  fetch, taken = fakes._Iterator.__next__, 0

  def fetch_and_look(it):
    nonlocal taken
    taken += 1
    if taken % _EVERY == 0:
      pages = int(Path('/proc/self/statm').read_text().split()[1])
      with Path(log).open('a') as file:
        record = {'pid': os.getpid(), 'step': it._position, 'taken': taken, 'compiled': compiled}
        file.write(json.dumps(record | {'mib': pages * 4 / 1024}) + '\n')
    return fetch(it)

  with mock.patch.object(fakes._Iterator, '__next__', fetch_and_look):
    try:
      train.train(_config(steps), folder, data=fakes.FakeData(), quiet=True)
    except stopping.StoppedError as stopped:
      sys.exit(stopped.status)


def main() -> int:
  parser = argparse.ArgumentParser(prog='python -m tests.soak', description=__doc__)
  parser.add_argument('--steps', type=int, default=20000)
  parser.add_argument('--kills', type=int, default=20)
  parser.add_argument('--seconds', type=float, default=20.0, help='between two kills, on average')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--keep', action='store_true', help='write the record and docs/faults.md')
  args = parser.parse_args()
  chance, context = random.Random(args.seed), multiprocessing.get_context('spawn')
  with tempfile.TemporaryDirectory() as root:
    kills = {signal.SIGKILL: 0, signal.SIGTERM: 0}
    for name, allowed in (('disturbed', args.kills), ('alone', 0)):
      folder, log = f'{root}/{name}', f'{root}/{name}.jsonl'
      while not Path(folder, 'summary.json').exists():
        child = context.Process(target=_child, args=(args.steps, folder, log))
        child.start()
        child.join(chance.uniform(0.5, 1.5) * args.seconds if sum(kills.values()) < allowed else None)
        if child.is_alive():
          number = chance.choice(list(kills))
          assert child.pid is not None
          os.kill(child.pid, number)
          kills[number] += 1
          child.join()
        elif child.exitcode:
          print(f'a process ended with {child.exitcode}')
          return 1
        print(f'{time.strftime("%H:%M:%S")} {name}: {sum(kills.values())} signals', flush=True)
    found = _judge(Path(root), args.steps)
  found |= {'steps': args.steps, 'sigkill': kills[signal.SIGKILL], 'sigterm': kills[signal.SIGTERM], 'seed': args.seed}
  print(found)
  if args.keep:
    os.environ['JAX_PLATFORMS'] = 'cpu'
    from tests import fault_records

    fault_records.keep({'name': 'soak', **found})
  return 1 if found['bad'] else 0


def _judge(root: Path, steps: int) -> dict[str, Any]:
  """What is bad, and how memory grew, from the logs of two runs."""
  os.environ['JAX_PLATFORMS'] = 'cpu'
  from tests.experiments.runs import train_test

  bad, growth = [], {'disturbed': [0.0], 'alone': [0.0]}
  records = []
  for name, grown in growth.items():
    records = [json.loads(line) for line in (root / f'{name}.jsonl').open()]
    for pid in sorted({record['pid'] for record in records}):
      own = [r for r in records if r['pid'] == pid and r['taken'] >= _SETTLED]
      # The dense end is another program.
      for part in ([r for r in own if r['step'] < 0.8 * steps], [r for r in own if r['step'] > 0.8 * steps + _SETTLED]):
        if len(part) > 1:
          grown.append(part[-1]['mib'] - part[0]['mib'])
          if late := part[-1]['compiled'] - part[0]['compiled']:
            bad.append(f'process {pid} compiled {late} programs after it had settled')
  if (most := max(map(max, growth.values()))) > _GROWTH_MIB:
    bad.append(f'memory grew by {most:.0f} MiB within a process')
  if len({(root / name / 'metrics.jsonl').read_bytes() for name in growth}) > 1:
    bad.append('metrics differ from those of the run that nobody disturbed')
  found, expected = (train_test.final_arrays(_config(steps), root / n)[0] for n in growth)
  if different := [path for path, array in expected.items() if found[path].tobytes() != array.tobytes()]:
    bad.append(f'{len(different)} of {len(expected)} arrays differ')
  return {
    'bad': bad, 'growth_mib': most, 'alone_growth_mib': max(growth['alone']), 'mib': records[-1]['mib'],
    'settled': _SETTLED,
  }  # fmt: skip


if __name__ == '__main__':
  sys.exit(main())
