"""`python -m pallas_kernels` where it cannot run."""

import contextlib
import io
import pathlib
from unittest import mock

from absl.testing import absltest, parameterized

from pallas_kernels import __main__ as command
from pallas_kernels import _device
from pallas_kernels.ops import OPS
from pallas_kernels.sparse_matmul import verify
from tests import targets

ROOMS = {'ffi', 'mosaic', 'triton_blocks', 'two_of_four'}


class CommandTest(parameterized.TestCase):
  @parameterized.parameters(
    ('bench sparse_matmul --select nosuch small', "--select: invalid choice: 'nosuch' (choose from"),
    ('tune attention', "invalid choice: 'attention' (choose from"),
    ('tune vnm_matmul --select nosuch', "invalid choice: 'nosuch' (choose from"),
    ('records --select small', 'unrecognized arguments: --select small'),
    ('verify --select small', 'unrecognized arguments: --select small'),
    ('bench sparse_matmul --count 5', 'unrecognized arguments: --count 5'),
    ('tune sparse_matmul --out results.jsonl', 'unrecognized arguments: --out results.jsonl'),
    ('verify --implementation cusparselt', "invalid choice: 'cusparselt' (choose from"),
    ('tune sparse_matmul', "tune runs on a GPU, and JAX finds 'cpu' here"),
    ('tune sparse_attention', 'tune sparse_attention: nothing to tune: its tiles follow'),
    ('bench vnm_matmul --select packs', "bench runs on a GPU, and JAX finds 'cpu' here"),
    ('bench sparse_attention --seconds 5', "bench runs on a GPU, and JAX finds 'cpu' here"),
    ('bench pack --tiny', 'unrecognized arguments: --tiny'),
    ('tune vnm_matmul', "tune runs on a GPU, and JAX finds 'cpu' here"),
    ('bench sparse_matmul', "bench runs on a GPU, and JAX finds 'cpu' here"),
    ('bounds --select all', "--select: invalid choice: 'all' (choose from"),
    ('bounds', "bounds runs on a GPU, and JAX finds 'cpu' here"),
    ('verify --count 3', "verify runs on a GPU, and JAX finds 'cpu' here"),
  )
  def test_says_so_at_once(self, arguments, message):
    with (
      contextlib.redirect_stderr(io.StringIO()) as err,
      mock.patch.object(_device, 'current', lambda: _device.Device('cpu', 'cpu')),
      self.assertRaises(SystemExit) as end,
    ):
      command.main(arguments.split())
    self.assertEqual(end.exception.code, 2)
    self.assertIn(message, err.getvalue())

  def test_every_op_has_its_files_or_says_why_not(self):
    package = pathlib.Path(command.__file__).parent
    folders = {path.parent.name for path in package.glob('*/__init__.py')}
    self.assertEqual({op.folder for op in OPS.values()}, folders - ROOMS)
    for name, op in OPS.items():
      there = {path.stem for path in (package / op.folder).glob('*.py')}
      self.assertContainsSubset({'api', 'reference', 'arg_specs', 'bench'}, there)
      self.assertEqual('tune' in there, op.untuned is None, name)

  def test_verify_hands_on_what_it_is_given(self):
    given = 'verify --count 3 --seed 4 --seconds 5 --out run.jsonl --implementation mosaic_gpu_sm80'
    with (
      mock.patch.object(_device, 'current', lambda: targets.target_device('sm_80')),
      mock.patch.object(verify, 'verify', return_value=2) as called,
    ):
      self.assertEqual(command.main(given.split()), 1)
    called.assert_called_once_with(3, 4, 5.0, pathlib.Path('run.jsonl'), 'mosaic_gpu_sm80')

  @parameterized.parameters(('sm_80', 'mosaic_gpu_sm80'), ('sm_90a', 'mosaic_gpu'))
  def test_verify_takes_the_kernel_of_the_gpu(self, target, kernel):
    with (
      mock.patch.object(_device, 'current', lambda: targets.target_device(target)),
      mock.patch.object(verify, 'verify', return_value=0) as called,
    ):
      self.assertEqual(command.main(['verify']), 0)
    self.assertEqual(called.call_args.args[-1], kernel)


if __name__ == '__main__':
  absltest.main()
