"""What `bind` finds in a function, and what it refuses."""

import dataclasses
import functools
import inspect
import math
from unittest import mock

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24
from sparse24_jax.binding import transform
from tests.quick import jit
from tests.sparse24_jax.binding.functions import arguments, CASES, relu_mlp

STE = s24.recipes.ste('.*')


@jax.custom_jvp
def _straight_relu(z):
  return jnp.maximum(z, 0)


_straight_relu.defjvp(lambda z, dz: (_straight_relu(z[0]), dz[0]))


def _shared_parts(w, x):
  """Two calls of one function, which share their equations."""
  part = jax.jit(lambda w, x: x @ w)
  return part(w[:8], x[:, :8]) + part(w[2:10], x[:, 2:10])


OWN = jax.custom_vjp(lambda w, x: x @ w)
OWN.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, dz: (kept[1].T @ dz, dz @ kept[0].T))


def two_largest_of_four(matrix):
  """`[in, out]` in float64 with the two largest of each four along the first axis, by sorting."""
  groups = np.asarray(matrix, np.float64).reshape(-1, 4, matrix.shape[1])
  kept = np.argsort(np.argsort(-np.abs(groups), axis=1, kind='stable'), axis=1) < 2
  return (groups * kept).reshape(matrix.shape)


def _gelu_by_a_real_power(z):
  return 0.5 * z * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * jnp.power(z, 3.0))))


def _gated(z):
  return jax.nn.silu(z[..., 0]) * z[..., 1]


