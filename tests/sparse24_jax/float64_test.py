"""Under `jax_enable_x64`: float64 is refused by name, and what is narrower gives the bits that it gives without.

Without it NumPy's float64 is float32, as everywhere in JAX.
"""

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pallas_kernels import formats
from pallas_kernels.gated_activation import api as gated_activation
from pallas_kernels.pack import api as pack
from pallas_kernels.pack.api import transposable_mask
from pallas_kernels.quantize import api as quantize
from pallas_kernels.sparse_attention.api import Pattern, sparse_attention
from pallas_kernels.sparse_matmul.api import sparse_matmul
import sparse24_jax as s24

FST = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
RECIPES = (
  s24.recipes.ste('.*'), s24.recipes.s_ste('.*'), s24.recipes.transposable_srste('.*', masked_decay=1e-3),
  s24.recipes.rigl('.*', density=0.2, total_steps=1000),
)  # fmt: skip
MASK = np.tile([True, False, False, True], (8, 2)).T
KEY = jax.random.key(0)


def ffn(w):
  state = {role: jnp.ones((8, 8), bool) for role in ('up', 'down')}
  return s24.ffn(w, w, w, state, policy=FST)


def neuron_level(w):
  state = {'up': jnp.float32(1), 'down': jnp.float32(1)}
  return s24.neuron_level_ffn(w, w, w, state, policy=s24.ActivationPolicy(s24.VNM(4, 8)))


# Of w, a matrix 8 x 8.
OPS = {
  'magnitude_mask': s24.magnitude_mask,
  'transposable_mask': s24.transposable_mask,
  'two_approx': lambda w: s24.transposable_mask(w, method='two_approx'),
  'soft_threshold': s24.soft_threshold,
  'soft_threshold_scale': s24.soft_threshold_scale,
  'vnm_mask': lambda w: s24.vnm_mask(w, v=4, m=8),
  'mvue24': lambda w: s24.mvue24(w, KEY),
  'dot': lambda w: s24.dot(w, w, policy=s24.DotPolicy()),
  'dot_fst': lambda w: s24.dot(w, w, jnp.ones((8, 8), bool), policy=FST),
  'ffn': ffn,
  'gated_linear_unit': lambda w: s24.gated_linear_unit(w, w, w, policy=s24.DotPolicy()),
  'neuron_level_ffn': neuron_level,
  'gated_activation': gated_activation.gated_activation,
  'activation_backward': lambda w: gated_activation.activation_backward(w, w, gated=False),
  'activation_backward_amax': lambda w: gated_activation.activation_backward_amax(w, w, gated=False),
  'activation_backward_pack': lambda w: gated_activation.activation_backward_pack(w, w, KEY, gated=False),
  'activation_backward_pack8': lambda w: gated_activation.activation_backward_pack(
    w, w, KEY, jnp.float32(1), gated=False, dtype=jnp.float8_e5m2
  ),
  'transposable_pack': pack.transposable_pack,
  'soft_threshold_pack': lambda w: pack.soft_threshold_pack(w, jnp.float32(1)),
  'soft_threshold_pack8': lambda w: pack.soft_threshold_pack(w, jnp.float32(1), dtype=jnp.float8_e4m3fn),
  'mvue_pack': lambda w: pack.mvue_pack(w, KEY),
  'mvue_pack8': lambda w: pack.mvue_pack(w, KEY, jnp.float32(1), dtype=jnp.float8_e5m2),
  'quantize': lambda w: quantize.quantize(w, jnp.float32(1), dtype=jnp.float8_e4m3fn),
  'sparse_matmul': lambda w: sparse_matmul(formats.compress(w, jnp.asarray(MASK)), w, out_dtype=jnp.float32),
  'kernels_transposable_mask': transposable_mask,
  'sparse_attention': lambda w: sparse_attention(*(w.reshape(1, 8, 2, 4),) * 3, patterns=Pattern('local', 2)),
}

# What users call on their own arrays.
DOORS = (
  'magnitude_mask', 'transposable_mask', 'two_approx', 'soft_threshold', 'soft_threshold_scale', 'vnm_mask', 'mvue24',
  'dot', 'dot_fst', 'ffn', 'gated_linear_unit',
)  # fmt: skip


