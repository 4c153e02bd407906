"""The Hopper kernel without a GPU, interpreted with race detection; its settings, and what it refuses."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _compat, _device, _tuning, formats
from pallas_kernels.mosaic import wgmma_sp
from pallas_kernels.sparse_matmul import mosaic_gpu, reference
from pallas_kernels.sparse_matmul.call import Call, Vectors
from tests import targets
from tests.pallas_kernels.sparse_matmul import interpreted

_BF16 = jnp.dtype('bfloat16')
_E4M3 = jnp.dtype('float8_e4m3fn')
# Small enough to interpret: each CTA has 2 x 64 rows and 64 columns.
_SMALL = mosaic_gpu.Config(rows=64, bn=64, stages=3, cluster=2)
_SMALL_FP8 = mosaic_gpu.Config(rows=64, bn=64, bk=128, stages=2, cluster=1, delay=0)


# One program in place of dozens of small ones, which take longer than a kernel's interpretation.
_compress = jax.jit(functools.partial(formats.compress, axis=-1))


def _inputs(m, n, k, a_dtype, b_dtype, b_layout, seed=0):
  rng = np.random.default_rng(seed)
  keep = np.argsort(rng.random((m, k // 4, 4)), axis=-1) < 2
  w = rng.standard_normal((m, k)).astype(np.float32).astype(a_dtype)
  a = _compress(w, keep.reshape(m, k))
  shape = (n, k) if b_layout == 'nk' else (k, n)
  return a, jnp.asarray(rng.standard_normal(shape).astype(np.float32).astype(b_dtype))


def _linspace(first, last, number):
  return np.linspace(first, last, number, dtype=np.float32)


@pytest.mark.few
class InterpretTest(parameterized.TestCase):

  def _check(self, a, b, config, bias=None, a_scale=None, b_scale=None, **kwargs):
    call = Call(**dict(out_dtype=_BF16, b_layout='nk', out_layout='mn') | kwargs)
    args = (a, b, Vectors(bias, a_scale, b_scale))
    interpreted.check(self, args, call, config)

  # The two other pairs are among the ragged sizes.
  @parameterized.parameters(('nk', 'mn'), ('kn', 'nm'))
  @pytest.mark.slow
  def test_layouts(self, b_layout, out_layout):
    a, b = _inputs(256, 128, 256, _BF16, _BF16, b_layout)
    self._check(a, b, _SMALL, b_layout=b_layout, out_layout=out_layout)

  @parameterized.parameters((100, 130, 140, 'nk', 'nm'), (257, 72, 68, 'kn', 'mn'), (1, 1, 4, 'nk', 'mn'))
  def test_ragged(self, m, n, k, b_layout, out_layout):
    a, b = _inputs(m, n, k, _BF16, _BF16, b_layout)
    self._check(a, b, _SMALL, b_layout=b_layout, out_layout=out_layout)

  @parameterized.parameters(
    (64, 320, {}), (300, 448, dict(cluster=2, stages=3, split=2, ctas=4)), (64, 192, dict(delay=0)),
    (64, 448, dict(stages=4, halves='k')), (64, 320, dict(cluster=2, along='n')),
  )
  def test_the_last_step_of_8_bits_is_half_a_one(self, m, k, change):
    a, b = _inputs(m, 72, k, _E4M3, _E4M3, 'nk')
    config = mosaic_gpu.Config(**dict(rows=64, bn=64, bk=128, stages=2, cluster=1) | change)
    self._check(a, b, config, out_layout='nm')

  @parameterized.parameters((32, 2, 'm', 512), (96, 2, 'n', 192), (96, 1, 'm', 200))
  @pytest.mark.slow
  def test_tiles_of_half_a_box_of_columns(self, bn, cluster, along, n):
    a, b = _inputs(136, n, 128, _BF16, _BF16, 'kn')
    config = mosaic_gpu.Config(rows=64, bn=bn, stages=2, cluster=cluster, along=along, epilogue_n=bn // 2)
    self._check(a, b, config, b_layout='kn', out_layout='nm')

  @parameterized.parameters((24, 8, 1, 'float32', 'mn'), (40, 8, 2, 'float32', 'mn'), (24, 24, 1, 'bfloat16', 'nm'))
  @pytest.mark.slow
  def test_tiles_of_an_odd_number_of_eight_columns(self, bn, epilogue_n, cluster, out_dtype, out_layout):
    # The last tile has eight columns.
    a, b = _inputs(136, 2 * bn + 8, 128, _BF16, _BF16, 'nk')
    config = mosaic_gpu.Config(rows=64, bn=bn, stages=2, cluster=cluster, along='n', epilogue_n=epilogue_n)
    self._check(a, b, config, out_dtype=jnp.dtype(out_dtype), out_layout=out_layout)

  def test_few_columns_share_out_the_sum(self):
    # Two tiles of 128 rows and four stages of 128 along K, in eight pieces.
    a, b = _inputs(200, 3, 1024, _BF16, _BF16, 'nk')
    config = mosaic_gpu.Config(rows=64, bn=8, bk=128, stages=3, cluster=1, split=4, epilogue_n=8, ctas=8)
    self._check(a, b, config, out_layout='nm')

  @parameterized.parameters((1, 768), (0, 512))
  @pytest.mark.slow
  def test_few_columns_by_steps(self, delay, k):
    # Four tiles of 64 rows on two CTAs; of 128 along K a consumer has three steps, or two.
    a, b = _inputs(200, 3, k, _BF16, _BF16, 'nk')
    config = mosaic_gpu.Config(
      rows=64, bn=8, bk=128, stages=2 + 2 * delay, cluster=1, epilogue_n=8, ctas=2, delay=delay, halves='k'
    )
    self._check(a, b, config, _linspace(-3.0, 3.0, 200), out_layout='nm')

  @parameterized.parameters((200, 136, 64, 'kn'), (256, 256, 192, 'nk'))
  @pytest.mark.slow
  def test_clusters_side_by_side(self, m, n, k, b_layout):
    # The first size leaves the right CTA of the last cluster without columns.
    a, b = _inputs(m, n, k, _BF16, _BF16, b_layout)
    config = dataclasses.replace(_SMALL, along='n', ctas=4)
    self._check(a, b, config, _linspace(-3.0, 3.0, m), b_layout=b_layout, out_layout='nm')

  @pytest.mark.slow
  def test_clusters_side_by_side_read_scales_by_column(self):
    a, b = _inputs(128, 136, 256, _E4M3, _E4M3, 'nk')
    config = dataclasses.replace(_SMALL_FP8, cluster=2, along='n')
    self._check(a, b, config, None, _linspace(0.5, 2.0, 128), _linspace(1.0, 3.0, 136))

  @pytest.mark.slow
  def test_odd_number_of_steps(self):
    # A single step is among the ragged sizes.
    a, b = _inputs(128, 192, 192, _BF16, _BF16, 'nk')
    self._check(a, b, mosaic_gpu.Config(rows=64, bn=64, stages=2, cluster=1, ctas=2), out_layout='nm')

  def test_epilogue(self):
    a, b = _inputs(128, 64, 128, jnp.dtype('float16'), jnp.dtype('float16'), 'nk')
    bias = _linspace(-3.0, 3.0, 128)
    self._check(a, b, _SMALL, bias, activation='squared_relu', out_dtype=jnp.dtype('float16'), out_layout='nm')

  @parameterized.parameters((1, 'mn', 'bfloat16'), (2, 'nm', 'float32'))
  def test_keeps_the_preactivation(self, slots, out_layout, out_dtype):
    # Two tiles on one CTA, two pieces a tile: the buffers are used again within a tile and by the next one.
    a, b = _inputs(128, 100, 128, _BF16, _BF16, 'nk')
    config = mosaic_gpu.Config(rows=64, bn=64, stages=2, cluster=1, ctas=1, epilogue_n=32, slots=slots)
    self._check(
      a, b, config, _linspace(-3.0, 3.0, 128), activation='gelu', out_layout=out_layout,
      out_dtype=jnp.dtype(out_dtype), keep_preactivation=True,
    )

  @parameterized.parameters(
    (dict(ctas=1, epilogue_n=32, slots=2), 128, 128, 'gelu', True, 'nm'),
    (dict(ctas=2, cluster=2), 200, 100, None, False, 'mn'),  # columns that no bias moves
    (dict(bn=8, bk=128, split=4, epilogue_n=8, ctas=8, stages=3), 200, 8, 'silu', True, 'nm'),
    (dict(bn=8, bk=128, epilogue_n=8, ctas=2, delay=0, halves='k', stages=2), 200, 8, None, True, 'nm'),
  )
  def test_notes_the_largest_magnitude(self, change, m, n, activation, bias, out_layout):
    a, b = _inputs(m, n, 1024 if 'split' in change else 512, _BF16, _BF16, 'nk')
    config = mosaic_gpu.Config(**(dict(rows=64, bn=64, stages=2, cluster=1) | change))
    call = Call(_BF16, 'nk', out_layout, activation, activation is not None, amax=True)
    vectors = Vectors(_linspace(-9.0, 3.0, m) if bias else None)
    f = functools.partial(mosaic_gpu.sparse_matmul, call=call, config=config, interpret=True)
    with mock.patch.object(reference, 'largest', side_effect=AssertionError):  # by a pass over D
      d, *z, largest = jax.jit(f)(a, b, vectors)
    self.assertFalse(_compat.races_found())
    self.assertEqual((largest, largest.dtype), (np.abs(np.asarray(d, np.float32)).max(), jnp.float32))
    self.assertLen(z, call.keep_preactivation)

  @parameterized.parameters((_BF16, (8, 7)), (jnp.dtype('float16'), (5, 10)), (jnp.dtype('float32'), (8, 23)))
  def test_the_largest_magnitude_is_rounded_as_d_is(self, dtype, bits):
    """By an instruction that XLA keeps: on GPUs a cast to 16 bits and back is none."""
    for x in (0.0, 1e-8, 2.99e-8, 5e-6, 3.69e-5, 6.1e-5, 6.2e-5, 1.0006, 65519.0, 65521.0, jnp.inf, jnp.nan):
      found = jax.jit(functools.partial(mosaic_gpu._rounded, dtype=dtype))(jnp.float32(x))
      with np.errstate(over='ignore'):
        np.testing.assert_array_equal(found, np.float32(x).astype(dtype).astype(np.float32))
    made = str(jax.make_jaxpr(functools.partial(mosaic_gpu._rounded, dtype=dtype))(jnp.float32(1.0)))
    self.assertIn('reduce_precision[exponent_bits={} mantissa_bits={}]'.format(*bits), made)
    self.assertNotIn('convert_element_type', made)

  @pytest.mark.slow  # its rounding is held above
  def test_a_small_largest_magnitude_in_float16(self):
    half = jnp.dtype('float16')
    a, b = _inputs(128, 64, 128, half, half, 'nk')
    call = Call(half, 'nk', 'nm', amax=True, alpha=1e-6)
    f = functools.partial(mosaic_gpu.sparse_matmul, call=call, config=_SMALL, interpret=True)
    d, largest = jax.jit(f)(a, b, Vectors())
    self.assertEqual(largest, np.abs(np.asarray(d, np.float32)).max())
    self.assertBetween(largest, 1e-7, 6e-5)

  @pytest.mark.slow
  def test_a_bias_does_not_count_where_there_are_no_columns(self):
    a, b = _inputs(128, 60, 128, _BF16, _BF16, 'nk')
    a, b = dataclasses.replace(a, values=jnp.abs(a.values)), -jnp.abs(b)
    call = Call(_BF16, 'nk', 'nm', amax=True)
    f = jax.jit(functools.partial(mosaic_gpu.sparse_matmul, call=call, config=_SMALL, interpret=True))
    d, largest = f(a, b, Vectors(_linspace(30.0, 60.0, 128)))
    self.assertEqual(largest, np.abs(np.asarray(d, np.float32)).max())
    self.assertLess(largest, 60)

  def test_float8_with_scales_by_row_and_column(self):
    a, b = _inputs(128, 96, 256, _E4M3, jnp.dtype('float8_e5m2'), 'nk')
    a_scale, b_scale = _linspace(0.5, 2.0, 128), _linspace(1.0, 3.0, 96)
    self._check(a, b, _SMALL_FP8, None, a_scale, b_scale, out_dtype=jnp.dtype('float32'))

  @pytest.mark.slow
  def test_float8_with_scalars(self):
    a, b = _inputs(64, 64, 384, _E4M3, _E4M3, 'nk')
    config = dataclasses.replace(_SMALL_FP8, delay=1)
    scalar = jnp.float32(4.0)
    for a_scale in (None, jnp.float32(0.25), _linspace(0.5, 2.0, 64)):
      self._check(a, b, config, None, a_scale, scalar, alpha=2.0)

  @pytest.mark.slow
  def test_vmap_launches_one_after_another(self):
    a, b = _inputs(128, 64, 128, _BF16, _BF16, 'nk')
    asked = dict(vectors=Vectors(), call=Call(_BF16, 'nk', 'mn'))
    f = functools.partial(mosaic_gpu.sparse_matmul, a, **asked, config=_SMALL, interpret=True)
    expected = jax.jit(functools.partial(reference.sparse_matmul, a, **asked))
    found = jax.jit(jax.vmap(f))(jnp.stack([b, b + b]))
    for d, x in zip(found, (b, b + b), strict=True):
      self.assertLessEqual(_tuning.relative_error(d, expected(x)), _tuning.TOLERANCE)

  @pytest.mark.slow
  def test_two_output_buffers_and_many_tiles(self):
    a, b = _inputs(256, 192, 128, _BF16, _BF16, 'kn')
    config = mosaic_gpu.Config(rows=64, bn=64, stages=2, cluster=1, ctas=1, epilogue_n=32, slots=2)
    self._check(a, b, config, b_layout='kn', out_layout='nm')


class ConfigTest(parameterized.TestCase):

  @parameterized.parameters(
    (True, 'bfloat16', {}, 2), (False, 'bfloat16', {}, 1), (True, 'bfloat16', dict(slots=3), 3),
    # Two buffers of float32 do not fit beside four stages.
    (True, 'float32', dict(epilogue_n=96), 1),
  )
  def test_two_outputs_take_two_buffers_where_they_fit(self, keep, out_dtype, change, slots):
    p = mosaic_gpu.Problem(512, 512, 512, _BF16, _BF16, jnp.dtype(out_dtype), keep_preactivation=keep)
    found = mosaic_gpu.for_outputs(p, mosaic_gpu.Config(**change))
    self.assertEqual(found, mosaic_gpu.Config(**(change | dict(slots=slots))))
    self.assertTrue(mosaic_gpu.fits(p, found))

  @parameterized.parameters((64, 140, 192), (128, 140, 256), (128, 68, 128), (64, 192, 192), (128, 192, 256))
  def test_kept_values_are_padded_to_whole_boxes_of_a_step(self, bk, k, padded):
    p = mosaic_gpu.Problem(104, 136, k, _BF16, _BF16, _BF16)
    self.assertEqual(mosaic_gpu._padded(p, mosaic_gpu.Config(rows=64, bn=16, bk=bk, epilogue_n=16)).k, padded)

  # By layout and dtype of D; what `test_impossible_configs` refuses, one step on. Mosaic compiles each of these.
  @parameterized.parameters(
    ('mn', 'float32', dict(epilogue_n=8)), ('mn', 'bfloat16', dict(epilogue_n=16)), ('nm', 'bfloat16', dict()),
    ('nm', 'bfloat16', dict(bn=24, cluster=2, along='n')), ('nm', 'bfloat16', dict(bn=8, epilogue_n=8, cluster=2)),
    ('mn', 'float32', dict(bn=96, epilogue_n=96)), ('mn', 'float32', dict(bn=16, epilogue_n=8, cluster=4)),
  )
  def test_widths_that_tma_copies(self, out_layout, out_dtype, change):
    p = mosaic_gpu.Problem(512, 512, 512, _BF16, _BF16, jnp.dtype(out_dtype), out_layout=out_layout)
    c = mosaic_gpu.Config(**(dict(rows=64, bn=48, epilogue_n=24, cluster=1) | change))
    self.assertTrue(mosaic_gpu.fits(p, c))


  @parameterized.parameters((1600, 1600), (1700, 1792), (1728, 1728), (1760, 1792), (64, 256), (192, 192))
  def test_k_of_8_bits_is_padded_unless_it_ends_with_half_a_step(self, k, expected):
    p = mosaic_gpu.Problem(1600, 512, k, _E4M3, _E4M3, _BF16)
    self.assertEqual(mosaic_gpu._padded(p, mosaic_gpu.Config(bk=128)).k, expected)

  @parameterized.parameters(((1,), (256, 32)), ((1,), (512, 64)), ((2,), (1024, 64)), ((4,), (1024, 32)))
  def test_an_instruction_reads_on_within_a_tile_and_goes_on_in_the_next(self, tiling, strides):
    found = [wgmma_sp.offset_of(i, tiling, strides) for i in range(2 * tiling[0] + 1)]
    self.assertEqual(found, [i // tiling[0] * strides[0] + i % tiling[0] * strides[1] for i in range(len(found))])


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters(
    (dict(bn=100), 'bn=100'), (dict(stages=9), 'bytes of shared memory'), (dict(rows=128, bn=256), 'accumulators'),
    (dict(epilogue_n=80), 'epilogue_n=80'), (dict(stages=1), 'stages=1 must exceed delay=1'),
    (dict(bn=24, epilogue_n=24), 'epilogue_n=24 columns of bfloat16 are 48 bytes; 32, 64 or a multiple of 128'),
    (dict(epilogue_n=8), 'are 16 bytes'), (dict(epilogue_n=96), 'are 192 bytes'),
    (dict(bn=24, epilogue_n=24, out_dtype='float32', out_layout='nm'), 'float32 are 96 bytes'),
    (dict(bn=24, epilogue_n=12, out_layout='nm'), 'epilogue_n=12 must be a multiple of 8'),
    (dict(bn=24, epilogue_n=24, out_layout='nm'), 'bn=24 must be a multiple or a divisor of 16: .* cluster=2'),
  )
  def test_impossible_configs(self, change, message):
    out_dtype, out_layout = change.pop('out_dtype', 'bfloat16'), change.pop('out_layout', 'mn')
    problem = mosaic_gpu.Problem(512, 512, 512, _BF16, _BF16, jnp.dtype(out_dtype), out_layout=out_layout)
    with self.assertRaisesRegex(ValueError, message):
      mosaic_gpu.build(problem, mosaic_gpu.Config(**change))

  @parameterized.parameters(
    (_device.Device('cpu', 'cpu'), 'nk', _BF16, 'compute capability 9.0'),
    (_device.Device('NVIDIA B200', 'gpu', (10, 0), 148), 'nk', _BF16, r'compute capability 9.0, .* \(10, 0\)$'),
    (targets.target_device('sm_86'), 'nk', _BF16, r"has \(8, 6\); implementation='mosaic_gpu_sm80' takes bfloat16"),
    (targets.target_device('sm_90a'), 'kn', _E4M3, 'K-major operands only'),
  )
  def test_not_mine(self, device, b_layout, dtype, message):
    a, b = _inputs(64, 64, 64, dtype, dtype, b_layout)
    with self.assertRaisesRegex(NotImplementedError, message):
      mosaic_gpu.sparse_matmul(
        a, b, Vectors(), Call(_BF16, b_layout, 'mn'), device=device
      )


if __name__ == '__main__':
  absltest.main()
