"""The two doors for Flax users: `sparsify` a model, hand it its `sparse_variables`."""

from collections.abc import Mapping
from typing import Any

from flax import linen, nnx, serialization

from sparse24_jax.binding.origin import FITS, known, MADE_OF, numbers_of, of_weights, POLICIES
from sparse24_jax.binding.states import weight_states
from sparse24_jax.binding.tracing import refuse_what_holds_a_module
from sparse24_jax.binding.transform import sparse_function
from sparse24_jax.integration import linen as linen_door
from sparse24_jax.integration import nnx as nnx_door
from sparse24_jax.integration.functional import projected_weights
from sparse24_jax.integration.nnx_states import dense_state, fingerprints, sparse_state, SparseVariable
from sparse24_jax.layout import Layouts
from sparse24_jax.optim import begins_projected, note_read, warn_of_other_weights
from sparse24_jax.recipe import PhaseName, Recipe, resolve_phase
from sparse24_jax.rules import is_weight, leaves_by_path, listed, nested, rule_for

__all__ = ['SparseVariable', 'sparse_variables', 'sparsify', 'states_of']

# Of an optimizer state Flax keeps the arrays; what is static is that of the state that is read into.
serialization.register_serialization_state(
  Layouts, lambda layouts: {}, lambda layouts, state: layouts, override=True
)  # fmt: skip


def sparsify(
  model: Any, recipe: Recipe, *, phase: PhaseName | None = None, rngs: nnx.Rngs | None = None
) -> Any:
  """The model with sparse matmuls in the layers that the rules match; parameters and checkpoints stay as they are.

  A linen model comes back wrapped: same methods and parameter tree, applied with `{'params': params, 'sparse24':
  sparse_variables(...)}` and `rngs={'mvue': key}`. A function of parameters, or of an nnx model, comes back as
  `g(params or model, variables, key, *args)`. Give each step and each micro-batch a key of its own,
  `jax.random.split(key, n)`: the gradients of those that share one are sampled alike, and nothing notices it.

  An nnx model by itself comes back as a copy; its calls, and its methods that are given arrays, are sparse. Before each
  forward bring the states in with `nnx.update(model, sparse_variables(...))`. Where a trainer owns the step
  and nobody ever does, a forward whose weights have changed chooses masks from them, outside of jit with a warning:
  each time, not every `refresh_every` steps, and on a GPU without what is packed once a step. Once they were brought
  in, other weights than those are an error wherever the weights do not tell their masks: where these wait for a refresh
  (`refresh_every` above 1), where links move, and where weights were packed. Under jit, which raises no error, what the
  call returns is NaN, as are its gradients and the floating-point numbers that it writes into the model, caches and
  batch statistics; integers that it returns, tokens say, are the least of their dtype (unsigned ones the largest), and
  booleans are as they come. As with dropout, the count of its `'mvue'` stream is in the model: a forward advances it,
  and an exact resume restores it.

  What is run is traced, so any layer will do whose weights meet matmuls: weights `[in, out]` by the recipe itself,
  others by the one that `bind` returns. A matched weight that goes elsewhere is an error by its path. A weight that
  your code gives to `sparse24_jax.dot` itself needs no rule here: give `sparsify` the recipe with it dense,
  `recipe.with_dense(path)`, and `sparse_training` and `sparse_variables` the whole recipe. In linen a matched layer
  cannot stand inside what changes its variables (`nn.WeightNorm`, an `nn.map_variables` that transposes, and, unless
  its masks are transposable, `nn.SpectralNorm`). To export a model, or to serve it without masks, give the plain model
  the weights of `project`.

  The phase is that of the step (`phase_at`), the same one here, in `sparse_training`, `sparse_variables` and `project`:
  where they differ, a part of the recipe goes on or stops. A model and a function refuse the variables of the other
  phase. A dense phase lifts the sparsity, not the precision: layers whose rule says `'fp8'` are dense ones in FP8, in
  an evaluation too. To evaluate in the precision of the model call the plain model.

  Args:
    model: a `flax.linen.Module`, a `flax.nnx.Module`, or a function whose first argument is a tree of parameters or a
      `flax.nnx.Module`; a module that `sparsify` made is fine too.
    recipe: its rules select layers by the path of their kernel in `model`, also where that is a part of a larger model.
    phase: `'dense'` gives the plain model, of linen one whose `apply` and `bind` refuse sparse states, of nnx a copy
      with a mark, and no variables, in its attribute `sparse24`. If rules have layers in FP8, these are dense in FP8,
      by a linen model that is wrapped as in a sparse phase and an nnx model whose calls are traced; no states and no
      keys are needed. None is the recipe's first, which one that begins dense, to be sparse later, must say.
    rngs: nnx only: streams with one named `'mvue'`, for recipes that use it.

  Raises:
    ValueError: neither a function nor a Flax module, a module that holds matched weights itself (Equinox), unknown
      phase, none in a recipe that begins dense, a rule that decides for nothing. Weights that no matmul contracts are
      found when the model is called.

  >>> from flax import linen as nn
  >>> import jax, jax.numpy as jnp, optax, sparse24_jax as s24
  >>> model, recipe, x = nn.Dense(4), s24.recipes.ste('kernel'), jnp.ones((2, 8))
  >>> params = model.init(jax.random.key(0), x)['params']
  >>> opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
  >>> variables = {'params': params, 'sparse24': s24.sparse_variables(params, opt_state, recipe)}
  >>> s24.sparsify(model, recipe).apply(variables, x).shape
  (2, 4)
  """
  phase = resolve_phase(recipe, phase)
  if isinstance(model, linen.Module):
    plain = linen_door.plain_of(model)
    return linen_door.of_dense_phase(plain, recipe) if phase == 'dense' else linen_door.SparseModule(plain, recipe)
  if isinstance(model, nnx.Module):
    return nnx_door.sparsify(model, recipe, phase=phase, rngs=rngs)
  if callable(model) and not isinstance(model, type):
    refuse_what_holds_a_module('model', model)
    _refuse_a_module(model, recipe)
    return sparse_function(model, recipe, phase=phase)
  raise ValueError(
    f'model must be a function of parameters, a flax.linen.Module or a flax.nnx.Module, found {type(model).__name__}:'
    ' of a class of modules make one first'
  )


