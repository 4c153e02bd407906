"""`python -m pallas_kernels` where it cannot run."""

import contextlib
import io
from unittest import mock

from absl.testing import absltest, parameterized

from pallas_kernels import __main__ as command
from pallas_kernels import _device


class CommandTest(parameterized.TestCase):
  @parameterized.parameters(
    ('bench --select nosuch small', '--select nosuch: known are square, headline, small'),
    ('where-it-pays --select nosuch', '--select nosuch: known are'),
    ('tune', "tune runs on a GPU, and JAX finds 'cpu' here"),
    ('bench', "bench runs on a GPU, and JAX finds 'cpu' here"),
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


if __name__ == '__main__':
  absltest.main()
