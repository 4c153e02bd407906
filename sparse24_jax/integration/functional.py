"""The framework-free door: any function of a pytree of weights gets the recipe's numerics, at dense speed."""

from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import formats
from sparse24_jax.binding.bound import require_axes
from sparse24_jax.binding.origin import known, require_fits, spoiled
from sparse24_jax.dot import check_state
from sparse24_jax.layout import Layout
from sparse24_jax.optim import (
  contexts,
  holds_state,
  named_one,
  note_read,
  projections_of,
  require_made_for,
  require_same_weights,
  sparse_states,
  wait_until_known,
  warn_of_other_weights,
)
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projection import abstract_state, Form, Masked, SoftThreshold, straight_through, TransposableMasked
from sparse24_jax.recipe import PhaseName, Recipe, require_recipe, resolve_phase
from sparse24_jax.rules import leaves_by_path, map_by_path, match_rules
from sparse24_jax.topology import Context, Topology
from sparse24_jax.weight_errors import errors_name


def project(params: Any, opt_state: Any, recipe: Recipe, *, phase: PhaseName | None = None) -> Any:
  """The parameters as the forward sees them: sparse weights projected, gradients passed straight through.

  Differentiable: the cotangent of a projected weight is that of the dense one. It gives the forward and the input
  gradient of a recipe; MVUE acts inside the weight-gradient matmul, which only `dot` can reach. Also the way to
  evaluate or export a sparse model.

  Args:
    params: any pytree of arrays.
    opt_state: optimizer state that holds a `sparse_training` state for `params`, of the same step: with others a call
      outside of jit warns, as `sparse_variables` does. None chooses masks from `params` as they are.
    recipe: the recipe of that state. One that `bind` made knows the axes of each weight. By itself it serves weights
      with two axes that are called `kernel`, those of Flax's layers, which are `[in, out]`. One that is stored as
      `[out, in]` under that name, as Hugging Face's Conv1D had it, must be bound: only a bias beside it gives it away.
    phase: `'dense'` returns `params` as they are; None is the recipe's first, which one that begins dense, to be sparse
      later, must say. So must a run that ended dense: `'dense'`, or `'sparse'` to prune it all the same.

  Returns:
    A tree like `params`.

  Raises:
    ValueError: weights whose axes nothing tells, unknown phase, none in a recipe that begins dense or after a step of a
      dense end, or the recipe, the state and the parameters do not fit. Where only a run tells, under jit, projected
      weights are NaN.

  >>> import jax, optax, sparse24_jax as s24
  >>> params = {'mlp': {'kernel': jax.random.normal(jax.random.key(0), (8, 4))}}
  >>> recipe = s24.recipes.ste('mlp/.*')
  >>> opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
  >>> s24.verify24(s24.project(params, opt_state, recipe)['mlp']['kernel'])
  >>> grads = jax.grad(lambda p: s24.project(p, opt_state, recipe)['mlp']['kernel'].sum())(params)
  >>> float(grads['mlp']['kernel'].min())
  1.0
  """
  now = resolve_phase(recipe, phase)
  # Whoever names the phase means it: a model that was finished dense may be pruned, and a dense step log its loss.
  if phase is None:
    note_read(opt_state, now)
  if now == 'dense':
    return params
  wait_until_known(opt_state)
  sparse, fits = projected_weights(params, opt_state, recipe, phase='sparse' if phase is None else None)
  fine = require_fits(known(fits))
  require_axes('project', params, sparse, recipe)
  if opt_state is not None:
    warn_of_other_weights(params, opt_state, wait=True)

  def one(path: str, w: Array) -> Array:
    policy, _, state = sparse.get(path, (None, None, None))
    if policy is None:
      return w
    projected = straight_through(policy.projection, w, state)
    return projected if fine is None else spoiled(projected, fine)

  return map_by_path(one, params)


