"""Masks and packed weights of a user's own arrays, divided in any way: what 8 and 64 devices exchange for them."""

import os
from pathlib import Path
import re
import subprocess
import sys

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.binding.origin import MADE_OF

LAYERS, D, HIDDEN = 2, 256, 1024
UP, DOWN = r'layers(/\d)?/up', r'layers(/\d)?/down'
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


def exchanged(name, layout, *, stacked, devices):
  """(kind, shapes) of each exchange of an update that chooses masks, and of `sparse_variables`.

  The fingerprints beside these are left out, as XLA does in a step that makes and reads them.
  """
  mesh = jax.make_mesh((devices // 8 * 4, 2), ('d', 'm'), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def place(a):
    lead = len(a.shape) - 2
    divided = a.shape[-2:] == (HIDDEN, D)
    spec = jax.P(*(None,) * lead, *LAYOUTS[layout]) if divided else jax.P()
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, spec))

  shape = jax.ShapeDtypeStruct((LAYERS, HIDDEN, D) if stacked else (HIDDEN, D), jnp.float32)
  layer = {'up': shape, 'down': shape}
  params = {'layers': layer if stacked else [layer]}
  bound = s24.bind(RECIPES[name], model, params, jax.ShapeDtypeStruct((64 * devices, D), jnp.float32))
  tx = s24.sparse_training(optax.adam(1e-3), bound, phase='sparse', learning_rate=1e-3)
  state = jax.eval_shape(tx.init, params)
  assert any(leaf.shape == shape.shape for leaf in jax.tree.leaves(state))
  params, state = jax.tree.map(place, (params, state))
  shardings = jax.tree.map(lambda a: a.sharding, (params, state))
  update = jax.jit(tx.update, out_shardings=shardings).lower(params, state, params)

  def states(params, state):
    found = s24.sparse_variables(params, state, bound, phase='sparse')
    return {key: value for key, value in found.items() if key != MADE_OF}

  variables = jax.jit(states).lower(params, state)
  text = '\n'.join(lowered.compile().as_text() or '' for lowered in (update, variables))
  return [(kind, re.findall(r'\w+\[([\d,]*)\]', result)) for result, kind in _EXCHANGE.findall(text)]


def check(name, layout, *, stacked, devices):
  """AssertionError unless all exchanges are sums of counts and scales: a number, or one a layer.

  More devices than `optim._left` samples along an axis hand each other the rows that it looks at, one of a layer each.
  """
  found = exchanged(name, layout, stacked=stacked, devices=devices)
  assert found, f'{name}: not even flip rates are summed'
  row = f'{LAYERS},1,{D}' if stacked else f'1,{D}'
  for kind, shapes in found:
    sampled = kind == 'collective-permute' and devices > 32 and set(shapes) == {row}
    sums = kind == 'all-reduce' and set(shapes) <= {'', str(LAYERS)}
    assert sampled or sums, (name, layout, stacked, kind, shapes)


class OnAMeshTest(parameterized.TestCase):
  """All weights stay where they are: masks are searched for, and weights packed, without an exchange of entries."""

  @parameterized.parameters('s_ste_fp8', 'fst')
  def test_two_axes_divide_both_sides(self, name):
    check(name, 'both', stacked=True, devices=8)

  @parameterized.product(name=tuple(RECIPES), layout=tuple(LAYOUTS))
  @pytest.mark.slow
  def test_all_recipes_and_layouts(self, name, layout):
    check(name, layout, stacked=False, devices=8)

  @pytest.mark.slow
  def test_64_devices_and_stacked_layers(self):
    code = (
      'from tests.sparse24_jax.binding.on_a_mesh_test import *\nfor name in RECIPES:\n'
      '  for layout in LAYOUTS:\n    check(name, layout, stacked=True, devices=64)'
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


if __name__ == '__main__':
  absltest.main()
