"""Functions with a `shard_map` made sparse by their trace, on four and eight devices, against projected weights."""

import functools

from absl.testing import absltest, parameterized
import jax
from jax import P
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

import sparse24_jax as s24
from tests.sparse24_jax.binding.transform_test import MVUE, prepare, RECIPES

EQUAL = np.ones(16, np.float32)
gather = functools.partial(jax.lax.all_gather, tiled=True)


def mesh_of(**sizes):
  return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def tensor_parallel(mesh, p, x):
  """Columns of `up` and rows of `down`, tokens over the other axis."""
  specs = {'up': P(None, 'model'), 'down': P('model', None)}

  def body(p, x):
    return jax.lax.psum(jax.nn.relu(x @ p['up']) @ p['down'], 'model')

  return jax.shard_map(body, mesh=mesh, in_specs=(specs, P('data')), out_specs=P('data'))(p, x)


def fsdp(mesh, p, x, **options):
  """Both weights divided along their inputs, two rows a shard where there are eight, and whole inside."""
  specs = {'up': P(('data', 'model')), 'down': P('model')}

  def body(p, x):
    up = gather(gather(p['up'], 'model', axis=0), 'data', axis=0)
    down = jax.lax.all_gather(p['down'].astype(x.dtype), 'model', axis=1).swapaxes(0, 1).reshape(32, 16)
    return jax.nn.relu(x @ up) @ down

  over = P(('data', 'model'))
  return jax.shard_map(body, mesh=mesh, in_specs=(specs, over), out_specs=over, **options)(p, x)


def replicated(mesh, p, x):
  def body(p, x):
    return jax.nn.relu(x @ p['up']) @ p['down']

  return jax.shard_map(body, mesh=mesh, in_specs=(P(), P('data')), out_specs=P('data'), check_vma=False)(p, x)


def some_axes(mesh, p, x):
  """Tokens divided by hand; the other axis is left to the compiler."""
  def body(p, x):
    return jax.nn.relu(x @ gather(p['up'], 'data', axis=1)) @ p['down']

  specs = {'up': P(None, 'data'), 'down': P()}
  return jax.shard_map(
    body, mesh=mesh, in_specs=(specs, P('data')), out_specs=P('data'), axis_names={'data'}
  )(p, x)  # fmt: skip


def heads(mesh, p, x):
  """Attention's projections, a share of the heads a device; the input projection is `[out, in]`."""
  specs = {'into': P(None, 'data'), 'query': P('data', 'model'), 'out': P('model')}

  def body(p, x):
    x = jnp.einsum('td,ed->te', x, gather(p['into'], 'data', axis=1))
    q = jnp.einsum('te,ehk->thk', x, gather(p['query'], 'data', axis=0))
    return jax.lax.psum(jnp.einsum('thk,hke->te', jnp.tanh(q), p['out']), 'model')

  return jax.shard_map(body, mesh=mesh, in_specs=(specs, P('data')), out_specs=P('data'))(p, x)


def layers_around(mesh, p, x):
  """A scan over layers with a `shard_map` in each."""
  return jax.lax.scan(lambda x, p: (x + tensor_parallel(mesh, p, x), None), x, p)[0]


def layers_inside(mesh, p, x):
  """A scan inside, over layers that are stacked behind and of which each device has a part of each."""
  def body(p, x):
    def layer(x, p):
      return x + jax.lax.psum(jax.nn.relu(x @ p['up']) @ p['down'], 'model'), None

    p = jax.tree.map(lambda w: jnp.moveaxis(w, 2, 0), p)
    return jax.lax.scan(jax.checkpoint(layer), x, p)[0]

  specs = {'up': P(None, 'model'), 'down': P('model')}
  return jax.shard_map(body, mesh=mesh, in_specs=(specs, P('data')), out_specs=P('data'))(p, x)


def experts(mesh, p, x, *, ragged):
  """MaxText's: each device has a share of the experts, a part of each, and all tokens."""
  def body(p, router, x):
    x = gather(x, 'data', axis=0)
    scores = jax.nn.softmax(x @ router)
    chosen = jnp.argmax(scores, axis=-1)
    n, first = p['wo'].shape[0], jax.lax.axis_index('data') * p['wo'].shape[0]
    wi_0, wi_1 = (gather(p[name], 'model', axis=1) for name in ('wi_0', 'wi_1'))
    if ragged:
      mine = jnp.where((chosen >= first) & (chosen < first + n), chosen - first, n)  # the others come last
      order = jnp.argsort(mine)
      sizes = jnp.bincount(mine, length=n)
      rows = x[order]
      h = jax.nn.silu(jax.lax.ragged_dot(rows, wi_0, sizes)) * jax.lax.ragged_dot(rows, wi_1, sizes)
      y = jax.lax.ragged_dot(h, p['wo'], sizes)[jnp.argsort(order)]
      y = jnp.where((mine < n)[:, None], y, 0) * jnp.max(scores, axis=-1, keepdims=True)
    else:
      slots = jnp.broadcast_to(x, (n, *x.shape))
      h = jax.nn.silu(jnp.einsum('ebd,edf->ebf', slots, wi_0)) * jnp.einsum('ebd,edf->ebf', slots, wi_1)
      weights = jax.lax.dynamic_slice_in_dim(scores, first, n, 1)
      y = jnp.einsum('ebf,efd,be->bd', h, p['wo'], weights)
    return jax.lax.psum_scatter(y, 'data', scatter_dimension=0, tiled=True)

  inputs = P('data', 'model')  # FSDP along the inputs, two of sixteen a device where there are eight
  specs = ({'wi_0': inputs, 'wi_1': inputs, 'wo': P('data')}, P(), P('data'))
  mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P('data'), check_vma=False)
  return mapped({name: p[name] for name in specs[0]}, p['router'], x)


