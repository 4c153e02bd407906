"""What the V:N:M ops say of arguments of another kind."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels.vnm import api
from pallas_kernels.vnm import format as vnm_format
from pallas_kernels.vnm.format import compress, decompress
from pallas_kernels.vnm.reference import vnm_mask
from tests.draws import gaussian


def _x(seed=0):
  return gaussian(seed, (16, 32), jnp.bfloat16)


def _compressed():
  return compress(_x(), vnm_mask(_x(), v=8, m=8), v=8, m=8)


def _operand():
  return vnm_format.to_vnm_operand(_compressed())


_B = jnp.ones((32, 4), jnp.bfloat16)
_IDS = jnp.zeros(3, jnp.int32)
_CALLS = (
  (lambda: api.vnm_matmul(_x(), _B), r'a must be of type CompressedVNM or VNMOperand, found an array of .*\(16, 32\)'),
  (lambda: api.vnm_matmul(_compressed(), _compressed()), 'b must be of type Array or ndarray, found CompressedVNM'),
  (lambda: api.vnm_matmul(_compressed(), _B, out_dtype='int32'), 'out_dtype must be one of .*, found int32'),
  (lambda: api.vnm_matmul(_operand(), _B, out_dtype=jnp.float8_e5m2), 'out_dtype must be one of .*, found float8_e5m2'),
  (lambda: api.transpose_pack(_compressed()), 'a must be of type VNMOperand, found CompressedVNM'),
  (lambda: api.transpose_pack(_operand(), pattern=_compressed()), 'pattern must be of type VNMOperand or None'),
  (lambda: api.transpose_pack_24(_compressed()), 'a must be of type VNMOperand, found CompressedVNM'),
  (lambda: api.transpose_pack_24(_operand(), pattern=_operand()), 'pattern must be of type SparseOperand or None'),
  (lambda: api.take_columns(_compressed(), _IDS), 'a must be of type VNMOperand, found CompressedVNM'),
  (lambda: api.take_columns(_operand(), [0]), 'columns must be of type Array or ndarray, found list'),
  (lambda: api.expand(_compressed()), 'operand must be of type SparseOperand or VNMOperand, found CompressedVNM'),
  (lambda: api.expand(formats.compress(jnp.ones((8, 8)), jnp.ones((8, 8)) > 0, axis=-1)), 'found Compressed24'),
  (lambda: api.vnm_pack(_operand(), v=8, m=8), 'x must be of type Array or ndarray, found VNMOperand'),
  (
    lambda: api.vnm_pack(_x(), v=8, m=8, gradient=_x(), pattern=_compressed()),
    'pattern must be of type VNMOperand or None, found CompressedVNM',
  ),
)


class ArgumentTest(parameterized.TestCase):

  @parameterized.parameters(*_CALLS)
  def test_says_what_is_accepted(self, call, message):
    with self.assertRaisesRegex(ValueError, message):
      call()

  def test_columns_that_are_not_there(self):
    a = _operand()
    dense = np.asarray(vnm_format.decompress_operand(a), np.float32)
    found = api.take_columns(a, jnp.array([-1, -32, 40, -40, 5], jnp.int32))
    np.testing.assert_array_equal(np.asarray(found, np.float32), dense[:, [31, 0, 31, 0, 5]])

  @parameterized.parameters('dense', 'reference')
  def test_a_derivative_where_there_is_one(self, implementation):
    a = _compressed()

    def loss(b):
      return api.vnm_matmul(a, b, out_dtype=jnp.float32, implementation=implementation).sum()

    expected = np.asarray(decompress(a), np.float32).sum(0, keepdims=True).T * np.ones((1, 4), np.float32)
    np.testing.assert_allclose(np.asarray(jax.grad(loss)(_B), np.float32), expected, rtol=2**-7, atol=1e-3)


if __name__ == '__main__':
  absltest.main()
