"""What XLA makes of a training step for an H100: compiled without one, read from the optimised HLO.

Runs where the CUDA plug-in wheels are, in the kernels' environment.
"""

import functools
import re
from unittest import mock

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax import numerics
from tests.sparse24_jax.hlo import calls, computations, moves, reached, result, result_bytes, SPARSE, TRITON
from tests.sparse24_jax.hopper import BF16, compiled, D, HIDDEN, hopper, needs_plugins, POLICY, struct, TOKENS


class Block(nn.Module):
  """A layer of a small model, with the hidden part as one module or as two Dense layers."""

  one: bool

  @nn.compact
  def __call__(self, x, _):
    if self.one:
      mlp = s24.linen.Sparse24MLP(HIDDEN, dtype=BF16, name='mlp')
      return x + mlp(x), None
    h = nn.gelu(nn.Dense(HIDDEN, use_bias=False, dtype=BF16, name='up')(x))
    return x + nn.Dense(D, use_bias=False, dtype=BF16, name='down')(h), None


class Model(nn.Module):
  one: bool

  @nn.compact
  def __call__(self, x):
    axes, rngs = {'params': 0, 'sparse24': 0}, {'params': True, 'mvue': True}
    return nn.scan(nn.remat(Block), axes, split_rngs=rngs, length=2)(self.one, name='h')(x, None)[0]


def both(z):
  return z[..., 0, :], z[..., 1, :]


def swiglu(gate, up, down):
  return (jax.nn.silu(gate) * up) @ down


