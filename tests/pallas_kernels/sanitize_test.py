"""The program that runs kernels under compute-sanitizer, with the tool faked: there is none without a GPU."""

import contextlib
import io
import json
from pathlib import Path
import subprocess
import tempfile
import time
from unittest import mock

from absl.testing import absltest
import jax.numpy as jnp

from pallas_kernels.sparse_matmul import mosaic_gpu
from pallas_kernels.sparse_matmul._problem import check_config, schedule
from tests.pallas_kernels import sanitize


class SanitizeTest(absltest.TestCase):
  def test_a_tool_that_dies_is_tried_again_and_what_it_found_fails(self):
    statuses, seen = {'packers': [-11, 0], 'vnm_ops': [9]}, []

    def run(command, **options):
      name = command[command.index('--cases') + 1].strip('^$')
      tool = 'compute-sanitizer' in command and command[command.index('--tool') + 1]
      seen.append((name, tool))
      if not tool:
        return subprocess.CompletedProcess(command, 0)
      status = statuses[name].pop(0)
      found = '========= Invalid __global__ read\n' if status == 9 else ''
      Path(command[command.index('--log-file') + 1]).write_text(found + '========= ERROR SUMMARY: 1 error\n')
      options['stdout'].write(f'noise\n{name}: passed, 3 s\n')
      return subprocess.CompletedProcess(command, status)

    out = Path(self.enter_context(tempfile.TemporaryDirectory()), 'found.json')
    with (
      mock.patch.object(subprocess, 'run', run), mock.patch.object(sanitize, 'environment', dict),
      mock.patch.object(sanitize, 'version', str), contextlib.redirect_stdout(io.StringIO()),
    ):  # fmt: skip
      argv = ['--tools', 'memcheck', '--cases', 'packers|vnm', '--out', str(out)]
      failed = sanitize.main(argv)
    again = ('packers', 'memcheck')
    self.assertEqual(seen, [('packers', False), again, again, ('vnm_ops', False), ('vnm_ops', 'memcheck')])
    found = json.loads(out.read_text())['tools']['memcheck']
    self.assertEqual((failed, found['packers']['status'], found['vnm_ops']['status']), (1, 0, 9))
    self.assertEqual(found['packers']['said'], ['packers: passed, 3 s'])
    self.assertEqual(found['vnm_ops']['found'], ['========= Invalid __global__ read'])

  def test_consumers_share_out_even_and_odd_numbers_of_steps(self):
    steps = []
    for case in sanitize.BY_STEPS:
      config, dtype = mosaic_gpu.Config(**case['config']), jnp.dtype(case['a_dtype'])
      problem = mosaic_gpu.Problem(case['m'], case['n'], case['k'], dtype, dtype, dtype, 'nk', 'nm')
      check_config(problem, config)
      work = schedule(problem, config, 132)
      self.assertGreater(work.tiles, 2 * work.clusters)
      self.assertEqual((config.halves, work.k_steps % 2), ('k', 0))
      steps.append(work.k_steps // 2)
    self.assertEqual({number % 2 for number in steps}, {0, 1})

  def test_what_a_tool_started_ends_with_it(self):
    out = Path(self.enter_context(tempfile.TemporaryDirectory()), 'pid')
    tool = ['bash', '-c', f'sleep 60 & echo $! > {out}; wait']
    self.assertIsNone(sanitize.run(tool, 1, 'cache'))
    child = Path('/proc', out.read_text().strip(), 'stat')
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone
      for _ in range(50):
        if child.read_text().split()[2] == 'Z':  # nobody has collected it
          return
        time.sleep(0.1)
      self.fail('it goes on')


if __name__ == '__main__':
  absltest.main()
