"""The V:N:M ops on a GPU: `pytest -m gpu`."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import _device, _tuning
from pallas_kernels.vnm import api, mosaic_gpu, reference
from pallas_kernels.vnm.format import compress, to_vnm_operand
from pallas_kernels.vnm.reference import vnm_mask

_BF16 = jnp.dtype('bfloat16')


pytestmark = [
  pytest.mark.gpu,
  pytest.mark.skipif(_device.current().arch.kernel('vnm_matmul') is None, reason='needs compute capability 9.0'),
]


class MatmulTest(parameterized.TestCase):

  @parameterized.product(v=(64, 128, 256), m=(8, 16), out_layout=('mn', 'nm'), n=(512, 448, 200))
  def test_against_the_reference(self, v, m, out_layout, n):
    x = jax.random.normal(jax.random.key(v + m), (512, 1024), _BF16)
    b = jax.random.normal(jax.random.key(n), (1024, n), _BF16)
    a = to_vnm_operand(compress(x, vnm_mask(x, v=v, m=m), v=v, m=m))
    f = jax.jit(functools.partial(mosaic_gpu.vnm_matmul, out_dtype=_BF16, out_layout=out_layout))
    found = f(a, b)
    expected = reference.vnm_matmul(a, b, out_dtype=jnp.float32, out_layout=out_layout)
    self.assertLessEqual(_tuning.relative_error(found, expected), _tuning.TOLERANCE)
    for _ in range(20):
      np.testing.assert_array_equal(found, f(a, b))

  @parameterized.parameters(dict(places='gpc', ctas=16), dict(places='gpc', ctas=48))
  def test_places_change_time_only(self, **change):
    # Few CTAs, so that each has several laps and the last transpose_pack is not full.
    x = jax.random.normal(jax.random.key(0), (2048, 1024), _BF16)
    b = jax.random.normal(jax.random.key(1), (1024, 448), _BF16)
    a = to_vnm_operand(compress(x, vnm_mask(x, v=128, m=8), v=128, m=8))
    free = dataclasses.replace(mosaic_gpu.default_config(128), places='launch', ctas=5)
    made = [
      jax.jit(functools.partial(mosaic_gpu.vnm_matmul, out_dtype=_BF16, out_layout='mn', config=config))
      for config in (free, dataclasses.replace(free, **change))
    ]
    for _ in range(20):
      np.testing.assert_array_equal(*(f(a, b) for f in made))

  @parameterized.parameters((64, 8), (128, 16), (256, 8))
  def test_changing_inputs_between_launches(self, v, m):
    """A missing fence would let one launch read what another left in shared memory."""

    def draw(seed):
      x, b = (jax.random.normal(key, shape, _BF16) for key, shape in zip(
        jax.random.split(jax.random.key(seed)), ((1024, 1024), (1024, 2048)), strict=True))
      return to_vnm_operand(compress(x, vnm_mask(x, v=v, m=m), v=v, m=m)), b

    f = jax.jit(functools.partial(mosaic_gpu.vnm_matmul, out_dtype=_BF16, out_layout='mn'))
    expected = jax.jit(functools.partial(reference.vnm_matmul, out_dtype=jnp.float32, out_layout='mn'))
    inputs = [jax.jit(draw)(seed) for seed in range(8)]
    for ab, d in zip(inputs, [f(*ab) for ab in inputs], strict=True):
      self.assertLessEqual(_tuning.relative_error(d, expected(*ab)), _tuning.TOLERANCE)


class PackTest(parameterized.TestCase):

  @parameterized.product(v=(64, 128), m=(8, 16))
  def test_what_the_block_calls(self, v, m):
    x = jax.random.randint(jax.random.key(v + m), (512, 512), -9, 10).astype(_BF16)
    gradient = jax.random.normal(jax.random.key(1), x.shape, _BF16)
    dense = jnp.arange(0, 512, 7, dtype=jnp.int32)
    used = jnp.ones(512, bool).at[dense].set(False)

    def block(x, gradient, implementation):
      pack = functools.partial(api.vnm_pack, v=v, m=m, activation='squared_relu', implementation=implementation)
      y = pack(x, residuals=True)
      dh, entries, *_ = pack(y.inputs, gradient=gradient, pattern=y.operand, masked=True)
      transposed = api.transpose_pack(y.operand, used=used, implementation=implementation)
      transposed_dh = api.transpose_pack(dh, pattern=transposed, implementation=implementation)
      along_tokens = api.transpose_pack_24(y.operand, used=used, implementation=implementation)
      dh_along_tokens = api.transpose_pack_24(dh, pattern=along_tokens, implementation=implementation)
      columns = api.take_columns(dh, dense, implementation=implementation)
      dense_again = api.expand(transposed, implementation=implementation)
      return y, dh, entries, transposed, transposed_dh, along_tokens, dh_along_tokens, columns, dense_again

    found, expected = (jax.jit(block, static_argnums=2)(x, gradient, name) for name in ('triton', 'reference'))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      np.testing.assert_array_equal(ours, theirs)


if __name__ == '__main__':
  absltest.main()
