"""Machine code of the Hopper kernel for sm_90a, on a machine without a GPU: spills, wgmmas, registers of metadata."""

import functools
import re

from absl.testing import absltest, parameterized
import jax.numpy as jnp
import pytest

from pallas_kernels import operand
from pallas_kernels.sparse_matmul import mosaic_gpu
from pallas_kernels.sparse_matmul.call import Call, Vectors
from tests import targets
from tests.pallas_kernels import compiling

_BF16 = jnp.dtype('bfloat16')
_E4M3 = jnp.dtype('float8_e4m3fn')

# Layers' matmuls by the name of their test; what `_report` takes, and the wgmma in the program.
_PROGRAMS = {
  'default': ((8192, 8192, 8192), _BF16, mosaic_gpu.Config(), {}, 8),
  'split': ((8192, 8192, 8192), _BF16, mosaic_gpu.Config(split=4, slots=2), {}, 8),
  'narrow': ((4096, 4096, 4096), _BF16, mosaic_gpu.Config(rows=64, bn=256, stages=5), {}, 4),
  'n_major_transposed': (
    (4096, 4096, 4096), _BF16, mosaic_gpu.Config(), dict(b_layout='kn', out_layout='nm'), 8
  ),
  'float32_transposed': (
    (4096, 4096, 4096), jnp.dtype('float16'), mosaic_gpu.Config(epilogue_n=32),
    dict(out_dtype=jnp.dtype('float32'), out_layout='nm'), 8,
  ),
  'float8_drained': ((8192, 8192, 8192), _E4M3, mosaic_gpu.Config(bk=128, delay=0), dict(scales='vectors'), 4),
  # Twice the metadata of 16 bits, in registers that the producer does without.
  'float8': ((8192, 8192, 8192), _E4M3, mosaic_gpu.Config(bk=128), dict(scales='scalars'), 8),
  'float8_split': (
    (3072, 768, 32768), _E4M3, mosaic_gpu.Config(bk=128, split=4, slots=2), dict(scales='scalars', out_layout='nm'), 8
  ),
  'float8_largest': (
    (6400, 24576, 1600), _E4M3, mosaic_gpu.Config(bk=128, slots=2),
    dict(scales='scalars', bias=True, out_layout='nm', activation='gelu', keep_preactivation=True, amax=True), 12,
  ),
  'ragged': ((100, 130, 140), _BF16, mosaic_gpu.Config(), {}, 12),
  'side_by_side': ((1600, 24576, 6400), _BF16, mosaic_gpu.Config(along='n'), dict(out_layout='nm'), 8),
  'side_by_side_n_major': (
    (1600, 6400, 24576), _BF16, mosaic_gpu.Config(along='n', split=4), dict(b_layout='kn', out_layout='nm'), 8
  ),
  'half_boxes_n_major': (
    (6400, 1600, 24576), _BF16, mosaic_gpu.Config(bn=160, epilogue_n=80), dict(b_layout='kn', out_layout='nm'), 8
  ),
  'half_boxes_n_major_narrow': (
    (3072, 768, 32768), _BF16, mosaic_gpu.Config(rows=64, bn=160, epilogue_n=80),
    dict(b_layout='kn', out_layout='nm'), 4,
  ),
  'odd_columns': (
    (4096, 4096, 4096), _BF16, mosaic_gpu.Config(rows=64, bn=24, cluster=1, epilogue_n=8),
    dict(out_dtype=jnp.dtype('float32')), 8,
  ),
  'few_columns': (
    (4096, 1, 4160), _BF16,  # no whole number of steps
    mosaic_gpu.Config(rows=64, bn=8, bk=128, stages=11, cluster=1, split=5, epilogue_n=8), dict(out_layout='nm'), 8,
  ),
  'few_columns_by_steps': (
    (4096, 1, 4096), _BF16,
    mosaic_gpu.Config(rows=64, bn=8, bk=128, stages=18, cluster=1, epilogue_n=8, halves='k'), dict(out_layout='nm'), 8,
  ),
  'few_columns_float8': (
    (4096, 16, 4096), _E4M3,
    mosaic_gpu.Config(rows=64, bn=16, bk=128, stages=16, cluster=1, split=4, epilogue_n=16),
    dict(scales='scalars', out_layout='nm'), 4,
  ),
  'float8_half_steps': (
    (6400, 24576, 1600), _E4M3, mosaic_gpu.Config(bk=128, slots=2, along='n'),
    dict(scales='scalars', out_layout='nm'), 12,
  ),
  'odd_steps': ((6400, 24576, 1600), _BF16, mosaic_gpu.Config(), dict(bias=True, out_layout='nm'), 12),
}


