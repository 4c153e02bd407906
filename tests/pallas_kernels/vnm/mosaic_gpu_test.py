"""The V:N:M kernel without a GPU: interpreted with race detection, and compiled for sm_90a."""

import dataclasses
import functools
import re

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat, _device, _tuning, operand
from pallas_kernels.operand import SparseOperand
from pallas_kernels.vnm import mosaic_gpu, reference
from pallas_kernels.vnm.format import compress, to_vnm_operand, VNMOperand
from pallas_kernels.vnm.reference import vnm_mask
from tests import targets
from tests.pallas_kernels import compiling

_BF16 = jnp.dtype('bfloat16')
_SMALL = mosaic_gpu.Config(rows=64, bn=64, stages=3)


def _inputs(r, n, k, v, m, dtype=_BF16, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((r, k)).astype(np.float32).astype(dtype)
  a = jax.jit(lambda x: compress(x, vnm_mask(x, v=v, m=m), v=v, m=m))(x)
  return a, jnp.asarray(rng.standard_normal((k, n)).astype(np.float32).astype(dtype))


@pytest.mark.few
class InterpretTest(parameterized.TestCase):

  def _check(self, a, b, config, out_layout='mn', device=None):
    found = mosaic_gpu.vnm_matmul(
      a, b, out_dtype=a.dtype, out_layout=out_layout, config=config, device=device, interpret=True
    )
    self.assertFalse(_compat.races_found())
    plain = functools.partial(reference.vnm_matmul, out_dtype=jnp.float32, out_layout=out_layout)
    expected = jax.jit(plain)(a, b)
    self.assertEqual((found.shape, found.dtype), (expected.shape, a.dtype))
    self.assertLessEqual(_tuning.relative_error(found, expected), _tuning.TOLERANCE)

  @parameterized.parameters((8, 'nm'), (16, 'mn'))
  def test_patterns(self, m, out_layout):
    self._check(*_inputs(128, 128, 16 * m, 64, m), _SMALL, out_layout)

  @pytest.mark.slow
  def test_blocks_of_two_tiles(self):
    self._check(*_inputs(128, 128, 256, 128, 8), _SMALL)

  @pytest.mark.slow
  def test_consumers_share_rows(self):
    self._check(*_inputs(128, 128, 256, 128, 8), dataclasses.replace(_SMALL, across='m'))

  @parameterized.parameters((320, 'n'), (384, 'n'), (448, 'n'), (192, 'm'))
  @pytest.mark.slow
  def test_the_last_tile_is_as_narrow_as_its_columns(self, n, across):
    # Of 256 columns a tile: 64 left over (of 128 copied), 128 (exactly), 192 (of 256, as wide as the others).
    a, b = _inputs(128, n, 256, 128 if across == 'm' else 64, 8)
    self._check(a, b, dataclasses.replace(_SMALL, bn=128, across=across, slots=2, ctas=1))

  @pytest.mark.slow
  def test_more_tiles_than_ctas_and_a_ragged_sum(self):
    a, b = _inputs(128, 200, 8 * 37, 64, 8, jnp.dtype('float16'))
    self._check(a, b, dataclasses.replace(_SMALL, ctas=1, stages=4))

  @pytest.mark.slow
  def test_a_step_stays_in_flight(self):
    self._check(*_inputs(128, 128, 384, 64, 8), dataclasses.replace(_SMALL, delay=1, stages=2))

  @pytest.mark.slow
  def test_a_from_registers(self):
    # The last tile has 64 columns: one instruction, not two.
    config = dataclasses.replace(_SMALL, bn=384, across='m', a_from='registers', ctas=1)
    self._check(*_inputs(128, 64 + 384, 128, 128, 8), config)

  @pytest.mark.slow
  def test_places_by_gpc(self):
    # The eleventh of 12 CTAs is said to be on SM 0.
    a, b = _inputs(256, 512, 256, 64, 8)
    device = _device.Device('a GPU', 'gpu', (9, 0), 12)
    self._check(a, b, dataclasses.replace(_SMALL, places='gpc', ctas=12), device=device)

  @pytest.mark.slow
  def test_any_index(self):
    # Rows of B may be named in any order: a permuted sum needs no permuted B.
    a, b = _inputs(128, 128, 256, 64, 8)
    order = jnp.asarray(np.random.default_rng(1).permutation(256), jnp.int32)
    a = to_vnm_operand(a)
    self._check(dataclasses.replace(a, rows=order[a.rows]), b, _SMALL)

  @pytest.mark.slow
  def test_an_index_that_is_out_of_range_is_taken_for_the_last(self):
    a, b = _inputs(128, 128, 256, 64, 8)
    a = to_vnm_operand(a)

    def multiply(first, second):
      bad = dataclasses.replace(a, rows=a.rows.at[0, 1].set(first).at[1, 6].set(second))
      return mosaic_gpu.vnm_matmul(bad, b, out_dtype=_BF16, out_layout='mn', config=_SMALL, interpret=True)

    np.testing.assert_array_equal(multiply(-5, 10**9), multiply(255, 255))

  @pytest.mark.slow
  def test_vmap_launches_one_after_another(self):
    a, b = _inputs(128, 128, 256, 64, 8)
    f = functools.partial(mosaic_gpu.vnm_matmul, a, out_dtype=_BF16, out_layout='mn', config=_SMALL, interpret=True)
    for d, x in zip(jax.vmap(f)(jnp.stack([b, b + b])), (b, b + b), strict=True):
      expected = reference.vnm_matmul(a, x, out_dtype=jnp.float32, out_layout='mn')
      self.assertLessEqual(_tuning.relative_error(d, expected), _tuning.TOLERANCE)


# SMs of an H100 whose CTAs come first in a launch of 128, and of the GPCs, in whose order it goes on from any of them.
_LEADING = range(124, 132)
_GPCS = (
  (0, 1, 16, 17, 32, 33, 48, 49),
  *(tuple(x for i in (0, 16, 32, 48, 62, 76, 90, 104) for x in (g + i, g + i + 1)) for g in range(2, 16, 2)),
)


class PlaceTest(parameterized.TestCase):

  @parameterized.parameters(range(8))
  def test_columns_end_where_gpcs_do_wherever_a_launch_begins(self, begin):
    launch = [*_LEADING, *(sm for gpc in (*_GPCS[begin:], *_GPCS[:begin]) for sm in gpc)]
    places = {sm: int(mosaic_gpu.place_of(i, launch.index(0), 128)) for i, sm in enumerate(launch)}
    self.assertCountEqual(places.values(), range(128))
    # 16 or 32 neighbours read the same columns of B.
    shared = [{places[sm] // 16 for sm in gpc} for gpc in (_LEADING, *_GPCS)]
    self.assertEqual(shared, [{0}, {0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}])

  @parameterized.parameters(2, 8, 9, 128)
  def test_by_index_where_nobody_said(self, ctas):
    self.assertEqual([int(mosaic_gpu.place_of(i, 0, ctas)) for i in range(ctas)], [*range(ctas)])


def _read_in_flight(sass):
  """(sparse wgmmas, what writes a register of A's values or positions that a wgmma reads until it is waited for)."""
  count, busy, writes = 0, set(), []
  for line in sass.splitlines():
    if sparse := re.search(r'HGMMA\.SP\.\S+ R\d+, R(\d+), gdesc\[UR\d+\]\S*, R\d+, R(\d+)', line):
      a, positions = map(int, sparse.groups())
      count, busy = count + 1, busy | {*range(a, a + 4), positions}
    elif 'WARPGROUP.DEPBAR' in line:
      busy = set()
    elif written := re.search(r'\*/\s+(?:@!?U?P\w+ )?([A-Z]\S*) R(\d+),', line):
      opcode, first = written[1], int(written[2])
      width = 4 if '.128' in opcode or opcode.endswith('.4') else 2 if '.64' in opcode or '.WIDE' in opcode else 1
      writes += [line] if busy & {*range(first, first + width)} else []
  return count, writes


class RegistersTest(parameterized.TestCase):

  @parameterized.parameters(*range(24, 169, 8))
  def test_no_more_than_a_launch_has(self, producer):
    # For more a consumer would wait for ever.
    consumer = mosaic_gpu.Config(producer_registers=producer).consumer_registers
    self.assertEqual(consumer % 8, 0)
    self.assertLessEqual(producer + 2 * consumer, 3 * 168)


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
    (dict(rows=32), 'rows=32'), (dict(across='k'), "across='k'"), (dict(across='m'), 'a tile of 256 rows'),
    (dict(a_from='L1'), "a_from='L1'"), (dict(a_from='registers'), 'rows=64 and delay=0, not 128 and 0'),
    (dict(rows=64, bn=320, a_from='registers'), 'bn=320'),
    (dict(places='sm'), "places='sm'"),
    (dict(bn=96), 'bn=96'), (dict(bn=256), 'accumulators'), (dict(epilogue_n=80), 'epilogue_n=80'),
    (dict(stages=1, delay=1), 'stages=1 must exceed delay=1'),
    (dict(stages=5), 'bytes of shared memory'), (dict(slots=0), 'slots=0 must be 1 or more'),
  )
  def test_impossible_configs(self, change, message):
    p = mosaic_gpu.Problem(512, 512, 512, 128, 1024, _BF16, _BF16, 'mn')
    with self.assertRaisesRegex(ValueError, message):
      mosaic_gpu.build(p, mosaic_gpu.Config(**change))

  @parameterized.parameters(
    (_device.Device('cpu', 'cpu'), 64, _BF16, 'compute capability 9.0'),
    (_device.Device('NVIDIA B200', 'gpu', (10, 0), 148), 64, _BF16, 'compute capability 9.0'),
    (targets.target_device('sm_90a'), 32, _BF16, 'blocks of 64 rows'),
    (targets.target_device('sm_90a'), 64, jnp.float32, 'bfloat16 or float16'),
  )
  def test_not_mine(self, device, v, dtype, message):
    a, b = _inputs(128, 128, 256, v, 8, dtype)
    with self.assertRaisesRegex(NotImplementedError, message):
      mosaic_gpu.vnm_matmul(a, b, out_dtype=dtype, out_layout='mn', device=device)


@absltest.skipUnless(compiling.can_compile_for_gpu(), 'needs the CUDA plugin wheels')
@pytest.mark.few
class CompileTest(parameterized.TestCase):

  @parameterized.named_parameters(
    # The last are the columns of a consumer, in all tiles but the last and in the last.
    ('v64', 64, 8, mosaic_gpu.default_config(64), 'mn', 4096, (256,)),
    ('v128', 128, 8, mosaic_gpu.default_config(128), 'mn', 4096, (384, 256)),
    ('v128_transposed_ragged', 128, 16, mosaic_gpu.Config(delay=1), 'nm', 4160, (192,)),
    ('v256', 256, 8, mosaic_gpu.default_config(256), 'mn', 4096, (192, 64)),
  )
  def test_no_spills_and_sparse_mma(self, v, m, config, out_layout, n, widths):
    r, k = 4096, 4096
    compact = 4 * k // m
    s = targets.struct

    def f(values, metadata, rows, b):
      a = VNMOperand(SparseOperand(values, metadata), rows, m)
      return mosaic_gpu.vnm_matmul(
        a, b, out_dtype=_BF16, out_layout=out_layout, config=config, device=targets.target_device('sm_90a')
      )

    report = compiling.compile_report(
      f, s((r, compact // 2), _BF16), s(operand.metadata_shape(r, compact), jnp.uint32),
      s((r // v, compact), jnp.int32), s((k, n), _BF16),
    )
    self.assertEqual(report.architecture, 'sm_90a')
    self.assertEqual(report.spill_bytes, 0)
    self.assertEqual(report.warnings, ())
    self.assertEqual(report.registers, 168)  # of a thread at the launch, see `consumer_registers`
    # Two K steps of two instructions a tile of 64 rows, for each width, or twice as many where one is too narrow.
    instructions = sum(2 * 2 * config.rows // 64 * -(-width // 256) for width in widths)
    self.assertEqual(report.count('wgmma.mma_async.sp'), instructions)
    self.assertEqual(report.count('cp.async.cg.shared.global'), sum(2 * 4 * config.parts * bn // 64 for bn in widths))
    self.assertEqual(report.count('%smid'), config.places == 'gpc')
    # Nobody waits for copies: they arrive at a barrier, behind which the consumers fence before they multiply.
    self.assertNotIn('cp.async.wait', report.ptx)
    self.assertEqual(report.count('cp.async.mbarrier.arrive.noinc'), 2 * len(widths))
    consumer = report.ptx[: report.ptx.rindex('wgmma.mma_async.sp')].split('setmaxnreg.inc')[1]
    before_each_step = consumer.split('wgmma.fence')[:-1]
    self.assertLen(before_each_step, 2 * len(widths))
    for text in before_each_step:
      waits, fence = list(re.finditer(r'mbarrier\.try_wait', text)), text.rindex('fence.proxy.async.shared::cta')
      self.assertLen(waits, 2)  # for A and for B
      self.assertGreater(fence, waits[-1].start())
    if config.a_from == 'registers':
      self._check_registers(report, instructions)

  def _check_registers(self, report, instructions):
    # To ptxas a register is free when the wgmma that reads it is issued.
    try:
      sass = compiling.disassemble(report.ptx)
    except NotImplementedError as e:
      self.skipTest(str(e))
    self.assertEqual(_read_in_flight(sass), (instructions, []))


if __name__ == '__main__':
  absltest.main()
