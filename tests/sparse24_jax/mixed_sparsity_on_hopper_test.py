"""What XLA makes of mixed sparsity training within transposable masks for an H100; compiled without one."""

import functools
import re
from unittest import mock

from absl.testing import absltest
from flax import linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import sparse24_jax as s24
from tests.sparse24_jax import hopper
from tests.sparse24_jax.hlo import calls, computations, moves, reached, result, SPARSE, TRITON

TOKENS, D, HIDDEN, BF16 = hopper.TOKENS, hopper.D, hopper.HIDDEN, hopper.BF16


def recipe_of():
  return s24.recipes.mixed_sparsity('.*', total_steps=10_000, structure='transposable', mvue_path='mlp/.*')


class Block(nn.Module):
  """A projection, whose weight gradient is exact, and a feed-forward layer, whose are sampled."""

  @nn.compact
  def __call__(self, x):
    x = x + nn.Dense(D, use_bias=False, dtype=BF16, name='attn')(x)
    return x + s24.linen.Sparse24MLP(HIDDEN, dtype=BF16, name='mlp')(x)


def compiled_step(gradient, params, *args):
  """A step whose links grow, its parameters and state donated."""
  recipe = s24.recipes.rigl('.*', density=0.2, total_steps=1000)
  tx = s24.sparse_training(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), recipe, phase='sparse')

  def step(params, opt_state, *args):
    updates, opt_state = tx.update(gradient(params, *args), opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  args = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=hopper.sharding()),
    (params, jax.eval_shape(tx.init, params), *args),
  )
  with hopper.hopper():
    return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()


@hopper.needs_plugins
class CompiledTest(absltest.TestCase):
  @pytest.mark.slow
  def test_matmuls_of_a_step(self):
    model, x, recipe = Block(), hopper.struct(TOKENS, D), recipe_of()
    params = jax.eval_shape(model.init, jax.random.key(0), x)['params']
    opt_state = jax.eval_shape(s24.sparse_training(optax.sgd(0.1), recipe, phase='sparse').init, params)
    sparse = s24.sparsify(model, recipe, phase='sparse')

    def gradient(params, opt_state, x, key):
      states = s24.sparse_variables(params, opt_state, recipe, phase='sparse')

      def loss(params, x):
        rngs = {'mvue': jax.random.wrap_key_data(key)}
        y = sparse.apply({'params': params, 'sparse24': states}, x, rngs=rngs)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

      return jax.grad(loss, argnums=(0, 1))(params, x)

    hlo = hopper.compiled(gradient, params, opt_state, x, hopper.struct(2, dtype=jnp.uint32))
    shapes = [result(line)[1] for line in calls(hlo.splitlines(), SPARSE)]
    fused = [(TOKENS, HIDDEN), (TOKENS, D), (TOKENS, HIDDEN), (TOKENS, D), (D, HIDDEN), (HIDDEN, D)]
    self.assertCountEqual(shapes, [*fused, (TOKENS, D), (TOKENS, D)])
    # Three weights packed once, both ways; the sample of dy, and that of dz in the pass that makes it.
    self.assertLen(calls(hlo.splitlines(), TRITON), 5)

  @pytest.mark.slow
  def test_a_step_that_moves_no_link_copies_no_weight(self):
    tx = s24.sparse_training(optax.adam(1e-3), recipe_of(), phase='sparse')
    params = {name: hopper.struct(D, HIDDEN, dtype=jnp.float32) for name in ('attn', 'mlp')}
    params = {name: {'kernel': w} for name, w in params.items()}

    def step(params, opt_state, grads):
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    with mock.patch.object(jax, 'jit', functools.partial(jax.jit, donate_argnums=(0, 1))):
      hlo = hopper.compiled(step, params, jax.eval_shape(tx.init, params), params)
    entry = computations(hlo)['ENTRY']
    self.assertEmpty(moves(entry))
    # The patterns are searched inside loops of one pass or none; another asks whether gradients are finite.
    self.assertEmpty(calls(entry, TRITON))
    bodies = {name for line in entry for name in re.findall(r'body=%([\w.\-]+)', line)}
    self.assertLen(bodies, 3)
    self.assertLen([body for body in bodies if calls(reached(hlo, body), TRITON)], 2)

  @pytest.mark.slow
  def test_a_search_holds_a_few_weights_at_a_time(self):
    """There are six equal weights: it holds the update of one, the weight after the step and what the search needs."""
    weights = {name: hopper.struct(D, HIDDEN, dtype=jnp.float32) for name in 'abcdef'}
    found = compiled_step(lambda _, grads: grads, weights, weights).memory_analysis()
    self.assertBetween(found.temp_size_in_bytes / (4 * D * HIDDEN), 1, 5)

  @pytest.mark.slow
  def test_a_backward_scan_shares_no_zeros(self):
    """With those of pruned gradients: XLA would make both at once, and keep the second until the scan is over."""

    def gradient(params, x):
      return jax.grad(lambda w: jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w['w'])[0]))(params)

    stack = {'w': hopper.struct(16, D, D, dtype=jnp.float32)}
    hlo = compiled_step(gradient, stack, hopper.struct(8, D, dtype=jnp.float32)).as_text()
    entry = '\n'.join(computations(hlo)['ENTRY'])
    made = re.findall(r'%[\w.]*broadcast[\w.]* = (.*?) fusion\(', entry)
    self.assertEqual(sum(types.count(f'f32[16,{D},{D}]') for types in made), 1)


if __name__ == '__main__':
  absltest.main()