def verify_weights(params: Any, recipe: Recipe) -> dict[str, float]:
  """Checks on the host that the weights of a recipe hold the zeros that it promises, as stored: what `project` returns.

  A weight whose values are all zero, as some libraries initialise kernels, passes: its share is 1.0.

  Args:
    params: parameters that are projected: those of `project`, or of an exported checkpoint, nested or flat, whose names
      have `/` between their parts. For PyTorch's `layers.0.w1` give `{name.replace('.', '/'): w ...}`.
    recipe: of the run. One that `bind` made knows along which axes; one by itself serves kernels with two axes, as in
      `project`.

  Returns:
    Path of each sparse weight to the share of its entries that are zero, to six digits. That is all where the recipe
    asks for no zeros in the end, as `mixed_sparsity` with a restoration, or nothing tells: a projection of your own, or
    a density by a function of your own in a recipe without `total_steps`.

  Raises:
    ValueError: names the first weight that is not 2:4, or 1:4 if that is its projection, along what its matmul
      contracts (of a transposable projection along both), with the group that is not, or that holds NaN; or, without a
      pattern, as under `rigl`, that has fewer zeros than the density at the end of the run leaves (give all weights
      of the recipe, which share it); or weights whose axes nothing tells.

  >>> import jax, optax, sparse24_jax as s24
  >>> params = {'up': {'kernel': jax.random.normal(jax.random.key(0), (8, 4))}}
  >>> recipe = s24.recipes.ste('up/.*')
  >>> opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
  >>> s24.verify_weights(s24.project(params, opt_state, recipe), recipe)
  {'up/kernel': 0.5}
  >>> s24.verify_weights(params, recipe)
  Traceback (most recent call last):
  sparse24_jax.weight_errors.WeightError: up/kernel: not 2:4 along axis -2: group (0, 0) holds [...]...
  """
  require_recipe(recipe)
  weights, shares = dict(leaves_by_path(params)), {}
  rules = match_rules(params, recipe)
  sparse = {path: p for path, rule in rules.items() if (p := rule.policy.projection) is not None}
  require_axes('verify_weights', params, sparse, recipe)
  spread = contexts(projections_of(params, recipe), params, jnp.int32(0))
  shared = dict(leaves_by_path(spread, is_leaf=lambda node: isinstance(node, Context)))
  for path, projection in sparse.items():
    layout = projection.layout_of(weights[path])
    of_matrix, w = projection.matrix or projection, layout.matrix(weights[path])
    with errors_name(path):
      if jnp.isnan(w).any():
        raise ValueError(
          'it holds NaN, and nothing tells what its zeros are: the run diverged, or under jit project was given a state'
          ' of other weights or of another recipe'
        )
      try:
        require_zeros(of_matrix.form, w, layout)
      except ValueError as error:
        raise ValueError(
          f"{error}; parameters as trained and those of project(..., phase='dense') are dense, as is right if the run"
          " ended dense; those of project(..., phase='sparse') have the zeros"
        ) from error
      if of_matrix.form is None and isinstance(of_matrix.update, Topology):
        _require_density(of_matrix.update, w, shared[path], recipe)
    shares[path] = round(float(jnp.mean(w == 0)), 6)
  return shares


def _require_density(topology: Topology, w: Array, context: Context, recipe: Recipe) -> None:
  """Raises ValueError where a weight, as [in, out], has more links than at the end of a run, if that is known."""
  last = topology.last_change(recipe.refresh_every, recipe.total_steps)
  if last is None or recipe.phases[-1].name == 'dense':
    return
  links, found = int(topology.links(context._replace(step=last), w.shape)), int((w != 0).sum((-2, -1)).max())
  if found > links * (1 + 1e-6) + 1:  # a compiled step may round shares in float32 otherwise
    size = w.shape[-2] * w.shape[-1]
    raise ValueError(
      f'{found} of {size} entries are not zero, and at the end of a run {recipe.name!r} keeps {links}, its share among'
      ' all weights of the recipe: give them all'
    )


def require_zeros(form: Form | None, w: Array, layout: Layout) -> None:
  """Raises ValueError where a projected weight, as [in, out], has too few zeros along what its projection packs."""
  axes = {TransposableMasked: (-2, -1), Masked: (-2,)}.get(type(form), ())
  for axis in (form.axis,) if isinstance(form, SoftThreshold) else axes:
    name, stored = ('inputs', layout.contracted) if axis == -2 else ('outputs', layout.outputs)
    along = f'{"axis" if len(stored) == 1 else "axes"} {", ".join(map(str, stored))} as stored, its {name}'
    n = form.n if isinstance(form, Masked) else 2
    try:
      formats.verify(w, axis=axis, n=n, along=None if layout.is_standard else along)
    except ValueError as error:
      if layout.is_standard:
        raise
      raise ValueError(f'{error} in the weight as [in, out]') from error


def projected_weights(
  params: Any, opt_state: Any, recipe: Recipe, *, phase: PhaseName | None = None
) -> tuple[dict[str, tuple[DotPolicy, Array, Array]], bool | Array]:
  """Policy, weight and state of each sparse weight, by path, and whether the state may be read for a phase.

  ValueError where it is known that it does not fit the recipe or, unless that is None, the phase.
  """
  if holds_state(params):
    raise ValueError(
      'params is an optimizer state: arguments in another order? Parameters come first, then the optimizer state, then'
      ' the recipe'
    )
  policies = {path: rule.policy for path, rule in match_rules(params, recipe).items() if rule.policy.projection}
  weights = dict(leaves_by_path(params))
  if opt_state is None:
    return {path: (p, weights[path], _chosen_now(path, p, weights[path])) for path, p in policies.items()}, True
  require_same_weights(recipe, policies, opt_state)
  fits = require_made_for(recipe, opt_state, phase=phase)
  states = sparse_states(opt_state)
  for path, policy in policies.items():
    w, projection = weights[path], policy.projection
    with errors_name(path):
      check_state(states[path], abstract_state(projection, w.shape, jnp.result_type(w)), projection)
  return {path: (policy, weights[path], states[path]) for path, policy in policies.items()}, fits


def _chosen_now(path: str, policy: DotPolicy, w: Array) -> Array:
  """The mask that a search finds in the weight as it is."""
  projection = policy.projection
  assert projection is not None
  if isinstance((projection.matrix or projection).form, SoftThreshold) or projection.update is not None:
    raise ValueError(
      f'{path}: projection {projection.name!r} keeps what the weights do not tell, a scale of the start or a topology:'
      ' give the optimizer state in place of None'
    )
  return named_one('chosen', path, projection.init(jax.lax.stop_gradient(w)))
