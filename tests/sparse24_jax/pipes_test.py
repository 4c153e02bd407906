"""A program whose reader is gone."""

import os
import sys
from unittest import mock

from absl.testing import absltest, parameterized

from sparse24_jax.pipes import quietly


def _prints() -> int:
  print('much')
  return 0


def _fails() -> int:
  raise BrokenPipeError('of a socket')


class QuietlyTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_a_closed_pipe_ends_it_without_an_error(self, buffered):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, 'w', buffering=-1 if buffered else 1) as out, mock.patch.object(sys, 'stdout', out):
      self.assertEqual(quietly(_prints), 1)
      print('more')  # goes nowhere, and no flush fails

  def test_another_closed_pipe_is_an_error(self):
    reader, writer = os.pipe()
    with os.fdopen(reader), open(writer, 'w') as out, mock.patch.object(sys, 'stdout', out):
      with self.assertRaisesRegex(BrokenPipeError, 'of a socket'):
        quietly(_fails)
      self.assertEqual(quietly(_prints), 0)


if __name__ == '__main__':
  absltest.main()
