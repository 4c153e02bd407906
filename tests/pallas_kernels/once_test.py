"""A kernel is lowered once a program, and is the same in every program: `mosaic.once` and the launcher of Triton."""

import concurrent.futures
import contextlib
import functools
import importlib
import pathlib
import re
import sys
import tempfile
import time
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import pytest

pytest.importorskip('triton')

from pallas_kernels import _compat, _device, _disk_cache, _triton, operand
from pallas_kernels.pack import triton as pack
from pallas_kernels.sparse_matmul import mosaic_gpu
from pallas_kernels.sparse_matmul.call import Call, Vectors
from pallas_kernels.vnm import mosaic_gpu as vnm_mosaic_gpu
from pallas_kernels.vnm.format import VNMOperand
from tests import targets

_BF16 = jnp.dtype('bfloat16')
_CALL = re.compile(r'custom_call @(?:mosaic_gpu_v2|triton_kernel_call)\(.*?\) \{(.*), operand_layouts')
_WEIGHT = targets.struct((128, 64), _BF16), targets.struct(operand.metadata_shape(128, 128), jnp.uint32)


_HELPER = """
import triton

@triton.jit
def times(x):
  return {} * x
"""
_CALLS_IT = """
import _helper
import triton
import triton.language as tl

@triton.jit
def kernel(x, y, N: tl.constexpr):
  i = tl.arange(0, N)
  tl.store(y + i, _helper.times(tl.load(x + i)))
"""


def _matmul(values, metadata, x):
  return mosaic_gpu.sparse_matmul(
    operand.SparseOperand(values, metadata), x, Vectors(), Call(_BF16, 'nk', 'nm')
  )


def _vnm(values, metadata, x):
  a = VNMOperand(operand.SparseOperand(values, metadata), jnp.zeros((2, 128), jnp.int32), 8, False)
  return vnm_mosaic_gpu.vnm_matmul(a, x, out_dtype=_BF16, out_layout='mn')


def _pack(values, metadata, x):
  del values, metadata
  return jnp.concatenate([pack.soft_threshold_pack(x, jnp.float32(1), axis=-1, dtype=_BF16).operand.values] * 2, 1)


def _layers(op, number, values, metadata, x):
  for _ in range(number):
    x = jnp.tanh(op(values, metadata, x))
  return x


@contextlib.contextmanager
def _for_h100():
  with mock.patch.object(_device, 'current', lambda: targets.target_device('sm_90a')), targets.lowering_for(90):
    yield


def _lowered_here(f) -> str:
  x = targets.struct((128, 128), _BF16)
  return jax.jit(f).trace(*_WEIGHT, x).lower(lowering_platforms=('cuda',)).as_text()


_lowered = _for_h100()(_lowered_here)