@needs_plugins
@pytest.mark.few
class TrainingStepTest(parameterized.TestCase):

  @parameterized.named_parameters(('module', True), ('dense_layers', False))
  @pytest.mark.slow
  def test_weights_are_packed_once_for_all_micro_batches(self, one):
    model = Model(one)
    recipe = s24.Recipe('r', (s24.Rule('h/.*kernel', POLICY),), refresh_every=40)
    tx = s24.sparse_training(optax.sgd(0.1), recipe)
    x = struct(TOKENS, D)
    params = jax.eval_shape(model.init, jax.random.key(0), x)['params']
    # The step reads the state and does not refresh it: the search for masks is compiled elsewhere.
    opt_state = jax.eval_shape(tx.init, params)
    sparse = s24.sparsify(model, recipe)

    def accumulated(params, opt_state, batches, key):
      states = s24.sparse_variables(params, opt_state, recipe)

      def micro(total, given):
        x, i = given
        rngs = {'mvue': jax.random.fold_in(jax.random.wrap_key_data(key), i)}

        def loss(params):
          y = sparse.apply({'params': params, 'sparse24': states}, x, rngs=rngs)
          return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.tree.map(jnp.add, total, jax.grad(loss)(params)), None

      zeros = jax.tree.map(jnp.zeros_like, params)
      return jax.lax.scan(micro, zeros, (batches, jnp.arange(4)))[0]

    hlo = compiled(accumulated, params, opt_state, struct(4, TOKENS, D), struct(2, dtype=jnp.uint32))
    outside = computations(hlo)['ENTRY']
    packs = calls(outside, TRITON)
    # Both operands of either map, for both layers at once: values [layers, rows, kept] on the way.
    self.assertLen(packs, 2)
    self.assertEmpty(calls(outside, SPARSE))
    loops = [name for line in outside for name in re.findall(r'body=%([\w.\-]+)', line)]
    inside = [line for name in loops for line in reached(hlo, name)]
    # Forward; forward again for remat; two gradients of either map. The layers are a loop.
    shapes = [result(line)[1] for line in calls(inside, SPARSE)]
    for shape in ((D, HIDDEN), (HIDDEN, D)):  # weight gradients
      self.assertEqual(shapes.count(shape), 1)
    self.assertGreaterEqual(shapes.count((TOKENS, HIDDEN)), 3)  # z twice, dh
    self.assertGreaterEqual(shapes.count((TOKENS, D)), 2)  # y, dx
    if one:  # a forward that is recomputed keeps no z
      z_and_h = [line for line in calls(inside, SPARSE) if line.count(f'bf16[{TOKENS},{HIDDEN}]') == 2]
      self.assertLen(z_and_h, 1)
    # Samples of both gradients and no packing of weights.
    self.assertLen(calls(inside, TRITON), 2)

  @parameterized.named_parameters(
    ('split', lambda p, x: swiglu(*jnp.split(x @ p['wi'], 2, axis=-1), p['wo']), {'wi': (D, 2 * HIDDEN)}),
    ('gating_einsum', lambda p, x: swiglu(*both(jnp.einsum('td,nhd->tnh', x, p['wi'])), p['wo']),
     {'wi': (2, HIDDEN, D)}),
    ('each_token', lambda p, x: jax.vmap(lambda x: p['wo'].T @ (jax.nn.silu(p['gate'] @ x) * (p['up'] @ x)))(x),
     {'gate': (HIDDEN, D), 'up': (HIDDEN, D)}),
  )  # fmt: skip
  @pytest.mark.slow
  def test_gate_and_up_as_models_write_them_are_the_fused_op(self, f, shapes):
    """The same kernels on the same sizes as `ffn` itself. Gate and up in one weight are never put together or apart."""
    shapes = {name: struct(*shape) for name, shape in {**shapes, 'wo': (HIDDEN, D)}.items()}

    def loss(params, x):
      return jnp.sum(jnp.square(f(params, x).astype(jnp.float32)))

    bound = s24.bind(s24.Recipe('r', (s24.Rule('.*', POLICY),)), loss, shapes, struct(TOKENS, D))
    sparse = s24.sparsify(loss, bound)

    def by_trace(params, masks, x, key):
      state = s24.sparse_training(optax.sgd(0.1), bound).init(params)._replace(projections=masks)
      return jax.grad(sparse)(params, s24.sparse_variables(params, state, bound), jax.random.wrap_key_data(key), x)

    def by_op(params, masks, x, key):
      def loss(params):
        y = s24.ffn(
          x, params['up'], params['down'], masks, policy=POLICY, activation='silu', w_gate=params['gate'],
          key=jax.random.wrap_key_data(key),
        )  # fmt: skip
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

      return jax.grad(loss)(params)

    kernels = []
    weights = {'gate': struct(D, HIDDEN), 'up': struct(D, HIDDEN), 'down': struct(HIDDEN, D)}
    for step, params in ((by_trace, shapes), (by_op, weights)):
      masks = jax.tree.map(lambda w: struct(*w.shape, dtype=bool), params)
      hlo = compiled(step, params, masks, struct(TOKENS, D), struct(2, dtype=jnp.uint32))
      kernels.append(sorted(result(line) for line in calls(hlo.splitlines(), SPARSE)))
      if 'wi' in params:
        self.assertEmpty(re.findall(r'%wrapped_(?:slice|concatenate)\S* =', hlo))
    self.assertEqual(*kernels)
    self.assertLen(kernels[0], 5)  # no gradient of x

  @parameterized.named_parameters(
    # Two weights, both ways, as one call each; or three, and gate and up are one matmul. S-STE's input gradients are
    # dense.
    ('gelu', False, s24.Recipe('r', (s24.Rule('h/.*kernel', POLICY),)), 6, 2),
    ('swiglu_fp8', True, s24.recipes.s_ste('h/.*', fp8=True), 4, 3),
    ('swiglu_fst_fp8', True, s24.recipes.transposable_srste('h/.*', masked_decay=1e-4, fp8=True), 6, 3),
  )
  @pytest.mark.slow
  def test_no_matmul_runs_twice_where_residuals_are_stacked(self, gated, recipe, matmuls, packs):
    class Layer(nn.Module):
      @nn.compact
      def __call__(self, x, _):
        activation = 'silu' if gated else 'gelu'
        return x + s24.linen.Sparse24MLP(HIDDEN, dtype=BF16, gated=gated, activation=activation, name='mlp')(x), None

    class Layers(nn.Module):
      @nn.compact
      def __call__(self, x):
        axes, rngs = {'params': 0, 'sparse24': 0}, {'params': True, 'mvue': True}
        return nn.scan(Layer, axes, split_rngs=rngs, length=2)(name='h')(x, None)[0]

    model, x = Layers(), struct(TOKENS, D)
    params = jax.eval_shape(model.init, jax.random.key(0), x)['params']
    opt_state = jax.eval_shape(s24.sparse_training(optax.sgd(0.1), recipe).init, params)
    sparse = s24.sparsify(model, recipe)

    def gradient(params, opt_state, x, key):
      states = s24.sparse_variables(params, opt_state, recipe)

      def loss(params):
        rngs = {'mvue': jax.random.wrap_key_data(key)}
        y = sparse.apply({'params': params, 'sparse24': states}, x, rngs=rngs)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

      return jax.grad(loss)(params)

    hlo = compiled(gradient, params, opt_state, x, struct(2, dtype=jnp.uint32))
    self.assertLen(calls(hlo.splitlines(), SPARSE), matmuls)
    self.assertLen(calls(computations(hlo)['ENTRY'], TRITON), packs)

  @parameterized.parameters(
    s24.recipes.transposable_srste('.*', masked_decay=1e-4, refresh_every=40), s24.recipes.s_ste('.*')
  )
  @pytest.mark.slow
  def test_a_step_without_a_search_neither_copies_nor_keeps_weights(self, recipe):
    tx = s24.sparse_training(optax.adam(1e-3), recipe)
    w = struct(D, HIDDEN, dtype=jnp.float32)
    opt_state = jax.eval_shape(tx.init, {'w': w})

    def step(params, opt_state, grads):
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    with mock.patch.object(jax, 'jit', functools.partial(jax.jit, donate_argnums=(0, 1))):
      hlo = compiled(step, {'w': w}, opt_state, {'w': w})
    entry = computations(hlo)['ENTRY']
    self.assertEmpty(moves(entry))
    # Weight and two moments; an update beside them would be a fourth.
    written = [line for line in entry if re.search(r' fusion\(', line) and result_bytes(line) == 4 * D * HIDDEN]
    self.assertLen(written, 1)
    self.assertLen(re.findall(rf'f32\[{D},{HIDDEN}\]', written[0].split(' fusion(')[0]), 3)

  @pytest.mark.slow
  def test_a_step_that_moves_no_link_copies_nothing(self):
    tx = s24.sparse_training(optax.adam(1e-3), s24.recipes.rigl('.*', total_steps=1000, density=0.2))
    w = struct(D, HIDDEN, dtype=jnp.float32)

    def step(params, opt_state, grads):
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    with mock.patch.object(jax, 'jit', functools.partial(jax.jit, donate_argnums=(0, 1))):
      hlo = compiled(step, {'w': w}, jax.eval_shape(tx.init, {'w': w}), {'w': w})
    self.assertEmpty(moves(computations(hlo)['ENTRY']))

  @parameterized.parameters('float8_e4m3fn', 'float8_e5m2')
  def test_the_simulation_of_fp8_rounds(self, to):
    """XLA drops a cast to fewer bits and back on GPUs."""
    hlo = compiled(functools.partial(numerics.round_to_fp8, to=to), struct(TOKENS, D))
    self.assertIn('round-nearest-even', hlo)

  @pytest.mark.slow
  def test_an_input_of_three_projections_is_rounded_once(self):
    """Both ways at once: the forward of attention's q, k and v reads it, and their three weight gradients."""
    recipe = s24.recipes.transposable_srste('.*', masked_decay=1e-4, fp8=True)
    params = {name: struct(D, HIDDEN) for name in 'qkv'}

    def gradients(params, state, x):
      def loss(params, x):
        x = jnp.tanh(x)
        return sum(jnp.square(x @ w).astype(jnp.float32).sum() for w in params.values())

      variables = s24.sparse_variables(params, state, recipe)
      return jax.grad(s24.sparsify(loss, recipe))(params, variables, jax.random.key(0), x)

    with hopper():
      state = jax.eval_shape(s24.sparse_training(optax.sgd(0.1), recipe).init, params)
    hlo = compiled(gradients, params, state, struct(TOKENS, D)).splitlines()
    self.assertLen(calls(hlo, SPARSE), 6)
    self.assertLen([line for line in calls(hlo, TRITON) if result(line) == ('f8e4m3fn', (TOKENS, D))], 1)

  @pytest.mark.slow
  def test_dense_layers_in_fp8_are_rounded_both_ways_at_once(self):
    """Weights too: XLA would round each transposed, and transpose it back for the input gradient."""
    policy = s24.DotPolicy(precision='fp8')

    def loss(x, w):
      z = s24.dot(s24.dot(x, w['up'], policy=policy), w['down'], policy=policy)
      return jnp.square(z.astype(jnp.float32)).sum()

    hlo = compiled(jax.grad(loss, (0, 1)), struct(TOKENS, D), {'up': struct(D, HIDDEN), 'down': struct(HIDDEN, D)})
    self.assertLen(calls(hlo.splitlines(), TRITON), 6)  # of x, h, both weights and both output gradients
    self.assertEmpty(re.findall(r'= f8\w+\[[\d,]*\]\S* (?:transpose|copy|fusion)\(', hlo))

  @parameterized.parameters(('e4m3', False, 5, 0), (False, True, 4, 1), (True, True, 4, 1))
  @pytest.mark.slow
  def test_a_block_with_gradients_in_e4m3_and_one_whose_last_gradient_is_exact(self, fp8, exact, sparse, dense):
    """The block stays fused: one pass makes dz and its sample, and the matmul of the exact gradient alone is dense."""
    recipe = s24.recipes.transposable_srste('.*', masked_decay=1e-4, fp8=fp8)
    recipe = recipe.with_exact_gradients('down') if exact else recipe
    params = {'up': struct(D, HIDDEN), 'down': struct(HIDDEN, D)}

    def loss(params, x):
      return jnp.square(jax.nn.gelu(x @ params['up']) @ params['down']).astype(jnp.float32).sum()

    def gradients(params, state, x):
      variables = s24.sparse_variables(params, state, bound)
      return jax.grad(s24.sparsify(loss, bound))(params, variables, jax.random.key(0), x)

    bound = s24.bind(recipe, loss, params, struct(TOKENS, D))
    with hopper():
      state = jax.eval_shape(s24.sparse_training(optax.sgd(0.1), bound).init, params)
    hlo = compiled(gradients, params, state, struct(TOKENS, D))
    found = len(calls(hlo.splitlines(), SPARSE)), len(re.findall(r' dot\(|__cublas', hlo))
    self.assertEqual(found, (sparse, dense))
    self.assertEqual('f8e5m2' in hlo, fp8 is True)


