"""What kernels were compiled to, kept on disk for the next process.

A file is code that a GPU will run. So the folder belongs to the user, nobody else may write there, and what is found
otherwise is left alone, with one warning. `SPARSE24_JAX_KERNEL_CACHE` names another folder, or is `off`.
"""

from collections.abc import Callable, Iterator
import contextlib
import functools
import hashlib
import importlib.metadata
import logging
import os
from pathlib import Path
import shutil
import stat
import tempfile
import time

import jax
import jaxlib.version

from pallas_kernels._dispatch import log_once

VARIABLE = 'SPARSE24_JAX_KERNEL_CACHE'
# Ours: a program has some ten kernels, of 10 to 100 KB.
_MOST_FILES = 2000
_MAGIC = b'sparse24 kernel 2\n'
# What is being written begins so; a process that is killed leaves it, and after an hour it is nobody's.
NEW = 'new-'
_ABANDONED_S = 3600
_SOURCES = Path(__file__).parent
# What compiles kernels, and the dense matmul that they are timed against; what is not installed counts as that.
_COMPILERS = (
  'jax', 'jaxlib', 'jax-cuda12-plugin', 'jax-cuda12-pjrt', 'jax-cuda13-plugin', 'jax-cuda13-pjrt', 'jax-triton',
  'triton', 'nvidia-cuda-nvcc-cu12', 'nvidia-cuda-nvcc', 'nvidia-nvjitlink-cu12', 'nvidia-nvjitlink', 'nvidia-nvvm',
)  # fmt: skip


def folder() -> Path | None:
  """The folder that keeps compiled kernels, made if need be; None if there is none."""
  named = os.environ.get(VARIABLE)
  if named == 'off':
    return None
  try:
    path = Path(named) if named else _of_the_user()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = path.resolve()
    # Who may write to a folder above may put another one in its place; in /tmp and its like only the owner may.
    above = next((p for p in path.parents if p.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH), None)
    reason = untrusted(path.stat(), stat.S_ISDIR) or (above and f'everybody may write to {above}')
  except (OSError, RuntimeError) as e:
    reason, path = str(e), None
  if reason:
    log_once(
      f'compiled kernels are not kept on disk, in {path or named or "the cache folder"}: {reason}; {VARIABLE} names'
      ' another folder, or is off', level=logging.WARNING,
    )  # fmt: skip
    return None
  return path


def read(key: str) -> bytes | None:
  """What was kept under a key, or None; what does not belong to the user or is damaged was not."""
  if (where := folder()) is None:
    return None
  with _unless_it_fails():
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    file = os.open(_path(where, key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(file, 'rb') as f:
      if reason := untrusted(os.fstat(file), stat.S_ISREG):
        log_once(f'{_path(where, key)} is not read: {reason}', level=logging.WARNING)
        return None
      found = f.read()
      with contextlib.suppress(OSError):  # a folder may be read-only
        os.utime(file)  # `write` removes what was not used for longest
    head, kept = found[: len(_MAGIC) + 32], found[len(_MAGIC) + 32 :]
    return kept if head == _head(key, kept) else None
  return None


def write(key: str, kept: bytes) -> None:
  """Keeps bytes under a key; a reader sees all of them or none."""
  if (where := folder()) is None:
    return
  with _unless_it_fails():
    sweep(where)
    files = sorted(where.glob('*.kernel'), key=_time_of)
    for old in files[: max(0, len(files) - _MOST_FILES + 1)]:
      old.unlink(missing_ok=True)
    file, name = tempfile.mkstemp(prefix=NEW, dir=where)  # which others may neither read nor write
    try:
      with os.fdopen(file, 'wb') as f:
        f.write(_head(key, kept) + kept)
      os.replace(name, _path(where, key))
    except OSError:
      Path(name).unlink(missing_ok=True)
      raise


def compiled_from() -> str:
  """A digest of this package's sources and of the versions of what compiles them: with another one, nothing serves.

  What runs is what was imported. If a source has changed since, the digest is one that no other process has.
  """
  with contextlib.suppress(OSError):  # they may be going as they are read
    digest = _digest_of_files()
    if _files() == _IMPORTED:
      return digest
  log_once(
    f'{_SOURCES} has changed since it was imported: what this process compiles serves no other', level=logging.WARNING
  )
  return _OF_THIS_PROCESS


@functools.cache
def _digest_of_files() -> str:
  # The imported jax and jaxlib count too: they differ from the installed ones after an upgrade.
  versions = [jax.__version__, jaxlib.version.__version__, *[_version(name) for name in _COMPILERS]]
  digest = hashlib.sha256(repr(versions).encode())
  for path in _sources():
    source = path.read_bytes()
    digest.update(f'\n{path.relative_to(_SOURCES)} {len(source)}\n'.encode())
    digest.update(source)
  return digest.hexdigest()


def _files() -> list[tuple[Path, int, int]]:
  """The sources and what Python tells their changes by, size and time; to hash them takes ten times as long."""
  return [(path, (status := path.stat()).st_size, status.st_mtime_ns) for path in _sources()]


def _sources() -> list[Path]:
  return sorted(path for path in _SOURCES.rglob('*.py') if path.is_file())  # an editor's lock is a link to nothing


_IMPORTED = _files()
_OF_THIS_PROCESS = f'of changed sources {os.urandom(16).hex()}'


def _version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:  # or used from its source tree
    return None


def sweep(where: Path) -> None:
  """Removes what processes that were killed left half written in a folder."""
  for path in where.glob(f'{NEW}*'):
    if 0 < _time_of(path) < time.time() - _ABANDONED_S:
      if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
      else:
        path.unlink(missing_ok=True)


def _time_of(path: Path) -> float:
  """When it was last written or used; 0 if another process has removed it."""
  try:
    return path.lstat().st_mtime
  except FileNotFoundError:
    return 0.0


def _of_the_user() -> Path:
  return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'sparse24_jax/kernels'


def _path(where: Path, key: str) -> Path:
  return where / f'{hashlib.sha256(key.encode()).hexdigest()}.kernel'


def _head(key: str, kept: bytes) -> bytes:
  """What a file begins with: it is whole, and of this key, so that a file that was renamed is no other kernel."""
  return _MAGIC + hashlib.sha256(hashlib.sha256(key.encode()).digest() + kept).digest()


def untrusted(status: os.stat_result, kind: Callable[[int], bool]) -> str | None:
  """Why what is found there may be somebody else's, or None."""
  if not kind(status.st_mode):
    return 'it is of another kind'
  if status.st_uid != os.geteuid():
    return f'it belongs to user {status.st_uid}'
  return 'others may write to it' if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


@contextlib.contextmanager
def _unless_it_fails() -> Iterator[None]:
  """A disk that is full, say, costs time and nothing else."""
  try:
    yield
  except FileNotFoundError:
    pass
  except OSError as e:
    log_once(f'compiled kernels are not kept on disk: {e}', level=logging.WARNING)
