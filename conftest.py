"""Settings for every test: eight simulated devices, no silent rank promotion; warnings are errors (pyproject.toml)."""

import collections
import contextlib
import gc
import importlib
import os
from pathlib import Path
import sys
import unittest
import zlib

from tests import simulated

if 'gpu' not in sys.argv and 'PYTEST_XDIST_WORKER' not in os.environ:  # of `-m gpu`; workers have what the first has
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Once, as workers inherit them: the cache goes by them, and a test by itself is to find what a worker compiled.
if simulated.flags() not in (flags := os.environ.get('XLA_FLAGS', '')):
  os.environ['XLA_FLAGS'] = f'{flags} {simulated.flags()}'
# Compiling is most of the time of most tests: what was compiled once is kept, for child processes and the next run too.
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(Path(__file__).parent / '.jax_cache'))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
os.environ.setdefault('SPARSE24_JAX_KERNEL_CACHE', str(Path(__file__).parent / '.jax_cache' / 'kernels'))
os.environ.setdefault('SPARSE24_JAX_CACHE', str(Path(__file__).parent / '.jax_cache' / 'ffi'))
# Lowering notes for each operation the calls that led to it; nobody reads them here.
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')
# Set from outside, these make rich take captured output for a terminal.
os.environ['FORCE_COLOR'] = ''
os.environ['TTY_COMPATIBLE'] = ''

from _pytest.doctest import DoctestModule
import jax
import pytest

jax.config.update('jax_numpy_rank_promotion', 'raise')


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
  """Files of tests have no doctests, and one that cannot be imported would be skipped as if it were of doctests.

  Of a file whose package is not imported yet pytest would make a second module, and tests would set that one's globals.
  """
  found = yield
  if file_path.name.endswith('_test.py'):
    return [each for each in found if not isinstance(each, DoctestModule)]
  if any(isinstance(each, DoctestModule) for each in found):
    with contextlib.suppress(ImportError, ValueError):  # of an extra that is not installed; of a file elsewhere
      importlib.import_module(file_path.relative_to(Path(__file__).parent).parts[0])
  return found


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config, items):
  """Marks slow all but the first cases of a test that is marked `few`; leaves a third of all tests, if one is named."""
  seen = collections.Counter()
  for item in items:
    if mark := item.get_closest_marker('few'):
      test = getattr(item.function, '__wrapped__', item.function)  # absl makes a function of each case
      case = item.name.removeprefix(test.__name__)  # its number, or what names it
      seen[item.parent.nodeid, test.__name__] += 1
      index = int(case) if case.isdecimal() else seen[item.parent.nodeid, test.__name__] - 1
      if index >= (mark.args[0] if mark.args else 1):
        item.add_marker('slow')
  if third := os.environ.get('TESTS_THIRD'):
    taken: dict[bool, list] = {True: [], False: []}
    for item in items:
      taken[zlib.crc32(item.nodeid.encode()) % 3 == int(third)].append(item)
    config.hook.pytest_deselected(items=taken[False])
    items[:] = taken[True]


def pytest_collection_finish():
  """What is imported stays: without it, and less often, garbage is looked for, which tracing makes little of."""
  gc.freeze()
  gc.set_threshold(200_000, 20, 100)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
  """Fails a run of GPU tests that were all skipped, say because no GPU was found: nothing passed."""
  reporter = session.config.pluginmanager.get_plugin('terminalreporter')
  if session.config.option.markexpr == 'gpu' and reporter and exitstatus == 0 and not reporter.stats.get('passed'):
    session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.fixture(autouse=True, scope='module')
def module_cleanups():
  """pytest calls setUpModule, but not what it gave to `unittest.addModuleCleanup`."""
  yield
  unittest.doModuleCleanups()


@pytest.fixture(autouse=True, scope='module')
def optimized(request):
  """Whether XLA optimizes much, which is half of compiling: little, where Python is what is tested.

  What is asserted of programs for GPUs is asserted of those that users get. The numbers of layers and kernels are
  those of programs with few optimizations in fast tests, and of a user's programs in slow ones.
  """
  path, lane = request.node.path, request.config.option.markexpr
  old = jax.config.read('jax_disable_most_optimizations')
  of_kernels = 'pallas_kernels' in request.node.nodeid and not path.name.startswith('mosaic_gpu')  # interpreted
  numbers = of_kernels or path.parent.name == 'sparse24_jax'
  if path.name.endswith('on_hopper_test.py') or (numbers and lane == 'slow'):
    little = False
  else:
    little = old if numbers or lane == 'gpu' else True
  jax.config.update('jax_disable_most_optimizations', little)
  yield
  jax.config.update('jax_disable_most_optimizations', old)


@pytest.fixture(autouse=True)
def nothing_is_said_yet():
  """What a process logs once it may have logged in a test before, whichever that was."""
  if (dispatch := sys.modules.get('pallas_kernels._dispatch')) is not None:
    dispatch.log_once.cache_clear()


@pytest.fixture(autouse=True)
def strict_dtypes(request):
  """No silent dtype promotion in our own arithmetic; Optax, used in the rest, is not written for that."""
  if 'pallas_kernels' in request.node.nodeid:
    with jax.numpy_dtype_promotion('strict'):
      yield
  else:
    yield
