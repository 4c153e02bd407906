"""Packed weights hold what the projection gives, in the order that the sparse matmul reads."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from pallas_kernels.operand import from_operand
import sparse24_jax as s24
from sparse24_jax import linear_layer
from sparse24_jax.plan import may_pack
from sparse24_jax.precision import NATIVE
from tests import oracles

PROJECTIONS = {
  'magnitude_2_4': s24.magnitude(),
  'magnitude_1_4': s24.magnitude(n=1),
  'transposable_exact': s24.transposable(),
  'transposable_two_approx': s24.transposable(method='two_approx'),
  'soft_threshold': s24.soft_threshold_projection(),
  'dynamic_2_4': s24.dynamic_sparse(0.3, structure='2:4'),
}
NOT_PACKED = {
  'magnitude_2_8': s24.magnitude(m=8),
  'magnitude_3_4': s24.magnitude(n=3),
  'soft_threshold_along_out': s24.soft_threshold_projection(axis=-1),
  'unstructured': s24.dynamic_sparse(0.3),
}
TRANSPOSABLE = PROJECTIONS['transposable_exact']


def weight(*shape: int, dtype=jnp.float32, seed: int = 0) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@functools.cache
def packer(projection, dtype):
  """(state, packed weight, projected weight) of a weight, and of a state if it is not new."""

  @jax.jit
  def of(w, state=None):
    state = projection.init(w) if state is None else state
    return state, NATIVE.pack(projection.form, w, state, dtype), projection.apply(w, state).astype(dtype)

  return of


@jax.jit
def decompress(operand):
  return formats.decompress(from_operand(operand))


def unpacked(operand) -> np.ndarray:
  return oracles.wide(decompress(operand))


class PackedWeightTest(parameterized.TestCase):

  @parameterized.product(
    name=list(PROJECTIONS),
    case=(
      (jnp.float32, jnp.bfloat16, (64, 128)),
      (jnp.bfloat16, jnp.bfloat16, (72, 20)),  # positions fill their tiles in part
      (jnp.float16, jnp.float16, (3, 12, 64)),  # a leading axis of layers
    ),
  )
  @pytest.mark.few(9)
  def test_decompresses_to_the_projected_weight(self, name, case):
    projection, (dtype, packed_dtype, shape) = PROJECTIONS[name], case
    state, packed, expected = packer(projection, packed_dtype)(weight(*shape, dtype=dtype))
    expected = oracles.wide(expected)
    self.assertEqual(packed.dtype, packed_dtype)
    self.assertEqual(packed.forward.shape, (*shape[:-2], shape[-1], shape[-2]))
    np.testing.assert_array_equal(unpacked(packed.forward), np.swapaxes(expected, -1, -2))
    np.testing.assert_array_equal(packed.state, state)
    if projection.transposable:
      self.assertEqual(packed.input_grad.shape, shape)
      np.testing.assert_array_equal(unpacked(packed.input_grad), expected)
    else:
      self.assertIsNone(packed.input_grad)

  @parameterized.parameters(*NOT_PACKED)
  def test_a_projection_that_is_not_2_4_along_the_input_has_no_packed_form(self, name):
    policy = s24.DotPolicy(NOT_PACKED[name], implementation='dense')
    self.assertFalse(may_pack(policy, weight(64, 128)))
    with self.assertRaisesRegex(ValueError, 'has no packed form'):
      linear_layer.pack_weight(policy, weight(64, 128), None, jnp.bfloat16)

  def test_an_old_mask_keeps_its_positions(self):
    """Between refreshes values move and positions stay."""
    w, later = weight(64, 128), weight(64, 128, seed=1)
    pack = packer(TRANSPOSABLE, jnp.bfloat16)
    mask, first, _ = pack(w)
    _, second, _ = pack(later, mask)
    np.testing.assert_array_equal(first.forward.metadata, second.forward.metadata)
    np.testing.assert_array_equal(first.input_grad.metadata, second.input_grad.metadata)
    kept = jnp.where(mask, later, 0).astype(jnp.bfloat16)
    np.testing.assert_array_equal(unpacked(second.input_grad), oracles.wide(kept))

  @parameterized.parameters('transposable_exact', 'soft_threshold', 'magnitude_2_4')
  @pytest.mark.few
  def test_a_layer_of_a_stack_is_the_layer_packed_alone(self, name):
    pack = packer(PROJECTIONS[name], jnp.float16)
    w = weight(3, 12, 64, dtype=jnp.float16)
    state, stacked, _ = pack(w)
    for i in range(3):
      _, alone, _ = pack(w[i], state[i])
      jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda a, i=i: a[i], stacked), alone)


class PytreeTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.w = weight(3, 12, 64, dtype=jnp.float16)
    self.packed = packer(TRANSPOSABLE, jnp.float16)(self.w)[1]

  def test_leaves(self):
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(self.packed)]
    self.assertEqual(
      names, ['.state', '.forward.values', '.forward.metadata', '.input_grad.values', '.input_grad.metadata']
    )
    masked = packer(s24.magnitude(), jnp.float16)(self.w)[1]
    self.assertLen(jax.tree.leaves(masked), 3)

  def test_through_jit(self):
    found = jax.jit(lambda p: p)(self.packed)
    self.assertIsInstance(found, s24.PackedWeight)
    jax.tree.map(np.testing.assert_array_equal, found, self.packed)

  def test_through_scan(self):
    def layer(total, packed):
      self.assertEqual((packed.forward.shape, packed.state.shape), ((64, 12), (12, 64)))
      return total + formats.decompress(from_operand(packed.forward)).astype(jnp.float32).T, None

    total, _ = jax.jit(lambda p: jax.lax.scan(layer, jnp.zeros((12, 64)), p))(self.packed)
    kept = oracles.wide(jnp.where(self.packed.state, self.w, 0.0))
    np.testing.assert_allclose(total, kept.sum(0), rtol=1e-6)


if __name__ == '__main__':
  absltest.main()
