"""A function of parameters with its matched weights sparse: what `sparsify` makes of a plain function."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
import functools
import inspect
import itertools
import logging
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._varying import varying_axes
from sparse24_jax.activation_sparsity import neuron_level_ffn
from sparse24_jax.asked import Asked, PLAIN
from sparse24_jax.binding import _jax
from sparse24_jax.binding.altered import Altered
from sparse24_jax.binding.beside import look_beside
from sparse24_jax.binding.blocks import by_itself, PAIRS, why_apart
from sparse24_jax.binding.bound import bind_traced, Bound, BoundWeight
from sparse24_jax.binding.interpreter import run
from sparse24_jax.binding.keys import Keys, require_key
from sparse24_jax.binding.notes import how_lost
from sparse24_jax.binding.origin import is_fingerprint, others, served, spoiled
from sparse24_jax.binding.reading import (
  as_result,
  as_rows,
  part_of,
  read,
  Reading,
  rows,
  scaled,
  weight_as_read,
  weight_matrix,
)
from sparse24_jax.binding.state import NNX_STATES, WeightState
from sparse24_jax.binding.tracing import functional, sizes_are_known, trace, Traced
from sparse24_jax.binding.values import Block, Matmul, Place
from sparse24_jax.binding.view import View
from sparse24_jax.block_plan import plan_block
from sparse24_jax.clusters import with_neurons
from sparse24_jax.dot import dot_general
from sparse24_jax.ffn import ffn_at
from sparse24_jax.layout import Layout
from sparse24_jax.linear_layer import projection_state
from sparse24_jax.packing import halves, PackedWeight
from sparse24_jax.projection import straight_through
from sparse24_jax.recipe import PhaseName, Recipe
from sparse24_jax.rules import leaves_by_path, listed, match_rules
from sparse24_jax.weight_errors import errors_name, WeightError

# What a function has that was made sparse, and so has what jax.jit, say, makes of it.
_MADE_SPARSE = '_made_sparse'


def sparse_function(f: Callable[..., Any], recipe: Recipe, *, phase: PhaseName) -> Callable[..., Any]:
  """`f(params, *args)` as `g(params, variables, key, *args)`, whose matched weights are sparse.

  In a dense phase it is `f` by itself or, where rules have layers in FP8, with these dense in FP8. `variables` are what
  `sparse_variables` makes; `key` is for MVUE, or None where no gradient is taken. `params` may be an nnx model. Its
  variables, and those of nnx in other arguments, change as by a call of `f`.
  """

  if hasattr(f, _MADE_SPARSE):
    raise ValueError(
      f'{getattr(f, "__name__", type(f).__name__)} was made by sparsify already: give the function that it was made of'
    )
  holds = recipe.in_dense_phase() if phase == 'dense' else recipe

  def run(params: Any, variables: Any, key: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if phase == 'dense':
      if jax.tree.leaves(variables):
        raise ValueError(
          "phase: the function was made for phase 'dense', and is given sparse states: give sparse_variables the same"
          ' phase'
        )
      variables = {}
    if holds is None:
      return f(params, *args, **kwargs)
    model = functional(params, f, args, kwargs)
    return model.finish(run_sparse(holds, model.function, model.params, variables, key, *model.rest, *args, **kwargs))

  @functools.wraps(f)
  def sparse(params: Any, variables: Any = _Absent, key: Any = _Absent, *args: Any, **kwargs: Any) -> Any:
    absent = [name for name, given in {'variables': variables, 'key': key}.items() if given is _Absent]
    if absent:
      raise _called_as_before(f, f'{" and ".join(absent)} {"is" if len(absent) == 1 else "are"} not given')
    if not (variables is None or isinstance(variables, Mapping)):
      raise _called_as_before(f, f'variables is a {type(variables).__name__}')
    require_key(key)
    try:
      return run(params, variables, key, args, kwargs)
    except TypeError as error:
      if misfit := _misfit(f, (params, *args), kwargs):
        raise _called_as_before(f, f'what follows the key does not fit it ({misfit})') from error
      raise

  # The arguments are others than those of `f`, for whoever reads a signature, as the transforms of nnx do.
  vars(sparse).pop('__wrapped__')
  setattr(sparse, _MADE_SPARSE, True)
  return sparse


class _Absent:
  """Takes the place of an argument that is not given."""


def _called_as_before(f: Callable[..., Any], problem: str) -> ValueError:
  return ValueError(
    f'{getattr(f, "__name__", type(f).__name__)} was made sparse, and {problem}: call it as f(params, variables, key,'
    ' ...) with what sparse_variables returns, a key or None, and then the other arguments of the function; of a module'
    ' that holds its weights make a function of them first (Equinox: eqx.partition)'
  )


def _misfit(f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
  """Why a function cannot have these arguments, as far as its signature tells."""
  try:
    signature = inspect.signature(f)
  except ValueError:  # one without a signature
    return None
  try:
    signature.bind(*args, **kwargs)
  except TypeError as error:
    return str(error)
  return None


def _deeper(path: str, states: Collection[str]) -> str:
  """A hint for states that are those of a tree around the parameters."""
  around = next((found.removesuffix(path)[:-1] for found in states if found.endswith(f'/{path}')), None)
  return '' if around is None else f'. There is one of {around}/{path}: give the part of the variables under {around!r}'


def run_sparse(
  recipe: Recipe, f: Callable[..., Any], params: Any, variables: Mapping[str, Any], key: Array | None,
  *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
  """What `f(params, *args)` returns, with sparse matmuls; weights that it never looks at need no state."""
  traced = trace(f, (params, *args), kwargs)
  bound = _bound_to(recipe, params, traced)
  states = {path.removeprefix(NNX_STATES): state for path, state in leaves_by_path(variables, is_leaf=is_state)}
  known, weights = {weight.path: weight for weight in bound.weights}, dict(leaves_by_path(params))
  missing = [path for path, w in known.items() if w.rule.policy.projection is not None and path not in states]
  if missing:
    raise ValueError(
      f'{listed(missing)}: no state; give what sparse_variables(params, opt_state, recipe, phase=phase) returns (and'
      " sparsify the same phase), to linen models as collection 'sparse24', and for a function of an nnx model make it"
      ' with the recipe of bind'
      f'{_deeper(missing[0], states)}'
    )
  deleted = [path for path in known if path in states and _is_deleted(states[path])]
  if deleted:
    raise ValueError(
      f'{listed(deleted)}: its state was deleted: it shares arrays with an optimizer state that a step was given to'
      ' keep (donate_argnums). Call sparse_variables again, with what that step returned'
    )
  reader = _Sparse(known)
  carried = {path: _carried(weight, states[path]) for path, weight in known.items() if path in states}
  values = traced.values(traced.leaves, traced.marks(known), carried)
  policies = {path: policy for path, w in known.items() if (policy := w.rule.policy).projection is not None}
  fine = served(states, policies)
  stale = _stale(states, {path: (weights[path], w.layout.stacked) for path, w in known.items()}, fine)
  with sizes_are_known(traced):
    out = [value.array for value in run(traced.jaxpr, traced.constants, values, Keys(key), reader)]
  if isinstance(recipe, Bound):  # perhaps to another function
    beside = look_beside(traced, {path: w.rule for path, w in known.items()}, reader.places)
    for path, texts in beside.problems.items():
      raise WeightError(f'{path}: {"; ".join(texts)}. Bind the recipe to what is run, which says what to do', path)
    for text in itertools.chain.from_iterable(beside.notes.values()):
      _dispatch.log_once(text, 'sparse24_jax', logging.WARNING)
  result = jax.tree.unflatten(traced.structure, out)
  return result if stale is None else spoiled(result, jnp.logical_not(stale))


def _stale(
  states: Mapping[str, Any], weights: Mapping[str, tuple[Array, tuple[int, ...]]], fine: Sequence[Array]
) -> Array | None:
  """Whether states belong to other weights, or one of the flags says that they are not fine.

  None if it is known that they do not, ValueError if it is known that they do.
  """
  found, unfit = others(states, weights), [jnp.logical_not(flag) for flag in fine]
  if unfit or not found or any(isinstance(other, jax.core.Tracer) for other in found.values()):
    flags = [*unfit, *found.values()]
    return functools.reduce(jnp.logical_or, flags) if flags else None
  if wrong := [path for path, other in found.items() if other.any()]:
    raise ValueError(
      f'{listed(wrong)}: variables were made of other weights than params, those of a step before say. Masks belong'
      ' to the weights of one step, and packed weights are read in place of params: call sparse_variables(params,'
      ' opt_state, recipe) in every step, of the parameters that the model is given. For weights that are perturbed or'
      ' averaged call it again, sparse_variables(perturbed, opt_state, recipe): the masks are those of opt_state'
    )
  return None


def _is_deleted(state: Any) -> bool:
  arrays = (leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array))
  return any(not isinstance(a, jax.core.Tracer) and a.is_deleted() for a in arrays)


def _carried(weight: BoundWeight, state: Any) -> WeightState:
  if isinstance(state, WeightState):
    return state
  if not weight.layout.is_standard and weight.rule.policy.projection is not None:
    raise ValueError(
      f'{weight.path}: its state was made for a weight stored as [stacked..., in, out], and the model reads it as'
      f' {weight.layout.describe()}: give sparse_training and sparse_variables the recipe that bind returned, too'
    )
  return WeightState(state, weight.layout.stacked)


def is_state(node: Any) -> bool:
  return isinstance(node, PackedWeight | WeightState) or is_fingerprint(node)


def _bound_to(recipe: Recipe, params: Any, traced: Traced) -> Bound:
  """The recipe as it is bound, or by what is run now; masks that were chosen before a model was seen are along -2."""
  if isinstance(recipe, Bound):
    match_rules(params, recipe)
    return recipe
  bound = bind_traced(recipe, params, traced, all_read=False)
  for weight in bound.weights:
    if not weight.layout.is_standard:
      raise ValueError(
        f'{weight.path} of shape {weight.shape}: the model reads it as {weight.layout.describe()}, and the recipe takes'
        f' it for {Layout.standard(len(weight.shape)).describe()}. Give sparse_training, sparse_variables and sparsify'
        ' sparse24_jax.bind(recipe, f, params, *example) in its place'
      )
  return bound


class _Sparse:
  """Reads matmuls by the library's op; see `binding.values.Reader`."""

  def __init__(self, weights: Mapping[str, Any]):
    self.weights = weights
    self.places: dict[Place, dict[str, str]] = {}

  def matmul(self, found: Matmul) -> Array:
    weight, reading = self._reading(found)
    path, policy = weight.path, weight.rule.policy
    if weight.rule.activation is not None:
      raise WeightError(by_itself(path, found.source), path)
    found.force()  # what other weights make, whose errors name them
    with errors_name(path):
      x, w = scaled(rows(found, reading), found, reading, inputs=True), weight_matrix(found, reading)
      dtype, asked = found.operands, found.asked
      batch = len(reading.batch)
      numbers = (((x.ndim - 1,), (batch,)), (tuple(range(batch)),) * 2)

      def run(x: Array, w: Array, state: Any, key: Array | None) -> Array:
        y = dot_general(
          x.astype(dtype), w.astype(dtype), numbers, state, policy=policy, key=key, precision=asked.precision,
          preferred_element_type=asked.dtype,
        )  # fmt: skip
        return as_result(scaled(y, found, reading, inputs=False), found, reading)

      # A layer that says how its result is divided: the compiler divides the three matmuls and their packing by itself.
      out_sharding = found.equation.params.get('out_sharding')
      divided: Any = run if out_sharding is None else jax.sharding.auto_axes(run, out_sharding=out_sharding)
      return _filled(divided(x, w, self._state(found, reading), _key(found, x, w)), (found,))

  def ragged(self, found: Matmul) -> Array:
    """Projected, straight through, for the model's own matmul: no kernel has groups of rows."""
    weight, reading = self._reading(found)
    policy = weight.rule.policy
    if found.view.factors:
      message = f'{weight.path}: a ragged matmul reads it after it was multiplied: multiply the result instead'
      raise WeightError(message, weight.path)
    if policy.weight_grad != 'dense':
      message = f'{weight.path}: a ragged matmul reads it, whose weight gradient is exact and not sampled'
      _dispatch.log_once(message, 'sparse24_jax', logging.WARNING)
    arrays = [value.array for value in found.arguments]
    if policy.projection is not None:
      w, state = weight_matrix(found, reading), projection_state(self._state(found, reading))
      arrays[found.side] = weight_as_read(straight_through(policy.projection, w, state), found, reading)
    with errors_name(weight.path):
      (out,) = _jax.rebind(found.equation, arrays)
    return _filled(out, (found,))

  def block(self, block: Block) -> Array | None:
    maps, order = block.maps, block.order
    read_by = {role: self._reading(found) for role, found in maps.items()}
    rules = {role: weight.rule for role, (weight, _) in read_by.items()}
    if why_apart({role: (maps[role], reading) for role, (_, reading) in read_by.items()}, block, rules) is not None:
      return None
    first, asked = next(role for role in maps if role != 'down'), {found.asked for found in maps.values()}
    policy, down, neurons = rules[first].policy, rules['down'].policy, rules[first].activation
    batch, x = read_by[first][1].batch, rows(maps[first], read_by[first][1])
    biases, plan = {role: found.bias for role, found in maps.items()}, None
    weights = {role: weight_matrix(maps[role], reading) for role, (_, reading) in read_by.items()}
    states = {role: self._state(maps[role], reading) for role, (_, reading) in read_by.items()}
    if first in PAIRS:
      weights |= zip(first.split('_'), halves(weights.pop(first), len(batch) + 2), strict=True)
      tokens, sides = math.prod(x.shape[len(batch) : -1]), {role: w.shape[-2:] for role, w in weights.items()}
      plan = plan_block(policy, tokens, sides, x.dtype, (x, weights), down=down, asked=next(iter(asked)))
      if not plan.fused:
        return None  # one matmul is faster than two
      states |= zip(first.split('_'), halves(states.pop(first), len(batch) + 2), strict=True)
      biases |= zip(first.split('_'), halves(biases.pop(first, None), 1), strict=True)
    paths = [weight.path for weight, _ in read_by.values()]
    if neurons is None:
      run = functools.partial(
        ffn_at, policy=policy, down=down, activation=block.activation, precision=asked.pop().precision,
        hidden_sharding=block.sharding, plan=plan,
      )  # fmt: skip
    else:
      with errors_name(*paths):
        _check_precision(maps['down'], asked)
      run = functools.partial(_neuron_level, policy=neurons, activation=block.activation)
    key = _key(maps['down'], x, weights)
    with errors_name(*paths):
      y = _for_each(batch, run, x, weights, states, key) if batch else run(x, weights, biases, states, key=key)
    y = as_rows(y, maps[first], order, maps['down'], read_by['down'][1])
    return _filled(as_result(y, maps['down'], read_by['down'][1]), maps.values())

  def layout_of(self, path: str) -> Layout:
    return self.weights[path].layout

  def apart(self, maps: Iterable[Matmul], reason: str) -> None:
    """Each is an op by itself."""

  def lost(self, mark: View | Altered, by: str, source: str, at: Place | None = None) -> None:
    if at is not None:
      self.places.setdefault(at, {})[mark.path] = how_lost(mark, by, source)
      return
    raise WeightError(
      f'{mark.path}: {how_lost(mark, by, source)}: no sparse matmul reads it there, and where the recipe was bound the'
      ' model did not do so: bind it to what is run',
      mark.path,
    )

  def _reading(self, found: Matmul) -> tuple[Any, Reading]:
    weight, reading = self.weights[found.view.path], read(found)
    if not weight.serves(reading.layout):
      raise WeightError(
        f'{weight.path}: {found.source} reads it as {reading.layout.describe()}, and where the recipe'
        f' was bound the model read it as {weight.layout.describe()}: bind it to what is run',
        weight.path,
      )
    return weight, reading

  def _state(self, found: Matmul, reading: Reading) -> Any:
    state, view = found.weight.state, found.view
    if state is None:
      return None
    state = state.at(view, reading.runs[: reading.axes[0]])
    layout = self.layout_of(view.path)
    state = state if reading.whole else part_of(projection_state(state), view, layout)
    return state if reading.layout == layout else jnp.swapaxes(projection_state(state), -1, -2)


