"""Compressed operands from elsewhere: what is the format in name only is refused, not multiplied to wrong numbers."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
from jax.experimental import checkify
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats, operand
from pallas_kernels.sparse_matmul.api import sparse_matmul
from pallas_kernels.two_of_four.prune import magnitude_mask
from pallas_kernels.vnm import api
from pallas_kernels.vnm import format as fmt
from pallas_kernels.vnm.format import compress
from pallas_kernels.vnm.reference import vnm_mask

_BF16 = jnp.bfloat16


def _compressed(m=6, k=20):
  w = jnp.asarray(np.random.default_rng(0).standard_normal((m, k)), jnp.float32).astype(_BF16)
  return formats.compress(w, magnitude_mask(w, n=2, m=4, axis=-1), axis=-1)


def _blocks():
  x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 32)), jnp.float32).astype(_BF16)
  return compress(x, vnm_mask(x, v=4, m=8), v=4, m=8)


def _put(array, at, value):
  return jnp.asarray(array).at[at].set(value)


class PositionsTest(parameterized.TestCase):
  # A pair named twice, in falling order, and of an odd number of groups (5) a spare nibble that is not zero.
  @parameterized.parameters(((2, 1), 0x00), ((2, 1), 0xFF), ((0, 0), 0x41), ((5, 2), 0x44))
  def test_metadata(self, at, byte):
    good = _compressed()
    bad = dataclasses.replace(good, metadata=_put(good.metadata, at, byte))
    b = jnp.ones((3, 20), _BF16)
    found = rf'\.metadata holds {byte:#04x} at \({at[0]}, {at[1]}\); a nibble is low \| high << 2'
    for refused in (
      formats.verify, formats.decompress, lambda c: sparse_matmul(c, b),
      lambda c: sparse_matmul(jax.tree.map(jnp.transpose, dataclasses.replace(c, axis=-2)), b),
    ):
      refused(good)
      transposed = rf'\.metadata holds {byte:#04x} at \({at[1]}, {at[0]}\)'
      with self.assertRaisesRegex(ValueError, f'{found}|{transposed}'):
        refused(bad)

  def test_metadata_of_another_shape_or_dtype(self):
    c = _compressed()
    with self.assertRaisesRegex(ValueError, r'c.metadata must be uint8 of shape \(6, 3\).*found uint8 of shape \(6, 2'):
      formats.decompress(dataclasses.replace(c, metadata=c.metadata[:, :2]))
    with self.assertRaisesRegex(ValueError, r'found int32 of shape \(6, 3\)'):
      jax.eval_shape(formats.decompress, dataclasses.replace(c, metadata=c.metadata.astype(jnp.int32)))
    with self.assertRaisesRegex(ValueError, r'c.values must hold two entries a group .* found shape \(6, 9\)'):
      formats.decompress(dataclasses.replace(c, values=c.values[:, :9]))

  def test_in_a_trace_checkify_sees_it_and_nothing_is_paid_otherwise(self):
    good = _compressed()
    bad = dataclasses.replace(good, metadata=_put(good.metadata, (2, 1), 0))
    b = jnp.ones((3, 20), _BF16)
    for f in (formats.decompress, lambda c: sparse_matmul(c, b)):
      checked = checkify.checkify(jax.jit(f))
      self.assertRegex(str(checked(bad)[0].get()), 'metadata names no pair of positions')
      self.assertIsNone(checked(good)[0].get())
      jax.jit(f)(bad)
    checked = jax.jit(formats.decompress).lower(good).compile().as_text() or ''
    bare = jax.jit(formats.expand).lower(good).compile().as_text() or ''
    self.assertEqual(checked.count('fusion('), bare.count('fusion('))
    self.assertNotIn('reduce', checked)

  @parameterized.parameters(_BF16, jnp.float8_e4m3fn)
  def test_metadata_of_an_operand(self, dtype):
    good = operand.to_operand(dataclasses.replace(_compressed(), values=_compressed().values.astype(dtype)))
    b = jnp.ones((3, 20), dtype)
    sparse_matmul(good, b)
    # The nibble of group 0 of row 0; what is beyond M and K does not count.
    word = good.metadata[0, 0, 0]
    with self.assertRaisesRegex(ValueError, r'a.metadata names positions 0 and 0 in group \(0, 0\); accepted are'):
      sparse_matmul(operand.SparseOperand(good.values, _put(good.metadata, (0, 0, 0), word & ~jnp.uint32(15))), b)
    sparse_matmul(operand.SparseOperand(good.values, _put(good.metadata, (0, 0, 127), 0)), b)
    with self.assertRaisesRegex(ValueError, r'a.metadata must be uint32 of shape \(1, 1, 128\).*found int32'):
      sparse_matmul(operand.SparseOperand(good.values, good.metadata.astype(jnp.int32)), b)

  def test_an_array_is_looked_at_once(self):
    a, b = operand.to_operand(_compressed()), jnp.ones((3, 20), _BF16)
    sparse_matmul(a, b)
    self.assertTrue(any(found is a.metadata for found in formats._in_order.values()))
    # Once for each shape of the values: what is beyond them did not count.
    beyond = _put(a.metadata, (0, 0, 4), 0)
    narrow = operand.SparseOperand(a.values[:1], beyond)
    sparse_matmul(narrow, b)
    with self.assertRaisesRegex(ValueError, r'a.metadata names positions 0 and 0 in group'):
      sparse_matmul(operand.SparseOperand(jnp.ones((64, a.values.shape[1]), _BF16), beyond), b)
    # NumPy's may have changed since.
    mine = operand.SparseOperand(np.asarray(a.values), np.array(a.metadata))
    sparse_matmul(mine, b)
    mine.metadata[:] = 0
    with self.assertRaisesRegex(ValueError, 'names positions 0 and 0'):
      sparse_matmul(mine, b)


class BlocksTest(parameterized.TestCase):
  @parameterized.parameters(255, 8, 0)
  def test_columns(self, column):
    good = _blocks()
    bad = dataclasses.replace(good, columns=_put(good.columns, (1, 7), column))
    for refused in (
      functools.partial(fmt.verify, v=4, m=8), fmt.verify, fmt.decompress,
      lambda a: api.vnm_matmul(a, jnp.ones((32, 2), _BF16)),
    ):
      refused(good)
      with self.assertRaisesRegex(
        ValueError, rf'\.columns of block \(1, 1\) are \[.*{column}\]; accepted are four below 8, ascending'
      ):
        refused(bad)
    error, _ = checkify.checkify(jax.jit(fmt.decompress))(bad)
    self.assertRegex(str(error.get()), 'columns are not four below 8')

  def test_positions_among_the_columns(self):
    good = _blocks()
    bad = dataclasses.replace(good, metadata=_put(good.metadata, (3, 1), 0xFF))
    for refused in (fmt.verify, fmt.decompress, lambda a: api.vnm_matmul(a, jnp.ones((32, 2), _BF16))):
      with self.assertRaisesRegex(ValueError, r'\.metadata holds 0xff at \(3, 1\)'):
        refused(bad)

  def test_columns_of_another_shape(self):
    c = _blocks()
    for columns in (c.columns[:, :12], c.columns.astype(jnp.int32), c.columns[0], jnp.tile(c.columns, (2, 1))[:3]):
      with self.assertRaisesRegex(ValueError, r'c.columns must be uint8 of shape \(.R / V., 16\) .* found'):
        fmt.decompress(dataclasses.replace(c, columns=columns))

  def test_sizes_that_are_not_those_of_the_format(self):
    with self.assertRaisesRegex(ValueError, r'x is 4:2:8, found v=8, n=2, m=8'):
      fmt.verify(_blocks(), v=8, m=8)
    with self.assertRaisesRegex(ValueError, 'v and m must be given for an array that is not compressed'):
      fmt.verify(jnp.zeros((8, 32)))
    with self.assertRaisesRegex(ValueError, r'c.m=3 must be from 4 to 256'):
      fmt.decompress(dataclasses.replace(_blocks(), m=3))

  @parameterized.parameters(
    (10**9, 'holds 1000000000'), (-5, 'holds -5'), (32, 'holds 32'), (None, 'names a row twice')
  )
  def test_rows(self, row, found):
    good = fmt.to_vnm_operand(_blocks())
    b = jnp.ones((32, 2), _BF16)
    row = int(good.rows[1, 2]) if row is None else row
    bad = dataclasses.replace(good, rows=_put(good.rows, (1, 3), row))
    for refused in (fmt.verify, lambda a: api.vnm_matmul(a, b)):
      refused(good)
      with self.assertRaisesRegex(ValueError, rf'\.rows of block \(1,\) {found}; accepted are rows of B, 0 to 31'):
        refused(bad)

  def test_metadata_of_the_compact_columns(self):
    good = fmt.to_vnm_operand(_blocks())
    compact = operand.SparseOperand(good.compact.values, jnp.zeros_like(good.compact.metadata))
    with self.assertRaisesRegex(ValueError, 'a.compact.metadata names positions 0 and 0'):
      api.vnm_matmul(dataclasses.replace(good, compact=compact), jnp.ones((32, 2), _BF16))


if __name__ == '__main__':
  absltest.main()
