"""Functions of parameters that read a weight in every way that a model may, for the tests of the trace."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24


class Case(NamedTuple):
  """A function f(params, x), the shapes of its parameters and of x, and the layout of each weight as text."""

  f: Callable[..., Any]
  shapes: dict
  x: tuple
  layouts: dict


def relu_mlp(p, x):
  return jax.nn.relu(x @ p['up']) @ p['down']


def _scan_over(axis):
  def f(p, x):
    layers = jax.tree.map(lambda w: jnp.moveaxis(w, axis, 0), p)
    return jax.lax.scan(lambda x, p: (x + relu_mlp(p, x), None), x, layers)[0]

  return f


def _loop_by_index(p, x):
  return jax.lax.fori_loop(0, 3, lambda i, x: x + relu_mlp(jax.tree.map(lambda w: w[i], p), x), x)


def _fused_qkv(p, x):
  q, k, v = jnp.split(x @ p['qkv'], 3, axis=-1)
  return q * k + v


def _parts_of_the_weight(p, x):
  q, k, v = jnp.split(p['qkv'], 3, axis=1)
  return (x @ q) * (x @ k) + x @ v


def _gate_and_up(p, x):
  return (jax.nn.silu(x @ p['wi'][:, 0]) * (x @ p['wi'][:, 1])) @ p['wo']


def _experts(p, x):
  return jnp.einsum('etd,edf->etf', x, p['w'])


def _experts_behind(p, x):
  return jnp.einsum('etd,dfe->etf', x, p['w'])


def _ragged(p, x):
  sizes = jnp.array([3, 0, 5])
  h = jax.nn.relu(jax.lax.ragged_dot(x, p['up'], sizes))
  return jax.lax.ragged_dot(h, jnp.swapaxes(p['down'], 1, 2), sizes)


def _ragged_in_layers(p, x):
  sizes = jnp.array([4, 4])
  return jax.lax.scan(lambda x, w: (x + jax.lax.ragged_dot(x, w.astype(x.dtype), sizes), None), x, p['w'])[0]


def _in_chunks(p, x):
  """A hidden layer of four chunks, one after another, as memory is saved."""
  up, down = p['up'].reshape(16, 4, 8), p['down'].reshape(4, 8, 16)
  scanned = jax.lax.scan(lambda y, w: (y + jnp.tanh(x @ w[0]) @ w[1], None), x, (up.swapaxes(0, 1), down))[0]
  return jax.lax.fori_loop(0, 4, lambda i, y: y + jnp.tanh(x @ up[:, i]) @ down[i], scanned)


def _attention(p, x):
  q = jnp.einsum('td,dhk->thk', x, p['query'])
  return jnp.einsum('thk,hkd->td', jax.nn.relu(q), p['out'])


def _read_inside_and_outside(p, x):
  z = x @ p['w']
  _, ys = jax.lax.scan(lambda carry, _: (carry + z, carry @ p['w']), z, None, length=2)
  return jax.lax.cond(x.sum() > 0, lambda: z, lambda: 2 * z) + ys.sum(0)


def _branches(p, x):
  return jax.lax.cond(x.sum() > 0, lambda w, x: x @ w, lambda w, x: -x @ w, p['w'], x)


def _jitted(p, x):
  return jax.jit(lambda w, x: x @ w.astype(x.dtype))(p['w'], x)


def _handed_on(p, x):
  def body(carry, _):
    w, x = carry
    return (w, x @ w), None

  return jax.lax.scan(body, (p['w'], x), None, length=2)[0][1]


def _until(p, x):
  return jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] @ p['w']), (0, x))[1]


def _reshaped(p, x):
  w = p['w'].reshape(16, 2, 4)
  return jnp.einsum('td,dhk->thk', x, w).reshape(x.shape[0], -1)


def _twice(p, x):
  return (x @ p['w']) @ p['w']


def _remat(p, x):
  p, x = jax.lax.optimization_barrier((jax.device_put(p), x))
  return jax.checkpoint(relu_mlp, policy=jax.checkpoint_policies.dots_saveable)(p, x)


def _each_token(p, x):
  """Layers for one token, `w @ x`, under vmap, as Equinox has them."""
  def layer(w, x):
    return w @ x + (jnp.arange(w.shape[0]) / 10).astype(w.dtype)

  return jax.vmap(lambda x: layer(p['down'], jax.nn.relu(layer(p['up'], x))))(x)


def _scaled(p, x):
  """Weights times a number, along outputs, along inputs, and along one of two axes of outputs."""
  h = x @ (p['number'] / 3) + x @ (-p['outputs'] * x[:1]) + x @ (x[1:2] * p['inputs']).T
  heads = jnp.einsum('td,dhk->thk', h, p['heads'] * x[2:3, :2, None])
  return h + heads.reshape(h.shape)


def _scaled_experts(p, x):
  return jnp.einsum('etd,edf->etf', x, p['w'] * x[:, :1, :1])


def _scaled_before_a_scan(p, x):
  return jax.checkpoint(_scan_over(0))(jax.lax.optimization_barrier(jax.tree.map(lambda w: 0.7 * w, p)), x)


MLP, STACKED = {'up': (16, 32), 'down': (32, 16)}, {'up': (3, 16, 32), 'down': (3, 32, 16)}
IN_OUT = 'in 0, out 1'
CASES = {
  'plain': Case(relu_mlp, MLP, (8, 16), dict.fromkeys(MLP, IN_OUT)),
  'remat': Case(_remat, MLP, (8, 16), dict.fromkeys(MLP, IN_OUT)),
  'scan': Case(_scan_over(0), STACKED, (8, 16), dict.fromkeys(MLP, 'stacked 0, in 1, out 2')),
  'scan_over_axis_1': Case(
    _scan_over(1), {'up': (16, 3, 32), 'down': (32, 3, 16)}, (8, 16), dict.fromkeys(MLP, 'stacked 1, in 0, out 2')
  ),
  'scan_over_the_last_axis': Case(
    _scan_over(2), {'up': (16, 32, 3), 'down': (32, 16, 3)}, (8, 16), dict.fromkeys(MLP, 'stacked 2, in 0, out 1')
  ),
  'loop_by_index': Case(_loop_by_index, STACKED, (8, 16), dict.fromkeys(MLP, 'stacked 0, in 1, out 2')),
  'in_chunks': Case(_in_chunks, MLP, (8, 16), dict.fromkeys(MLP, IN_OUT)),
  'out_in': Case(lambda p, x: x @ p['w'].T, {'w': (8, 16)}, (4, 16), {'w': 'in 1, out 0'}),
  'weight_on_the_left': Case(lambda p, x: p['w'] @ x, {'w': (8, 16)}, (16, 4), {'w': 'in 1, out 0'}),
  'fused_qkv': Case(_fused_qkv, {'qkv': (16, 24)}, (4, 16), {'qkv': IN_OUT}),
  'parts_of_the_weight': Case(_parts_of_the_weight, {'qkv': (16, 24)}, (4, 16), {'qkv': IN_OUT}),
  'gate_and_up_in_one': Case(
    _gate_and_up, {'wi': (16, 2, 32), 'wo': (32, 16)}, (8, 16), {'wi': 'stacked 1, in 0, out 2', 'wo': IN_OUT}
  ),
  'each_token': Case(
    _each_token, {'up': (32, 16), 'down': (16, 32)}, (8, 16), {'up': 'in 1, out 0', 'down': 'in 1, out 0'}
  ),
  'experts': Case(_experts, {'w': (3, 16, 8)}, (3, 4, 16), {'w': 'stacked 0, in 1, out 2'}),
  'experts_behind': Case(_experts_behind, {'w': (16, 8, 3)}, (3, 4, 16), {'w': 'stacked 2, in 0, out 1'}),
  'ragged': Case(
    _ragged, {'up': (3, 16, 32), 'down': (3, 8, 32)}, (8, 16),
    {'up': 'stacked 0, in 1, out 2', 'down': 'stacked 0, in 2, out 1'},
  ),
  'ragged_in_layers': Case(_ragged_in_layers, {'w': (3, 2, 16, 16)}, (8, 16), {'w': 'stacked 0 1, in 2, out 3'}),
  'attention': Case(
    _attention, {'query': (16, 2, 8), 'out': (2, 8, 16)}, (4, 16), {'query': 'in 0, out 1 2', 'out': 'in 0 1, out 2'}
  ),
  'inside_and_outside': Case(_read_inside_and_outside, {'w': (16, 16)}, (4, 16), {'w': IN_OUT}),
  'branches': Case(_branches, {'w': (16, 8)}, (4, 16), {'w': IN_OUT}),
  'jit': Case(_jitted, {'w': (16, 8)}, (4, 16), {'w': IN_OUT}),
  'handed_on_by_a_scan': Case(_handed_on, {'w': (16, 16)}, (4, 16), {'w': IN_OUT}),
  'while': Case(_until, {'w': (16, 16)}, (4, 16), {'w': IN_OUT}),
  'reshaped': Case(_reshaped, {'w': (16, 8)}, (4, 16), {'w': IN_OUT}),
  'scaled': Case(
    _scaled, {'number': (16, 16), 'outputs': (16, 16), 'inputs': (16, 16), 'heads': (16, 2, 8)}, (4, 16),
    {'number': IN_OUT, 'outputs': IN_OUT, 'inputs': 'in 1, out 0', 'heads': 'in 0, out 1 2'},
  ),
  'scaled_experts': Case(_scaled_experts, {'w': (3, 16, 8)}, (3, 4, 16), {'w': 'stacked 0, in 1, out 2'}),
  'scaled_before_a_scan': Case(
    _scaled_before_a_scan, STACKED, (8, 16), dict.fromkeys(MLP, 'stacked 0, in 1, out 2')
  ),
  'twice': Case(_twice, {'w': (16, 16)}, (4, 16), {'w': IN_OUT}),
  'vmap_inside': Case(
    lambda p, x: jax.vmap(lambda w, x: x @ w, in_axes=(2, 0))(p['w'], x), {'w': (16, 8, 3)}, (3, 4, 16),
    {'w': 'stacked 2, in 0, out 1'},
  ),
}  # fmt: skip


def arguments(name):
  """Parameters and x of a case."""
  case, rng = CASES[name], np.random.default_rng(0)

  def draw(shape):
    return rng.normal(size=shape).astype(np.float32)

  return {key: jnp.asarray(draw(shape) / 3) for key, shape in case.shapes.items()}, jnp.asarray(draw(case.x))


def shape(*sizes):
  """Of an array in float32."""
  return jax.ShapeDtypeStruct(sizes, jnp.float32)


def traces(bound, f, params, x):
  """That the sparse function and its gradient can be traced; nothing is compiled."""

  def loss(params, x):
    found = s24.sparsify(f, bound)(params, s24.sparse_variables(params, None, bound), None, x)
    return sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(found))

  jax.eval_shape(jax.grad(loss), params, x)