@functools.cache
def _program(name):
  """The report of an entry of `_PROGRAMS`, compiled once."""
  shape, dtype, config, kwargs, _ = _PROGRAMS[name]
  return _report(shape, dtype, config, **kwargs)


def _report(shape, dtype, config, *, bias=False, scales='none', **kwargs):
  m, n, k = shape
  call = Call(**dict(out_dtype=_BF16, b_layout='nk', out_layout='mn') | kwargs)
  s, f32 = targets.struct, jnp.float32
  args = [s((m, k // 2), dtype), s(operand.metadata_shape(m, k), jnp.uint32)]
  args += [s((n, k) if call.b_layout == 'nk' else (k, n), dtype)]
  args += [s((m,), f32)] if bias else []
  shapes = {'none': [], 'scalars': [(), ()], 'vectors': [(m,), (n,)]}[scales]
  args += [s(shape, f32) for shape in shapes]

  def f(values, metadata, b, *rest):
    rest = list(rest)
    vectors = Vectors(rest.pop(0) if bias else None, *rest)
    return mosaic_gpu.sparse_matmul(
      operand.SparseOperand(values, metadata), b, vectors, call, config=config,
      device=targets.target_device('sm_90a'),
    )

  return compiling.compile_report(f, *args)


@absltest.skipUnless(compiling.can_compile_for_gpu(), 'needs the CUDA plugin wheels')
@pytest.mark.few
class CompileTest(parameterized.TestCase):

  @parameterized.parameters(*_PROGRAMS)
  def test_compiles_without_spills(self, name):
    report = _program(name)
    self.assertEqual(report.spill_bytes, 0, report.warnings)
    self.assertEqual(report.count('wgmma.mma_async.sp'), _PROGRAMS[name][-1])
    # C75xx: ptxas serialised the wgmmas.
    self.assertEqual(report.warnings, ())

  @parameterized.parameters(('gelu', 'nm'), ('silu', 'mn'), ('gelu_exact', 'nm'))
  @pytest.mark.slow
  def test_keeps_the_preactivation_without_spills(self, activation, out_layout):
    # No config: the one that the GPU's record and `for_outputs` give.
    report = _report(
      (16384, 16384, 4096), _BF16, None, bias=True, activation=activation, out_layout=out_layout,
      keep_preactivation=True,
    )
    self.assertEqual(report.spill_bytes, 0)
    self.assertEqual(report.count('wgmma.mma_async.sp'), 8)
    self.assertEqual(report.warnings, ())

  # Registers of metadata of a step: one for 64 rows and 64 entries along K.
  @parameterized.parameters(('default', 2), ('split', 2), ('odd_steps', 2), ('float8', 4), ('float8_split', 4))
  def test_no_group_loads_the_metadata_register_of_the_group_in_flight(self, name, registers):
    (_, _, k), _, config, *_ = _PROGRAMS[name]
    try:
      sass = compiling.disassemble(_program(name).ptx)
    except NotImplementedError as e:
      self.skipTest(str(e))
    instruction = re.compile(r'[HQ]GMMA\.SP\.\S+ R\d+, gdesc\[UR\d+\], R\d+, (R\d+)')
    groups = [instruction.findall(x) for x in sass.split('DEPBAR.LE gsb0')]
    first, second, *tail = (set(g) for g in groups if g)
    self.assertLen(tail, k // config.bk % 2)
    # The loop goes from the second group to the first, or on to the odd step.
    for before, after in ((first, second), (second, first), *((second, t) for t in tail)):
      self.assertLen(after, registers)
      self.assertFalse(before & after)


if __name__ == '__main__':
  absltest.main()
