"""The cases of the conformance tests: every projection and every recipe, and a small network that each of them trains.

A two-layer network is trained for three steps by each case in each layout, once; the tests look at that record.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

import sparse24_jax as s24
from sparse24_jax.clusters import with_neurons
from sparse24_jax.rules import rule_for
from tests.draws import gaussian
from tests.quick import jit

RULE = '(up|down)/kernel'
RATE, STEPS = 0.1, 3
NARROW, WIDE, TOKENS = 32, 64, 64

PROJECTIONS = {
  'magnitude_2_4': s24.magnitude(),
  'magnitude_1_4': s24.magnitude(n=1),
  'transposable_exact': s24.transposable(),
  'transposable_two_approx': s24.transposable(method='two_approx'),
  'soft_threshold': s24.soft_threshold_projection(),
  'dynamic_sparse': s24.dynamic_sparse(0.3, drop_fraction=0.3, random_share=0.25),
  'dynamic_sparse_2_4': s24.dynamic_sparse(0.3, drop_fraction=0.3, random_share=0.25, structure='2:4'),
  'dynamic_sparse_transposable': s24.dynamic_sparse(
    0.3, drop_fraction=0.3, random_share=0.25, structure='transposable'
  ),
}
RECIPES = {
  'dense': s24.recipes.dense(RULE, watch=s24.magnitude()),
  'ste': s24.recipes.ste(RULE),
  'sr_ste_on_weights': s24.recipes.sr_ste(RULE, masked_decay=0.1),
  'sr_ste_on_gradients': s24.recipes.sr_ste(RULE, masked_decay=0.1, decay_on='gradients'),
  'transposable_srste': s24.recipes.transposable_srste(RULE, masked_decay=0.1, refresh_every=2),
  'transposable_srste_fp8': s24.recipes.transposable_srste(RULE, masked_decay=0.1, refresh_every=2, fp8=True),
  's_ste': s24.recipes.s_ste(RULE),
  's_ste_fp8': s24.recipes.s_ste(RULE, fp8=True),
  'step': s24.recipes.step(RULE),
  'mixed_sparsity': s24.recipes.mixed_sparsity(RULE, total_steps=STEPS, warm_up=0.4, restoration=0.3, refresh_every=1),
  'rigl': s24.recipes.rigl(RULE, density=0.4, total_steps=100, refresh_every=2),
  'set_': s24.recipes.set_(RULE, density=0.4, refresh_every=2),
  'static': s24.recipes.static(RULE, density=0.4),
} | {
  f'neuron_level{name}': s24.recipes.neuron_level(
    'up/kernel', 'down/kernel', policy=policy, warmup_fraction=0.0,
    dense_fraction=0.0, refresh_every=2,
  )
  # Clusters keep blocks of tokens, as published.
  for name, policy in (
    ('', s24.ActivationPolicy(s24.VNM(16, 8))),
    ('_clusters', s24.ActivationPolicy(s24.VNM(16, 8), s24.VNM(16, 8), 0.05, s24.Clusters(4, 32))),
  )
}  # fmt: skip
# A recipe that needs nothing special stands in no list.
RECIPES |= {
  name: known.example(*((RULE,) if len(known.paths) == 1 else ('up/kernel', 'down/kernel')))
  for name, known in s24.recipes.KNOWN.items()
  if name in s24.recipes.__all__ and name not in {recipe.name for recipe in RECIPES.values()}
}  # fmt: skip
CASES = RECIPES | {
  name: s24.Recipe(name, (s24.Rule(RULE, s24.DotPolicy(projection, weight_grad='mvue')),), masked_decay=0.1)
  for name, projection in PROJECTIONS.items()
}
UNSTRUCTURED = ('dynamic_sparse', 'mixed_sparsity', 'rigl', 'set_', 'static')
# Spec of tokens, of weights. FSDP cuts the contracted axis, tensor parallelism the output axis.
LAYOUTS = {'data': ('d', (None, None)), 'fsdp': ('d', ('d', None)), 'tensor': (None, (None, 'd'))}
# One of each kind: masks for both passes, a scale with real FP8, links that move, moments that rest, activations. They
# are in the fast lane; all recipes train on the layout that cuts groups of weights, these on the others too.
KINDS = ('transposable_srste', 's_ste_fp8', 'mixed_sparsity', 'step', 'neuron_level_clusters')
OTHER_CASES = tuple(case for case in CASES if case not in KINDS)
PROJECTION_KINDS = ('transposable_exact', 'soft_threshold', 'dynamic_sparse')
# What the count of steps, and the layout, could matter to besides: links that move anew, activations without clusters.
OTHERS_THAT_MOVE = ('rigl', 'neuron_level', 'dynamic_sparse_2_4', 'dynamic_sparse_transposable')
OTHER_PROJECTIONS = tuple(name for name in PROJECTIONS if name not in PROJECTION_KINDS)


def mesh(axis_type=AxisType.Auto):
  return Mesh(np.array(jax.devices()[:8]), ('d',), axis_types=(axis_type,))


def place(tree, spec, axis_type=AxisType.Auto):
  """From NumPy, but for keys: what is on a device already is divided by a program."""
  plain = jax.tree.map(lambda a: a if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else np.asarray(a), tree)
  return jax.device_put(plain, NamedSharding(mesh(axis_type), PartitionSpec(*spec)))


def weights(dtype=jnp.float32, seed=0):
  rng, shapes = np.random.default_rng(seed), {'up': (NARROW, WIDE), 'down': (WIDE, NARROW)}
  return {
    name: {'kernel': jnp.asarray((rng.standard_normal(shape, np.float32) / 6).astype(dtype))}
    for name, shape in shapes.items()
  }


def phase_of(recipe):
  return 'dense' if recipe.name == 'dense' else 'sparse'


def optimizer(recipe, phase=None):
  phase = phase or phase_of(recipe)
  inner = s24.step_adam(RATE, eps=1e-2, phase=phase) if recipe.name == 'step' else optax.adam(RATE)
  return optax.chain(
    optax.clip_by_global_norm(1.0), s24.sparse_training(inner, recipe, phase=phase, learning_rate=RATE)
  )


def block(policy, params, states, x):
  """Both layers at once, which is how sparse activations run."""
  up, down = (params[name]['kernel'] for name in ('up', 'down'))
  by_role = with_neurons({name: states[name]['kernel'] for name in ('up', 'down')}, policy)
  return s24.neuron_level_ffn(jnp.tanh(x), up, down, by_role, policy=policy)


def loss(recipe, params, states, x, key):
  if activation := recipe.rules[0].activation:
    return jnp.mean(jnp.square(block(activation, params, states, x).astype(jnp.float32) - 1))
  policy = s24.DotPolicy() if phase_of(recipe) == 'dense' else recipe.rules[0].policy
  for name in ('up', 'down'):
    key, own = jax.random.split(key)
    state = states[name]['kernel'] if states else None
    x = s24.dot(jnp.tanh(x), params[name]['kernel'], state, policy=policy, key=own)
  return jnp.mean(jnp.square(x.astype(jnp.float32) - 1))


def make_step(recipe, tx=None):
  tx = tx or optimizer(recipe)

  def step(params, state, x, key):
    states = s24.sparse_variables(params, state, recipe, phase=phase_of(recipe))
    value, grads = jax.value_and_grad(lambda p: loss(recipe, p, states, x, key))(params)
    updates, state = tx.update(grads, state, params, unknown_extra=1)
    return optax.apply_updates(params, updates), state, value

  return jit(step)


class Record(NamedTuple):
  """A training: its losses, and parameters and state at the start, after one step and at the end."""

  losses: list[float]
  params: Any
  states: list[Any]
  compilations: int


@functools.cache
def run(case, layout=None):
  """Trains `case`, on one device if no layout is given."""
  params, x = weights(), gaussian(5, (TOKENS, NARROW))
  if layout:
    tokens, spec = LAYOUTS[layout]
    params, x = place(params, spec), place(x, (tokens, None))
  step = make_step(CASES[case])
  states = [jit(optimizer(CASES[case]).init)(params)]
  if layout:  # Zeros of moments follow nothing, so jit leaves them whole; everything like a weight goes with it.
    states = [jax.tree.map(lambda a: place(a, spec if a.ndim == 2 else ()), states[0])]
  losses = []
  for i in range(STEPS):
    key = jax.random.key(i)
    if layout:
      key = place(key, ())
    params, state, value = step(params, states[-1], x, key)
    states.append(state)
    losses.append(float(value))
  return Record(losses, params, states, step._cache_size())


def projection_of(case, name):
  rule = rule_for(f'{name}/kernel', CASES[case])
  assert rule is not None
  return rule.policy.projection


def assert_trees_equal(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)
