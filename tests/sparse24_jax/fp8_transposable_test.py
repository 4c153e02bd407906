"""FP8 under transposable masks, all three matmuls sparse: against formulas in NumPy, and against the simulation."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import formats
from pallas_kernels.operand import from_operand
from pallas_kernels.pack import api as pack
from pallas_kernels.sparse_matmul import api
import sparse24_jax as s24
from sparse24_jax import linear_layer
from sparse24_jax.availability import target
from sparse24_jax.block_plan import plan_block
from sparse24_jax.plan import plan_layer
from tests import oracles
from tests.oracles import assert_close
from tests.sparse24_jax import fp8_oracles
from tests.sparse24_jax.fp8_problems import (
  BF16,
  D,
  dot_and_gradients,
  draw,
  draw_weight,
  ffn_and_gradients,
  FLIPS,
  init_masks,
  jit,
  KEY,
  MASKED,
  NOISE,
  OUT,
  problem,
  TOKENS,
  TOLERANCE,
  unpacked,
)

SIMULATED = dataclasses.replace(MASKED, implementation='reference')
CHOOSES = dataclasses.replace(MASKED, implementation=None)
H100 = 'nvidia_h100_80gb_hbm3'
pack_weight = jit(functools.partial(linear_layer.pack_weight, MASKED, dtype=BF16))


class DotTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    w = draw_weight(1, D, OUT) * 1.5  # of which e4m3 gets numbers beyond 240
    self.given = draw(0, *TOKENS, D), w, init_masks(w), draw(2, *TOKENS, OUT)

  @parameterized.product(dtype=(BF16, jnp.float16), weight_grad=('mvue', 'dense'))
  @pytest.mark.few(2)
  def test_formulas(self, dtype, weight_grad):
    x, w, mask, dz = (a if a.dtype == bool else a.astype(dtype) for a in self.given)
    key = KEY if weight_grad == 'mvue' else None
    found = dot_and_gradients(dataclasses.replace(MASKED, weight_grad=weight_grad), x, w, mask, dz, key)
    self.assertEqual([(a.shape, a.dtype) for a in found], [(a.shape, dtype) for a in (dz, x, w)])
    assert_close(found, fp8_oracles.written_dot(x, w, mask, dz, key), TOLERANCE)

  def test_is_the_simulation_up_to_rounding(self):
    found, expected = (dot_and_gradients(policy, *self.given, KEY) for policy in (MASKED, SIMULATED))
    assert_close(found, expected, NOISE)

  @pytest.mark.slow
  def test_packed_here_or_there(self):
    x, w, mask, dz = self.given
    packed = pack_weight(w, mask)
    values, factor = fp8_oracles.f8_weights([w], [mask])
    np.testing.assert_array_equal(unpacked(packed), values)
    along_out = oracles.wide(formats.decompress(from_operand(packed.operand('input_grad'))))
    np.testing.assert_array_equal(along_out, values)
    self.assertEqual((packed.dense, packed.dtype, 1 / float(packed.scale)), (None, jnp.float8_e4m3fn, factor))
    self.assertGreater(abs(values).max(), 240)  # lost where they are taken for an e4m3 with infinities
    with mock.patch.object(pack, 'masked_pack', side_effect=AssertionError('packed again')):
      found = jit(functools.partial(dot_and_gradients.__wrapped__, MASKED))(x, w, packed, dz, KEY)
    assert_close(found, dot_and_gradients(MASKED, *self.given, KEY), 0.0)

  @pytest.mark.slow
  def test_vmap_and_stacked_layers(self):
    count = 3
    w = draw_weight(3, count, D, OUT) * (8.0 ** jnp.arange(count, dtype=BF16)).reshape(-1, 1, 1)
    x, dz, masks = draw(4, count, 8, D), draw(5, count, 8, OUT), init_masks(w)
    keys = jax.random.split(KEY, count)
    packed = pack_weight(w, masks)
    self.assertEqual(packed.scale.shape, (count,))
    found = jit(jax.vmap(functools.partial(dot_and_gradients.__wrapped__, MASKED)))(x, w, masks, dz, keys)
    for i in range(count):
      own = jax.tree.map(lambda a, i=i: a[i], packed)
      one = dot_and_gradients(MASKED, x[i], w[i], own, dz[i], keys[i])
      assert_close(jax.tree.map(lambda a, i=i: a[i], found), one, TOLERANCE)

  @pytest.mark.slow
  def test_scan_and_remat(self):
    """A checkpoint keeps both operands as bytes."""
    w = draw_weight(3, 2, D, D)
    masks, keys, x, dz = init_masks(w), jax.random.split(KEY, 2), self.given[0], draw(4, *TOKENS, D)

    def layer(x, given):
      return s24.dot(x, given[0], given[1], policy=MASKED, key=given[2]), None

    @jit
    def scanned(x, w):
      states = linear_layer.pack_weight(MASKED, w, masks, BF16)
      z, vjp = jax.vjp(lambda x, w: jax.lax.scan(jax.checkpoint(layer), x, (w, states, keys))[0], x, w)
      return z, vjp(dz)

    z, (dx, dw) = scanned(x, w)
    middle = dot_and_gradients(MASKED, x, w[0], masks[0], dz, keys[0])[0]
    expected, cotangent, second = dot_and_gradients(MASKED, middle, w[1], masks[1], dz, keys[1])
    _, *first = dot_and_gradients(MASKED, x, w[0], masks[0], cotangent, keys[0])
    assert_close((z, dx, dw[0], dw[1]), (expected, *first, second), TOLERANCE)


class FfnTest(parameterized.TestCase):

  @parameterized.parameters(('silu', True), ('gelu', False))
  @pytest.mark.few
  def test_formulas(self, activation, gated):
    x, weights, biases, masks, dy = problem(gated=gated, biased=True, init=init_masks)
    if gated:
      weights['up'] = weights['up'] / 256  # gate and up have one scale when they are multiplied
    given = x, weights, biases, masks, dy
    found = ffn_and_gradients(MASKED, activation, *given, KEY)
    assert_close(found, fp8_oracles.written_ffn(activation, *given, KEY), FLIPS)

  @pytest.mark.slow
  def test_is_the_simulation_up_to_rounding(self):
    given = problem(gated=True, biased=True, init=init_masks)
    found, expected = (ffn_and_gradients(policy, 'silu', *given, KEY) for policy in (MASKED, SIMULATED))
    assert_close(found, expected, 2 * NOISE)


  @pytest.mark.slow
  def test_vmap(self):
    """Over experts, each with its own scales."""
    x, weights, biases, _, dy = jax.tree.map(lambda a: jnp.stack([a, a * 3]), problem(gated=True, biased=True))
    many, keys = (x, weights, biases, jax.tree.map(init_masks, weights), dy), jax.random.split(KEY, 2)
    found = jit(jax.vmap(functools.partial(ffn_and_gradients.__wrapped__, MASKED, 'silu')))(*many, keys)
    for i in range(2):
      own = jax.tree.map(lambda a, i=i: a[i], (found, many, keys))
      assert_close(own[0], ffn_and_gradients(MASKED, 'silu', *own[1], own[2]), TOLERANCE)


class PlanTest(parameterized.TestCase):

  @parameterized.parameters('mosaic_gpu', 'dense')
  def test_on_hopper_all_three_take_the_kernel_whatever_was_measured(self, fastest):
    tokens, sides, on = 16384, {'up': (4096, 16384), 'down': (16384, 4096)}, target(H100)
    with mock.patch.object(api, 'chosen', lambda *_: fastest):
      plan = plan_layer(CHOOSES, tokens, *sides['up'], BF16, on=on)
    self.assertEqual(plan.backends.sole, 'mosaic_gpu')
    # Both ways, each with half of the values and an eighth of a byte for their positions; and a scale.
    self.assertEqual(plan.packed_bytes, 4096 * 16384 * 2 * 5 // 8 + 4)
    self.assertTrue(plan_block(CHOOSES, tokens, sides, BF16, on=on).fused)

  def test_where_it_pays_prices_its_matmuls(self):
    recipe = s24.Recipe('fst_fp8', (s24.Rule('.*', CHOOSES),))
    params = {'kernel': jax.ShapeDtypeStruct((4096, 16384), BF16)}
    (layer,) = s24.where_it_pays(params, recipe, tokens=16384, device=H100)
    self.assertEqual([role.chosen for role in layer.roles], ['mosaic_gpu'] * 3)
    for role in layer.roles:
      self.assertLess(role.sparse_ms, role.dense_fp8_ms, role.role)

  def test_a_dense_input_gradient_is_refused(self):
    x, w = jax.ShapeDtypeStruct((8, D), BF16), jax.ShapeDtypeStruct((D, OUT), BF16)
    policy = dataclasses.replace(MASKED, input_grad='dense')
    with self.assertRaisesRegex(ValueError, "no dense weight to read: input_grad must be 'sparse', found 'dense'"):
      jax.eval_shape(functools.partial(s24.dot, policy=policy), x, w, jax.ShapeDtypeStruct(w.shape, bool))


if __name__ == '__main__':
  absltest.main()
