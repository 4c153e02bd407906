"""What XLA makes of the feed-forward block for an H100: six sparse matmuls, nothing moved, each kernel once."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.extend
import jax.numpy as jnp
import pytest

import sparse24_jax as s24
from tests.sparse24_jax.hlo import calls, computations, moves, result, SPARSE, TRITON
from tests.sparse24_jax.hopper import compiled, D, HIDDEN, hopper, needs_plugins, POLICY, struct, TOKENS

FP8 = dataclasses.replace(POLICY, precision='fp8')


def kernels_of(jaxpr) -> list:
  """The inner jaxpr of each call of a kernel; two are one object where JAX lowers them once."""
  found = []
  for equation in jaxpr.eqns:
    if equation.params.get('name') in ('mosaic_kernel', 'triton_kernel'):
      found.append(equation.params['jaxpr'])
      continue
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      found += kernels_of(inner)
  return found


@needs_plugins
@pytest.mark.few
class BlockTest(parameterized.TestCase):

  # FP8 has the most passes; in 16 bits kernels run in the step of CheckStepOnHopperTest.
  @parameterized.parameters(
    ('gelu', False, FP8), ('gelu', False, POLICY), ('silu', True, FP8), ('silu', True, POLICY)
  )
  def test_six_sparse_matmuls_and_nothing_moved(self, activation, gated, policy):
    def step(x, weights, states, dy, key):
      def block(x, weights):
        return s24.ffn(
          x, weights['up'], weights['down'], states, policy=policy, activation=activation,
          w_gate=weights.get('gate'), key=jax.random.wrap_key_data(key),
        )  # fmt: skip

      y, vjp = jax.vjp(block, x, weights)
      return y, vjp(dy)

    weights = {'up': struct(D, HIDDEN), 'down': struct(HIDDEN, D)} | ({'gate': struct(D, HIDDEN)} if gated else {})
    states = {role: struct(*w.shape, dtype=jnp.bool_) for role, w in weights.items()}
    hlo = compiled(step, struct(TOKENS, D), weights, states, struct(TOKENS, D), struct(2, dtype=jnp.uint32))
    entry = computations(hlo)['ENTRY']
    sparse = calls(entry, SPARSE)
    self.assertLen(sparse, 6)
    # The results of the six: forward, input gradient and weight gradient of either map, gate and up being one.
    width = HIDDEN * (2 if gated else 1)
    expected = [(TOKENS, width), (TOKENS, D), (TOKENS, HIDDEN), (TOKENS, D), (D, width), (HIDDEN, D)]
    found = [result(line)[1] for line in sparse]
    self.assertCountEqual(found, expected)
    # Packs of the weights, the sample of dy, and the pass that makes dz and its sample; in FP8 x and h, rounded.
    self.assertLen(calls(entry, TRITON), (5 if gated else 4) + (2 if policy is FP8 else 0))
    self.assertEmpty(moves(entry))
    self.assertNotRegex(hlo, r'__cublas|dot\(')

  def test_layers_call_the_same_kernels(self):
    """However many layers, recomputed or not, a program has each kernel once to lower and to compile."""
    def step(layers, x, weights, states):
      block = jax.checkpoint(lambda x: s24.ffn(x, *weights, states, policy=POLICY, key=jax.random.key(0)))

      def loss(x):
        for _ in range(layers):
          x = block(x)
        return jnp.sum(x.astype(jnp.float32))

      return jax.grad(loss)(x)

    weights = struct(D, HIDDEN), struct(HIDDEN, D)
    states = {role: struct(*w.shape, dtype=jnp.bool_) for role, w in zip(('up', 'down'), weights, strict=True)}
    with hopper():
      one, three = (
        kernels_of(jax.make_jaxpr(functools.partial(step, layers))(struct(TOKENS, D), weights, states).jaxpr)
        for layers in (1, 3)
      )
    self.assertGreaterEqual(len(one), 10)
    self.assertLen(three, 3 * len(one))
    self.assertEqual(set(map(id, three)), set(map(id, one)))

  def test_traces_inside_shard_map(self):
    """Kernels do not say that their results vary over the mesh; a gradient must."""
    plain, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec('d')

    def loss(weights, x, states):
      key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index('d'))
      y = s24.ffn(x, weights['up'], weights['down'], states, policy=POLICY, key=key)
      y = s24.dot(y, weights['up'], states['up'], policy=POLICY, key=key)
      return jax.lax.psum(jnp.sum(y.astype(jnp.float32)), 'd')

    gradient = jax.shard_map(
      jax.grad(loss, argnums=(0, 1)), mesh=jax.sharding.Mesh(jax.devices(), ('d',)),
      in_specs=(plain, split, plain), out_specs=(plain, split),
    )  # fmt: skip
    weights = {'up': struct(D, HIDDEN), 'down': struct(HIDDEN, D)}
    states = {role: struct(*w.shape, dtype=jnp.bool_) for role, w in weights.items()}
    x = struct(8 * TOKENS, D)
    with hopper():
      found = jax.eval_shape(gradient, weights, x, states)
    self.assertEqual(jax.tree.map(lambda a: a.shape, found), jax.tree.map(lambda a: a.shape, (weights, x)))


if __name__ == '__main__':
  absltest.main()
