"""Modules of MaxText's shape: nnx layers inside linen ones by the bridge, and layers stacked on axis 1."""

from absl.testing import absltest, parameterized
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import pytest

import sparse24_jax as s24
from tests.models.training import check_training, random_like

pytestmark = pytest.mark.slow


class DenseGeneral(nnx.Module):
  """MaxText's: any axes contracted, a kernel of their sizes and the features, `lax.dot_general`."""

  def __init__(self, sizes, features, axis=(-1,), *, rngs):
    self.axis = axis
    self.kernel = nnx.Param(nnx.initializers.normal(0.2)(rngs.params(), (*sizes, *features)))

  def __call__(self, x):
    axis = tuple(a % x.ndim for a in self.axis)
    kernel = jnp.asarray(self.kernel[...], x.dtype)
    return jax.lax.dot_general(x, kernel, ((axis, tuple(range(len(axis)))), ((), ())))


class MlpBlock(nnx.Module):
  """Gated, with sublayers, as MaxText has it."""

  def __init__(self, *, rngs):
    self.wi_0 = DenseGeneral((16,), (32,), rngs=rngs)
    self.wi_1 = DenseGeneral((16,), (32,), rngs=rngs)
    self.wo = DenseGeneral((32,), (16,), rngs=rngs)

  def __call__(self, x):
    return self.wo(nnx.silu(self.wi_0(x)) * self.wi_1(x))


class Attention(nnx.Module):
  """Heads as axes of the kernels."""

  def __init__(self, *, rngs):
    self.query = DenseGeneral((16,), (2, 8), rngs=rngs)
    self.out = DenseGeneral((2, 8), (16,), axis=(-2, -1), rngs=rngs)

  def __call__(self, x):
    return self.out(nnx.relu(self.query(x)))


class Layer(nn.Module):
  """A linen layer around nnx ones."""

  @nn.compact
  def __call__(self, x, _):
    x = x + nnx.bridge.to_linen(Attention, name='self_attention')(x)
    return x + nnx.bridge.to_linen(MlpBlock, name='mlp')(x), None


WEIGHTS = {
  'self_attention/query/kernel': ((0,), (1, 2)),
  'self_attention/out/kernel': ((0, 1), (2,)),
  'mlp/wi_0/kernel': ((0,), (1,)),
  'mlp/wi_1/kernel': ((0,), (1,)),
  'mlp/wo/kernel': ((0,), (1,)),
}
RECIPE = s24.recipes.ste('.*/kernel')


def layouts(prefix='', stacked=None):
  """The layouts of a layer's weights as text, by themselves or with the layers on an axis."""
  def shifted(axes):
    return ' '.join(str(a + (stacked is not None and a >= stacked)) for a in axes)

  front = '' if stacked is None else f'stacked {stacked}, '
  return {f'{prefix}{path}': f'{front}in {shifted(i)}, out {shifted(o)}' for path, (i, o) in WEIGHTS.items()}


class MaxTextTest(parameterized.TestCase):

  def test_layers_stacked_on_axis_1(self):
    model = nn.scan(
      nn.remat(Layer, prevent_cse=False), variable_axes={'params': 1, 'nnx': 1}, split_rngs={'params': True}, length=3
    )()
    x, y = jax.random.normal(jax.random.key(1), (2, 2, 8, 16))
    params = random_like(jax.eval_shape(model.init, jax.random.key(0), x, None)['params'])

    def loss(params, x, y):
      return jnp.mean((model.apply({'params': params}, x, None)[0] - y) ** 2)

    bound = s24.bind(RECIPE, loss, params, x, y)
    check_training(bound, loss, params, x, y, expected=layouts(stacked=1))

  @parameterized.parameters(False, True)
  def test_a_bridged_module_with_sublayers(self, bind):
    """The wrapped model; not long ago the masks came out as the weights."""
    model = nnx.bridge.to_linen(MlpBlock)
    x, y = jax.random.normal(jax.random.key(1), (2, 2, 8, 16))
    params = random_like(jax.eval_shape(model.init, jax.random.key(0), x)['params'])

    def loss(params, x, y):
      return jnp.mean((model.apply({'params': params}, x) - y) ** 2)

    bound = s24.bind(RECIPE, loss, params, x, y)
    sparsified = s24.sparsify(model, bound if bind else RECIPE)

    def sparse(params, variables, key, x, y):
      return jnp.mean((sparsified.apply({'params': params, 'sparse24': variables}, x) - y) ** 2)

    plain = {path.removeprefix('mlp/'): text for path, text in layouts().items() if path.startswith('mlp/')}
    check_training(bound, loss, params, x, y, expected=plain, sparse=sparse)

  def test_a_linen_module_inside_an_nnx_one(self):
    model = nnx.bridge.lazy_init(nnx.bridge.ToNNX(nn.Dense(16), rngs=nnx.Rngs(0)), jnp.ones((8, 16)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    x, y = jax.random.normal(jax.random.key(1), (2, 8, 16))

    def loss(params, x, y):
      return jnp.mean((nnx.merge(graph, params, rest, copy=True)(x) - y) ** 2)

    bound = s24.bind(s24.recipes.ste('.*kernel'), loss, params, x, y)
    check_training(bound, loss, params, x, y, expected={'kernel': 'in 0, out 1'})


if __name__ == '__main__':
  absltest.main()