def _constrained(z, *spec, devices=2):
  mesh = jax.make_mesh((devices,), ('x',), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
  return jax.lax.with_sharding_constraint(z, jax.NamedSharding(mesh, jax.P(*spec or (None, 'x'))))


def _of_three(p, x):
  gate, up, _ = jnp.split((x @ p['up'])[:, :24], 3, axis=-1)
  return (jax.nn.silu(gate) * up) @ p['down'][:8]


class BindTest(parameterized.TestCase):

  def test_a_function_that_closes_over_its_weights_is_told_so(self):
    closed = {'a': jnp.ones((8, 8))}
    with self.assertRaisesRegex(ValueError, 'nor any other such weight: does the function close over other parameters'):
      s24.bind(s24.recipes.ste('a'), lambda params, x: x @ closed['a'], closed, jnp.ones((4, 8)))
    both = {'a': jnp.ones((8, 8)), 'b': jnp.ones((8, 8))}
    with self.assertRaisesRegex(ValueError, r"^b of shape .*contracts it: leave it dense, recipe\.with_dense\('b'\)$"):
      s24.bind(s24.recipes.ste('a|b'), lambda params, x: x @ params['a'], both, jnp.ones((4, 8)))

  def test_what_is_said_to_leave_a_weight_dense_does_so(self):
    params, recipe = {'a': jnp.ones((8, 8)), 'b (1)': jnp.ones((8, 8))}, s24.recipes.ste('.*')
    with self.assertRaises(ValueError) as caught:
      s24.bind(recipe, lambda params, x: x @ params['a'], params, jnp.ones((4, 8)))
    dense = eval(str(caught.exception).partition('leave it dense, ')[2])
    self.assertEqual(s24.bind(dense, lambda params, x: x @ params['a'], params, jnp.ones((4, 8))).weights[0].path, 'a')

  def test_a_loss_may_hold_a_module(self):
    class Loss:
      module = nn.Dense(8)

      def __call__(self, params, x):
        return self.module.apply({'params': params}, x).sum()

    x = jnp.ones((4, 8))
    params = Loss.module.init(jax.random.key(0), x)['params']
    self.assertEqual([w.path for w in s24.bind(s24.recipes.ste('kernel'), Loss(), params, x).weights], ['kernel'])

  def test_a_matmul_in_functions_of_jax_alone_has_the_line_of_their_call(self):
    def f(p, x):
      return jax.lax.scan(lambda x, w: (jax.jit(jnp.dot)(x, w), None), x, p['w'])[0]

    uses = s24.bind(STE, f, {'w': jnp.ones((3, 8, 8))}, jnp.ones((4, 8)))['w'].uses
    self.assertRegex(uses[0].source, rf'bound_test.py:{inspect.getsourcelines(f)[1] + 1}\b')

  @parameterized.parameters(*CASES)
  def test_layouts(self, name):
    params, x = arguments(name)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (params, x))
    bound = s24.bind(STE, CASES[name].f, *shapes)
    self.assertEqual({weight.path: weight.layout.describe() for weight in bound.weights}, CASES[name].layouts)
    self.assertEqual(bound.describe()['layouts'], CASES[name].layouts)

  @parameterized.parameters(*CASES)
  def test_masks_lie_along_the_contracted_axes(self, name):
    params, x = arguments(name)
    bound = s24.bind(STE, CASES[name].f, params, x)
    tx = s24.sparse_training(optax.sgd(0.1), bound)
    projected = jit(lambda params: s24.project(params, tx.init(params), bound))(params)
    for weight in bound.weights:
      layout, w = weight.layout, np.asarray(params[weight.path])
      matrices = np.transpose(w, layout.order).reshape(-1, *layout.matrix_shape(w.shape)[-2:])
      found = np.transpose(np.asarray(projected[weight.path]), layout.order).reshape(matrices.shape)
      for matrix, kept in zip(matrices, found, strict=True):
        np.testing.assert_allclose(kept, two_largest_of_four(matrix), rtol=1e-6)

  def test_uses_of_a_weight(self):
    params, x = arguments('parts_of_the_weight')
    (weight,) = s24.bind(STE, CASES['parts_of_the_weight'].f, params, x).weights
    self.assertEqual([(use.tokens, use.whole) for use in weight.uses], [(4, False)] * 3)
    self.assertFalse(weight.packs)

  @parameterized.named_parameters(
    ('gelu', jax.nn.gelu, 'gelu'),
    ('gelu_in_float32', lambda z: jax.nn.gelu(z.astype(jnp.float32)).astype(z.dtype), 'gelu'),
    ('gelu_by_a_real_power', lambda z: _gelu_by_a_real_power(z.astype(jnp.float32)).astype(z.dtype), 'gelu'),
    ('silu', jax.nn.silu, 'silu'),
    ('silu_by_hand', lambda z: z * jax.nn.sigmoid(z), 'silu'),
    ('relu', jax.nn.relu, 'relu'),
    ('squared_relu', lambda z: jnp.square(jax.nn.relu(z)), 'squared_relu'),
    ('squared_relu_by_power', lambda z: jax.nn.relu(z) ** 2, 'squared_relu'),
    ('squared_relu_by_product', lambda z: jax.nn.relu(z) * jax.nn.relu(z), 'squared_relu'),
    ('squared_relu_by_itself', lambda z: z * jax.nn.relu(z), 'squared_relu'),
    ('squared_relu_by_a_real_power', lambda z: jnp.power(jax.nn.relu(z), 2.0), 'squared_relu'),
    ('squared_relu_by_a_real_power_of_maximum', lambda z: jnp.power(jnp.maximum(z, 0), 2.0), 'squared_relu'),
    ('squared_relu_by_maximum', lambda z: jnp.maximum(0, z) ** 2, 'squared_relu'),
    ('squared_relu_by_clip', lambda z: jnp.square(jnp.clip(z, 0)), 'squared_relu'),
    ('squared_relu_by_where', lambda z: jnp.where(z > 0, z**2, 0), 'squared_relu'),
    ('gelu_exact', functools.partial(jax.nn.gelu, approximate=False), 'gelu_exact'),
    ('gelu_by_erf', lambda z: 0.5 * z * (1 + jax.lax.erf(z / math.sqrt(2))), 'gelu_exact'),
    ('gelu_by_a_number_of_an_array', lambda z: z * 0.5 * (1 + jax.lax.erf(z / jnp.sqrt(2.0))), 'gelu_exact'),
    ('relu_by_where', lambda z: jnp.where(z > 0, z, 0), 'relu'),
    ('constrained', lambda z: _constrained(jax.nn.relu(_constrained(z))), 'relu'),
    ('scaled', lambda z: 2 * jax.nn.relu(z), None),
    ('tanh', jnp.tanh, None),
    ('relu_by_maximum', lambda z: jnp.maximum(z, 0), None),  # its derivative at zero is another one
    ('relu_with_a_derivative_of_its_own', _straight_relu, None),
  )
  def test_blocks_are_found(self, activation, expected):
    params, x = arguments('plain')
    x, bias = x.astype(jnp.bfloat16), jnp.zeros(32, jnp.bfloat16)
    low = functools.partial(jax.tree.map, lambda w: w.astype(jnp.bfloat16))

    def f(p, x):
      p = low(p)
      return activation(x @ p['up'] + bias[None]) @ p['down']

    def gated(p, x):
      p = low(p)
      return (activation(x @ p['gate']) * (x @ p['up'])) @ p['down']

    self.assertEqual({(u.block, u.role) for w in s24.bind(STE, f, params, x).weights for u in w.uses},
                     {(expected, 'up'), (expected, 'down')} if expected else {(None, None)})  # fmt: skip
    found = s24.bind(STE, gated, {**params, 'gate': params['up']}, x).weights
    self.assertEqual({(w.path, u.block, u.role) for w in found for u in w.uses},
                     {(path, expected, path if expected else None) for path in ('up', 'down', 'gate')})  # fmt: skip

  @parameterized.named_parameters(
    ('thirds', _of_three, 'some columns, and not one half as gate and the other as up'),
    ('every_second', lambda p, x: _gated((x @ p['up']).reshape(8, 16, 2)) @ p['down'][:16], 'every second column'),
    ('softmax_of_a_half', lambda p, x: jax.nn.softmax((x @ p['up'])[:, :8]) @ p['down'][:8], 'reduce_max at .* reads'),
    ('another_array', lambda p, x: (jax.nn.silu(x @ p['up']) * x[:, :1]) @ p['down'], 'more than an activation'),
    ('another_activation', lambda p, x: jnp.tanh(x @ p['up']) @ p['down'], 'not gelu, silu, relu or squared relu'),
    ('dtypes', lambda p, x: jax.nn.silu(x @ p['up']).astype(jnp.bfloat16) @ p['down'].astype(jnp.bfloat16),
     'in several dtypes: float32, bfloat16'),
    ('scaled', lambda p, x: jax.nn.silu(x @ (p['up'] * 3)) @ p['down'], 'multiplied before its matmul'),
    ('norm', lambda p, x: jax.nn.softmax(x @ p['up']) @ p['down'], 'reduce_max at .* reads its result'),
    ('divided_twice', lambda p, x: _constrained(jax.nn.relu(_constrained(x @ p['up'], 'x'))) @ p['down'],
     r'several sharding constraints on its hidden layer \(8, 32\): '),
    ('divided_in_parts', lambda p, x: _gated(_constrained(x @ p['up']).reshape(8, 16, 2)) @ p['down'][:16],
     'reshape at .* reads its result'),
    ('transposed_late', lambda p, x: jax.nn.relu(x @ p['up']).T.T @ p['down'],
     r'transpose at .* reads its result \(between .* only the result of the first may be transposed'),
    ('divided_tokens', lambda p, x: _constrained(jax.nn.relu(x @ p['up']).T).T @ p['down'], 'transpose at .* reads'),
  )  # fmt: skip
  def test_why_matmuls_are_no_block(self, f, reason):
    params, x = arguments('plain')
    up = s24.bind(STE, f, params, x)['up']
    self.assertEqual([use.block for use in up.uses], [None])
    self.assertRegex(up.uses[0].apart, reason)

  def test_a_derivative_that_is_transposed_is_another_one(self):
    @jax.custom_jvp
    def turned(z):
      return jnp.maximum(z, 0)

    turned.defjvp(lambda z, dz: (turned(z[0]), jnp.where(z[0] > 0, dz[0], 0).T))
    params, x = {'up': jnp.ones((8, 8)), 'down': jnp.ones((8, 8))}, jnp.ones((8, 8))
    for activation, found in ((turned, None), (jax.nn.relu, 'relu')):
      bound = s24.bind(STE, lambda p, x, activation=activation: activation(x @ p['up']) @ p['down'], params, x)
      self.assertEqual(bound['up'].uses[0].block, found)

  def test_symbolic_dimensions_where_nothing_sparse_is(self):
    (b,), w = jax.export.symbolic_shape('b'), jnp.ones((8, 8))
    x, symbolic = jnp.ones((4, 8)), jax.ShapeDtypeStruct((b, 8), jnp.float32)
    self.assertEmpty(s24.bind(s24.recipes.dense(), lambda p, x: x @ p['w'], {'w': w}, symbolic).weights)
    bound = s24.bind(s24.recipes.ste('w'), lambda p, x, y: (x @ p['w']).sum() + y.sum(), {'w': w}, x, symbolic)
    self.assertLen(bound.weights, 1)
    ffn = functools.partial(s24.ffn, w_up=w, w_down=w, state=None, policy=s24.DotPolicy(), activation='gelu')
    self.assertEqual(jax.eval_shape(ffn, symbolic).shape, (b, 8))

  def test_gate_and_up_that_contract_other_axes_of_one_array_are_no_block(self):
    def f(p, x):
      across = jax.lax.dot_general(x, p['up'], (((0,), (0,)), ((), ())))
      return (jax.nn.silu(x @ p['gate']) * across) @ p['down']

    params = {'gate': jnp.ones((8, 16)), 'up': jnp.ones((8, 16)), 'down': jnp.ones((16, 8))}
    (use,) = s24.bind(STE, f, params, jnp.ones((8, 8)))['up'].uses
    self.assertEqual((use.block, use.apart), (None, 'gate and up read different arrays'))

  def test_layers_for_one_token_under_vmap_are_a_block(self):
    params, x = arguments('each_token')
    bound = s24.bind(STE, CASES['each_token'].f, params, x)
    self.assertEqual({w.path: [use.block for use in w.uses] for w in bound.weights}, {'up': ['relu'], 'down': ['relu']})
    with mock.patch.object(transform, 'ffn_at', side_effect=transform.ffn_at) as fused:
      sparse = s24.sparsify(CASES['each_token'].f, bound)
      jax.eval_shape(lambda params: sparse(params, s24.sparse_variables(params, None, bound), None, x), params)
    fused.assert_called_once()

  def test_of_three_matmuls_in_a_row_the_last_two_are_the_block(self):
    params, x = arguments('plain')

    def f(p, x):
      return jax.nn.relu(jax.nn.relu(x @ p['up']) @ p['down']) @ p['up']

    first, last = s24.bind(STE, f, params, x)['up'].uses
    self.assertEqual((first.block, last.role), (None, 'down'))
    self.assertEqual(first.apart, 'the matmul that reads its result begins another block')

  def test_weights_of_two_policies_are_no_block(self):
    params, x = arguments('plain')
    rules = (s24.Rule('up', s24.DotPolicy(s24.transposable())), *STE.rules)
    bound = s24.bind(s24.Recipe('two', rules), CASES['plain'].f, params, x)
    self.assertEqual({use.apart for w in bound.weights for use in w.uses}, {'its weights have different policies'})

  def test_sparse_activations_of_a_divided_hidden_layer_are_refused(self):
    params, x = arguments('plain')
    divided = lambda p, x: _constrained(jnp.square(jax.nn.relu(x @ p['up']))) @ p['down']  # noqa: E731
    recipe = s24.recipes.neuron_level('up', 'down')
    with self.assertRaisesRegex(ValueError, 'by itself: .*do not take the sharding constraint of their hidden layer'):
      s24.bind(recipe, divided, params, x)
    # On one device it divides nothing.
    whole = lambda p, x: _constrained(jnp.square(jax.nn.relu(x @ p['up'])), devices=1) @ p['down']  # noqa: E731
    self.assertEqual([use.role for use in s24.bind(recipe, whole, params, x)['down'].uses], ['down'])

  @parameterized.named_parameters(
    ('embedding', lambda w, x: w[x.astype(int)[:, 0]], r'w of shape .*gather at '),
    ('low_rank', lambda w, x: x @ (w + x.T @ x), r'add at .* changes it .*x @ w \+ \(x @ a\) @ b'),
    ('reparametrised', lambda w, x: x @ jnp.sin(w), r'w of shape .*: sin at .* changes it before a matmul reads it'),
    ('masked', lambda w, x: x @ (w * jnp.tril(x.T @ x)), 'mul at .* changes it before a matmul reads it'),
    ('scaled_part', lambda w, x: x[:, :8] @ (w * x.T[:, :1])[:8], 'an array along axis 0, of which it takes a part'),
    ('scaled_both_ways', lambda w, x: x @ (w[None] * (x.T @ x)[None])[0], 'along its inputs and its outputs at once'),
    ('convolution', lambda w, x: jax.lax.conv(x[None, None], w[None, None], (1, 1), 'SAME'), 'conv_general_dilated'),
    ('nothing_reads_it', lambda w, x: x, 'no matmul of the function contracts it'),
    ('only_a_norm', lambda w, x: jnp.sum(w**2), 'no matmul of the function contracts it'),
    ('both_ways', lambda w, x: (x @ w) @ w.T, 'in different ways, in 0, out 1 at .* both, s24.transposable'),
    ('its_gradient', lambda w, x: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w)))(x), 'its own gradient, .*, give the'),
    ('carried', lambda w, x: jax.lax.scan(lambda w, _: (w + 1, x @ w), w, None, length=2)[1], 'the carry of a scan'),
    ('own_derivative', OWN, 'custom_vjp_call, whose derivative is its own'),
    ('own_forward_derivative', lambda w, x: x @ jax.nn.relu(w), 'custom_jvp_call, whose derivative is its own'),
    ('ragged_rows', lambda w, x: jax.lax.ragged_dot(w, x[:, :, None], jnp.array([8, 0, 8, 0])), 'the ragged operand'),
    ('by_hand', lambda w, x: (x[:, :, None] * w[None]).sum(1), 'mul at .*, then reduce_sum at'),
    ('returned_by_a_checkpoint', lambda w, x: x @ jax.checkpoint(lambda w: -w)(w), 'what a checkpoint returns at '),
    ('returned_by_a_branch', lambda w, x: x @ jax.lax.cond(True, lambda w: -w, lambda w: w, w), 'what a cond returns'),
    ('scanned_out', lambda w, x: x @ jax.lax.scan(lambda c, r: (c, -r), 0, w)[1], 'what a scan returns'),
    ('parts_by_one_function', _shared_parts, 'a part of axis 0, 8 entries from 2, cuts groups of 4'),
    ('experts', lambda w, x: jnp.einsum('td,edf->etf', x[:, :4], w.reshape(4, 4, 16)[:2]), '2 of 4 entries|in part'),
    ('chunks_of_two', lambda w, x: jax.lax.scan(lambda c, e: (c, e[0] @ e[1]), 0, (x.reshape(-1, 8, 2).swapaxes(0, 1),
                                                                                   w.reshape(8, 2, 16)))[1],
     'may cut groups of 4 .split the axis by a reshape into parts of a multiple of 4'),
    ('chunks_from_anywhere', lambda w, x: jax.lax.map(
      lambda i: x[:, :8] @ jax.lax.dynamic_slice_in_dim(w, i, 8, 0), jnp.arange(3)), 'take a part by its number'),
    ('cut_groups', lambda w, x: x[:, :6] @ w[:6], 'a part of axis 0, 6 entries from 0, cuts groups of 4'),
  )
  def test_refuses(self, f, message):
    with self.assertRaisesRegex(ValueError, message):
      s24.bind(STE, lambda p, x: f(p['w'], x), {'w': jnp.ones((16, 16))}, jnp.ones((4, 16)))

  def test_a_transpose_that_a_backward_pass_reads(self):
    """Is no other direction of the model, whose weight gradients would not be sampled."""
    fst = s24.recipes.transposable_srste('w', masked_decay=1e-3)
    params, x = {'w': jnp.ones((16, 32))}, jnp.ones((4, 16))

    def loss(p, x):
      return jnp.sum(jnp.sin(jnp.sin(x) @ p['w']))

    tied = s24.bind(fst, lambda p, x: x @ p['w'] @ p['w'].T, params, x)
    self.assertEqual((tied['w'].layout.describe(), [use.turned for use in tied['w'].uses]), ('in 0, out 1', [0, 1]))
    for f in (loss, jax.jit(loss), jax.checkpoint(loss)):
      for gradient in (jax.grad(f, 1), jax.jit(jax.value_and_grad(f, (0, 1)))):
        with self.assertRaisesRegex(ValueError, 'in different ways, .*own gradient, .*, give the loss'):
          s24.bind(fst, gradient, params, x)

  def test_what_a_ragged_matmul_has_not(self):
    def f(p, x):
      return jax.lax.ragged_dot(x, p['w'], jnp.array([4, 4]))

    params, x = {'w': jnp.ones((2, 16, 8))}, jnp.ones((8, 16))
    (use,) = s24.bind(STE, f, params, x)['w'].uses
    self.assertEqual((use.kind, use.tokens), ('ragged_dot_general', 4))
    cases = ({'precision': 'fp8'}, {'precision': 'default'}), ({'implementation': 'sparse'}, {'implementation': None})
    for setting, served in cases:
      ((name, value),) = served.items()
      policy = s24.DotPolicy(s24.magnitude(), **setting)
      message = f"which has no {name}=.*dense.*Rule.'w', dataclasses.replace.rule.policy, {name}={value!r}"
      with self.assertRaisesRegex(ValueError, message):
        s24.bind(s24.Recipe('r', (s24.Rule('w', policy),)), f, params, x)
      s24.bind(s24.Recipe('r', (s24.Rule('w', dataclasses.replace(policy, **served)),)), f, params, x)

  def test_numbers_among_the_arguments_of_calls(self):
    def f(p, x):
      scale = jax.jit(lambda a, y: a * y)(2, x) + jnp.linspace(0, 1, 16)[None]
      return jax.lax.scan(lambda carry, _: (carry, scale @ p['w']), 0.0, None, length=2)[1]

    self.assertLen(s24.bind(STE, f, {'w': jnp.ones((16, 8))}, jnp.ones((4, 16)))['w'].uses, 1)

  def test_what_is_dense_by_a_rule_is_not_asked_for(self):
    recipe = s24.Recipe('r', (s24.Rule('emb', s24.DotPolicy()), *STE.rules))
    params = {'emb': jnp.ones((16, 16)), 'w': jnp.ones((16, 8))}
    bound = s24.bind(recipe, lambda p, t: p['emb'][t] @ p['w'], params, jnp.zeros(4, int))
    self.assertEqual([weight.path for weight in bound.weights], ['w'])

  def test_another_model_than_the_bound_one(self):
    params, x = arguments('plain')
    bound = s24.bind(STE, relu_mlp, params, x)
    tx = s24.sparse_training(optax.sgd(0.1), bound)
    with self.assertRaisesRegex(ValueError, r'up has shape \(16, 64\), and had \(16, 32\)'):
      tx.init({**params, 'up': jnp.ones((16, 64))})
    with self.assertRaisesRegex(ValueError, 'down: the recipe was bound to a model that has this weight'):
      tx.init({'up': params['up']})

  def test_sizes_are_checked_along_the_axes_that_were_found(self):
    message = r'w of shape \(8, 6\), as \[in, out\] of shape \(6, 8\) has length 6 along axis -2'
    with self.assertRaisesRegex(ValueError, message):
      s24.bind(STE, lambda p, x: x @ p['w'].T, {'w': jnp.ones((8, 6))}, jnp.ones((4, 6)))

  def test_flax_modules(self):
    class Model(nn.Module):
      @nn.compact
      def __call__(self, x):
        return nn.MultiHeadDotProductAttention(num_heads=2, name='attention')(x)

    x = jnp.ones((2, 4, 16))
    params = jax.eval_shape(Model().init, jax.random.key(0), x)['params']
    bound = s24.bind(s24.recipes.ste('.*/kernel'), lambda p, x: Model().apply({'params': p}, x), params, x)
    self.assertEqual(
      {weight.path: weight.layout.describe() for weight in bound.weights},
      {f'attention/{name}/kernel': 'in 0, out 1 2' for name in ('query', 'key', 'value')}
      | {'attention/out/kernel': 'in 0 1, out 2'},
    )

  def test_a_function_that_takes_its_parameters_later_is_told_how_to_wrap(self):
    params, x = {'w': jnp.ones((8, 4))}, jnp.ones((2, 8))

    def keyword(x, *, params=None):
      return x.reshape(-1, 8) @ params['w']

    def behind(x, weights):
      return jnp.sum(x) + weights['w']

    def unnamed(x, w=params):
      return x.reshape(-1, 8) @ w['w']

    for f, args, name in (
      (keyword, (), 'params'), (keyword, (x,), 'params'), (behind, (x,), 'weights'), (unnamed, (), 'params'),
    ):  # fmt: skip
      message = rf'^f must take the parameters first; wrap it: lambda p, \*a: f\(\*a, {name}=p\)$'
      with self.assertRaisesRegex(ValueError, message) as raised:
        s24.bind(STE, f, params, *args)
      self.assertIsInstance(raised.exception.__cause__, AttributeError | TypeError)
    for call in (s24.bind, s24.check):
      message = rf"params is given by name, .*: {call.__name__}\(recipe, f, params, \*args\).*wrap it: lambda p, \*a: f"
      with self.assertRaisesRegex(ValueError, message):
        call(STE, keyword, x, params=params)
    self.assertLen(s24.bind(STE, lambda p, *a: keyword(*a, params=p), params, x).weights, 1)
    self.assertLen(s24.bind(recipe=STE, f=lambda p, x: keyword(x, params=p), params=params, x=x).weights, 1)

  def test_other_errors_of_a_function_stay_as_they_are(self):
    params, x = {'w': jnp.ones((8, 4))}, jnp.ones((2, 8))
    for f, kind in (
      (lambda params, x: params.shape, AttributeError), (lambda p, x: p['w'].nothing, AttributeError),
      (lambda p, x: p.nothing, AttributeError), (lambda p, x: jnp.sum(p), TypeError),
      (lambda p, x, params=(): x + 'a', TypeError),
    ):  # fmt: skip
      with self.assertRaises(kind):
        s24.bind(STE, f, params, x)


if __name__ == '__main__':
  absltest.main()
