"""Compiled kernels that are kept on disk: with stand-ins for the GPU and for the executables that it would take."""

import concurrent.futures
import os
from pathlib import Path
import tempfile
import types
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _disk_cache
from pallas_kernels.mosaic import compiled
from pallas_kernels.mosaic.once import once
from tests import targets

_X = targets.struct((8,), jnp.float32)
_GPU = types.SimpleNamespace(
  device_kind='NVIDIA H100', compute_capability='9.0', client=types.SimpleNamespace(platform_version='CUDA 13.0')
)


def _lowered() -> str:
  """A program of two calls of a kernel, lowered anew."""
  kernel = once(lambda x: (x + 1,), (_X,), 'a kernel')
  return jax.jit(lambda x: kernel(*kernel(x))).trace(_X).lower(lowering_platforms=('cuda',)).as_text()


class CompiledTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
    self.enter_context(mock.patch.dict(os.environ, {_disk_cache.VARIABLE: str(self.folder)}))
    self.gpu = self.enter_context(mock.patch.object(_compat, 'gpu_here', return_value=_GPU))
    self.made = self.enter_context(mock.patch.object(_compat, 'serialized_executable', side_effect=self._make))
    self.loaded = self.enter_context(mock.patch.object(_compat, 'load_executable'))

  def _make(self, f, arguments, wide, device):
    del wide, device
    jax.jit(f).trace(*arguments).lower(lowering_platforms=('cuda',))  # it calls the kernel, as programs do
    return b'machine code'

  def _process(self, made: int, loaded: int) -> None:
    """Lowers programs in a process of its own, as it were, which is to compile and load so many executables."""
    for each in (self.made, self.loaded):
      each.reset_mock()
    with mock.patch.object(compiled, '_seen', set()):
      texts = {_lowered(), _lowered()}
    self.assertEqual((self.made.call_count, self.loaded.call_count), (made, loaded))
    with mock.patch.object(compiled, 'is_on', lambda: False):
      self.assertEqual(texts, {_lowered()})

  def _kept(self) -> list[Path]:
    return [path for path in self.folder.iterdir() if b'machine code' in path.read_bytes()]

  def test_the_first_process_compiles_a_kernel_and_the_next_loads_it(self):
    self._process(made=1, loaded=0)
    self._process(made=0, loaded=1)
    self.assertEqual(self.loaded.call_args.args, (b'machine code', _GPU))

  def test_what_is_damaged_or_does_not_load_is_compiled_again(self):
    self._process(made=1, loaded=0)
    self._kept()[0].write_bytes(b'machine code')
    self._process(made=1, loaded=0)
    self.loaded.side_effect = RuntimeError('of another version')
    with self.assertLogs('pallas_kernels', 'WARNING') as logs:
      self._process(made=1, loaded=1)
    self.assertLen(logs.output, 1)
    self.assertIn('of another version', logs.output[0])
    self.assertLen(self._kept(), 1)

  def test_what_cannot_be_compiled_alone_is_left_to_the_program(self):
    self.made.side_effect = NotImplementedError('it does not serialize')
    with self.assertLogs('pallas_kernels', 'WARNING'):
      self._process(made=1, loaded=0)
    self.assertEmpty(self._kept())

  def test_another_machine_or_version_compiles_its_own(self):
    self._process(made=1, loaded=0)
    for change in (
      mock.patch.object(_GPU, 'device_kind', 'NVIDIA H200'), mock.patch.object(_GPU, 'compute_capability', '9.1'),
      mock.patch.object(_GPU, 'client', types.SimpleNamespace(platform_version='CUDA 13.1')),
      mock.patch.object(compiled, '_processors', return_value=['flags: sse']),
      mock.patch.object(_disk_cache, 'compiled_from', return_value='other sources'),
      mock.patch.dict(os.environ, MOSAIC_GPU_OPTION='1'),
    ):  # fmt: skip
      with change:
        self._process(made=1, loaded=0)
    self._process(made=0, loaded=1)

  def test_nothing_is_kept_without_a_folder_or_a_gpu(self):
    with mock.patch.dict(os.environ, {_disk_cache.VARIABLE: 'off'}):
      self._process(made=0, loaded=0)
    self.gpu.return_value = None
    self._process(made=0, loaded=0)

  def test_nothing_is_kept_where_mosaic_writes_down_what_it_compiles(self):
    with mock.patch.dict(os.environ, {'MOSAIC_GPU_DUMP_PTX': '1'}):
      self._process(made=0, loaded=0)

  def test_a_gpu_that_cannot_be_told_costs_a_warning(self):
    self.gpu.side_effect = AttributeError('backend')
    with self.assertLogs(level='WARNING') as logs:
      self._process(made=0, loaded=0)
    self.assertIn('backend', logs.output[0])

  def test_threads_that_lower_a_kernel_at_once_compile_it_once(self):
    with mock.patch.object(compiled, '_seen', set()), concurrent.futures.ThreadPoolExecutor(4) as pool:
      self.assertLen(set(pool.map(lambda _: _lowered(), range(4))), 1)
    self.assertEqual((self.made.call_count, self.loaded.call_count), (1, 0))
    self.assertLen(self._kept(), 1)


class CompatTest(parameterized.TestCase):

  @parameterized.parameters(
    ({}, True), (dict(platform='cpu'), False), (dict(client='of a topology'), False), (dict(devices=2), False)
  )
  def test_a_gpu_is_here_if_it_is_all_that_programs_run_on(self, changes, here):
    of = {'platform': 'gpu', 'client': 'cuda', 'devices': 1} | changes
    device = types.SimpleNamespace(platform=of['platform'], client='cuda')
    context = types.SimpleNamespace(module_context=types.SimpleNamespace(backend=of['client']))
    with mock.patch.object(jax, 'devices', lambda: [device] * of['devices']):
      self.assertEqual(_compat.gpu_here(context), device if here else None)

  def test_nothing_that_is_lowered_here_is_for_a_gpu_of_this_process(self):
    with (
      mock.patch.object(compiled, 'is_on', lambda: True), mock.patch.object(compiled, '_seen', set()) as seen,
      mock.patch.object(_compat, 'serialized_executable') as made,
    ):  # fmt: skip
      _lowered()
    self.assertEqual((seen, made.call_count), (set(), 0))

  def test_an_executable_loads_on_one_of_several_devices_and_computes_the_same(self):
    device = jax.devices()[1]
    for _ in range(2):  # what JAX's own cache returned the second time could not be serialized
      kept = _compat.serialized_executable(lambda x: (x + 1,), [targets.struct((3,), jnp.float64)], True, device)
      with jax.enable_x64(True):
        (found,) = _compat.load_executable(kept, device)(jax.device_put(jnp.arange(3.0), device))
      self.assertEqual((found.dtype, found.tolist(), found.devices()), (jnp.float64, [1, 2, 3], {device}))


if __name__ == '__main__':
  absltest.main()
