"""Functions made sparse by their trace, against the same functions on projected weights."""

import dataclasses
import functools
import re

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from tests.draws import gaussian
from tests.quick import jit
from tests.sparse24_jax.binding.functions import arguments, CASES

MVUE = s24.Recipe('mvue', (s24.Rule('.*', s24.DotPolicy(s24.soft_threshold_projection(), weight_grad='mvue')),))
RECIPES = {
  'ste': s24.recipes.ste('.*'),
  'transposable': s24.Recipe('t', (s24.Rule('.*', s24.DotPolicy(s24.transposable(), input_grad='sparse')),)),
  'soft_threshold': s24.Recipe('s', (s24.Rule('.*', s24.DotPolicy(s24.soft_threshold_projection())),)),
  # The path of kernels, packed operands included, on any device.
  'packed': s24.Recipe(
    'p', (s24.Rule('.*', s24.DotPolicy(s24.transposable(), input_grad='sparse', implementation='dense')),)
  ),
}

TIED = {
  'two': (lambda w, x: jnp.tanh(x @ w) @ w.T, (16, 32)),
  'block': (lambda w, x: jax.nn.gelu(x @ w) @ w.T, (16, 32)),
  'layers': (lambda w, x: jax.lax.scan(lambda x, w: (x + jax.nn.relu(x @ w) @ w.T, None), x, w)[0], (2, 16, 32)),
}
OTHER_TIED = {
  'heads': (lambda w, x: jnp.einsum('bhk,dhk->bd', jnp.tanh(jnp.einsum('bd,dhk->bhk', x, w)), w), (16, 4, 8)),
  'part': (lambda w, x: jnp.tanh(x @ w[:, 8:24]) @ w[:, 8:24].T, (16, 32)),
  'transposed_first': (lambda w, x: jnp.tanh(x @ w.T) @ w, (32, 16)),
}

LAYOUTS = ('scan', 'gate_and_up_in_one', 'attention')  # one of each kind


def at_start(bound, params):
  """(what the sparse function reads, projected weights) at the start of a run."""
  state = s24.sparse_training(optax.sgd(0.1), bound).init(params)
  return s24.sparse_variables(params, state, bound), s24.project(params, state, bound)


def prepare(bound, params):
  """`at_start`, by one program."""
  return jit(functools.partial(at_start, bound))(params)


def sparse_and_reference(recipe, name, dtype=jnp.float32, gradients=True):
  """(value, gradients) of a case by the transform, and of the function itself at its projected weights."""
  params, x = arguments(name)
  f = CASES[name].f

  def loss(params, x):
    y = f(jax.tree.map(lambda w: w.astype(dtype), params), x.astype(dtype))
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))

  bound = s24.bind(recipe, loss, params, x)
  sparse = s24.sparsify(loss, bound)
  differentiate = jax.value_and_grad if gradients and name != 'while' else lambda f: (lambda *args: (f(*args), None))

  @jit
  def both(params):
    variables, projected = at_start(bound, params)
    return differentiate(lambda p: sparse(p, variables, None, x))(params), projected

  found, projected = both(params)
  reference = jit(differentiate(loss))
  return found, reference(projected, x), reference(params, x)[0]


