"""Builds the C++ of this folder when it is first needed, and loads it.

The package installs without a compiler: the source travels in the wheel, and what is built from it lies in a folder of
the user's, named after everything that it depends on (source, flags, jaxlib with its FFI headers). The variable
`SPARSE24_JAX_FFI_LIBRARY` names a library that was built elsewhere, for machines without a compiler.
"""

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import re
import shlex
import shutil
import stat
import subprocess
import tempfile

import jax
import jaxlib.version

from pallas_kernels import _disk_cache

SOURCE = pathlib.Path(__file__).parent / 'cusparselt.cc'
PREBUILT = 'SPARSE24_JAX_FFI_LIBRARY'
CACHE = 'SPARSE24_JAX_CACHE'
_FLAGS = ('-std=c++17', '-O2', '-fPIC', '-shared')
_COMPILERS = ('c++', 'g++', 'clang++')


@functools.cache
def load() -> ctypes.CDLL:
  """The library, built if it was not before.

  Raises:
    NotImplementedError: no compiler, a build that failed, or a library built for another FFI; with the remedy.
  """
  path = library_path()
  try:
    library = ctypes.CDLL(str(path))
    library.sparse24_ffi_api_version.restype = ctypes.c_int64
    built_for = divmod(library.sparse24_ffi_api_version(), 1000)
  except (OSError, AttributeError) as e:
    raise NotImplementedError(f'the FFI library {path} cannot be loaded: {e}') from e
  ours = api_version()
  # XLA refuses the registration of a newer handler, and then every later use of the platform with it.
  if built_for[0] != ours[0] or built_for[1] > ours[1]:
    raise NotImplementedError(
      f'{path} was built for version {built_for[0]}.{built_for[1]} of the XLA FFI, this jaxlib has {ours[0]}.{ours[1]};'
      f' build it again or unset {PREBUILT}'
    )
  return library


def library_path() -> pathlib.Path:
  """The path of the library; builds it if it is not there yet, or not whole.

  Its name has a hash of its bytes, so that one which was cut short is not loaded. Nobody else may write to it or to its
  folder, and it is no link: to load a library is to run it.
  """
  prebuilt = os.environ.get(PREBUILT)
  if prebuilt:
    if not pathlib.Path(prebuilt).is_file():
      raise NotImplementedError(f'{PREBUILT}={prebuilt} is no file')
    return pathlib.Path(prebuilt)
  folder, name = cache_folder(), f'cusparselt-{_fingerprint()}'
  for path in sorted(folder.glob(f'{name}-*.so')):
    # Who may write to a folder above may put one of his own in the place of this, between the look at it and here.
    if not _disk_cache.untrusted(path.lstat(), stat.S_ISREG) and path.stem == f'{name}-{_hash(path)}':
      return path
    path.unlink(missing_ok=True)
  _disk_cache.sweep(folder)
  with tempfile.TemporaryDirectory(prefix=_disk_cache.NEW, dir=folder) as temporary:
    built = pathlib.Path(temporary, 'built.so')
    compile_source(SOURCE, built, include=(jax.ffi.include_dir(),))
    path = folder / f'{name}-{_hash(built)}.so'
    os.replace(built, path)
  return path


def _hash(path: pathlib.Path) -> str:
  return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def compile_source(source: pathlib.Path, path: pathlib.Path, *, include: tuple[str, ...] = ()) -> None:
  """Compiles one C++ file to a shared library.

  Args:
    source: the file.
    path: where the library goes; it appears there whole or not at all, whoever else builds it at the same time.
    include: folders of headers, whose warnings are not ours.

  Raises:
    NotImplementedError: there is no compiler, or it failed; the message holds what it said.
  """
  command = [*compiler(), *_FLAGS, *(x for folder in include for x in ('-isystem', folder)), str(source)]
  path.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=path.parent) as folder:
    built = pathlib.Path(folder, path.name)
    done = subprocess.run([*command, '-o', str(built), '-ldl'], capture_output=True, text=True, check=False)
    if done.returncode:
      raise NotImplementedError(f'building {source.name} failed: {shlex.join(command)}\n{done.stderr[-2000:]}')
    os.replace(built, path)


def compiler() -> list[str]:
  """The C++ compiler with its own flags: `$CXX`, or the first of c++, g++ and clang++ on the PATH."""
  named = shlex.split(os.environ.get('CXX', ''))
  names = [named[0]] if named else list(_COMPILERS)
  for name in names:
    found = shutil.which(name)
    if found:
      return [found, *named[1:]]
  raise NotImplementedError(
    f'the cuSPARSELt call has to be built once and no C++ compiler was found ({", ".join(names)} on the PATH); install'
    f' one, or build pallas_kernels/ffi/{SOURCE.name} elsewhere and name the library in {PREBUILT}'
  )


def cache_folder() -> pathlib.Path:
  """`$SPARSE24_JAX_CACHE` or the user's cache folder, sparse24_jax/ffi, if nobody else may write there.

  Else a folder in it of the user's own; a new temporary one where neither will do.
  """
  named = os.environ.get(CACHE)
  base = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache') / 'sparse24_jax/ffi'
  folder = pathlib.Path(named) if named else base
  for mine in (folder, folder / f'of_user_{os.geteuid()}'):
    try:
      mine.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
      break
    status = mine.lstat() if mine != folder else mine.stat()
    if not stat.S_ISDIR(status.st_mode) or not os.access(mine, os.W_OK):
      break
    if not _disk_cache.untrusted(status, stat.S_ISDIR):
      return mine
  logging.getLogger('pallas_kernels').warning(
    'the cuSPARSELt call is built again in each process: %s is read-only, or others may put a library there; name a'
    ' folder of your own in %s', folder, CACHE,
  )  # fmt: skip
  return _temporary_folder()


@functools.cache
def _temporary_folder() -> pathlib.Path:
  return pathlib.Path(tempfile.mkdtemp(prefix='sparse24_jax_'))


def api_version() -> tuple[int, int]:
  """Version of the XLA FFI of the installed jaxlib, read from the headers that it brings."""
  text = pathlib.Path(jax.ffi.include_dir(), 'xla/ffi/api/c_api.h').read_text()
  major, minor = (re.search(rf'#define XLA_FFI_API_{part} (\d+)', text) for part in ('MAJOR', 'MINOR'))
  if major is None or minor is None:
    raise NotImplementedError('the FFI headers of this jaxlib name no version')
  return int(major.group(1)), int(minor.group(1))


def _fingerprint() -> str:
  built_with = repr((_FLAGS, jaxlib.version.__version__, api_version())).encode()
  return hashlib.sha256(SOURCE.read_bytes() + built_with).hexdigest()[:16]
