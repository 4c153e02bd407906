"""Describes where, with what and how a run was started, for its record."""

from collections.abc import Mapping
import importlib.metadata
import os
from pathlib import Path
import platform
import re
import shlex
import subprocess
import sys
from typing import Any

import jax

_PACKAGES = {'jax': 'jax', 'flax': 'flax', 'optax': 'optax', 'orbax': 'orbax-checkpoint', 'numpy': 'numpy'}


def environment() -> dict[str, Any]:
  """Device, versions, commit of the source and command line, as JSON-able data."""
  kind, on_cpu = jax.devices()[0].device_kind, jax.default_backend() == 'cpu'
  return {
    'device': f'{os.cpu_count()} CPU cores ({platform.machine()})' if on_cpu else f'{jax.device_count()} x {kind}',
    'python': platform.python_version(),
    'versions': {name: importlib.metadata.version(package) for name, package in _PACKAGES.items()},
    'commit': commit(),
    'command': command(),
  }


def head() -> dict[str, Any]:
  """What a record of runs says of where it was made."""
  return without_folders(environment())


def commit() -> str | None:
  """Commit of the source, with '-dirty' after it when tracked files differ; None where it is not a git checkout.

  A copy of the source without its history is told by the variable SPARSE24_COMMIT.
  """
  if told := os.environ.get('SPARSE24_COMMIT'):
    return told
  git = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
  try:
    out = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError):
    return None
  return out.stdout.strip()


def command() -> str:
  """The command line of this process, as one would type it."""
  program = Path(sys.argv[0])
  if program.name == '__main__.py' and 'experiments' in program.parts:
    inside = program.parts[program.parts.index('experiments') : -1]
    return shlex.join(['python', '-m', '.'.join(inside), *sys.argv[1:]])
  return shlex.join([program.name, *sys.argv[1:]])


def without_folders(environment: Mapping[str, Any]) -> dict[str, Any]:
  """An environment in whose command line only the last part of an absolute path is kept.

  >>> without_folders({'command': 'python -m experiments compare --folder /data/runs --results=/data/r.jsonl'})
  {'command': 'python -m experiments compare --folder runs --results=r.jsonl'}
  """
  parts = [re.sub(r'(^|=)/\S*/', r'\1', part) for part in shlex.split(environment['command'])]
  return {**environment, 'command': shlex.join(parts)}
