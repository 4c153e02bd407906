"""`python -m experiments COMMAND`: train, look at, tune and compare 2:4-sparse models; without one, the main job."""

import argparse
from collections.abc import Sequence
import os
import sys
import traceback

# Orbax and TFDS log through absl at INFO, and glog speaks up before Python can stop it.
os.environ.setdefault('GLOG_minloglevel', '2')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')

try:
  from experiments.arguments import make_parser, PROGRAMS
  from experiments.commands import COMMANDS, is_one_of_several
except ModuleNotFoundError as missing:
  if (missing.name or 'experiments').startswith(('experiments', 'sparse24_jax', 'pallas_kernels')):
    raise
  sys.exit(f"error: the programs need {missing.name}: pip install -e '.[experiments,tasks]'")

_RESUMABLE = ('train', 'main-job', 'compare', 'sweep', 'grid')


def main(argv: Sequence[str] | None = None) -> int:
  """Runs a command; errors that say what to do are printed without a traceback.

  Returns:
    The exit status: 0; 1 after an error; of a run that was told to stop and is saved, 75 after SIGTERM or a notice of
    preemption and 130 after Ctrl-C; 76 where another process of the run is lost.
  """
  parser = make_parser()
  argv = list(sys.argv[1:] if argv is None else argv)
  args, args.rest = parser.parse_known_args(argv)
  if args.rest and args.command not in PROGRAMS:
    parser.error(f'unrecognized arguments: {" ".join(args.rest)}')
  if args.command is None:
    args = parser.parse_args([*argv, 'main-job'])

  status = _status_of(args)
  if status and is_one_of_several(args):
    from experiments.runs import hosts

    if status != hosts.LOST:
      hosts.end_together()
    # At its usual end a process waits for the others, which may be gone, or wait for this one in the middle of a step.
    sys.stderr.flush()
    os._exit(status)
  return status


def _status_of(args: argparse.Namespace) -> int:
  """Runs the command of parsed arguments, and tells its errors."""
  from absl import logging
  from jax.errors import JaxRuntimeError

  from experiments.runs import hosts
  from experiments.runs.checkpoint_errors import CheckpointError
  from experiments.runs.stopping import StoppedError
  from experiments.runs.train import TrainingDivergedError
  from sparse24_jax.pipes import quietly

  logging.set_verbosity(logging.ERROR)
  try:
    return quietly(lambda: COMMANDS[args.command](args) or 0)
  except StoppedError as stopped:
    if hosts.first():
      print(stopped, file=sys.stderr)
    return stopped.status
  except KeyboardInterrupt:
    resumes = '; the same command resumes from the last checkpoint' if args.command in _RESUMABLE else ''
    print(f'\nstopped{resumes}', file=sys.stderr)
    return 130
  except Exception as error:
    several = is_one_of_several(args)
    if several and hosts.lost_another(error):
      print(f'error: {hosts.tell_lost(error)}', file=sys.stderr)
      return hosts.LOST
    known = isinstance(error, ValueError | OSError | CheckpointError | TrainingDivergedError | hosts.OtherProcessError)
    if known and not args.debug and not isinstance(error, JaxRuntimeError):
      print(f'error: {_printable(str(error))}', file=sys.stderr)
    elif several:
      traceback.print_exc()
    else:
      raise
    return 1


def _printable(text: str) -> str:
  """Text for a terminal: what a file from elsewhere says is not to move its cursor or rename its window."""
  return ''.join(c if c.isprintable() or c in '\n\t' else ascii(c)[1:-1] for c in text)


if __name__ == '__main__':
  sys.exit(main())
