"""Layers that are stored as one array and read in the ways that models have: one by one, in groups, some of them."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

import sparse24_jax as s24

D, F = 8, 16
STE = s24.recipes.ste('up|down')


def layer(p, x):
  return x + jax.nn.silu(x @ p['up']) @ p['down']


def scanned(p, x):
  return jax.lax.scan(lambda x, p: (layer(p, x), None), x, p)[0]


def each(f, p):
  return jax.tree.map(f, p)


def unpacked(p, x):
  for up, down in zip(p['up'], p['down'], strict=True):
    x = layer({'up': up, 'down': down}, x)
  return x


def two_in_a_body(p, x):
  """Gemma's layers with local and with global attention."""
  def body(x, p):
    return 2 * layer(each(lambda w: w[1], p), layer(each(lambda w: w[0], p), x)), None

  return jax.lax.scan(body, x, each(lambda w: w.reshape(2, 2, *w.shape[1:]), p))[0]


def scan_in_scan(p, x):
  body = jax.checkpoint(lambda x, p: (scanned(p, x), None))
  return jax.lax.scan(body, x, each(lambda w: w.reshape(2, 2, *w.shape[1:]), p))[0]


def every_second(p, x):
  return scanned(each(lambda w: w[::2], p), x) + scanned(each(lambda w: w[1::2], p), x)


def all_but_the_first(p, x):
  return scanned(each(lambda w: w[1:], p), layer(each(lambda w: w[0], p), x))


def stages(p, x):
  """Layers side by side, each of them the first of two in a row, as in a pipeline."""
  return jax.vmap(scanned)(each(lambda w: w.reshape(2, 2, *w.shape[1:]), p), jnp.stack([x, 2 * x]))


def experts_by_two_axes(p, x):
  x = jnp.stack([x, x + 1, x + 2, x + 3]).reshape(2, 2, *x.shape)
  up, down = (p[name].reshape(2, 2, *p[name].shape[1:]) for name in ('up', 'down'))
  return jnp.einsum('abtf,abfd->abtd', jax.nn.silu(jnp.einsum('abtd,abdf->abtf', x, up)), down)


def some_experts(p, x):
  return jnp.einsum('etd,edf->etf', jnp.stack([x, x + 1]), p['up'][1:3]) @ p['down'][3]


CASES = (
  unpacked, two_in_a_body, scan_in_scan, every_second, all_but_the_first, stages, experts_by_two_axes, some_experts,
)  # fmt: skip


class StacksTest(parameterized.TestCase):

  def test_each_way_has_the_numbers_of_the_projected_weights(self):
    rng = np.random.default_rng(0)
    params = {'up': (4, D, F), 'down': (4, F, D)}
    params = {name: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32) for name, shape in params.items()}
    x = jnp.asarray(rng.normal(size=(4, D)), jnp.float32)

    def both(params, x):
      found = {}
      for case in CASES:
        def loss(params, x, case=case):
          return jnp.sum(jnp.sin(1 + case(params, x)))

        bound = s24.bind(STE, loss, params, x)
        self.assertEqual({w.layout.describe() for w in bound.weights}, {'stacked 0, in 1, out 2'}, case.__name__)
        sparse, states = s24.sparsify(loss, bound), s24.sparse_variables(params, None, bound)
        found[case.__name__] = (
          jax.value_and_grad(lambda p, f=sparse, v=states: f(p, v, None, x))(params),
          jax.value_and_grad(lambda p, f=loss, r=bound: f(s24.project(p, None, r), x))(params),
        )
      return found

    for name, (found, expected) in jax.jit(both)(params, x).items():
      for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5, err_msg=name)

  def test_a_factor_of_layers_that_are_read_in_part_is_refused(self):
    def f(p, x):
      scales = jnp.arange(1.0, 5.0)[:, None, None] * x[0, 0]
      return jnp.einsum('etd,edf->etf', jnp.stack([x, x]), (p['up'] * scales)[1:3])

    with self.assertRaisesRegex(ValueError, 'up of shape .* an array along axis 0, of which it takes a part'):
      s24.bind(s24.recipes.ste('up'), f, {'up': jnp.ones((4, D, F))}, jnp.ones((4, D)))


class MessagesTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('joined', lambda p, x: x @ jnp.concatenate([p['a'], p['b']], 1), 'b of shape .*concatenate at .*joins it with'),
    ('stacked', lambda p, x: x @ jnp.stack([p['a'], p['b']])[0], 'b of shape .*(stack|concatenate) at .*joins it'),
    ('padded', lambda p, x: x @ jnp.pad(p['a'], ((0, 0), (0, 8))) @ jnp.tile(p['b'], 2).T,
     r'a of shape .*pad at .*stacks_test.*pad what the matmul'),
    ('repeated', lambda p, x: jax.lax.scan(lambda x, w: (x @ w, None), x, jnp.repeat(p['a'][None], 3, 0))[0] @ p['b'],
     r'a of shape .*broadcast_in_dim at .* repeats it .*jax\.lax\.scan\(f, x, None, length=n\)'),
    ('turned_round', lambda p, x: x @ p['a'][::-1] @ p['b'], r'a of shape .*rev at .*turns it round .*reverse=True'),
    ('in_another_order', lambda p, x: x @ p['a'][np.arange(D)[::-1]] @ p['b'], 'a of .*gather at .*in another order'),
    ('by_example', lambda p, x: jnp.einsum('bi,bio->bo', x, x[:, :, None] * p['a'][None]) @ p['b'],
     r'a of shape .*mul at .*\(x \* s\) @ w'),
    ('branches', lambda p, x: x @ jax.lax.cond(x.sum() > 0, lambda w: w, lambda w: 2 * w, p['a']) @ p['b'],
     'a of shape .*what a cond returns at .*put the matmul into its branches'),
    ('in_8_bits', lambda p, x: x @ p['a'].astype(jnp.float8_e4m3fn).astype(x.dtype) @ p['b'],
     'convert_element_type at .* changes it before a matmul reads it'),
    ('integers', lambda p, x: x @ p['a'].astype(jnp.int8).astype(x.dtype) @ p['b'], 'convert_element_type at'),
  )  # fmt: skip
  def test_a_weight_that_is_lost_is_told_with_the_line(self, f, message):
    params = {'a': jnp.ones((D, D)), 'b': jnp.ones((D, D))}
    with self.assertRaisesRegex(ValueError, message):
      s24.bind(s24.recipes.ste('.*'), f, params, jnp.ones((4, D)))

  def test_a_bound_weight_without_whole_groups_is_not_told_to_bind(self):
    def f(p, x):
      return jax.lax.scan(lambda c, w: (c + (x @ w).sum(), None), 0.0, p['w'])[0]

    with self.assertRaisesRegex(ValueError, r"length 2 along axis -1; projection .* multiple of 4, or leave it dense"):
      s24.bind(s24.recipes.transposable_srste('w', masked_decay=0.0), f, {'w': jnp.ones((3, D, 2))}, jnp.ones((4, D)))

  def test_integers_that_a_rule_matches_are_named(self):
    def f(p, x):
      return jax.lax.dot_general(x.astype(jnp.int8), p['q'], (((1,), (0,)), ((), ())), preferred_element_type=jnp.int32)

    with self.assertRaisesRegex(ValueError, r"q of shape \(8, 8\): it is int8.*recipe.with_dense\('q'\)"):
      s24.bind(s24.recipes.ste('.*'), f, {'q': jnp.ones((D, D), jnp.int8)}, jnp.ones((4, D)))

  def test_a_ragged_matmul_is_told_to_run_dense(self):
    def f(p, x):
      return jax.lax.ragged_dot(x, p['w'], jnp.array([3, 5]))

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, D, F), (8, D)))
    text = str(s24.check(s24.recipes.ste('w'), f, {'w': w}, x))
    self.assertIn('w: a ragged matmul multiplies the projected weight as it does the dense one', text)
    self.assertRegex(text, 'not packed once in an optimizer step .*\n  w: a ragged matmul')
    self.assertIn('  4.00 on average  ', text)
    few = jax.eval_shape(lambda: jnp.ones((1, D)))
    self.assertIn('  0.50 on average  ', str(s24.check(s24.recipes.ste('w'), f, {'w': w}, few)))


if __name__ == '__main__':
  absltest.main()
