"""A process of a run of several, on fake data: `python -m tests.experiments.runs.several DEVICES ARGUMENT ...`."""

import contextlib
import os
from pathlib import Path
import sys
import time

from tests import simulated


def main():
  devices, *arguments = sys.argv[1:]
  os.environ['XLA_FLAGS'] = simulated.flags(devices)
  from unittest import mock

  import jax
  from orbax.checkpoint import type_handlers

  jax.config.update('jax_disable_most_optimizations', True)
  from experiments import __main__ as cli
  from experiments.runs import build, durable, metrics
  from experiments.runs.data import pipeline
  from tests.experiments import fakes

  kill_at = os.environ.get('KILL_AT', '')
  fetch = fakes._Iterator.__next__

  def fetch_or(self):
    if kill_at and self._position == int(kill_at):
      os.kill(os.getpid(), int(os.environ['KILL_BY']))
    batch = fetch(self)
    bad = self._position == int(os.environ.get('BAD_BATCH', '0'))
    return {name: x * 0 - 10**6 for name, x in batch.items()} if bad else batch

  def load(**options):
    index, count, parts = (options[name] for name in ('process_index', 'process_count', 'micro_batches'))
    config = pipeline.DataConfig(process_index=index, process_count=count, micro_batches=parts)
    return fakes.FakeData(rows=config.rows)

  def full(*given, **_):
    raise OSError(28, 'No space left on device', *(str(path) for path in given if isinstance(path, Path)))

  make_parts = build.make_parts

  def make_late(*given, **options):
    time.sleep(float(os.environ.get('LATE', '0')))
    return make_parts(*given, **options)

  init = metrics.MetricsWriter.__init__

  def open_full(self, *arguments, **options):
    init(self, *arguments, **options)
    self._files[metrics.METRICS] = open('/dev/full', 'a')  # noqa: SIM115

  # What cannot be written any more once the disk is full.
  places = {
    'settings': (durable, 'write_json'),
    'arrays': (type_handlers.ArrayHandler, 'serialize'),
  }
  with contextlib.ExitStack() as stack:
    if (place := os.environ.get('FULL_DISK')) == 'metrics':
      stack.enter_context(mock.patch.object(metrics.MetricsWriter, '__init__', open_full))
    elif place:
      stack.enter_context(mock.patch.object(*places[place], full))
    stack.enter_context(mock.patch.object(build, 'make_parts', make_late))
    stack.enter_context(mock.patch.object(pipeline, 'load', load))
    stack.enter_context(mock.patch.object(fakes._Iterator, '__next__', fetch_or))
    return cli.main(arguments)


if __name__ == '__main__':
  sys.exit(main())
