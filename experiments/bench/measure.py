"""What the step benchmarks share beside `pallas_kernels._bench`: heads of records, command lines."""

import argparse
from collections.abc import Sequence
from pathlib import Path
import shlex
import sys
from typing import Any

import jax

from pallas_kernels import _bench, _device


def environment(module: str, argv: Sequence[str] | None) -> dict[str, Any]:
  """The head of a record; of paths on the command line only the last part is kept."""
  given = [Path(a).name if '/' in a else a for a in (sys.argv[1:] if argv is None else argv)]
  return _device.environment() | {'command': f'python -m {module} {shlex.join(given)}'.rstrip()}


def plain_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
  """What every program that writes records takes."""
  result = argparse.ArgumentParser(prog=f'python -m {module}', description=(doc or '').partition('\n')[0])
  result.add_argument('--out', type=Path, required=True, help='JSON-lines file to append records to')
  return result


def parser(module: str, doc: str | None, choices: Sequence[str], default: Sequence[str]) -> argparse.ArgumentParser:
  """The options that every step benchmark has."""
  result = plain_parser(module, doc)
  _bench.arguments(result, choices, default)
  result.add_argument('--explain', action='store_true', help='print and record device time by kind of kernel')
  return result


def check_gpu(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
  """Ends the program where there is no GPU and `--tiny` is not given, before anything is compiled for hours."""
  if not options.tiny and jax.default_backend() != 'gpu':
    parser.error(f'this is timed on a GPU, JAX has {jax.default_backend()!r} here; --tiny only shows that it runs')
