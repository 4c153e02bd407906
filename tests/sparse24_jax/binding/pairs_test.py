"""Blocks whose gate and up are one weight, and those of `w @ x`, as models write them."""

from unittest import mock

from absl.testing import absltest, parameterized
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest

import sparse24_jax as s24
from sparse24_jax.binding import transform

D, H = 64, 64  # halves of whole tiles of positions


def split(p, x):
  """A dense layer of twice the width, with a bias."""
  gate, up = jnp.split(x @ p['wi'] + p['bias'][None], 2, axis=-1)
  return (jax.nn.silu(gate) * up) @ p['wo']


def columns(p, x):
  """Up in front, by slices; gelu of the second half."""
  z = x @ p['wi']
  return (jax.nn.gelu(z[..., H:]) * z[..., :H]) @ p['wo']


def gating_einsum(p, x):
  """gemma's."""
  gate = jnp.einsum('...F,NHF->...NH', x, p['wi'])
  return jnp.einsum('...H,HF->...F', jax.nn.gelu(gate[..., 0, :]) * gate[..., 1, :], p['wo'])


def scanned(p, x):
  """MaxText's fused kernel [embed, 2, mlp], layers on axis 1."""
  def layer(x, p):
    z = jax.lax.dot_general(x, p['wi'], (((1,), (0,)), ((), ())))
    return x + (jax.nn.silu(z[:, 0, ...]) * z[:, 1, ...]) @ p['wo'], None

  return jax.lax.scan(layer, x, jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), p))[0]


def experts(p, x):
  z = jnp.einsum('etd,edf->etf', jnp.broadcast_to(x, (2, *x.shape)), p['wi'])
  h = jax.nn.silu(z[..., :H]) * z[..., H:]
  return jnp.einsum('etf,efd->etd', h, p['wo']).sum(0)


def each_token(p, x):
  """Equinox' layers without biases under `vmap`, twice."""
  def mlp(x):
    return p['wo'] @ (jax.nn.silu(p['gate'] @ x) * (p['up'] @ x))

  return jax.vmap(jax.vmap(mlp))(x.reshape(2, -1, D)).reshape(-1, D)


def gemma_experts(p, x):
  """gemma 4's: experts and tokens change places, and the pair is in front."""
  x = jnp.repeat(x[None, None], 2, axis=1)
  gate, up = jnp.einsum('gecd,ekfd->kgecf', x, p['wi'])
  return jnp.einsum('gecf,efd->gecd', jax.nn.gelu(gate) * up, p['wo'])[0].sum(0)


