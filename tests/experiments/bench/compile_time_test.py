"""Seconds of compiling: a process a contender and layout, run three times over what is kept on disk."""

import argparse
import contextlib
import io
import json
from pathlib import Path
import tempfile
from unittest import mock

from absl.testing import absltest
import jax
import pytest

from experiments.bench import compile_time
from experiments.runs.race.programs import Programs


class CompileTimeTest(absltest.TestCase):

  def run_main(self, *arguments: str) -> tuple[int, list[dict], str]:
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as printed:
      out = Path(folder, 'new.jsonl')
      failed = compile_time.main(['--tiny', '--out', str(out), *arguments])
      return failed, [json.loads(line) for line in out.read_text().splitlines()], printed.getvalue()

  def test_a_record_a_contender_and_layout_and_a_failure_costs_the_others_nothing(self):
    folders = []

    def process(name, layout, options, *given):
      if name == 'fst':
        raise RuntimeError('exit status 1: out of memory')
      folders.append(given)
      return dict(trace_s=1.0, lower_s=2.0, compile_s=3.0 / len(folders), total_s=3.0 + 3.0 / len(folders), programs=2)

    with mock.patch.object(compile_time, '_in_a_process', process):
      failed, (record,), printed = self.run_main('--select', 'dense', 'fst', '--layouts', 'scan')
    self.assertEqual(failed, 1)
    self.assertRegex(printed, 'fst-scan: failed: .*out of memory')
    self.assertRegex(printed, 'dense-scan: 2 programs: trace 1.0, lower 2.0, compile 3.0, total 6.0 s; ')
    self.assertRegex(printed, 'with kernels from disk 4.5 s, with programs 4.0 s')
    self.assertEqual((record['device'], record['recipe'], record['layouts']), ('cpu', 'dense', 'scan'))
    self.assertEqual([record[each]['compile_s'] for each in ('first', 'next', 'again')], [3.0, 1.5, 1.0])
    kernels, programs = zip(*folders, strict=True)
    self.assertLen(set(kernels), 1)
    self.assertTrue(programs[0] == programs[2] != programs[1])

  def test_the_programs_are_those_of_a_run(self):
    """What one step compiles counts for each: with a search and without, where there is one."""
    options = argparse.Namespace(tiny=True, size='124m', batch=2)
    asked = []

    def step_of(programs, phase, refresh=None):
      asked.append((phase, refresh))
      return jax.jit(lambda x: x + 1), (jax.ShapeDtypeStruct((), 'float32'),)

    with mock.patch.object(Programs, 'step_of', step_of):
      found = [compile_time.stages(name, 'scan', options)['programs'] for name in ('fst', 's_ste_fp8', 'dense')]
    self.assertEqual(found, [2, 1, 1])
    self.assertEqual(asked, [('sparse', False), ('sparse', True), ('sparse', False), ('dense', None)])

  @pytest.mark.slow
  def test_the_second_process_finds_the_program_on_disk(self):
    failed, (record,), _ = self.run_main('--select', 'dense', '--layouts', 'unrolled')
    self.assertEqual(failed, 0)
    self.assertLess(record['again']['compile_s'], record['first']['compile_s'] / 2)


if __name__ == '__main__':
  absltest.main()
