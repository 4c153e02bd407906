"""Checks at first use on a CPU that stands for a GPU: XLA in place of the kernel, a clock of our own."""

import concurrent.futures
import importlib.metadata
import os
import pathlib
import tempfile
import threading
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _checks, _compat, _device, _disk_cache, _dispatch, _records, _tuning
from pallas_kernels.sparse_matmul import _prepared, _settings, api, check, mosaic_gpu_sm80
from tests import targets

A100 = targets.target_device('sm_80')
H20 = _device.Device('NVIDIA H20', 'gpu', (9, 0), 78)
KEY = dict(m=64, n=128, k=192, dtype='bfloat16', out_dtype='bfloat16', b_layout='nk', out_layout='nm')


class Machine:
  """What stands for a GPU: `kernel_ms` of its kernel where dense takes 1, and by how much that is off."""

  def __init__(self, kernel_ms, factor=1.0):
    self.kernel_ms, self.factor, self.checks, self.threads = kernel_ms, factor, 0, set()

  def compiled(self, p, own, settings):
    self.checks += 1
    self.threads.add(threading.get_ident())

    def kernel(a, b):
      d = api.sparse_matmul(
        a, b, b_layout=p.b_layout, out_layout=p.out_layout, out_dtype=p.out_dtype, implementation='reference'
      )
      return d * jnp.asarray(self.factor, d.dtype)

    f = jax.jit(kernel)
    f.__wrapped__.is_kernel = True
    return [(settings[0] if settings else mosaic_gpu_sm80.Config(), f)]

  def times(self, f, args, iterations):
    jax.block_until_ready(f(*args))
    return [self.kernel_ms if hasattr(getattr(f, '__wrapped__', None), 'is_kernel') else 1.0] * iterations


class CheckTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    folder = self.enter_context(tempfile.TemporaryDirectory())
    self.kept = pathlib.Path(folder) / 'kept'
    self.enter_context(mock.patch.dict(os.environ, {_disk_cache.VARIABLE: str(self.kept)}))
    self.enter_context(mock.patch.object(check, 'LEAST_MULTIPLICATIONS', 1))
    self.enter_context(mock.patch.object(_checks, '_is_here', lambda device: True))
    self.enter_context(mock.patch.object(_prepared, 'gap_s', lambda p, iterations: 0.0))
    self.enter_context(mock.patch.object(_tuning, 'let_others_profile', lambda: None))
    self.enter_context(mock.patch.dict(_checks._made, clear=True))
    _dispatch.log_once.cache_clear()

  def _on(self, machine):
    self.enter_context(mock.patch.object(_settings, 'compiled', machine.compiled))
    self.enter_context(mock.patch.object(_prepared, 'times_ms', machine.times))

  def _candidates(self, device=A100, **changes):
    key = KEY | changes
    return api.candidates_for(**key, device=device)

  @parameterized.parameters((A100, 0.8, 'mosaic_gpu_sm80'), (A100, 1.1, None), (H20, 0.5, 'mosaic_gpu'))
  def test_the_faster_one_is_taken_and_the_next_process_reads_it(self, device, kernel_ms, found):
    expected = (found, 'dense') if found else ('dense',)
    machine = Machine(kernel_ms)
    self._on(machine)
    with self.assertLogs('pallas_kernels', 'INFO') as logs:
      for _ in range(2):
        self.assertEqual(self._candidates(device), expected)
    self.assertEqual((machine.checks, len(logs.output)), (1, 1))
    self.assertIn(f'checked here: the kernel is {1 / kernel_ms:.2f} times as fast', logs.output[0])
    entry = api.checked(KEY, device)
    self.assertEqual(_records.times_ms(entry), {'dense': 1.0, found or 'mosaic_gpu_sm80': kernel_ms})
    self.assertAlmostEqual(_checks.gain(entry), 1 / kernel_ms)
    _checks._made.clear()
    self.assertEqual(self._candidates(device), expected)
    self.assertEqual(machine.checks, 1)
    # Of another GPU of that generation nothing is known.
    self._candidates(_device.Device('NVIDIA A30', 'gpu', (8, 0), 56))
    self.assertEqual(machine.checks, 2)

  def test_a_wrong_kernel_is_not_taken_and_each_process_says_so(self):
    machine = Machine(0.5, factor=1.02)
    self._on(machine)
    for _ in range(2):
      with self.assertLogs('pallas_kernels', 'WARNING') as logs:
        self.assertEqual(self._candidates(), ('dense',))
      self.assertIn('the kernel is wrong here: mosaic_gpu_sm80: relative error', logs.output[0])
      _checks._made.clear()
      _dispatch.log_once.cache_clear()
    self.assertEqual(machine.checks, 1)

  def test_a_check_that_fails_leaves_dense_with_a_warning_and_is_not_kept(self):
    machine = Machine(0.5)
    self._on(machine)
    with mock.patch.object(_prepared, 'prepare', side_effect=RuntimeError('out of memory')):
      with self.assertLogs('pallas_kernels', 'WARNING') as logs:
        for _ in range(2):
          self.assertEqual(self._candidates(), ('dense',))
      self.assertIn('RuntimeError: out of memory', logs.output[0])
    self.assertEqual(machine.checks, 1)
    _checks._made.clear()
    self.assertEqual(self._candidates()[0], 'mosaic_gpu_sm80')

  def test_nothing_is_checked_where_it_is_off_or_small_or_elsewhere_or_of_no_kernel_or_while_xla_compiles(self):
    machine = Machine(0.5)
    self._on(machine)
    with mock.patch.dict(os.environ, {_checks.VARIABLE: 'off'}):
      self.assertEqual(self._candidates(), ('dense',))
    with mock.patch.object(check, 'LEAST_MULTIPLICATIONS', 2**30):
      self.assertEqual(self._candidates(), ('dense',))
    with mock.patch.object(_checks, '_is_here', lambda device: False):
      self.assertEqual(self._candidates(), ('dense',))
    self.assertEqual(self._candidates(dtype='float32'), ('dense',))
    self.assertEqual(self._candidates(dtype='float8_e4m3fn'), ('dense',))
    self.assertEqual(self._candidates(_device.Device('NVIDIA B200', 'gpu', (10, 0), 148)), ('dense',))
    self.assertIsNone(api.chosen(KEY, A100, check=False))
    self.assertEqual(machine.checks, 0)

  def test_what_was_traced_before_does_not_decide(self):
    # Of two processes one has met the problem before, by itself; then XLA compiles the program of both.
    self._on(Machine(0.5))
    for _ in range(2):
      self.assertEqual(api.candidates_for(**KEY, device=A100, check=False), ('dense',))
      self.assertEqual(_records.expected_ms(A100.slug, api.OP, KEY), {})  # by which V:N:M blocks are chosen
      self.assertEqual(self._candidates()[0], 'mosaic_gpu_sm80')

  def test_threads_that_trace_one_problem_check_it_once(self):
    machine = Machine(0.5)
    self._on(machine)
    with mock.patch.object(jax, 'process_count', lambda: 2), mock.patch.object(
      _compat.distributed.global_state, 'client', Store()
    ), concurrent.futures.ThreadPoolExecutor(4) as pool:
      found = list(pool.map(lambda _: self._candidates(), range(4)))
    self.assertEqual(found, [('mosaic_gpu_sm80', 'dense')] * 4)
    self.assertEqual(machine.checks, 1)

  def test_other_sources_and_compilers_are_checked_again(self):
    made = []
    sources = self.kept.parent / 'sources'
    sources.mkdir()
    versions = {}

    def version(name):  # as where source trees are used that are not installed
      if name not in versions:
        raise importlib.metadata.PackageNotFoundError(name)
      return versions[name]

    self.enter_context(mock.patch.object(_disk_cache, '_SOURCES', sources))
    self.enter_context(mock.patch.object(importlib.metadata, 'version', version))

    def checks():  # by another process
      _checks._made.clear()
      _disk_cache._digest_of_files.cache_clear()
      self.enter_context(mock.patch.object(_disk_cache, '_IMPORTED', _disk_cache._files()))
      _checks.outcome(A100, api.OP, KEY, [], lambda: made.append('one') or dict(candidates=[]))
      return len(made)

    self.addCleanup(_disk_cache._digest_of_files.cache_clear)
    (sources / 'kernel.py').write_text('a = 1')
    self.assertEqual([checks(), checks()], [1, 1])
    (sources / 'kernel.py').write_text('a = 2')
    self.assertEqual([checks(), checks()], [2, 2])
    versions['jax-cuda13-plugin'] = '0.12.1'
    self.assertEqual([checks(), checks()], [3, 3])

  def test_inside_a_trace(self):
    machine = Machine(0.5)
    self._on(machine)
    found = []
    mesh = jax.make_mesh((jax.device_count(),), ('x',), axis_types=(jax.sharding.AxisType.Explicit,))

    def f(x):
      found.append(self._candidates())
      return jnp.sum(x * x)

    with jax.set_mesh(mesh):
      jax.eval_shape(jax.grad(f), jax.ShapeDtypeStruct((4,), 'float32'))
    self.assertEqual(found, [('mosaic_gpu_sm80', 'dense')])
    self.assertNotIn(threading.get_ident(), machine.threads)


class Store(dict):
  """The store of `jax.distributed` that processes share."""

  def key_value_set(self, name, value, allow_overwrite=False):
    if name in self and not allow_overwrite:
      raise jax.errors.JaxRuntimeError(f'ALREADY_EXISTS: {name}')
    self[name] = value

  def blocking_key_value_get(self, name, wait_ms):
    if name not in self:
      raise jax.errors.JaxRuntimeError(f'DEADLINE_EXCEEDED after {wait_ms}')
    return self[name]


class ProcessesTest(absltest.TestCase):

  def _as(self, index, store, make):
    with (
      mock.patch.object(jax, 'process_count', lambda: 2), mock.patch.object(jax, 'process_index', lambda: index),
      mock.patch.object(_compat.distributed.global_state, 'client', store),
    ):
      return _compat.told_by_process_0('a check', make, 1)

  def test_the_others_take_what_process_0_found(self):
    store = Store()
    self.assertEqual(self._as(0, store, lambda: {'choice': 'dense'}), {'choice': 'dense'})
    self.assertEqual(self._as(1, store, lambda: self.fail('a second check')), {'choice': 'dense'})

  def test_process_0_may_say_it_again(self):
    store = Store()
    self.assertEqual([self._as(0, store, lambda: 'dense') for _ in range(2)], ['dense', 'dense'])

  def test_an_error_where_process_0_does_not_trace_the_same(self):
    with self.assertRaisesRegex(RuntimeError, 'process 1 waited 1 s .* SPARSE24_JAX_CHECKS=off'):
      self._as(1, Store(), lambda: None)


if __name__ == '__main__':
  absltest.main()
