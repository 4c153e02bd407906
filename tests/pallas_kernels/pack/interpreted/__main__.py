"""The Triton packing kernels against the reference, bit for bit, in Triton's interpreter, by interpreted_test.py."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pack import reference
from pallas_kernels.pack import triton as pack
from tests.pallas_kernels import triton_interpreter

CASES = (((2, 20, 132), jnp.bfloat16), ((128, 64), jnp.float16), ((68, 4), jnp.float32))


def weights(shape, dtype, seed=0, special=0.02):
  """Normal values with ties and signed zeros, and infinities and NaN in the share `special`."""
  rng = np.random.default_rng(seed)
  w = rng.standard_normal(shape).astype(np.float32)
  w = np.where(rng.random(shape) < 0.3, np.round(w), w)
  w = np.where(rng.random(shape) < 0.02, np.float32(-0.0), w)
  for value in (np.inf, -np.inf, np.nan):
    w = np.where(rng.random(shape) < special, np.float32(value), w)
  return jnp.asarray(w.astype(dtype))


masked_pack = jax.jit(reference.masked_pack, static_argnames='dtype')
soft_threshold_pack = jax.jit(reference.soft_threshold_pack, static_argnames=('axis', 'dtype'))


@jax.jit
def codes_of(w):
  return reference.mask_codes(reference.transposable.transposable_mask(w))


def run(kernel, structs, inputs, shape, zero_last=False, config=None, **constants):
  config = config or pack.Config()
  batches, rows, columns = int(np.prod(shape[:-2])), *shape[-2:]
  return triton_interpreter.run(
    kernel, config.grid(batches, rows, columns), inputs, [(s.shape, s.dtype) for s in structs],
    {**config.constants(rows, columns), **constants}, zero_last=zero_last,
  )  # fmt: skip


class InterpretedTest(parameterized.TestCase):

  def assert_same_bits(self, found, expected):
    expected = np.asarray(expected)
    self.assertEqual(found.shape, expected.shape)
    self.assertEqual(found.dtype, expected.dtype)
    bits = f'u{expected.dtype.itemsize}'
    np.testing.assert_array_equal(found.view(bits), expected.view(bits))

  def assert_operand(self, found, expected):
    self.assert_same_bits(found[1], expected.metadata)
    # One NaN is as good as another.
    values, nan = np.asarray(expected.values), np.isnan(np.asarray(expected.values).astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found[0].astype(np.float32)), nan)
    zero = values.dtype.type(0)
    self.assert_same_bits(np.where(nan, zero, found[0]), np.where(nan, zero, values))

  @parameterized.parameters((*CASES[0], 0.0), *((*case, 0.02) for case in CASES))
  def test_transposable(self, shape, dtype, special):
    w = weights(shape, dtype, special=special)
    out = jnp.float16 if dtype == jnp.float16 else jnp.bfloat16
    lead, rows, columns = shape[:-2], *shape[-2:]
    expected = jax.jit(functools.partial(reference.transposable_pack, dtype=out))(w)
    config = pack.Config(tile_rows=16 if dtype == jnp.float32 else 32)
    grid = config.grid(int(np.prod(lead)), rows, columns)
    structs = [
      *pack.pair_structs(shape, jnp.dtype(out)),
      jax.ShapeDtypeStruct((*lead, rows // 4, columns // 4), jnp.uint16),
    ]  # fmt: skip
    inputs = [w]
    flag = jax.ShapeDtypeStruct((1,), jnp.int32)
    *made, raised = run(
      pack.transposable_kernel, [*structs, flag], inputs, shape, zero_last=True, config=config,
      AHEAD=0 if dtype == jnp.float32 else 1,
    )  # fmt: skip
    self.assertEqual(bool(raised[0]), special > 0)
    if special:
      inputs = [*inputs, raised, *made]
      made = run(pack.repair_kernel, structs, inputs, shape, config=config, TILES=grid[0])
    *found, codes = made
    self.assert_same_bits(codes, expected.codes)
    self.assert_operand(found[:2], expected.rows)
    self.assert_operand(found[2:], expected.columns)

  def test_a_search_fetches_the_tiles_of_later_programs(self):
    # Two tiles of 64 x 128 side by side; of the second a row has one line of 128 bytes, of the first two.
    batches, rows, columns = shape = (2, 192, 160)
    structs = [
      *pack.pair_structs(shape, jnp.dtype(jnp.bfloat16)),
      jax.ShapeDtypeStruct((batches, rows // 4, columns // 4), jnp.uint16), jax.ShapeDtypeStruct((1,), jnp.int32),
    ]  # fmt: skip
    triton_interpreter.fetched.clear()
    w, config = weights(shape, jnp.bfloat16), pack.Config(tile_columns=32)
    run(pack.transposable_kernel, structs, [w], shape, zero_last=True, config=config, AHEAD=3)
    expected = [
      (batch * rows + row) * 2 * columns + line
      for batch in range(batches) for row in range(rows) for line in (0, 128, 256)
      if row // 64 * 2 + line // 256 >= 3
    ]  # fmt: skip
    start = min(triton_interpreter.fetched) - min(expected)
    self.assertCountEqual([address - start for address in triton_interpreter.fetched], expected)

  @parameterized.parameters(*CASES)
  def test_masked(self, shape, dtype):
    w = weights(shape, dtype)
    out = jnp.float16 if dtype == jnp.float16 else jnp.bfloat16
    codes = codes_of(weights(shape, dtype, 1))
    expected = masked_pack(w, codes, dtype=out)
    found = run(pack.masked_kernel, pack.pair_structs(shape, jnp.dtype(out)), [w, codes], shape)
    self.assert_operand(found[:2], expected.rows)
    self.assert_operand(found[2:], expected.columns)

  @parameterized.parameters((*CASES[0], -1), (*CASES[0], -2), (*CASES[1], -1), (*CASES[2], -2))
  def test_soft_threshold(self, shape, dtype, axis):
    w = weights(shape, dtype)
    out = jnp.dtype(jnp.float16 if dtype == jnp.float16 else jnp.bfloat16)
    scale = np.linspace(1.4, 1.5, int(np.prod(shape[:-2])), dtype=np.float32).reshape(shape[:-2])
    expected = soft_threshold_pack(w, scale, axis=axis, dtype=out)
    found = run(
      pack.soft_threshold_kernel, pack.structs(shape, out, axis), [w, scale.reshape(-1)], shape,
      GROUPS_DOWN=axis == -2, dense=None,
    )  # fmt: skip
    self.assert_operand(found, expected.operand)

  @parameterized.parameters(*CASES)
  def test_mvue(self, shape, dtype):
    x = weights(shape, dtype)
    out = jnp.dtype(jnp.float16 if dtype == jnp.float16 else jnp.bfloat16)
    key, origin = jax.random.key(7), (3, 5, 8)
    expected = jax.jit(functools.partial(reference.mvue_pack, origin=origin, dtype=out))(x, key)
    found = run(pack.mvue_kernel, pack.structs(shape, out, -2), [x, pack.draw_parameters(key, origin)], shape)
    self.assert_operand(found, expected.operand)

  def assert_packed(self, found, expected):
    triton_interpreter.assert_equal_float8(found[0], expected.operand.values)
    self.assert_same_bits(found[1], expected.operand.metadata)
    triton_interpreter.assert_equal_float8(found[2], expected.dense)

  # With these scales a few entries saturate and a few round to zero.
  @parameterized.parameters((CASES[0], -2), (CASES[1], -1), (CASES[2], -2))
  def test_soft_threshold_in_float8(self, case, axis):
    shape, dtype = case
    w, out = weights(shape, dtype), jnp.dtype(jnp.float8_e4m3fn)
    scale = np.linspace(0.01, 300, int(np.prod(shape[:-2])), dtype=np.float32).reshape(shape[:-2])
    expected = soft_threshold_pack(w, scale, axis=axis, dtype=out)
    found = run(
      pack.soft_threshold_kernel, pack.structs(shape, out, axis), [w, scale.reshape(-1)], shape,
      GROUPS_DOWN=axis == -2,
    )  # fmt: skip
    self.assert_packed(found, expected)

  @parameterized.parameters(*CASES)
  def test_masked_in_float8(self, shape, dtype):
    w, out = weights(shape, dtype), jnp.dtype(jnp.float8_e4m3fn)
    codes = codes_of(weights(shape, dtype, 1))
    scale = np.linspace(0.01, 300, int(np.prod(shape[:-2])), dtype=np.float32).reshape(shape[:-2])
    expected = masked_pack(w, codes, scale, dtype=out)
    found = run(pack.masked_scaled_kernel, pack.pair_structs(shape, out), [w, codes, scale.reshape(-1)], shape)
    for values, metadata, operand in ((*found[:2], expected.rows), (*found[2:], expected.columns)):
      triton_interpreter.assert_equal_float8(values, operand.values)
      self.assert_same_bits(metadata, operand.metadata)

  # Many round to zero, or many saturate, or neither; in the last groups are all zero or have one entry left.
  @parameterized.parameters(
    (CASES[0], 3e-5, 2e4), (CASES[1], 5e-3, 200), (CASES[2], 3e-5, 2e4), (CASES[2], 1.5e-3, 1.5e-3)
  )
  def test_mvue_in_float8(self, case, first, last):
    shape, dtype = case
    x, out = weights(shape, dtype), jnp.dtype(jnp.float8_e5m2 if last == 2e4 else jnp.float8_e4m3fn)
    key, origin = jax.random.key(7), (3, 5, 8)
    scale = np.linspace(first, last, int(np.prod(shape[:-2])), dtype=np.float32).reshape(shape[:-2])
    expected = functools.partial(reference.mvue_pack, origin=origin, dtype=out)
    inputs = [x, pack.draw_parameters(key, origin), scale.reshape(-1)]
    found = run(
      pack.mvue_scaled_kernel, pack.structs(shape, out, -2), inputs, shape, config=pack.Config(tile_columns=32)
    )
    self.assert_packed(found, jax.jit(expected)(x, key, scale))


if __name__ == '__main__':
  absltest.main()