class TransformTest(parameterized.TestCase):

  @parameterized.parameters(
    *(name for name in CASES if name not in (*LAYOUTS, 'scan_over_the_last_axis')), 'scan_over_the_last_axis',
  )
  @pytest.mark.few(len(CASES) - len(LAYOUTS) - 1)  # another axis of a scan is fast
  def test_forward(self, name):
    """Alone takes half as long to compile; each case's gradient, which is that of the ops, is slow."""
    (found, _), (expected, _), dense = sparse_and_reference(RECIPES['ste'], name, gradients=False)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
    self.assertGreater(abs(float(found - dense)), 1e-3)

  @parameterized.parameters(
    *(('ste', name) for name in LAYOUTS), *(('soft_threshold', name) for name in LAYOUTS),
    *(('ste', name) for name in CASES if name not in (*LAYOUTS, 'while')),
  )
  @pytest.mark.few(len(LAYOUTS))
  def test_forward_and_straight_through_gradients(self, recipe, name):
    found, expected, dense = sparse_and_reference(RECIPES[recipe], name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)
    self.assertGreater(abs(float(found[0] - dense)), 1e-3)

  @parameterized.parameters(*LAYOUTS, *(name for name in CASES if name not in LAYOUTS))
  @pytest.mark.few
  def test_transposable_masks_and_packed_operands(self, name):
    if name in LAYOUTS[1:]:
      found, expected, _ = sparse_and_reference(RECIPES['transposable'], name)
      jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)
    # XLA on a CPU makes of a gradient that is summed or scaled in float32 a bfloat16 matmul that it then does not run.
    gradients = name not in ('twice', 'scaled')
    found, expected, _ = sparse_and_reference(RECIPES['packed'], name, jnp.bfloat16, gradients=gradients)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.05 * scale), found, expected)

  @parameterized.parameters(*TIED, 'heads', 'part', 'transposed_first')
  @pytest.mark.few
  def test_a_weight_and_its_transpose(self, name):
    """Transposable masks serve both, as one op or two, and their gradients add up."""
    f, shape = (TIED | OTHER_TIED)[name]

    def loss(params, x):
      return jnp.sum(jnp.sin(f(params['w'], x).astype(jnp.float32)))

    for recipe, dtype, tolerance in (('transposable', jnp.float32, 2e-4), ('packed', jnp.bfloat16, 0.05)):
      params, x = {'w': jnp.asarray((np.asarray(gaussian(0, shape)) / 4).astype(dtype))}, gaussian(1, (8, 16), dtype)
      bound = s24.bind(RECIPES[recipe], loss, params, x)
      self.assertFalse(bound['w'].packs)
      (variables, projected), sparse = prepare(bound, params), s24.sparsify(loss, bound)
      # XLA on a CPU makes of the sum of two gradients a bfloat16 matmul that it then does not run.
      differentiate = jax.value_and_grad if dtype == jnp.float32 else lambda f: f
      found = jax.tree.leaves(jit(differentiate(sparse))(params, variables, None, x))
      reference = jit(differentiate(loss))
      expected, dense = (jax.tree.leaves(reference(p, x)) for p in (projected, params))
      for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * float(np.abs(expected[-1]).max()))
      self.assertGreater(abs(float(found[0]) - float(dense[0])), 1e-3)

  def test_a_weight_and_its_transpose_in_a_dense_end_in_fp8(self):
    recipe = s24.recipes.transposable_srste('w', masked_decay=1e-3, fp8=True)
    params, x = {'w': gaussian(0, (16, 32)) / 4}, gaussian(1, (8, 16))
    bound = s24.bind(recipe, lambda p, x: TIED['two'][0](p['w'], x), params, x)
    found = s24.sparsify(lambda p, x: TIED['two'][0](p['w'], x), bound, phase='dense')(params, None, None, x)
    np.testing.assert_allclose(found, TIED['two'][0](params['w'], x), atol=0.25)  # of numbers up to 5

  @pytest.mark.slow
  def test_mean_of_sampled_gradients_of_a_weight_and_its_transpose(self):
    self.check_mean(
      s24.Recipe('fst', (s24.Rule('w', s24.DotPolicy(s24.transposable(), 'sparse', 'mvue')),)),
      lambda p, x: TIED['two'][0](p['w'], x), {'w': gaussian(0, (16, 32)) / 4}, gaussian(1, (8, 16)),
    )  # fmt: skip

  @pytest.mark.slow
  def test_mean_of_sampled_gradients(self):
    self.check_mean(MVUE, CASES['scan_over_axis_1'].f, *arguments('scan_over_axis_1'))

  def check_mean(self, recipe, f, params, x):
    bound = s24.bind(recipe, f, params, x)
    (variables, projected), sparse = prepare(bound, params), s24.sparsify(f, bound)
    keys = jax.random.split(jax.random.key(0), 2000)
    grad = jax.grad(lambda p, key: jnp.sum(jnp.sin(sparse(p, variables, key, x))))
    samples = jax.jit(jax.vmap(grad, (None, 0)))(params, keys)
    expected = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(f(p, x)))))(projected)
    for drawn, exact in zip(jax.tree.leaves(samples), jax.tree.leaves(expected), strict=True):
      found = np.asarray(drawn, np.float64)
      error = np.linalg.norm(found.mean(0) - exact)
      # The distance of a mean of n samples from what it estimates, by their own spread.
      self.assertLess(error, 1.5 * np.sqrt(found.var(0).sum() / len(keys)) + 1e-5)
      self.assertGreater(np.linalg.norm(found[0] - exact), 10 * error)

  def test_a_layer_a_matmul_and_a_key_draw_their_own_samples(self):
    recipe = s24.Recipe('m', (s24.Rule('.*', s24.DotPolicy(s24.magnitude(), weight_grad='mvue')),))
    params = {'w': np.broadcast_to(np.arange(1, 17, dtype=np.float32)[:, None], (2, 16, 8))}
    x, dz = np.ones((8, 16), np.float32), np.random.default_rng(1).standard_normal((8, 8), np.float32)

    def f(p, x):
      return jax.lax.scan(lambda total, w: (total + x @ w, None), jnp.zeros((8, 8)), p['w'])[0]

    bound = s24.bind(recipe, f, params, x)
    (variables, _), sparse = prepare(bound, params), s24.sparsify(f, bound)
    gradient = jax.jit(jax.grad(lambda p, i: jnp.sum(dz * sparse(p, variables, jax.random.key(i), x))))
    one, again, other = (np.asarray(gradient(params, i)['w']) for i in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    self.assertTrue((one != other).any())
    self.assertTrue((one[0] != one[1]).any())

  def test_a_ragged_matmul_has_exact_weight_gradients_and_says_so(self):
    params, x = arguments('ragged')
    f = CASES['ragged'].f
    bound = s24.bind(MVUE, f, params, x)
    (variables, projected), sparse = prepare(bound, params), s24.sparsify(f, bound)
    with self.assertLogs('sparse24_jax', 'WARNING') as logged:
      found = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(sparse(p, variables, jax.random.key(0), x)))))(params)
    self.assertIn('up: a ragged matmul reads it, whose weight gradient is exact', '\n'.join(logged.output))
    expected = jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(f(p, x)))))(projected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)

  def test_a_learnt_factor_has_the_gradient_that_it_has_on_the_sparse_weight(self):
    (params, x), recipe = arguments('plain'), s24.Recipe('w', (s24.Rule('up', RECIPES['ste'].rules[0].policy),))
    params = {'up': params['up'], 'gain': np.linspace(0.5, 2, 32, dtype=np.float32)[None]}
    params['scale'] = np.linspace(1, 3, 16, dtype=np.float32)[:, None]

    def f(p, x):
      return jnp.sum(jnp.sin(x @ (p['up'] * p['gain'] * p['scale'] / jnp.sum(p['gain']))))

    bound = s24.bind(recipe, f, params, x)
    (variables, projected), sparse = prepare(bound, params), s24.sparsify(f, bound)
    found = jax.jit(jax.grad(lambda p: sparse(p, variables, None, x)))(params)
    expected = jax.jit(jax.grad(f))(projected, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)

  @parameterized.named_parameters(
    ('number', lambda w, x: x @ (w / 4.0)[:, :8], (16, 24)),
    ('of_heads', lambda w, x: jnp.einsum('bd,dhk->bhk', x, (w * jnp.full((1, 4, 1), 2.0))[..., 4:]), (16, 4, 8)),
    ('of_inputs', lambda w, x: x @ (w * jnp.arange(1.0, 5)[:, None, None])[:, 4:].reshape(16, 8), (4, 8, 8)),
    ('of_experts', lambda w, x: x[None] @ (w * jnp.arange(1.0, 4)[:, None, None])[..., 8:], (3, 16, 16)),
  )
  def test_a_factor_of_a_weight_that_is_read_in_part(self, f, shape):
    """As a fused projection of queries, keys and values that is divided by a root of its width."""
    params, x = {'w': gaussian(0, shape)}, gaussian(1, (8, 16))
    loss = lambda p, x: jnp.sum(jnp.sin(f(p['w'], x)))  # noqa: E731
    bound = s24.bind(RECIPES['ste'], loss, params, x)
    (variables, projected), sparse = prepare(bound, params), s24.sparsify(loss, bound)
    found = jax.jit(jax.value_and_grad(lambda p: sparse(p, variables, None, x)))(params)
    expected = jax.jit(jax.value_and_grad(loss))(projected, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)

  def test_a_hidden_layer_keeps_its_sharding_constraint(self):
    params, x = arguments('plain')
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))
    mesh = jax.make_mesh((2,), ('d',), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def f(p, x):
      h = jax.lax.with_sharding_constraint(jax.nn.relu(x @ p['up']), jax.NamedSharding(mesh, jax.P('d')))
      return (h @ p['down']).astype(jnp.float32).sum()

    # Composed of dots the hidden layer and its gradient are divided so; fused what the activation is of, too.
    fused = s24.DotPolicy(s24.transposable(), 'sparse', 'mvue', implementation='dense')
    for recipe, expected in ((RECIPES['packed'], 2), (s24.Recipe('fused', (s24.Rule('.*', fused),)), 3)):
      bound = s24.bind(recipe, f, params, x)
      self.assertEqual([use.role for use in bound['down'].uses], ['down'])
      variables, sparse = s24.sparse_variables(params, None, bound), s24.sparsify(f, bound)
      key = jax.random.key(0)
      text = str(jax.make_jaxpr(jax.grad(sparse))(params, variables, key, x))
      self.assertLen(re.findall(r"sharding_constraint\[[^]]*NamedSharding[^]]*spec=P\('d'", text), expected)

  def test_a_call_keeps_how_its_arguments_and_results_are_divided(self):
    """It is inlined, and with it the shardings that it was told."""
    mesh = jax.make_mesh((2,), ('d',), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    columns, rows = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in ((None, 'd'), ('d', None)))
    call = jax.jit(lambda w, x: x @ w, in_shardings=(columns, None), out_shardings=rows)
    params, x = {'w': jnp.ones((16, 8))}, jnp.ones((4, 16))
    bound = s24.bind(s24.recipes.ste('w'), lambda p, x: call(p['w'], x), params, x)
    variables, sparse = s24.sparse_variables(params, None, bound), s24.sparsify(lambda p, x: call(p['w'], x), bound)
    program = jax.make_jaxpr(sparse)(params, variables, None, x)
    found = [e for e in program.eqns if e.primitive.name == 'sharding_constraint']
    self.assertEqual(
      [(e.outvars[0].aval.shape, e.params['sharding'].spec) for e in found],
      [((16, 8), columns.spec), ((4, 8), rows.spec)],
    )

  @parameterized.parameters((0, 16), (3, 0, 16))
  def test_a_batch_of_no_tokens(self, *shape):
    def f(p, x):
      return jax.nn.gelu(x @ p['up']) @ p['down']

    params, x = {'up': jnp.ones((16, 32)), 'down': jnp.ones((32, 16))}, jnp.zeros(shape)
    bound = s24.bind(RECIPES['packed'], f, params, jnp.ones((*shape[:-2], 4, 16)))
    states, sparse = prepare(bound, params)[0], s24.sparsify(f, bound)

    @jit
    def both(params):
      y, pull = jax.vjp(lambda p: sparse(p, states, None, x), params)
      return y, pull(y)

    y, gradients = both(params)
    self.assertEqual(y.shape, shape)
    for g in jax.tree.leaves(gradients):
      self.assertFalse(np.asarray(g).any())

  @pytest.mark.slow
  def test_a_layer_that_is_not_there(self):
    """`jnp.take` fills with NaN behind the last entry, whatever mask or packed operand is there."""
    params, x = jax.tree.map(lambda a: np.asarray(a).astype(jnp.bfloat16), arguments('scan'))

    def f(p, x, i):
      return CASES['plain'].f(jax.tree.map(lambda w: jnp.take(w, i, axis=0), p), x)

    reference = jit(f)
    for recipe in ('packed', 'ste'):
      bound = s24.bind(RECIPES[recipe], f, params, x, jnp.int32(0))
      self.assertEqual({use.block for weight in bound.weights for use in weight.uses}, {'relu'})
      (variables, projected), sparse = prepare(bound, params), s24.sparsify(f, bound)
      run = jit(lambda i, s=sparse, v=variables: s(params, v, None, x, i))
      for i in (2, 3, -1, -4):
        found, expected = (np.asarray(a, np.float32) for a in (run(i), reference(projected, x, i)))
        self.assertEqual(bool(np.isnan(expected).all()), i in (3, -4))
        np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.05)

  def test_dense_phase_and_static_arguments(self):
    params, x = arguments('plain')

    def f(p, x, *, scale, train):
      return CASES['plain'].f(p, x) * scale if train else x

    bound = s24.bind(RECIPES['ste'], f, params, x, scale=2.0, train=True)
    dense = s24.sparsify(f, bound, phase='dense')(params, {}, None, x, scale=2.0, train=True)
    np.testing.assert_array_equal(dense, f(params, x, scale=2.0, train=True))
    unread = s24.sparsify(f, bound)(params, dict.fromkeys(params, 1), None, x, scale=1.0, train=False)
    np.testing.assert_array_equal(unread, x)

  def test_calls_of_the_function_as_it_was(self):
    """Python names what the function lacks, or a function that nobody wrote."""
    params, x = {'w': jnp.ones((8, 4))}, jnp.ones((4, 8))
    call = r'call it as f\(params, variables, key, \.\.\.\)'
    loss = s24.sparsify(lambda p, x, y: jnp.sum((x @ p['w'] - y) ** 2), RECIPES['ste'])
    for args, problem in (
      ((x, x), 'variables is a ArrayImpl'),
      ((), 'variables and key are not given'),
      (({},), 'key is not given'),
      (({}, None, x), r"what follows the key does not fit it \(missing a required argument: 'y'\)"),
    ):
      with self.assertRaisesRegex(ValueError, rf'<lambda> was made sparse, and {problem}: {call}'):
        loss(params, *args)

    @functools.wraps(lambda p, x, y: None)
    def with_x(p):  # a decorator that gives an argument
      return jnp.sum(x @ p['w'])

    states = {'w': s24.magnitude().init(params['w'])}
    self.assertEqual(s24.sparsify(with_x, RECIPES['ste'])(params, states, None), 4 * 4 * 4)

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Module:  # as those of Equinox: a callable that holds its weights
      w: jax.Array

      def __call__(self, x):
        return x @ self.w

    with self.assertRaisesRegex(ValueError, r"Module that holds the weights w itself: make a .*partition"):
      s24.sparsify(Module(params['w']), RECIPES['ste'])

  def test_a_function_that_is_sparse_already(self):
    def loss(params, x):
      return jnp.sum(x @ params['w'])

    params, x = {'w': jnp.ones((8, 4))}, jnp.ones((4, 8))
    states = {'w': s24.magnitude().init(params['w'])}
    sparse = s24.sparsify(loss, RECIPES['ste'])
    for again in (sparse, jax.jit(sparse)):
      with self.assertRaisesRegex(ValueError, '^loss was made by sparsify already: give the function that it was made'):
        s24.sparsify(again, RECIPES['ste'])
    self.assertEqual(sparse(params, states, None, x), 4 * 4 * 4)  # as good as before

  def test_sparse_states_in_a_dense_phase(self):
    dense = s24.sparsify(lambda p: p['w'], RECIPES['ste'], phase='dense')
    with self.assertRaisesRegex(ValueError, "^phase: .* phase 'dense', and is given sparse states"):
      dense({'w': jnp.ones((8, 4))}, {'w': jnp.ones((8, 4), bool)}, None)

  def test_without_states_and_with_states_of_another_layout(self):
    params, x = arguments('out_in')
    f, recipe = CASES['out_in'].f, RECIPES['ste']
    with self.assertRaisesRegex(ValueError, 'w: no state; give what sparse_variables'):
      s24.sparsify(f, s24.bind(recipe, f, params, x))(params, {}, None, x)
    # Masks chosen before the model was seen lie along axis -2: here, along the outputs.
    variables = s24.sparse_variables(params, s24.sparse_training(optax.sgd(0.1), recipe).init(params), recipe)
    with self.assertRaisesRegex(ValueError, r'w of shape \(8, 16\): the model reads it as in 1, out 0.*_jax\.bind'):
      s24.sparsify(f, recipe)(params, variables, None, x)

  def test_states_of_a_tree_around_the_parameters(self):
    params, x = arguments('out_in')
    bound = s24.bind(RECIPES['ste'], CASES['out_in'].f, params, x)
    variables = s24.sparse_variables(params, s24.sparse_training(optax.sgd(0.1), bound).init(params), bound)
    told = r"w: no state; .* There is one of params/w: give the part of the variables under 'params'"
    with self.assertRaisesRegex(ValueError, told):
      s24.sparsify(CASES['out_in'].f, bound)(params, {'params': variables}, None, x)

  def test_states_that_a_step_has_deleted(self):
    params, x = arguments('out_in')
    bound = s24.bind(RECIPES['ste'], CASES['out_in'].f, params, x)
    state = s24.sparse_training(optax.sgd(0.1), bound).init(params)
    variables = s24.sparse_variables(params, state, bound)
    jax.tree.map(lambda leaf: leaf.delete(), variables)  # as a step does that donates them
    with self.assertRaisesRegex(ValueError, 'w: its state was deleted: .* Call sparse_variables again'):
      s24.sparsify(CASES['out_in'].f, bound)(params, variables, None, x)

  def test_one_recipe_for_all_or_an_error(self):
    """Masks of two layouts may have one shape: of a square weight, along inputs and along outputs."""
    params, x, f, recipe = {'w': jnp.eye(16) + 1}, jnp.ones((4, 16)), lambda p, x: x @ p['w'].T, s24.recipes.ste('w')
    bound = s24.bind(recipe, f, params, x)
    of_bound, of_plain = (s24.sparse_training(optax.sgd(0.1), r) for r in (bound, recipe))
    wrong = r'w: its state was made for a weight stored as \[stacked\.\.\., in, out\]'
    with self.assertRaisesRegex(ValueError, wrong):
      s24.sparse_variables(params, of_plain.init(params), bound)
    with self.assertRaisesRegex(ValueError, wrong):
      s24.project(params, of_plain.init(params), bound)
    with self.assertRaisesRegex(ValueError, wrong):
      of_bound.update(params, of_plain.init(params), params)
    with self.assertRaisesRegex(ValueError, 'w: its state was made for a weight stored as in 1, out 0'):
      s24.project(params, of_bound.init(params), recipe)
    variables = s24.sparse_variables(params, of_plain.init(params), recipe)
    with self.assertRaisesRegex(ValueError, wrong):
      s24.sparsify(f, bound)(params, variables, None, x)

  def test_something_else_is_run_than_was_bound(self):
    params, x = arguments('plain')
    bound = s24.bind(RECIPES['ste'], CASES['plain'].f, params, x)
    variables = s24.sparse_variables(params, s24.sparse_training(optax.sgd(0.1), bound).init(params), bound)
    with self.assertRaisesRegex(ValueError, 'up: sin at .* changes it before a matmul reads it'):
      s24.sparsify(lambda p, x: x @ jnp.sin(p['up']), bound)(params, variables, None, x)

  def test_masks_of_the_weights_as_they_are(self):
    """Without an optimizer state nothing can be stale: other weights have other masks."""
    params, x = arguments('plain')
    f, recipe = CASES['plain'].f, RECIPES['ste']
    bound = s24.bind(recipe, f, params, x)
    sparse = s24.sparsify(f, bound)
    for p in (params, jax.tree.map(jnp.cos, params)):
      fresh = s24.sparse_training(optax.sgd(0.1), bound).init(p)
      expected = f(s24.project(p, fresh, bound), x)
      found = sparse(p, s24.sparse_variables(p, None, bound), None, x)
      np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    with self.assertRaisesRegex(ValueError, "down: projection 'soft_threshold' keeps what the weights do not tell"):
      s24.sparse_variables(params, None, s24.bind(RECIPES['soft_threshold'], f, params, x))

  def test_from_outside_under_vmap_and_jit(self):
    params, x = arguments('plain')
    f = CASES['plain'].f
    bound = s24.bind(RECIPES['ste'], f, params, x)
    variables = s24.sparse_variables(params, s24.sparse_training(optax.sgd(0.1), bound).init(params), bound)
    sparse = s24.sparsify(f, bound)
    xs = jnp.stack([x, 2 * x])
    found = jax.jit(jax.vmap(lambda x: sparse(params, variables, None, x)))(xs)
    np.testing.assert_allclose(found[1], sparse(params, variables, None, xs[1]), rtol=1e-5, atol=1e-5)


if __name__ == '__main__':
  absltest.main()
