"""The precision and the dtype of the result that a model asks of its matmuls."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.asked import Asked
from sparse24_jax.availability import target
from sparse24_jax.plan import plan_layer
from sparse24_jax.where_it_pays import table

STE = s24.recipes.ste('.*')
MVUE = s24.Recipe('m', (s24.Rule('.*', s24.DotPolicy(s24.magnitude(), weight_grad='mvue')),))


def made_sparse(f, recipe, params, *args):
  """(the function of parameters and key, projected parameters, the bound recipe)."""
  bound = s24.bind(recipe, f, params, *args)
  state = s24.sparse_training(optax.sgd(0.1), bound).init(params)
  variables, sparse = s24.sparse_variables(params, state, bound), s24.sparsify(f, bound)
  return (lambda p, key=None: sparse(p, variables, key, *args)), s24.project(params, state, bound), bound


def draw(*shapes, dtype=jnp.bfloat16):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def dots(jaxpr, found=None):
  """The `dot_general`s of a jaxpr and of those inside."""
  found = [] if found is None else found
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      found.append(equation)
    for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, 'eqns')):
      inner = getattr(leaf, 'jaxpr', leaf)
      if hasattr(inner, 'eqns'):
        dots(inner, found)
  return found


def precisions(equations):
  found = [equation.params['precision'] for equation in equations]
  return {str(p) for pair in found for p in (pair if isinstance(pair, tuple) else (pair,))}


def wide(x, w):
  return jnp.dot(x, w, preferred_element_type=jnp.float32)


class PrecisionTest(parameterized.TestCase):

  @parameterized.parameters(jax.lax.Precision.HIGHEST, 'BF16_BF16_F32_X3')
  def test_of_all_three_matmuls(self, precision):
    x, w = draw((8, 16), (16, 8), dtype=jnp.float32)
    f, _, bound = made_sparse(lambda p, x: jnp.dot(x, p['w'], precision=precision), STE, {'w': w}, x)
    found = dots(jax.make_jaxpr(jax.grad(lambda p: f(p).sum()))({'w': w}))
    self.assertLen(found, 3)
    self.assertEqual(precisions(found), {str(precision)})
    self.assertIn('precision=', bound['w'].uses[0].asked.describe())

  def test_of_a_block(self):
    x, up, down = draw((8, 16), (16, 32), (32, 16), dtype=jnp.float32)
    params = {'up': up, 'down': down}

    def model(p, x):
      with jax.default_matmul_precision('highest'):
        return jax.nn.silu(x @ p['up']) @ p['down']

    f, _, bound = made_sparse(model, STE, params, x)
    self.assertEqual({use.block for weight in bound.weights for use in weight.uses}, {'silu'})
    found = dots(jax.make_jaxpr(jax.grad(lambda p: f(p).sum()))(params))
    self.assertEqual(precisions(found), {'HIGHEST'})

  def test_of_a_weight_on_the_left(self):
    x, w = draw((16, 8), (8, 16), dtype=jnp.float32)
    f, *_ = made_sparse(lambda p, x: jnp.dot(p['w'], x, precision=('default', 'highest')), STE, {'w': w}, x)
    (found,) = dots(jax.make_jaxpr(f)({'w': w}))
    lhs, rhs = found.params['precision']
    self.assertEqual((str(lhs), str(rhs)), ('HIGHEST', 'DEFAULT'))  # activations come first

  def test_fp8_is_no_higher_precision(self):
    recipe = s24.Recipe('r', (s24.Rule('w', s24.DotPolicy(s24.soft_threshold_projection(), precision='fp8')),))
    x, w = draw((8, 16), (16, 8), dtype=jnp.float32)
    with self.assertRaisesRegex(ValueError, r"w of shape \(16, 8\): precision=HIGHEST, of the .*: its rule has"):
      s24.bind(recipe, lambda p, x: jnp.dot(x, p['w'], precision='highest'), {'w': w}, x)
    with self.assertRaisesRegex(ValueError, "its rule has precision='fp8'"):
      s24.dot(x, w, s24.soft_threshold_projection().init(w), policy=recipe.rules[0].policy, precision='highest')


class WiderResultTest(parameterized.TestCase):

  def test_results_and_gradients_are_not_rounded(self):
    x, w, dz = draw((8, 64), (64, 8), (8, 8))
    dz = dz.astype(jnp.float32) + 2.0**-12  # bfloat16 would lose it
    f, projected, bound = made_sparse(lambda p, x: wide(x, p['w']), STE, {'w': w}, x)
    z, pull = jax.vjp(f, {'w': w})
    self.assertEqual(z.dtype, jnp.float32)
    x64, w64, dz64 = (np.asarray(a, np.float64) for a in (x, projected['w'], dz))
    np.testing.assert_allclose(z, x64 @ w64, rtol=1e-6, atol=1e-5)
    (dw,) = pull(dz)
    np.testing.assert_array_equal(dw['w'], jnp.asarray(x64.T @ dz64, jnp.float32).astype(jnp.bfloat16))
    self.assertEqual(bound['w'].uses[0].asked, Asked(None, 'float32'))
    self.assertFalse(bound['w'].packs)

  @pytest.mark.slow
  def test_the_sample_is_drawn_of_the_wider_gradient(self):
    x, w, dz = draw((8, 16), (16, 4), (8, 4))
    dz = dz.astype(jnp.float32)
    f, *_ = made_sparse(lambda p, x: wide(x, p['w']), MVUE, {'w': w}, x)
    grad = jax.jit(jax.vmap(jax.grad(lambda p, key: jnp.sum(dz * f(p, key))), (None, 0)))
    drawn = np.asarray(grad({'w': w}, jax.random.split(jax.random.key(0), 2000))['w'], np.float64)
    exact = np.asarray(x, np.float64).T @ np.asarray(dz, np.float64)
    error = np.linalg.norm(drawn.mean(0) - exact)
    self.assertLess(error, 1.5 * np.sqrt(drawn.var(0).sum() / 2000) + 1e-3 * np.linalg.norm(exact))
    self.assertGreater(np.linalg.norm(drawn[0] - exact), 10 * error)

  def test_narrower_than_the_operands(self):
    x, w = draw((8, 16), (16, 8), dtype=jnp.float32)
    f, projected, _ = made_sparse(
      lambda p, x: jnp.dot(x, p['w'], preferred_element_type=jnp.bfloat16), STE, {'w': w}, x
    )
    np.testing.assert_array_equal(f({'w': w}), jnp.dot(x, projected['w']).astype(jnp.bfloat16))
    dw = jax.grad(lambda p: f(p).astype(jnp.float32).sum())({'w': w})['w']
    np.testing.assert_allclose(dw, np.tile(np.asarray(x, np.float64).sum(0)[:, None], 8), rtol=1e-5, atol=1e-5)

  @pytest.mark.slow
  def test_rounded_at_once_it_is_the_plain_op(self):
    """What is asked for in float32 and cast by the next line is one rounding of a sum: kernels and blocks serve it."""
    x, up, down = draw((8, 16), (16, 32), (32, 16))
    params = {'up': up, 'down': down}
    recipe = s24.Recipe('p', (s24.Rule('.*', s24.DotPolicy(s24.transposable(), implementation='dense')),))

    def model(p, x):
      h = jax.nn.gelu(wide(x, p['up']).astype(x.dtype))
      return wide(h, p['down']).astype(x.dtype)

    f, projected, bound = made_sparse(model, recipe, params, x)
    self.assertEqual({(use.block, use.role) for weight in bound.weights for use in weight.uses},
                     {('gelu', 'up'), ('gelu', 'down')})  # fmt: skip
    self.assertTrue(bound['up'].packs)
    found, expected = f(params), model(projected, x)
    self.assertEqual(found.dtype, jnp.bfloat16)
    np.testing.assert_allclose(found.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.02, atol=0.02)

  def test_read_in_both_widths(self):
    x, w = draw((8, 16), (16, 8))

    def model(p, x):
      z = wide(x, p['w'])
      return z.astype(x.dtype).astype(jnp.float32) - z

    f, projected, _ = made_sparse(model, STE, {'w': w}, x)
    np.testing.assert_array_equal(f({'w': w}), model(projected, x))

  def test_a_named_kernel_says_that_it_cannot(self):
    x, w = draw((8, 16), (16, 8))
    policy = s24.DotPolicy(s24.transposable(), implementation='dense')
    message = r'w: implementation=.dense. cannot serve this layer: preferred_element_type=float32 makes results'
    f, *_ = made_sparse(lambda p, x: wide(x, p['w']), s24.Recipe('r', (s24.Rule('w', policy),)), {'w': w}, x)
    with self.assertRaisesRegex(ValueError, message):
      f({'w': w})


class PlanTest(absltest.TestCase):

  def test_what_kernels_give(self):
    policy = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
    h100 = target('nvidia_h100_80gb_hbm3')

    def plan(precision, result):
      asked = Asked.of(precision, result, 'bfloat16')
      return plan_layer(policy, 16384, 4096, 16384, 'bfloat16', on=h100, asked=asked)

    self.assertEqual(plan(None, None).backends.sole, 'mosaic_gpu')
    # Products of 16 bits are exact in float32, in which kernels add.
    for precision in ('highest', 'float32', 'tensorfloat32', 'fastest', ('bfloat16', 'high')):
      self.assertEqual(plan(precision, 'bfloat16'), plan(None, None))
    self.assertEqual(Asked.of('bfloat16', None, 'bfloat16'), Asked())  # another name of the default
    for asked in ((None, 'float32'), (jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3, None)):
      found = plan(*asked)
      self.assertFalse(found.packs or found.backends.weight_grad)
      self.assertRegex(found.plain, 'preferred_element_type=float32|names an algorithm')

  def test_where_it_pays_says_so(self):
    recipe = s24.recipes.transposable_srste('w', masked_decay=1e-4)
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16384, 4096), (4096, 16384)))
    for f, chosen in ((jnp.dot, 'mosaic_gpu'), (wide, 'dense')):
      bound = s24.bind(recipe, lambda p, x, f=f: f(x, p['w']), {'w': w}, x)
      (layer,) = s24.where_it_pays({'w': w}, bound, tokens=16384, device='nvidia_h100_80gb_hbm3')
      self.assertEqual({role.chosen for role in layer.roles}, {chosen})
    self.assertIn('w: no kernel: preferred_element_type=float32 makes', table([layer]))


if __name__ == '__main__':
  absltest.main()
