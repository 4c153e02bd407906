"""The fused feed-forward block under JAX's transformations: loops, recomputing, batching, shards."""

import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np
import pytest

from pallas_kernels.pack import api as pack
import sparse24_jax as s24
from sparse24_jax import linear_layer
from tests import oracles
from tests.oracles import assert_close

BF16, F32 = jnp.bfloat16, jnp.float32
D, HIDDEN = 16, 64
KEY = jax.random.key(7)
POLICY = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue', implementation='dense')
jit = jax.jit


def equations(jaxpr, inside=False):
  """(equation, whether it stands in the body of a loop) of a jaxpr and all that it calls."""
  for eqn in jaxpr.eqns:
    yield eqn, inside
    params = list(eqn.params.values())
    for param in jax.tree.leaves(params, is_leaf=lambda p: hasattr(p, 'eqns') or hasattr(p, 'jaxpr')):
      inner = getattr(param, 'jaxpr', param)
      if hasattr(inner, 'eqns'):
        yield from equations(inner, inside or eqn.primitive.name in ('scan', 'while'))


class TransformationTest(parameterized.TestCase):
  """On the kernels' path, multiplied decompressed, each transformation gives what plain calls give.

  On numbers that bfloat16 holds exactly: in a loop XLA rounds in other places, and decisions of a sample turn with it.
  """

  LAYERS = 3

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(1)
    shapes = {'up': (self.LAYERS, D, HIDDEN), 'down': (self.LAYERS, HIDDEN, D)}
    self.weights = {
      role: jnp.asarray(rng.integers(-1, 2, s) * (rng.random(s) < 0.2), BF16) for role, s in shapes.items()
    }
    self.states = {role: jnp.asarray(oracles.random_transposable_mask(rng, s)) for role, s in shapes.items()}
    self.x = jnp.asarray(rng.integers(-1, 2, (64, D)), BF16)
    self.keys = jax.random.split(KEY, self.LAYERS)

  def pack(self, weights, states):
    return {role: linear_layer.pack_weight(POLICY, w, states[role], BF16) for role, w in weights.items()}

  def layer(self, x, given):
    weights, states, key = given
    y = s24.ffn(x, weights['up'], weights['down'], states, policy=POLICY, activation='relu', key=key)
    return x + y, None

  def one(self, i=0):
    return jax.tree.map(lambda a: a[i], (self.weights, self.states, self.keys))

  def loss(self, weights, x, states, key):
    return self.total(self.layer(x, (weights, states, key))[0])

  def total(self, y):
    """Its cotangent holds ones, minus ones and zeros."""
    return jnp.sum(y.astype(F32) * (jnp.arange(y.size).reshape(y.shape) * 7 % 11 % 3 - 1))

  @pytest.mark.slow
  def test_scan_over_layers_of_packed_weights_and_remat(self):
    def total(run, weights, x):
      packed = self.pack(weights, self.states)
      return self.total(run(weights, packed, x))

    def looped(layer, weights, packed, x):
      for i in range(self.LAYERS):
        x, _ = layer(x, jax.tree.map(lambda a, i=i: a[i], (weights, packed, self.keys)))
      return x

    def scanned(layer, weights, packed, x):
      return jax.lax.scan(layer, x, (weights, packed, self.keys))[0]

    remat = jax.checkpoint(self.layer)
    runs = [functools.partial(looped, self.layer), functools.partial(looped, remat), functools.partial(scanned, remat)]
    first, *others = (
      jit(jax.value_and_grad(functools.partial(total, run), argnums=(0, 1)))(self.weights, self.x) for run in runs
    )
    for other in others:
      assert_close(other, first, 1e-2)

  @pytest.mark.slow
  def test_packed_here_or_there(self):
    weights, states, key = self.one()
    given = [states, jit(self.pack)(weights, states)]
    one, other = (jit(jax.value_and_grad(self.loss, argnums=(0, 1)))(weights, self.x, s, key) for s in given)
    assert_close(one, other, 1e-3)

  def accumulated(self, how):
    """A gradient over micro-batches of weights that are packed ahead of the loop, or not, and its arguments."""
    weights, states, _ = self.one()

    def accumulated(weights, batches):
      handed = self.pack(weights, states) if how == 'packed' else states

      def micro(total, batch):
        x, key = batch
        value, grads = jax.value_and_grad(self.loss)(weights, x, handed, key)
        return jax.tree.map(lambda a, b: a + b.astype(F32), total, (value, grads)), None

      zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, F32), (jnp.float32(0), weights))
      return jax.lax.scan(micro, zeros, batches)[0]

    return accumulated, weights, (self.x.reshape(4, 16, D), jax.random.split(KEY, 4))

  @parameterized.parameters('packed', 'bare')
  def test_packed_ahead_nothing_is_packed_in_the_loop(self, how):
    plain = pack.masked_pack

    def spy(w, codes, **kwargs):
      def masked_pack(w, codes):
        return plain(w, codes, **kwargs)

      return jax.jit(masked_pack)(w, codes)

    accumulated, *args = self.accumulated(how)
    with mock.patch.object(pack, 'masked_pack', spy):
      jaxpr = jax.make_jaxpr(accumulated)(*args)
    found = [inside for eqn, inside in equations(jaxpr.jaxpr) if eqn.params.get('name') == 'masked_pack']
    self.assertEqual(found, [how == 'bare'] * 2)  # up and down

  @parameterized.parameters('packed', 'bare')
  @pytest.mark.slow
  def test_micro_batches_share_what_was_packed(self, how):
    accumulated, weights, batches = self.accumulated(how)
    _, states, _ = self.one()
    gradient = jit(jax.value_and_grad(self.loss))
    parts = [gradient(weights, x, states, key) for x, key in zip(*batches, strict=True)]
    expected = jax.tree.map(lambda *a: sum(oracles.wide(p) for p in a), *parts)
    assert_close(jit(accumulated)(weights, batches), expected, 1e-2)

  @pytest.mark.slow
  def test_vmap(self):
    weights, states, _ = self.one()
    xs, keys = self.x.reshape(2, 32, D), jax.random.split(KEY, 2)
    gradient = jax.value_and_grad(self.loss, argnums=(0, 1))
    found = jit(jax.vmap(gradient, in_axes=(None, 0, None, 0)))(weights, xs, states, keys)
    single = jit(gradient)
    for i in range(2):
      assert_close(jax.tree.map(lambda a, i=i: a[i], found), single(weights, xs[i], states, keys[i]), 1e-2)

  @parameterized.parameters('packed', 'bare')
  @pytest.mark.slow
  def test_shard_map_over_tokens(self, how):
    """Data parallel over eight devices, a key a shard; the gradient is the sum over the shards."""
    mesh = Mesh(np.array(jax.devices()), ('data',))
    plain, split = PartitionSpec(), PartitionSpec('data')
    weights, states, _ = self.one()
    handed = jit(self.pack)(weights, states) if how == 'packed' else states

    def local(weights, x, handed):
      key = jax.random.fold_in(KEY, jax.lax.axis_index('data'))
      return jax.lax.psum(self.loss(weights, x, handed, key), 'data')

    mapped = jax.shard_map(
      jax.value_and_grad(local, argnums=(0, 1)), mesh=mesh, in_specs=(plain, split, plain),
      out_specs=(plain, (plain, split)),
    )  # fmt: skip
    value, (dw, dx) = jit(mapped)(weights, self.x, handed)
    gradient = jit(jax.value_and_grad(self.loss, argnums=(0, 1)))
    parts = [
      gradient(weights, x, states, jax.random.fold_in(KEY, i)) for i, x in enumerate(self.x.reshape(8, 8, D))
    ]
    np.testing.assert_allclose(value, sum(float(v) for v, _ in parts), rtol=1e-2)
    assert_close(dx, np.concatenate([oracles.wide(g[1]) for _, g in parts]), 1e-2)
    summed = jax.tree.map(lambda *a: sum(map(oracles.wide, a)), *(g[0] for _, g in parts))
    assert_close(dw, summed, 1e-2)


if __name__ == '__main__':
  absltest.main()