def _filled(y: Array, maps: Iterable[Matmul]) -> Array:
  """The result, multiplied by the fill value (NaN or zero) if a lookup was outside of its weight."""
  for fill in {id(found.view.fill): found.view.fill for found in maps if found.view.fill is not None}.values():
    y = y * fill.astype(y.dtype)
  return y


def _key(found: Matmul, *arrays: Any) -> Array | None:
  """The random key of a sample. Inside a `shard_map` shards get different keys if their operands may differ."""
  key, varying = found.key, frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))
  for name in found.view.manual if key is not None else ():
    index = jax.lax.axis_index(name)
    if name in varying or not varying_axes(index):  # with check_vma=False types do not say what varies
      key = jax.random.fold_in(key, index)
  return key


def _check_precision(found: Matmul, asked: set[Asked]) -> None:
  """ValueError unless a block with sparse activations, which multiplies as kernels do, gives what is asked."""
  for ask in asked - {PLAIN}:
    if reason := ask.unfit(found.operands) or (found.operands == jnp.float32 and ask.describe()):
      raise ValueError(f'{reason}: a block with sparse activations has the default precision only')


def _neuron_level(
  x: Array, weights: Any, biases: Any, states: Any, *, policy: Any, activation: str, key: Array | None
) -> Array:
  if activation != 'squared_relu' or 'gate' in weights:
    found = f'{activation!r}{" with a gate" if "gate" in weights else ""}'
    raise ValueError(f"sparse activations take activation='squared_relu' without a gate, found {found}")
  states = with_neurons({role: projection_state(state) for role, state in states.items()}, policy)
  biases = {f'b_{role}': bias for role, bias in biases.items()}
  return neuron_level_ffn(x, weights['up'], weights['down'], states, policy=policy, **biases)


def _for_each(batch: tuple[int, ...], block: Any, x: Array, weights: Any, states: Any, key: Array | None) -> Array:
  """A block for each expert, with a key of its own."""
  lead = x.shape[: len(batch)]
  x, weights, states = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(batch) :]), (x, weights, states))
  keys = None if key is None else jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(x.shape[0]))
  y = jax.vmap(lambda x, w, s, k: block(x, w, {}, s, key=k))(x, weights, states, keys)
  return y.reshape(*lead, *y.shape[1:])