def experts_behind_the_batch(p, x):
  """MaxText's of a fixed capacity."""
  x = jnp.broadcast_to(x.reshape(4, 1, -1, D), (4, 2, x.shape[0] // 4, D))
  gate, up = (jnp.einsum('becd,edf->becf', x, p[name]) for name in ('gate', 'up'))
  return jnp.einsum('becf,efd->becd', jax.nn.silu(gate) * up, p['wo']).sum(1).reshape(-1, D)


def named(p, x):
  """MaxText's fused kernel under a policy of `jax.checkpoint`; tokens are divided and joined again."""
  z = checkpoint_name(jax.lax.dot_general(x.reshape(2, -1, D), p['wi'], (((2,), (0,)), ((), ()))), 'mlpwi')
  z = z.reshape(-1, 2, H)
  return (jax.nn.silu(z[:, 0]) * checkpoint_name(z[:, 1], 'up')) @ p['wo']


def tokens_transposed(p, x):
  """The matmul that ends the block has batch and time in the other order."""
  h = jax.nn.gelu((x.reshape(2, -1, D) @ p['up']).swapaxes(0, 1))
  return (h @ p['wo']).swapaxes(0, 1).reshape(-1, D)


def on_the_left(p, x):
  return (p['wo'].T @ jax.nn.silu(p['up'].T @ x.T)).T


PAIR = {'wi': (D, 2 * H), 'wo': (H, D)}
CASES = {
  'tokens_transposed': (tokens_transposed, {'up': (D, H), 'wo': (H, D)}, ('gelu', 'up')),
  'gating_einsum': (gating_einsum, {'wi': (2, H, D), 'wo': (H, D)}, ('gelu', 'gate_up')),
  'each_token': (each_token, {'gate': (H, D), 'up': (H, D), 'wo': (D, H)}, ('silu', 'up')),
  'split': (split, {**PAIR, 'bias': (2 * H,)}, ('silu', 'gate_up')),
  'columns': (columns, PAIR, ('gelu', 'up_gate')),
  'scanned': (scanned, {'wi': (D, 2, 2, H), 'wo': (H, 2, D)}, ('silu', 'gate_up')),
  'experts': (experts, {'wi': (2, D, 2 * H), 'wo': (2, H, D)}, ('silu', 'gate_up')),
  'gemma_experts': (gemma_experts, {'wi': (2, 2, H, D), 'wo': (2, H, D)}, ('gelu', 'gate_up')),
  'behind_the_batch': (
    experts_behind_the_batch, {'gate': (2, D, H), 'up': (2, D, H), 'wo': (2, H, D)}, ('silu', 'up'),
  ),
  'named': (named, {'wi': (D, 2, H), 'wo': (H, D)}, ('silu', 'gate_up')),
  'on_the_left': (on_the_left, {'up': (D, H), 'wo': (H, D)}, ('silu', 'up')),
}
RECIPE = s24.Recipe(
  'packed',
  (s24.Rule('(?!bias).*', s24.DotPolicy(s24.transposable(), 'sparse', 'mvue', implementation='dense')),),
)  # fmt: skip


def arguments(shapes, dtype):
  x, *weights = (jnp.asarray(np.random.default_rng(i).normal(size=s) / 4, dtype) for i, s in enumerate(
    [(8, D), *shapes.values()]))
  return dict(zip(shapes, weights, strict=True)), x


class PairsTest(parameterized.TestCase):

  @parameterized.parameters(*CASES)
  def test_is_found(self, name):
    f, shapes, (activation, role) = CASES[name]
    bound = s24.bind(RECIPE, f, *arguments(shapes, jnp.bfloat16))
    (first,) = bound[next(name for name in ('wi', 'up') if name in shapes)].uses
    self.assertEqual((first.block, first.role, bound['wo'].uses[0].role), (activation, role, 'down'))

  @parameterized.parameters(*CASES)
  @pytest.mark.few
  def test_is_one_op_with_the_numbers_of_the_projected_weights(self, name):
    """Packed once, and halved. Where two of four tokens have a gradient samples are exact."""
    f, shapes, _ = CASES[name]
    params, x = arguments(shapes, jnp.bfloat16)
    weights = np.tile(np.float32([1, 0, 0, 1]), 2)[:, None]

    def loss(params, x):
      return jnp.sum(weights * jnp.sin(1 + f(params, x).astype(jnp.float32)))

    bound = s24.bind(RECIPE, loss, params, x)
    states = s24.sparse_variables(params, None, bound)
    self.assertTrue(all(weight.packs for weight in bound.weights))
    sparse = s24.sparsify(loss, bound)
    with mock.patch.object(transform, 'ffn_at', side_effect=transform.ffn_at) as fused:
      found = jax.jit(jax.value_and_grad(lambda p: sparse(p, states, jax.random.key(0), x)))(params)
    fused.assert_called()
    expected = jax.jit(jax.value_and_grad(loss))(s24.project(params, None, bound), x)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
      error = np.linalg.norm(np.asarray(a, np.float32) - np.asarray(b, np.float32))
      self.assertLess(error, 0.02 * np.linalg.norm(np.asarray(b, np.float32)) + 1e-6)

  def test_a_split_that_is_no_block_stays_one(self):
    """Queries, keys and values: three splits would have three transposes."""
    params, x = arguments({'qkv': (D, 3 * H)}, jnp.float32)

    def f(p, x):
      q, k, v = jnp.split(x @ p['qkv'], 3, axis=-1)
      return jax.nn.softmax(q @ k.T) @ v

    bound = s24.bind(s24.recipes.ste('.*'), f, params, x)
    sparse = s24.sparsify(f, bound)
    jaxpr = jax.make_jaxpr(lambda p, v: sparse(p, v, None, x))(params, s24.sparse_variables(params, None, bound))
    self.assertEqual(str(jaxpr).count('split['), 1)

  def test_where_no_kernel_runs_it_stays_one_matmul(self):
    f, shapes, _ = CASES['gating_einsum']
    params, x = arguments(shapes, jnp.float32)
    bound = s24.bind(s24.recipes.ste('.*'), f, params, x)
    sparse = s24.sparsify(f, bound)
    jaxpr = jax.make_jaxpr(lambda p, v: sparse(p, v, None, x))(params, s24.sparse_variables(params, None, bound))
    self.assertEqual(str(jaxpr).count('dot_general['), 2)


if __name__ == '__main__':
  absltest.main()
