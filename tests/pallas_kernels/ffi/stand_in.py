"""A library that keeps the contract of cuSPARSELt, and the handlers that call it, each compiled once for all tests."""

import hashlib
import pathlib

from pallas_kernels.ffi import build

SOURCE = pathlib.Path(__file__).parent / 'fake_cusparselt.cc'


def library() -> pathlib.Path:
  """The stand-in."""
  path = build.cache_folder().parent / f'stand_in-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so'
  if not path.exists():
    build.compile_source(SOURCE, path)
  return path


def handlers() -> pathlib.Path:
  """The library of the source as it is."""
  return build.library_path()