class Float64Test(parameterized.TestCase):

  @parameterized.parameters(*OPS)
  def test_ops_name_it(self, op):
    w = jax.random.normal(KEY, (8, 8))
    with jax.enable_x64(True), self.assertRaisesRegex(ValueError, 'float64.*float32|float32.*float64'):
      OPS[op](w.astype(jnp.float64))

  @parameterized.parameters(*RECIPES)
  def test_recipes_name_the_weight(self, recipe):
    with jax.enable_x64(True):
      params = {'mlp': {'kernel': jnp.ones((8, 8), jnp.float64)}}
      with self.assertRaisesRegex(ValueError, 'mlp/kernel must be float32, bfloat16 or float16, found float64'):
        s24.sparse_training(optax.sgd(0.1), recipe).init(params)

  def test_layers_that_compute_in_it_name_their_weight(self):
    recipe = s24.recipes.ste('kernel')
    params = {'kernel': jnp.ones((8, 4))}
    opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    variables = {'params': params, 'sparse24': s24.sparse_variables(params, opt_state, recipe)}
    with jax.enable_x64(True), self.assertRaisesRegex(ValueError, 'kernel: x and w must be float32.*found float64'):
      s24.sparsify(nn.Dense(4, use_bias=False, dtype=jnp.float64), recipe).apply(variables, jnp.ones((2, 8)))

  def test_what_stores_values_as_they_are_takes_it(self):
    with jax.enable_x64(True):
      w = jnp.where(MASK, jax.random.normal(KEY, (8, 8), jnp.float64), 0)
      back = s24.decompress(s24.compress(w, jnp.asarray(MASK)))
      self.assertEqual(back.dtype, jnp.float64)
      np.testing.assert_array_equal(back, w)
      s24.verify24(w)

  @parameterized.product(dtype=('float32', 'bfloat16'), weight_grad=('mvue', 'dense'))
  @pytest.mark.few
  def test_the_rest_has_the_bits_that_it_has_without(self, dtype, weight_grad):
    policy = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad=weight_grad)
    x, w = (jax.random.normal(jax.random.key(i), (16, 16), dtype) for i in range(2))

    def run():
      state = policy.projection.init(w)
      return state, jax.grad(lambda x, w: s24.dot(x, w, state, policy=policy, key=KEY).sum(), (0, 1))(x, w)

    plain = run()
    with jax.enable_x64(True):
      wide = run()
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(wide), strict=True):
      self.assertEqual(a.dtype, b.dtype)
      np.testing.assert_array_equal(a, b)

  @parameterized.parameters(*DOORS)
  def test_numpy_arrays_are_what_jax_makes_of_them(self, op):
    w = np.random.default_rng(0).standard_normal((8, 8))
    found, expected = OPS[op](w), OPS[op](jnp.asarray(w, jnp.float32))
    self.assertEqual(found.dtype, expected.dtype)
    np.testing.assert_array_equal(found, expected)
    with jax.enable_x64(True), self.assertRaisesRegex(ValueError, 'found float64'):
      OPS[op](w)

  def test_numpy_arrays_are_compressed(self):
    w = np.random.default_rng(0).standard_normal((8, 8))
    found, expected = s24.compress(w, MASK), s24.compress(jnp.asarray(w, jnp.float32), jnp.asarray(MASK))
    self.assertEqual(found.dtype, jnp.float32)
    np.testing.assert_array_equal(found.values, expected.values)
    np.testing.assert_array_equal(found.metadata, expected.metadata)

  @parameterized.parameters(*RECIPES)
  def test_numpy_weights_are_what_jax_makes_of_them(self, recipe):
    w = np.random.default_rng(0).standard_normal((8, 8))
    tx = s24.sparse_training(optax.sgd(0.1), recipe)

    def step(w):
      params = {'mlp': {'kernel': w}}
      updates, state = tx.update({'mlp': {'kernel': jnp.ones((8, 8))}}, tx.init(params), params)
      projected = s24.project(params, state, recipe)
      return updates, state, projected, s24.sparse_variables(params, state, recipe)

    found, expected = step(w), step(jnp.asarray(w, jnp.float32))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      self.assertEqual(jnp.result_type(a), b.dtype)
      np.testing.assert_array_equal(jnp.asarray(a), b)


if __name__ == '__main__':
  absltest.main()