@needs_plugins
class CheckStepOnHopperTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_kernels_in_a_step_are_sparse_matmuls(self, fp8):
    """Packed once a step, read by the fused block of a scanned layer, forward and backward."""
    recipe = s24.recipes.s_ste('.*', fp8=True) if fp8 else s24.recipes.transposable_srste('.*', masked_decay=1e-4)
    tx = s24.sparse_training(optax.sgd(0.1), recipe)

    def loss(params, x):
      layer = jax.checkpoint(lambda x, w: (x + jax.nn.gelu(x @ w['up']) @ w['down'], None))
      return jax.lax.scan(layer, x, params)[0].astype(jnp.float32).sum()

    def step(params, state, x, sparse):
      if sparse:
        variables = s24.sparse_variables(params, state, recipe)
        self.assertIsInstance(variables['up'], s24.PackedWeight)
        grads = jax.grad(s24.sparsify(loss, recipe))(params, variables, jax.random.key(0), x)
      else:
        grads = jax.grad(loss)(params, x)
      return tx.update(grads, state, params)

    with hopper():
      params = {'up': struct(2, D, HIDDEN), 'down': struct(2, HIDDEN, D)}
      given = params, jax.eval_shape(tx.init, params), struct(TOKENS, D)
      found = s24.check_step(step, *given, sparse=True)
      self.assertEqual((set(found.weights), found.fp8), ({'up', 'down'}, {'up', 'down'} if fp8 else set()))
      with self.assertRaisesRegex(ValueError, 'down: the step reads it dense at'):
        s24.check_step(step, *given, sparse=False)

  def test_kernels_of_fst_in_fp8_in_both_phases(self):
    recipe = s24.recipes.transposable_srste('.*', masked_decay=1e-4, fp8=True)

    def loss(params, x):
      return jnp.square(jax.nn.gelu(x @ params['up']) @ params['down']).astype(jnp.float32).sum()

    def step(params, state, x, phase):
      variables = s24.sparse_variables(params, state, recipe, phase=phase)
      grads = jax.grad(s24.sparsify(loss, recipe, phase=phase))(params, variables, jax.random.key(0), x)
      return s24.sparse_training(optax.sgd(0.1), recipe, phase=phase).update(grads, state, params)

    with hopper():
      params = {'up': struct(D, HIDDEN), 'down': struct(HIDDEN, D)}
      state = jax.eval_shape(s24.sparse_training(optax.sgd(0.1), recipe, phase='sparse').init, params)
      for phase in s24.recipe.PHASES:
        found = s24.check_step(step, params, state, struct(TOKENS, D), phase=phase)
        self.assertEqual((found.phase, found.fp8), (phase, {'up', 'down'}))


if __name__ == '__main__':
  absltest.main()