MLP = {'up': (16, 32), 'down': (32, 16)}
EXPERTS = {'wi_0': (8, 16, 32), 'wi_1': (8, 16, 32), 'wo': (8, 32, 16), 'router': (16, 8)}
CASES = {
  'tensor_parallel': (tensor_parallel, MLP, {'up': 'in 0, out 1', 'down': 'in 0, out 1'}),
  'experts': (functools.partial(experts, ragged=False), EXPERTS, dict.fromkeys(EXPERTS, 'stacked 0, in 1, out 2')),
  'fsdp': (fsdp, MLP, {'up': 'in 0, out 1', 'down': 'in 0, out 1'}),
  'heads': (
    heads, {'into': (12, 16), 'query': (12, 4, 8), 'out': (4, 8, 16)},
    {'into': 'in 1, out 0', 'query': 'in 0, out 1 2', 'out': 'in 0 1, out 2'},
  ),
  'replicated': (replicated, MLP, {'up': 'in 0, out 1', 'down': 'in 0, out 1'}),
  'some_axes': (some_axes, MLP, {'up': 'in 0, out 1', 'down': 'in 0, out 1'}),
  'layers_around': (
    layers_around, {'up': (3, 16, 32), 'down': (3, 32, 16)}, dict.fromkeys(MLP, 'stacked 0, in 1, out 2')
  ),
  'layers_inside': (
    layers_inside, {'up': (16, 32, 3), 'down': (32, 16, 3)}, dict.fromkeys(MLP, 'stacked 2, in 0, out 1')
  ),
  'ragged_experts': (
    functools.partial(experts, ragged=True), EXPERTS, dict.fromkeys(EXPERTS, 'stacked 0, in 1, out 2')
  ),
}  # fmt: skip


def arguments(shapes):
  rng = np.random.default_rng(0)
  x, *weights = (rng.standard_normal(s, np.float32) for s in [(16, 16), *shapes.values()])
  return dict(zip(shapes, weights, strict=True)), x


def sparse_and_reference(recipe, mesh, f, params, x):
  """(bound, the transform's value and gradients, those of the function itself at its projected weights).

  Both are functions of weights of the tokens and, the first, a key.
  """
  def loss(params, x, weights):
    return jnp.sum(weights[:, None] * jnp.sin(f(mesh, params, x)).astype(jnp.float32))

  bound = s24.bind(recipe.with_dense('router') if 'router' in params else recipe, loss, params, x, EQUAL)
  variables, projected = prepare(bound, params)
  sparse = s24.sparsify(loss, bound)
  by_trace = jax.jit(jax.value_and_grad(lambda p, key, weights: sparse(p, variables, key, x, weights)))
  by_projection = jax.jit(jax.value_and_grad(loss))
  return (
    bound, lambda weights=EQUAL, key=None: by_trace(params, key, weights),
    lambda weights=EQUAL: by_projection(projected, x, weights),
  )  # fmt: skip


def assert_near(found, expected):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), found, expected)


