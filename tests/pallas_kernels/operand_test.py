from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats, operand

_to_operand, _from_operand = jax.jit(operand.to_operand), jax.jit(operand.from_operand)
_compress, _decompress = jax.jit(formats.compress, static_argnames='axis'), jax.jit(formats.decompress)


def _random(m, k, dtype, seed=0):
  rng = np.random.default_rng(seed)
  keep = np.argsort(rng.random((m, k // 4, 4)), axis=-1) < 2
  w = rng.integers(1, 9, (m, k)).astype(np.float32)
  return _compress(w.astype(dtype), keep.reshape(m, k), axis=-1)


def _dense_by_thread_map(values, metadata, width):
  """Independent oracle: walks tiles, threads and nibbles as the PTX manual's figures draw them."""
  m, half_k = values.shape
  dense = np.zeros((m, 2 * half_k), np.float32)

  def put(row, group, nibble):
    if row < m and group < half_k // 2:
      low, high = nibble & 3, nibble >> 2
      dense[row, 4 * group + low] = values[row, 2 * group]
      dense[row, 4 * group + high] = values[row, 2 * group + 1]

  for tile_m, tile_k, thread in np.ndindex(metadata.shape):
    word = int(metadata[tile_m, tile_k, thread])
    warp, lane = divmod(thread, 32)
    g, t = divmod(lane, 4)
    row = 64 * tile_m + 16 * warp + g
    for i in range(8):
      nibble = word >> (4 * i) & 15
      if width == 2:
        k = 64 * tile_k + 32 * (t >> 1) + 16 * (t & 1) + 4 * (i % 4)
        put(row + 8 * (i // 4), k // 4, nibble)
      else:
        k = 64 * tile_k + 32 * (t >> 1) + 4 * i
        put(row + 8 * (t & 1), k // 4, nibble)
  return dense


class OperandTest(parameterized.TestCase):

  # The width of a dtype is all that counts.
  @parameterized.parameters(
    *((shape, dtype) for shape in ((128, 192), (65, 68)) for dtype in (jnp.bfloat16, jnp.float8_e4m3fn)),
    *(((3, 4), dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)),
  )
  def test_metadata_means_the_matrix(self, shape, dtype):
    c = _random(*shape, dtype)
    found = _to_operand(c)
    self.assertEqual(found.metadata.shape, operand.metadata_shape(*shape))
    self.assertEqual(found.metadata.dtype, jnp.uint32)
    dense = _dense_by_thread_map(np.asarray(found.values, np.float32), np.asarray(found.metadata), c.dtype.itemsize)
    np.testing.assert_array_equal(dense, np.asarray(_decompress(c), np.float32))

  @parameterized.parameters(jnp.bfloat16, jnp.float8_e4m3fn)
  def test_every_nibble_is_legal(self, dtype):
    metadata = np.asarray(_to_operand(_random(65, 68, dtype)).metadata)
    nibbles = metadata[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    self.assertTrue(np.all((nibbles & 3) < (nibbles >> 2)))

  @parameterized.product(shape=((64, 64), (65, 68), (1, 4)), dtype=(jnp.bfloat16, jnp.float8_e4m3fn))
  def test_round_trip(self, shape, dtype):
    c = _random(*shape, dtype)
    back = _from_operand(_to_operand(c))
    np.testing.assert_array_equal(back.metadata, c.metadata)
    np.testing.assert_array_equal(back.values, c.values)

  def test_compressed_along_the_first_axis_stands_for_the_transpose(self):
    c = _random(64, 128, jnp.bfloat16)
    t = formats.Compressed24(np.asarray(c.values).T, np.asarray(c.metadata).T, -2)
    np.testing.assert_array_equal(_to_operand(t).metadata, _to_operand(c).metadata)

  def test_layers_in_front(self):
    stack = jax.tree.map(lambda *x: np.stack(x), *[_random(70, 72, jnp.bfloat16, s) for s in range(3)])
    together = _to_operand(stack)
    self.assertEqual(together.shape, (3, 70, 72))
    for i in range(3):
      one = _to_operand(_random(70, 72, jnp.bfloat16, i))
      np.testing.assert_array_equal(np.asarray(together.metadata)[i], one.metadata)
    np.testing.assert_array_equal(_from_operand(together).metadata, stack.metadata)

  def test_refuses_wide_values(self):
    with self.assertRaisesRegex(ValueError, '8 or 16 bits wide, found float32'):
      operand.to_operand(_random(64, 64, jnp.float32))


if __name__ == '__main__':
  absltest.main()