class OnceTest(parameterized.TestCase):

  @parameterized.parameters(_matmul, _vnm, _pack)
  def test_layers_share_a_kernel_and_so_do_programs(self, op):
    three = _CALL.findall(text := _lowered(functools.partial(_layers, op, 3)))
    self.assertLen(three, 1)
    self.assertLen(re.findall(r' call @(?:mosaic|triton)_kernel', text), 3)
    # By another function, after others were lowered.
    self.assertEqual(_CALL.findall(_lowered(op)), three)

  @parameterized.parameters((_pack, _triton, '_lower_by_jax_triton'), (_matmul, _compat, 'lowered_kernel'))
  def test_the_next_process_finds_what_was_lowered(self, op, module, lower):
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict('os.environ', SPARSE24_JAX_KERNEL_CACHE=folder):
      made = _lowered(functools.partial(op))
      (kept,) = pathlib.Path(folder).iterdir()
      with mock.patch.object(module, lower, side_effect=AssertionError('lowered again')):
        self.assertEqual(_lowered(functools.partial(op)), made)
        with self.assertRaisesRegex(AssertionError, 'lowered again'):
          _lowered(lambda values, metadata, x: op(values, metadata, x[:64]))
        kept.write_bytes(b'')
        with self.assertRaisesRegex(AssertionError, 'lowered again'):
          _lowered(functools.partial(op))

  def test_a_lowered_kernel_is_another_for_another_gpu_or_source(self):
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict('os.environ', SPARSE24_JAX_KERNEL_CACHE=folder):
      _lowered(_matmul)
      for what, found in (('mosaic_target', (10, 0)), ('compiled_from', 'other sources')):
        with (
          mock.patch.object(_compat if what == 'mosaic_target' else _disk_cache, what, lambda found=found: found),
          mock.patch.object(_compat, 'lowered_kernel', side_effect=AssertionError('lowered again')),
          self.assertRaisesRegex(AssertionError, 'lowered again'),
        ):
          _lowered(functools.partial(_matmul))

  def test_threads_that_lower_a_kernel_at_once_do_not_meet_in_its_module(self):
    def slow(pipeline):
      time.sleep(0.05)
      return manager.parse(pipeline)

    manager = _compat.PassManager
    with (
      mock.patch.object(_disk_cache, 'read', lambda key: None), _for_h100(),
      mock.patch.object(_compat, 'PassManager', mock.Mock(parse=slow)),
      concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
      texts = list(pool.map(_lowered_here, [functools.partial(_matmul) for _ in range(4)]))
    self.assertEqual(_CALL.findall(texts[0]), _CALL.findall(_lowered(_matmul)))
    self.assertLen(set(texts), 1)

  def test_a_mesh_of_another_gpu_is_no_part_of_a_kernel_nor_of_its_key(self):
    device = jax.sharding.AbstractDevice('NVIDIA B200', 148, 'gpu')
    mesh = jax.sharding.AbstractMesh((1,), ('x',), abstract_device=device)
    targets_seen = []

    def infer():  # as Mosaic GPU does where a GPU is
      targets_seen.append((10, 0) if jax.sharding.get_abstract_mesh().abstract_device else (9, 0))
      return targets_seen[-1]

    with (
      tempfile.TemporaryDirectory() as folder, mock.patch.dict('os.environ', SPARSE24_JAX_KERNEL_CACHE=folder),
      mock.patch.object(_compat.utils, '_infer_arch', infer),
    ):
      with jax.sharding.use_abstract_mesh(mesh):
        made = _lowered(_matmul)
      with mock.patch.object(_compat, 'lowered_kernel', side_effect=AssertionError('lowered again')):
        self.assertEqual(_CALL.findall(_lowered(functools.partial(_matmul))), _CALL.findall(made))
    self.assertEqual(set(targets_seen), {(9, 0)})

  def test_a_kernel_is_another_if_a_function_that_it_calls_is(self):
    found = set()
    for factor in (2, 3):
      with tempfile.TemporaryDirectory() as folder:
        for name, text in (('_helper', _HELPER.format(factor)), ('_calls_it', _CALLS_IT)):
          pathlib.Path(folder, f'{name}.py').write_text(text)
        with mock.patch.object(sys, 'path', [folder, *sys.path]):
          kernel = importlib.import_module('_calls_it').kernel
        for module in ('_helper', '_calls_it'):
          del sys.modules[module]
      for options in (dict(N=16), dict(N=32)):
        what = [], (1,), tuple({'num_warps': 4, 'compute_capability': 90, **options}.items())
        found.add(_triton._identity(kernel, what))
    self.assertLen(found, 4)

  def test_machine_code_is_of_the_triton_that_was_imported(self):
    installed = _triton._compilers.__wrapped__()
    with mock.patch('triton.__version__', '3.5.0'):  # and another one was installed since
      self.assertNotEqual(_triton._compilers.__wrapped__(), installed)

  def test_kernels_that_are_written_to_files_keep_their_names(self):
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict('os.environ', MOSAIC_GPU_DUMP_TO=folder):
      text = _lowered(functools.partial(_layers, _matmul, 1))
    self.assertIn('dump_basename', text)


if __name__ == '__main__':
  absltest.main()