class ShardMapTest(parameterized.TestCase):

  # Every case with masks, some with a scale and on the other mesh; which mask it is matters to no case.
  @parameterized.parameters(
    ('ste', 8, 'tensor_parallel'), *(('transposable', 8, name) for name in CASES),
    *(('soft_threshold', 4, name) for name in ('tensor_parallel', 'fsdp', 'experts')), ('ste', 8, 'fsdp'),
  )
  @pytest.mark.few
  def test_forward_and_straight_through_gradients(self, recipe, devices, name):
    f, shapes, layouts = CASES[name]
    params, x = arguments(shapes)
    bound, found, expected = sparse_and_reference(
      RECIPES[recipe], mesh_of(data=2, model=devices // 2), f, params, x
    )
    for weight in bound.weights:
      self.assertEqual(weight.layout.describe(), layouts[weight.path])
    assert_near(found(), expected())

  @parameterized.parameters('tensor_parallel', 'replicated', 'fsdp', 'layers_around', 'experts')
  @pytest.mark.few
  def test_packed_inside(self, name):
    """The path of kernels: each shard is packed by itself."""
    f, shapes, _ = CASES[name]
    params, x = jax.tree.map(lambda a: np.asarray(a).astype(jnp.bfloat16), arguments(shapes))
    _, found, expected = sparse_and_reference(RECIPES['packed'], mesh_of(data=2, model=2), f, params, x)
    leaves = ([np.asarray(leaf, np.float32) for leaf in jax.tree.leaves(f())] for f in (found, expected))
    for a, b in zip(*leaves, strict=True):
      error = np.linalg.norm(a - b) / np.linalg.norm(b)
      self.assertLess(error, 0.02)

  @parameterized.parameters((tensor_parallel,), (replicated,))
  @pytest.mark.few
  def test_each_shard_draws_its_own_sample(self, f):
    """Which is exact where two of four tokens have a gradient; shards with the same tokens differ where not."""
    params, x = arguments(MLP)
    x, key = np.concatenate([x[:8], x[:8]]), jax.random.key(1)
    _, found, expected = sparse_and_reference(MVUE, mesh_of(data=2, model=2), f, params, x)
    two_of_four = np.tile(np.array([1, 0, 0, 1], np.float32), 4)
    assert_near(found(two_of_four, key), expected(two_of_four))
    both, first = found(EQUAL, key)[1], found(np.repeat(np.array([1, 0], np.float32), 8), key)[1]
    for name in MLP:
      self.assertGreater(np.abs(np.asarray(both[name]) - 2 * np.asarray(first[name])).max(), 0.1)

  def test_blocks_are_found_inside(self):
    params, x = arguments(MLP)
    bound = s24.bind(RECIPES['ste'], functools.partial(tensor_parallel, mesh_of(data=2, model=4)), params, x)
    self.assertEqual({w.path: (w.uses[0].block, w.uses[0].role, w.uses[0].tokens) for w in bound.weights},
                     {'up': ('relu', 'up', 8), 'down': ('relu', 'down', 8)})
    self.assertFalse(bound['up'].packs)  # the packed whole could not be divided

  def test_what_cuts_groups_is_refused_by_name(self):
    mesh, (params, x) = mesh_of(model=8), arguments(MLP)

    def rows_cut(p, x):
      def body(w, x):
        return jax.lax.psum(x @ w, 'model')

      return jax.shard_map(body, mesh=mesh, in_specs=(P('model'), P(None, 'model')), out_specs=P())(p['up'], x)

    def columns_cut(p, x):
      def body(w, x):
        return x @ w

      return jax.shard_map(body, mesh=mesh, in_specs=(P(None, 'model'), P()), out_specs=P(None, 'model'))(p['down'], x)

    with self.assertRaisesRegex(ValueError, r"up of shape .16, 32.: .*P\('model', None\).*of 4 along axis 0: .* 2 of"):
      s24.bind(s24.recipes.ste('up'), rows_cut, params, x)
    s24.bind(s24.recipes.ste('down'), columns_cut, params, jnp.ones((4, 32)))
    with self.assertRaisesRegex(ValueError, r"down of .*P\(None, 'model'\).*groups of 4 along axis 1: .*all_gather"):
      s24.bind(s24.recipes.transposable_srste('down', masked_decay=0), columns_cut, params, jnp.ones((4, 32)))

  def test_what_cannot_be_followed_is_refused_by_name(self):
    mesh, (params, x) = mesh_of(model=2), arguments(MLP)

    def loss(change, in_spec, scale, p, x):
      def body(w, x):
        return x @ change(w)

      return jax.shard_map(body, mesh=mesh, in_specs=(in_spec, P()), out_specs=P(None, 'model'))(p['up'] * scale, x)

    passed_on = functools.partial(jax.lax.ppermute, axis_name='model', perm=[(0, 1), (1, 0)])
    for change, scale, found in (
      (passed_on, 1.0, 'ppermute'), (lambda w: w, jnp.arange(32.0)[None], 'in_specs say .*multiplied by an array along')
    ):  # fmt: skip
      with self.assertRaisesRegex(ValueError, f'up of shape .16, 32.: .*{found}.*with_dense'):
        s24.bind(s24.recipes.ste('up'), functools.partial(loss, change, P(None, 'model'), scale), params, x)

  def test_a_part_of_an_axis_is_to_be_stored_apart(self):
    def f(p, x):
      parts = p['up'].reshape(16, 4, 8).transpose(2, 0, 1)

      def body(w, x):
        return jnp.einsum('td,kdn->ktn', x, w)

      return jax.shard_map(body, mesh=mesh_of(model=2), in_specs=(P('model'), P()), out_specs=P('model'))(parts, x)

    params, x = arguments(MLP)
    with self.assertRaisesRegex(ValueError, 'up of shape .16, 32.: .*divide a part of an axis .* axes of their own'):
      s24.bind(s24.recipes.ste('up'), f, params, x)


if __name__ == '__main__':
  absltest.main()
