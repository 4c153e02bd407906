"""`python -m experiments.bench`: runs measurements one by one, goes on where it ended, keeps what was measured."""

import contextlib
import importlib
import io
import json
from pathlib import Path
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from unittest import mock

from absl.testing import absltest, parameterized
import pytest

from experiments.bench import __main__ as bench
from experiments.runs import json_lines

# Stands for a benchmark: appends its first argument as a record, prints the second, does the third.
PROGRAM = """
import pathlib, sys, time
record, text, then, _, out = sys.argv[1:]
with pathlib.Path(out).open('a') as file:
  file.write(record + chr(10))
print(text, flush=True)
exec(then)
"""


def measured(record, text='0.5 ms', then='', seconds=30, processes=1):
  """A measurement by the program above, which is not a module."""
  command = shlex.join([json.dumps(record), text, then])
  arguments = bench.Measurement(command, seconds).arguments(Path('OUT'))[2:]
  return mock.Mock(
    command=command, seconds=seconds, processes=processes,
    arguments=lambda out: [sys.executable, '-c', PROGRAM, *arguments[:-1], str(out)],
  )  # fmt: skip


def quiet(function, *args):
  """What a function returns and prints."""
  with contextlib.redirect_stdout(io.StringIO()) as out:
    return function(*args), out.getvalue()


def wait_for(condition, seconds=120):
  """Returns when a condition holds; fails when it does not by then."""
  end = time.monotonic() + seconds
  while not condition():
    if time.monotonic() > end:
      raise AssertionError('not in time')
    time.sleep(0.05)


class RunTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.folder = Path(self.enter_context(tempfile.TemporaryDirectory())) / 'new'

  def run_with(self, measurements, seconds=float('inf')):
    with mock.patch.dict(bench.MEASUREMENTS, measurements, clear=True):
      return quiet(bench.run, list(measurements), self.folder, seconds)

  @pytest.mark.slow
  def test_one_that_fails_or_takes_too_long_costs_the_others_nothing(self):
    missing, printed = self.run_with({
      'slow': measured({'a': 1}, then='time.sleep(60)', seconds=4),
      'broken': measured({'a': 2}, text='no such GPU', then='sys.exit(3)'),
      'good': measured({'a': 3}),
    })
    self.assertEqual(missing, 2)
    self.assertRegex(printed, r'(?m)^slow: stopped, \d+ s\. 0\.5 ms$')
    self.assertRegex(printed, r'(?m)^broken: failed, exit status 3, \d+ s\. no such GPU$')
    self.assertRegex(printed, r'(?m)^good: finished, \d+ s\. 0\.5 ms$')
    self.assertEqual((self.folder / 'good.jsonl').read_text(), '{"a": 3}\n')

  def test_goes_on_where_it_ended(self):
    self.run_with({'good': measured({'a': 1}), 'broken': measured({'a': 2}, then='sys.exit(1)')})
    missing, printed = self.run_with({'good': measured({'a': 1}), 'broken': measured({'a': 6})})
    self.assertEqual(missing, 0)
    self.assertIn('good: finished before\n', printed)
    self.assertEqual((self.folder / 'good.jsonl').read_text(), '{"a": 1}\n')
    self.assertEqual((self.folder / 'broken.jsonl').read_text(), '{"a": 6}\n')  # nothing of the attempt that failed

  def test_another_command_of_that_name_runs(self):
    self.run_with({'good': measured({'a': 1})})
    _, printed = self.run_with({'good': measured({'a': 5})})
    self.assertIn('good: finished, ', printed)
    self.assertEqual((self.folder / 'good.jsonl').read_text(), '{"a": 5}\n')

  def test_one_without_a_record_is_not_finished(self):
    silent = measured({}, then='pathlib.Path(out).unlink()')
    for _ in range(2):
      missing, printed = self.run_with({'silent': silent})
      self.assertEqual(missing, 1)
      self.assertIn('silent: failed, no record', printed)

  def test_what_is_timed_is_timed_by_several_processes_in_both_orders(self):
    measurements = {name: measured({'bench': name}, processes=3) for name in ('a', 'b')} | {'check': measured({})}
    missing, printed = self.run_with(measurements)
    self.assertEqual(missing, 0)
    order = [line.partition(':')[0] for line in printed.splitlines()]
    self.assertEqual(order, ['a-0', 'b-0', 'check', 'b-1', 'a-1', 'a-2', 'b-2'])
    for process in range(3):
      self.assertEqual(json_lines.read(self.folder / f'a-{process}.jsonl'), [{'bench': 'a', 'process': process}])
    self.assertEqual((self.folder / 'check.jsonl').read_text(), '{}\n')
    self.assertEqual(self.run_with(measurements)[1].count('finished before'), 7)

  def test_what_a_process_wrote_before_it_failed_says_its_process(self):
    self.run_with({'a': measured({'bench': 'a'}, then='sys.exit(1)', processes=2)})
    self.assertEqual(json_lines.read(self.folder / 'a-1.jsonl'), [{'bench': 'a', 'process': 1}])

  @parameterized.parameters(signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
  @pytest.mark.slow
  def test_nothing_runs_on_when_it_is_ended(self, number):
    program = f"""
import json, pathlib, signal, sys
from unittest import mock
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background starts without
from experiments.bench import __main__ as bench
sleeper = mock.Mock(command='', seconds=60, processes=1)
code = 'import os, sys, time; open(sys.argv[1], "w").write(str(os.getpid())); time.sleep(60)'
sleeper.arguments = lambda out: [sys.executable, '-c', code, str(out)]
bench.MEASUREMENTS = {{'sleeper': sleeper}}
bench.run(['sleeper'], pathlib.Path({str(self.folder)!r}), 100)
"""
    runner = subprocess.Popen([sys.executable, '-c', program], cwd=Path(__file__).parents[3], stderr=subprocess.DEVNULL)
    wait_for(lambda: (self.folder / 'sleeper.jsonl').exists() and (self.folder / 'sleeper.jsonl').read_text())
    child = int((self.folder / 'sleeper.jsonl').read_text())
    runner.send_signal(number)
    self.assertNotEqual(runner.wait(120), 0)
    wait_for(lambda: not Path(f'/proc/{child}').exists())

  def test_begins_none_that_could_end_too_late(self):
    missing, printed = self.run_with({'long': measured({}, seconds=90), 'short': measured({}, seconds=20)}, 60)
    self.assertEqual(missing, 1)
    self.assertIn('long: left out, it may take 90 s', printed)
    self.assertIn('short: finished', printed)

  @parameterized.parameters(*bench.MEASUREMENTS)
  def test_programs_take_their_arguments(self, name):
    """Without a GPU each program says so, once it has understood what it was asked."""
    _, _, module, *argv = bench.MEASUREMENTS[name].arguments(self.folder / 'x.jsonl')
    package = importlib.util.find_spec(module).submodule_search_locations is not None
    main = importlib.import_module(f'{module}.__main__' if package else module).main
    with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):
      main(argv)
    self.assertRegex(said.getvalue(), 'GPU|jax-triton|PyTorch is not')
    self.assertNotIn('unrecognized', said.getvalue())

  def test_lists_what_it_would_run(self):
    _, printed = quiet(bench.main, ['run', '--list'])
    self.assertIn('best-steps-1558m ', printed)
    self.assertNotIn('mesh', printed)
    _, printed = quiet(bench.main, ['run', '--list', '--select', 'fsdp'])
    self.assertEqual(printed.split()[:5], ['fsdp', '3', 'x', '420', 's'])

  def test_needs_a_folder(self):
    with contextlib.redirect_stderr(io.StringIO()) as said, self.assertRaises(SystemExit):
      bench.main(['run'])
    self.assertIn('--out', said.getvalue())


