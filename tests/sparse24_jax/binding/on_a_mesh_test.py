"""What 8 and 64 devices exchange for masks and states: of a user's own arrays, of linen and of nnx models."""

import functools
import itertools
import os
from pathlib import Path
import re
import subprocess
import sys

from absl.testing import absltest, parameterized
from flax import linen, nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.binding.origin import MADE_OF
from sparse24_jax.integration.nnx_states import ATTRIBUTE
from sparse24_jax.optim import _left
from tests.draws import gaussian
from tests.quick import OPTIONS

LAYERS, D, HIDDEN = 2, 256, 1024
UP, DOWN = r'layers(/\d)?/up(/kernel)?', r'layers(/\d)?/down(/kernel)?'
WEIGHTS = f'({UP})|({DOWN})'
RECIPES = {
  'fst': s24.recipes.transposable_srste(WEIGHTS, masked_decay=0.1),
  's_ste': s24.recipes.s_ste(WEIGHTS),
  's_ste_fp8': s24.recipes.s_ste(WEIGHTS, fp8=True),
  'sr_ste': s24.recipes.sr_ste(WEIGHTS, masked_decay=0.1),
  'v_n_m': s24.recipes.neuron_level(UP, DOWN, policy=s24.ActivationPolicy(s24.VNM(64, 8)), warmup_fraction=0.0),
  'mst': s24.recipes.mixed_sparsity(WEIGHTS, total_steps=10_000),
}
# How [hidden, d], both of the weights, is divided over the mesh axes 'd' and 'm'.
LAYOUTS = {'fsdp': (('d', 'm'), None), 'tensor': ('m', None), 'both': ('m', 'd')}
_EXCHANGE = re.compile(
  r' = (.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\('
)


def model(params, x):
  """Layers of [neurons, d] both, as one stack in a scan or one by one."""

  def layer(x, w):
    return x + jnp.square(jax.nn.relu(jnp.einsum('td,hd->th', x, w['up']))) @ w['down'], None

  if isinstance(params['layers'], dict):
    return jax.lax.scan(layer, x, params['layers'])[0]
  for w in params['layers']:
    x = layer(x, w)[0]
  return x


class Layer(linen.Module):
  @linen.compact
  def __call__(self, x, _=None):
    h = jnp.square(jax.nn.relu(linen.Dense(HIDDEN, use_bias=False, name='up')(x)))
    return x + linen.Dense(D, use_bias=False, name='down')(h), None


class Layers(linen.Module):
  """The model in linen: a stack of kernels [in, out] in a scan."""

  @linen.compact
  def __call__(self, x):
    axes, rngs = {'params': 0, 'sparse24': 0}, {'params': True, 'mvue': True}
    return linen.scan(Layer, axes, split_rngs=rngs, length=LAYERS)(name='layers')(x, None)[0]


