"""Programs that end quietly when the reader of their output, such as `head`, closes the pipe."""

from collections.abc import Callable
import os
import select
import sys


def quietly(program: Callable[[], int]) -> int:
  """Runs a program; if what reads its output is gone, it ends with status 1 and no message.

  >>> quietly(lambda: 0)
  0
  """
  try:
    status = program()
    sys.stdout.flush()
    return status
  except BrokenPipeError:
    output = select.poll()
    output.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):  # another pipe, of the program's own
      raise
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python, which flushes at its exit
    return 1