class KeepTest(absltest.TestCase):
  def test_a_poorer_record_takes_no_place_unless_asked(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    old = {'bench': 'ffn', 'device': 'H', 'samples_ms': [1.0, 2.0], 'profile': {}, 'baselines': {'dense': {}}}
    old['profile'] = {'sparse': 1}
    for change, lost in (
      ({'samples_ms': [1.0]}, '1 samples for 2'), ({'profile': None}, 'no profile'),
      ({'baselines': {}}, "no baseline 'dense'"),
    ):  # fmt: skip
      self.write(folder / 'blocks.jsonl', old)
      self.write(folder / 'new' / 'a.jsonl', old | change)
      changed, printed = quiet(bench.keep, [folder / 'new' / 'a.jsonl'], folder)
      self.assertEqual(changed, {})
      self.assertEqual(printed, f'blocks.jsonl, line 1, stays: the new record has {lost}\n')
      self.assertEqual(self.read(folder / 'blocks.jsonl'), [old])
      self.assertEqual(bench.keep([folder / 'new' / 'a.jsonl'], folder, poorer=True), {'blocks.jsonl': 1})
      self.assertEqual(self.read(folder / 'blocks.jsonl'), [old | change])

  def test_a_record_takes_the_place_of_an_equal_one(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    block = {'bench': 'ffn', 'device': 'H', 'op': 'ffn', 'shape': {'tokens': 8}, 'median_ms': 2.0}
    other = block | {'shape': {'tokens': 16}}
    self.write(folder / 'blocks.jsonl', block, other)
    untouched = {'bench': 'attention', 'device': 'H', 'op': 'a', 'shape': {}, 'median_ms': 1.0}
    self.write(folder / 'attention.jsonl', untouched)
    before = (folder / 'attention.jsonl').stat().st_mtime_ns
    new = [
      block | {'median_ms': 1.5},
      block | {'device': 'other'},
      {'bench': 'verify', 'seed': 0},
      {'bench': 'verify', 'seed': 1, 'worst_error': 1.0},
      {'bench': 'verify', 'seed': 0, 'worst_error': 2.0},
    ]
    self.write(folder / 'new' / 'a.jsonl', *new)
    changed = bench.keep([folder / 'new' / 'a.jsonl'], folder)
    self.assertEqual(changed, {'blocks.jsonl': 2, 'verify.jsonl': 3})
    self.assertEqual(self.read(folder / 'blocks.jsonl'), [new[0], other, new[1]])
    self.assertEqual(self.read(folder / 'verify.jsonl'), [new[4], new[3]])
    self.assertEqual((folder / 'attention.jsonl').stat().st_mtime_ns, before)

  def test_records_of_three_processes_take_the_place_of_one_that_does_not_say_its_process(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    block = {'bench': 'ffn', 'device': 'H', 'op': 'ffn'}
    self.write(folder / 'blocks.jsonl', block)
    for ms in (1.0, 2.0):  # twice, and later sessions replace process by process
      new = [block | {'process': process, 'median_ms': ms} for process in range(3)]
      self.write(folder / 'new' / 'a.jsonl', *new)
      self.assertEqual(bench.keep([folder / 'new' / 'a.jsonl'], folder), {'blocks.jsonl': 3})
      self.assertEqual(self.read(folder / 'blocks.jsonl'), new)

  def test_a_process_has_one_record_wherever_others_stand(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    block = {'bench': 'ffn', 'device': 'H', 'op': 'ffn'}
    old = [block | {'process': 0, 'median_ms': 5.0}, block]
    self.write(folder / 'blocks.jsonl', *old)
    new = block | {'process': 0, 'median_ms': 7.0}
    self.write(folder / 'new' / 'a.jsonl', new)
    for _ in range(2):
      self.assertEqual(bench.keep([folder / 'new' / 'a.jsonl'], folder), {'blocks.jsonl': 1})
      self.assertEqual(self.read(folder / 'blocks.jsonl'), [new, block])
    self.write(folder / 'blocks.jsonl', new)
    self.write(folder / 'new' / 'a.jsonl', block)
    changed, printed = quiet(bench.keep, [folder / 'new' / 'a.jsonl'], folder)
    self.assertEqual((changed, self.read(folder / 'blocks.jsonl')), ({}, [new]))
    self.assertIn('line 1, stays: it says its process', printed)

  def test_a_new_record_goes_to_those_of_its_recipe(self):
    folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    for name, recipe in (('a', 'fst'), ('b', 'neuron_level')):
      self.write(folder / f'{name}.jsonl', {'bench': 'ffn', 'recipe': recipe, 'device': 'H'})
    new = [{'bench': 'ffn', 'recipe': recipe, 'device': 'other'} for recipe in ('neuron_level', 'fst', 's_ste')]
    self.write(folder / 'new' / 'new.jsonl', *new)
    self.assertEqual(bench.keep([folder / 'new' / 'new.jsonl'], folder), {'b.jsonl': 1, 'a.jsonl': 2})

  def write(self, path, *records):
    path.parent.mkdir(exist_ok=True)
    path.write_text(''.join(json.dumps(record) + '\n' for record in records))

  def read(self, path):
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == '__main__':
  absltest.main()