def _refuse_a_module(f: Any, recipe: Recipe) -> None:
  """ValueError if a callable is a tree with the recipe's weights in it; a partial function may hold any arguments."""
  held = [] if hasattr(f, 'keywords') else leaves_by_path(f)
  if weights := [path for path, leaf in held if is_weight(path, leaf) and rule_for(path, recipe)]:
    raise ValueError(
      f'model is a {type(f).__name__} that holds the weights {listed(weights)} itself: make a function of its'
      ' parameters. Equinox: params, static = eqx.partition(model, eqx.is_inexact_array), and sparsify a function of'
      ' params that calls eqx.combine(params, static)'
    )


def sparse_variables(
  params: Any, opt_state: Any, recipe: Recipe, *, phase: PhaseName | None = None, pack: bool | None = None
) -> Any:
  """What the forward of a sparsified model reads besides its parameters: each sparse weight packed, or its state.

  Call it once an optimizer step, inside the jitted step and outside the loop over micro-batches: where kernels will
  run, it packs the weights for all of them, forward and backward. What no kernel then reads, XLA drops. Elsewhere it
  only arranges what the optimizer state holds.

  It packs the values of `params`: apply the model to those parameters only, and call this again for others: an average,
  loaded weights, those that SAM or noise perturbed. The masks are those of `opt_state` each time. With others than
  `params`, of a later step say, a linen model or a function raises an error, and under jit returns NaN (integers as for
  nnx, see `sparsify`): the fingerprints of a few weights are beside the states, and a forward in the trace that made
  them compares nothing. A cast to fewer bits is no change; those of less than some millionths of a weight's size, and
  weights that are not looked at, go unseen.

  An nnx model keeps what `nnx.update` brought, and refuses it for other parameters, see `sparsify`. At the end of a
  step, after `optimizer.update`, bring in `sparse_variables(..., pack=False)`: the masks of the new weights, in arrays
  as `sparsify` made them. The model is then one to evaluate and to save, and the next step finds what it was traced
  for.

  Args:
    params: the parameters, a nested dictionary (linen) or an `nnx.State`. Where a forward of yours reads weights of an
      nnx module, experts in one array say, give `nnx.to_pure_dict(nnx.state(model, nnx.Param))`.
    opt_state: an optimizer state that holds a `sparse_training` state for them, of the same step: its masks are those
      of the weights that step left. With others a call outside of jit warns, once for each place in a program, as far
      as `sparse_training` tells them apart; for an average of weights that is as it should be. None chooses masks from
      `params` as they are: for a trainer whose loss sees parameters only, and whose optimizer is a plain one. They
      cannot be stale; soft thresholds, which keep a scale of the start, and moving topologies need the state.
    recipe: the recipe of that state.
    phase: that of the model, see `sparsify`; in `'dense'` there is nothing to hand over but, for nnx, which phase it
      is: a model that was made for the other one is an error in `nnx.update`. The model still has to be that of the
      dense phase, as `check_step` sees: one of the sparse phase goes on sparse. If `sparsify` did not make the nnx
      model, Flax says "Found data ... assigned to static attribute 'sparse24'". None is the recipe's first; one that
      begins dense, to be sparse later, must be told.
    pack: whether to pack; None does if the policy names a kernel, or if this GPU has them and they may be chosen. Which
      matmuls then read it each forward decides by its tokens and their dtype, which are not known here.

  Returns:
    linen: the collection `'sparse24'`, a nested dictionary with an entry more, `'made of'`: the fingerprints, whether
      `opt_state` serves the recipe and the phase, and numbers of the policies. `states_of` leaves it out. nnx: an
      `nnx.State` for `nnx.update`, or for a function.

  Raises:
    ValueError: the recipe, the state and the parameters do not fit, unknown phase, none in a recipe that begins
      dense, or a sparse one where the last step was of a dense end. Under jit, which raises none, forwards give NaN.

  >>> import jax.numpy as jnp, optax, sparse24_jax as s24
  >>> params, recipe = {'mlp': {'up': {'kernel': jnp.eye(4)}}}, s24.recipes.ste('mlp/.*')
  >>> opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
  >>> s24.sparse_variables(params, opt_state, recipe)['mlp']['up']['kernel'].shape
  (4, 4)
  """
  phase = resolve_phase(recipe, phase)
  if isinstance(params, nnx.Module):
    raise ValueError('params is an nnx module: give its parameters, nnx.state(model, nnx.Param)')
  sparse, fits = projected_weights(params, opt_state, recipe, phase='sparse' if phase == 'sparse' else None)
  note_read(opt_state, phase)
  if opt_state is not None and not (phase == 'dense' and begins_projected(params, opt_state, recipe)):
    warn_of_other_weights(params, opt_state, reads=phase == 'sparse')
  if phase == 'dense':
    sparse = {}
  states, policies = weight_states(recipe, sparse, pack), numbers_of(policy for policy, _, _ in sparse.values())
  if isinstance(params, nnx.State):
    if phase == 'dense':
      return dense_state()
    made_of = fingerprints({path: (policy.projection, w) for path, (policy, w, _) in sparse.items()})
    return sparse_state(states, made_of, brought_in=opt_state is not None, fits=known(fits), policies=policies)
  if not sparse:
    return nested(states)
  weights = {path: (w, p.layout_of(w).stacked) for path, (policy, w, _) in sparse.items() if (p := policy.projection)}
  flags = {FITS: known(fits), POLICIES: policies}
  made_of = of_weights(weights) | {path.removeprefix(f'{MADE_OF}/'): flag for path, flag in flags.items()}
  return {MADE_OF: made_of} | nested(states)


def states_of(variables: Mapping[str, Any]) -> dict[str, Any]:
  """The states alone in what `sparse_variables` returns for linen and for functions, to map them with parameters.

  A forward that is given these does not see whether they are of its parameters: give it the variables themselves.

  Args:
    variables: a nested dictionary.

  Returns:
    A nested dictionary with an entry for each sparse weight, at its path.

  Raises:
    ValueError: those of an nnx model, which holds them apart.

  >>> import jax, jax.numpy as jnp, optax, sparse24_jax as s24
  >>> params, recipe = {'mlp': {'kernel': jnp.ones((8, 4))}}, s24.recipes.ste('mlp/.*')
  >>> opt_state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
  >>> variables = s24.sparse_variables(params, opt_state, recipe)
  >>> jax.tree.map(lambda mask, w: float((mask * w).sum()), s24.states_of(variables), params)
  {'mlp': {'kernel': 16.0}}
  """
  if isinstance(variables, nnx.State):
    raise ValueError('variables are those of an nnx model, which has the states by path: model.sparse24.states')
  return {name: node for name, node in variables.items() if name != MADE_OF}