class Pair(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(D, HIDDEN, use_bias=False, rngs=rngs)
    self.down = nnx.Linear(HIDDEN, D, use_bias=False, rngs=rngs)


class Pairs(nnx.Module):
  """The model in nnx."""

  def __init__(self, rngs):
    self.layers = nnx.List([Pair(rngs)])

  def __call__(self, x):
    for layer in self.layers:
      x = x + layer.down(jnp.square(jax.nn.relu(layer.up(x))))
    return x


def own_arrays(recipe, stacked, x):
  shape = jax.ShapeDtypeStruct((LAYERS, HIDDEN, D) if stacked else (HIDDEN, D), jnp.float32)
  layer = {'up': shape, 'down': shape}
  params = {'layers': layer if stacked else [layer]}
  return params, s24.bind(recipe, model, params, x)


def of_linen(recipe, stacked, x):
  assert stacked
  return jax.eval_shape(Layers().init, jax.random.key(0), x)['params'], recipe


def of_nnx(recipe, stacked, x):
  del x
  assert not stacked
  return nnx.state(nnx.eval_shape(lambda: Pairs(nnx.Rngs(0))), nnx.Param), recipe


ALL = (
  *itertools.product(RECIPES, LAYOUTS, (own_arrays,)), *itertools.product(RECIPES, ('both',), (of_linen, of_nnx)),
)  # fmt: skip
# More devices change how a recipe is divided, or how a layout is, each by itself.
OF_64 = tuple(case for case in ALL if case[1:] == ('both', own_arrays) or case[0] == 'fst')


def exchanged(name, layout, *, stacked, devices, params_of=own_arrays):
  """(kind, shapes) of each exchange of an update that chooses masks, and of `sparse_variables`.

  The fingerprints beside these are left out, as XLA does in a step that makes and reads them.
  """
  mesh = jax.make_mesh((devices // 8 * 4, 2), ('d', 'm'), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def place(a):
    lead = len(a.shape) - 2
    specs = {(HIDDEN, D): LAYOUTS[layout], (D, HIDDEN): LAYOUTS[layout][::-1]}
    spec = jax.P(*(None,) * lead, *specs[a.shape[-2:]]) if a.shape[-2:] in specs else jax.P()
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, spec))

  params, bound = params_of(RECIPES[name], stacked, jax.ShapeDtypeStruct((64 * devices, D), jnp.float32))
  tx = s24.sparse_training(optax.adam(1e-3), bound, phase='sparse', learning_rate=1e-3)
  state = jax.eval_shape(tx.init, params)
  assert any(leaf.shape == w.shape for leaf in jax.tree.leaves(state) for w in jax.tree.leaves(params))
  params, state = jax.tree.map(place, (params, state))
  shardings = jax.tree.map(lambda a: a.sharding, (params, state))
  update = jax.jit(tx.update, out_shardings=shardings).lower(params, state, params)

  def states(params, state):
    found = s24.sparse_variables(params, state, bound, phase='sparse')
    if isinstance(found, nnx.State):
      return found[ATTRIBUTE]['states']
    return {key: value for key, value in found.items() if key != MADE_OF}

  variables = jax.jit(states).lower(params, state)
  text = '\n'.join(lowered.compile().as_text() or '' for lowered in (update, variables))
  return [(kind, re.findall(r'\w+\[([\d,]*)\]', result)) for result, kind in _EXCHANGE.findall(text)]


def check(name, layout, *, stacked, devices, params_of=own_arrays):
  """AssertionError unless all exchanges are sums: of counts and scales, a number or one a layer, and those of `_left`.

  More devices than `optim._left` samples along an axis hand each other the rows, or columns, that it looks at, one of a
  layer each.
  """
  found = exchanged(name, layout, stacked=stacked, devices=devices, params_of=params_of)
  assert found, f'{name}: not even flip rates are summed'
  lead = f'{LAYERS},' if stacked else ''
  row = rf'{lead}(1,\d+|\d+,1)'
  for kind, shapes in found:
    sampled = kind == 'collective-permute' and devices > 32 and all(re.fullmatch(row, shape) for shape in shapes)
    sums = kind == 'all-reduce' and set(shapes) <= {'', *map(str, (LAYERS, _left.SUMS, _left.SUMS + 1))}
    assert sampled or sums, (name, layout, stacked, kind, shapes)


class OnAMeshTest(parameterized.TestCase):
  """All weights stay where they are: masks are searched for, and weights packed, without an exchange of entries."""

  @parameterized.parameters('fst', 's_ste_fp8')
  @pytest.mark.slow
  def test_two_axes_divide_both_sides(self, name):
    check(name, 'both', stacked=True, devices=8)

  def test_flax(self):
    check('s_ste', 'both', stacked=False, devices=8, params_of=of_nnx)

  @parameterized.parameters(*(case for case in ALL if case != ('s_ste', 'both', of_nnx)))
  @pytest.mark.slow
  def test_all_recipes_and_layouts(self, name, layout, params_of):
    check(name, layout, stacked=params_of is of_linen, devices=8, params_of=params_of)

  @pytest.mark.slow
  def test_64_devices(self):
    code = (
      'from tests.sparse24_jax.binding.on_a_mesh_test import *\nfor name, layout, params_of in OF_64:\n'
      '  check(name, layout, stacked=params_of is not of_nnx, devices=64, params_of=params_of)'
    )
    flags = {'XLA_FLAGS': '--xla_force_host_platform_device_count=64', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'}
    root = Path(__file__).parents[3]
    done = subprocess.run(
      [sys.executable, '-c', code], env={**os.environ, **flags}, cwd=root, capture_output=True, text=True, check=False
    )
    self.assertEqual(done.returncode, 0, done.stderr[-2000:])

  def test_what_is_gathered_is_seen(self):
    mesh = jax.make_mesh((8,), ('d',), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(np.ones((16, 4), np.float32), jax.NamedSharding(mesh, jax.P('d')))
    text = jax.jit(s24.magnitude_mask).lower(x).compile().as_text() or ''
    self.assertTrue(_EXCHANGE.findall(text))  # two entries of a group of four on each device

  @parameterized.parameters(
    ('ste', 'tensor'), ('packed', 'fsdp'), ('ste', 'fsdp'), ('packed', 'tensor'), ('fst', 'tensor'), ('fst', 'fsdp')
  )
  @pytest.mark.few
  def test_matmuls_that_say_how_their_results_are_divided(self, name, layout):
    """No gradient goes to `x`, so that JAX traces the first matmul once more than the second, after all else."""
    fst = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
    # The path of kernels, which take 16 bits.
    packed = s24.DotPolicy(s24.transposable(), input_grad='sparse', implementation='dense')
    dtype, tolerance = (jnp.bfloat16, 1e-2) if name == 'packed' else (jnp.float32, 1e-5)
    policy = {'ste': s24.DotPolicy(s24.magnitude()), 'fst': fst, 'packed': packed}[name]
    recipe = s24.Recipe(name, (s24.Rule('.*', policy),))
    batch, hidden = {'tensor': (None, 'd'), 'fsdp': ('d', None)}[layout]
    specs = {'tensor': {'up': (None, 'd'), 'down': ('d', None)}, 'fsdp': {'up': ('d', None), 'down': (None, 'd')}}
    params, x = {'up': gaussian(0, (32, 64)), 'down': gaussian(1, (64, 16))}, gaussian(2, (32, 32))

    def loss(params, x, on_mesh):
      first, second = (jax.P(batch, part) if on_mesh else None for part in (hidden, None))
      params, x = jax.tree.map(lambda a: a.astype(dtype), (params, x))
      h = jnp.sin(jnp.dot(x, params['up'], out_sharding=first))
      y = jnp.einsum('th,hd->td', h, params['down'], out_sharding=second)
      return jnp.mean(y.astype(jnp.float32) ** 2)

    def gradient(params, x, on_mesh):
      f = functools.partial(loss, on_mesh=on_mesh)
      bound = s24.bind(recipe, f, params, x)
      variables = s24.sparse_variables(params, s24.sparse_training(optax.sgd(0.1), bound).init(params), bound)
      return jax.value_and_grad(s24.sparsify(f, bound))(params, variables, jax.random.key(0), x)

    # Both programs round where they say so: the result of a matmul is divided in one of them before it is read.
    options = {**OPTIONS, 'xla_allow_excess_precision': False}
    gradient = jax.jit(gradient, static_argnums=2, compiler_options=options)
    if name == 'fst':
      value, expected = gradient(params, x, False)
    else:  # nothing is sampled, and the gradients are those of the projected weights
      plain = jax.jit(jax.value_and_grad(loss), static_argnums=2, compiler_options=options)
      assert policy.projection
      masks = {role: np.asarray(policy.projection.init(w)) for role, w in params.items()}
      value, expected = plain({role: np.where(masks[role], w, 0) for role, w in params.items()}, x, False)
    with jax.set_mesh(jax.make_mesh((4,), ('d',), axis_types=(jax.sharding.AxisType.Explicit,))):
      on_mesh = {name: jax.device_put(w, jax.P(*specs[layout][name])) for name, w in params.items()}
      found_value, found = gradient(on_mesh, jax.device_put(x, jax.P(batch)), True)
    np.testing.assert_allclose(found_value, value, rtol=tolerance)
    for role, w in on_mesh.items():
      error = np.linalg.norm(found[role] - np.asarray(expected[role])) / np.linalg.norm(expected[role])
      self.assertLess(error, tolerance)
      self.assertEqual(found[role].sharding, w.sharding)

  @parameterized.parameters('ste', 'fst')
  @pytest.mark.slow
  def test_weights_that_a_model_gathers_itself(self, name):
    """And a block with relu, whose derivative is a function of its own, traced for arrays on the mesh."""
    fst = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
    policy = {'ste': s24.DotPolicy(s24.magnitude()), 'fst': fst}[name]
    recipe = s24.Recipe(name, (s24.Rule('.*', policy),))
    params, x = {'up': gaussian(0, (32, 64)), 'down': gaussian(1, (64, 32))}, gaussian(2, (32, 32))

    def loss(params, x, on_mesh):
      up, down = (jax.sharding.reshard(params[k], jax.P()) if on_mesh else params[k] for k in ('up', 'down'))
      return jnp.mean((jax.nn.relu(x @ up) @ down) ** 2)

    def gradient(params, x, on_mesh):
      bound = s24.bind(recipe, f := functools.partial(loss, on_mesh=on_mesh), params, x)
      variables = s24.sparse_variables(params, s24.sparse_training(optax.sgd(0.1), bound).init(params), bound)
      return jax.value_and_grad(s24.sparsify(f, bound))(params, variables, jax.random.key(0), x)

    gradient = jax.jit(gradient, static_argnums=2, compiler_options=OPTIONS)
    value, expected = gradient(params, x, False)
    with jax.set_mesh(jax.make_mesh((4,), ('d',), axis_types=(jax.sharding.AxisType.Explicit,))):
      on_mesh = {name: jax.device_put(w, jax.P(None, 'd')) for name, w in params.items()}
      x = jax.device_put(x, jax.P('d'))
      found_value, found = gradient(on_mesh, x, True)
      checked = s24.check(recipe, functools.partial(loss, on_mesh=True), on_mesh, x)
    self.assertRegex(str(checked), r'up .* relu up ')
    np.testing.assert_allclose(found_value, value, rtol=1e-5)
    for role, w in on_mesh.items():
      error = np.linalg.norm(found[role] - np.asarray(expected[role])) / np.linalg.norm(expected[role])
      self.assertLess(error, 1e-5)
      self.assertEqual(found[role].sharding, w.sharding)


if __name__ == '__main__':
  absltest.main()
