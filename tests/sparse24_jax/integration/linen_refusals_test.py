"""What sparsified linen models refuse, and how they say it."""

import copy
import pickle

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse24_jax as s24
from tests.sparse24_jax.integration.linen_models import (
  apply,
  at_start,
  FST,
  init,
  KEY,
  Loop,
  opt_state,
  prepared,
  Scan,
  variables,
  X,
)  # fmt: skip

FST_ALL = s24.recipes.transposable_srste('.*/kernel', masked_decay=0.0)


class PastItsHook(nn.Dense):
  @nn.compact
  def __call__(self, x):
    return x @ self.param('kernel', self.kernel_init, (x.shape[-1], self.features))


class RefusalTest(parameterized.TestCase):

  @parameterized.parameters('loop', 'remat', 'scan')
  def test_gradient_without_key(self, name):
    model, recipe, params, v, _ = prepared(name, 'fst')
    sparse = s24.sparsify(model, recipe)
    with self.assertRaisesRegex(ValueError, r"weight_grad='mvue' needs a random key.*rngs=\{'mvue': key\}"):
      jax.eval_shape(jax.grad(lambda p: sparse.apply({**v, 'params': p}, X).sum()), params)

  def test_gradient_with_odd_tokens(self):
    model, recipe, params, v, _ = prepared('loop', 'fst')
    sparse = s24.sparsify(model, recipe)
    message = r'h_0/up/kernel, h_0/down/kernel: .* groups tokens in fours: x of shape \(7, 16\) has 7 to'
    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(jax.grad(lambda p: sparse.apply({**v, 'params': p}, X[:7], rngs={'mvue': KEY}).sum()), params)

  @parameterized.parameters((('params',), ('params', 'mvue')), (('params', 'sparse24'), ('params',)))
  @pytest.mark.slow
  def test_a_scan_need_not_know_of_states_and_randomness(self, axes, rngs):
    """The library's collection and its random stream go around the model, not through it."""
    model = Scan(axes=axes, rngs=rngs)
    params = init(model)
    v = variables(params, FST)

    def grad(model):
      sparse = s24.sparsify(model, FST)
      return jax.jit(jax.grad(lambda p: sparse.apply({**v, 'params': p}, X, rngs={'mvue': KEY}).sum()))

    jax.tree.map(np.testing.assert_array_equal, grad(model)(params), grad(Scan())(params))

  def test_an_error_of_the_layer_before(self):
    """It is met where the next layer asks for its input, and named that one as well."""
    model, x = nn.Sequential((nn.Dense(16), nn.Dense(8))), jnp.ones((8, 16))
    params = init(model, x.shape)
    sparse, v = s24.sparsify(model, FST_ALL), variables(params, FST_ALL)
    with self.assertRaisesRegex(ValueError, r"^layers_0/kernel: weight_grad='mvue' needs a random key"):
      jax.eval_shape(jax.grad(lambda p: sparse.apply({**v, 'params': p}, x).sum()), params)

  def test_sparse_states_in_a_dense_phase(self):
    """The plain model passed over them: a run whose variables say sparse was dense."""
    dense, params = s24.sparsify(Loop(), FST, phase='dense'), init(Loop())
    v = variables(params, FST)
    again = pickle.loads(pickle.dumps(dense))
    for run in (dense.apply, dense.bind, dense.clone().apply, again.apply):
      with self.assertRaisesRegex(ValueError, r"^2 of h_\*/\w+/kernel, .* phase 'dense', .*sparse_variables the phase"):
        run(v, X)
    of_dense = s24.sparse_variables(params, opt_state(params, FST), FST, phase='dense')
    own = {'head': {'kernel': jnp.ones((16, 4))}}  # of a layer that calls `dot` itself, under no rule
    for states in ({}, of_dense, own):
      found = again.apply({'params': params, 'sparse24': states}, X, method=Loop.__call__)
      np.testing.assert_array_equal(found, Loop().apply({'params': params}, X))

  def test_apply_without_the_collection(self):
    params = init(Loop())
    with self.assertRaisesRegex(ValueError, r'^2 of h_\*/down/kernel, 2 of h_\*/up/kernel: no state; .*_variables'):
      s24.sparsify(Loop(), FST).apply({'params': params}, X)

  def test_a_method_that_the_model_lacks(self):
    sparse = s24.sparsify(Loop(), FST)
    with self.assertRaisesRegex(AttributeError, 'no attribute "decode"'):
      sparse.apply(variables(init(Loop()), FST), X, method='decode')
    self.assertEqual(copy.deepcopy(sparse), sparse)

  def test_rule_without_a_match(self):
    params = init(Loop())
    recipe = s24.recipes.ste('mlp/.*')
    with self.assertRaisesRegex(ValueError, r"rule 'mlp/\.\*' .* for no weight; weights are 2 of h_\*/down/kernel"):
      s24.sparsify(Loop(), recipe).apply({'params': params, 'sparse24': {}}, X)

  @parameterized.named_parameters(
    ('raw_parameter', lambda self, x: x @ self.param('odd', nn.initializers.normal(), (16, 8))),
    ('past_its_hook', lambda self, x: PastItsHook(8, name='odd')(x)),
    ('einsum', lambda self, x: nn.Einsum((16, 8), 'ab,bc->ac', name='odd', use_bias=False)(x)),
  )
  def test_any_matmul_is_found(self, layer):
    class Model(nn.Module):
      @nn.compact
      def __call__(self, x):
        return layer(self, nn.Dense(16, name='up')(x))

    recipe = s24.recipes.ste('.*')
    params = init(Model())
    v, projected = at_start(params, recipe)
    found = apply(s24.sparsify(Model(), recipe), v)
    np.testing.assert_allclose(found, apply(Model(), {'params': projected}), rtol=1e-5, atol=1e-6)
    self.assertGreater(np.abs(found - apply(Model(), {'params': params})).max(), 1e-3)

  def test_a_convolution_is_no_matmul(self):
    class Model(nn.Module):
      @nn.compact
      def __call__(self, x):
        return nn.Conv(8, (4,), name='odd')(nn.Dense(16, name='up')(x)[None])

      def encode(self, x):
        return self(x)

    recipe = s24.recipes.ste('.*')
    v = variables(init(Model()), recipe)
    for method in (None, 'encode'):
      with self.assertRaisesRegex(ValueError, r'odd/kernel of shape .*: conv_general_dilated at .*recipe.with_dense'):
        s24.sparsify(Model(), recipe).apply(v, X, method=method)

  def test_embeddings_are_no_weights(self):
    model, recipe, tokens = nn.Embed(16, 8), s24.recipes.ste('.*'), jnp.zeros((4,), jnp.int32)
    with self.assertRaisesRegex(ValueError, r'decides for no weight; weights are \[\]'):
      s24.sparsify(model, recipe).apply({**model.init(KEY, tokens), 'sparse24': {}}, tokens)

  def test_kernel_with_many_feature_axes_is_named(self):
    class Model(nn.Module):
      @nn.compact
      def __call__(self, x):
        return nn.DenseGeneral((4, 8), name='heads')(x)

    recipe = s24.recipes.ste('heads/kernel')
    params = init(Model())
    with self.assertRaisesRegex(ValueError, r'heads/kernel of shape \(16, 4, 8\): .*in 0, out 1 2.*sparse24_jax\.bind'):
      s24.sparsify(Model(), recipe).apply(variables(params, recipe), X)


if __name__ == '__main__':
  absltest.main()
