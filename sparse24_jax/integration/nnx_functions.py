"""A function of an nnx model as a pure function of its parameters: what `bind`, `check` and `sparsify` trace."""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

from flax import nnx
import jax

from sparse24_jax.binding.origin import Changed
from sparse24_jax.binding.tracing import as_callable, Functional, functional


@functional.register(nnx.Module)
def as_function(
  model: nnx.Module,
  f: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: Mapping[str, Any],
  *,
  prepare: Callable[[nnx.Module], None] = lambda copy: None,
) -> Functional:
  """A call `f(model, *args)`, made with copies; `finish` puts back what it changed of the variables of all of these.

  Args:
    model: holds parameters and whatever else.
    f: called with the copy.
    args: its other arguments, which may hold variables, as `nnx.Rngs` or a cache does, but no parameters.
    kwargs: likewise.
    prepare: changes the copy of the model before the call.

  Raises:
    ValueError: an argument beside the model holds parameters, or variables of the model.
  """
  given, own = (args, dict(kwargs)), set(map(id, _variables(model)))
  for variable in (held := _variables(given)):
    if isinstance(variable, nnx.Param):
      raise ValueError(
        'an argument beside the model holds parameters, which no rule would match: make both parts of one model; or,'
        ' where they are not trained, give a function of the arrays of both'
      )
    if id(variable) in own:
      raise ValueError(
        f'an argument holds a {type(variable).__name__} of the model, so that a call would change two copies of it:'
        ' read it from the model, or keep it beside the model alone'
      )
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)

  def function(params: Any, rest: Any, /, *args: Any, **kwargs: Any) -> Any:
    # With the arrays' own variables a change would reach the caller's, from inside the trace.
    copy = nnx.merge(graphdef, params, rest, copy=True)
    prepare(copy)
    before, graph = _arrays(copy), nnx.graphdef(copy)
    out, beside = _watched(functools.partial(f, copy), args, kwargs, given)
    return out, Changed((_changes(copy, before, graph), beside))

  def finish(result: Any) -> Any:
    out, new = result
    changed, beside = new.values
    nnx.update(model, changed)
    _put_back(held, beside)
    return out

  return Functional(function, params, (rest,), finish)


@functional.register(object)
def _of_arrays(params: Any, f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Functional:
  """A call `f(params, *args)` of arrays; `finish` puts back what it changed of variables in the other arguments."""
  given = (args, dict(kwargs))
  held = _variables(given)
  if not (held or _nodes(given)):
    return Functional(f, params)

  def function(params: Any, /, *args: Any, **kwargs: Any) -> Any:
    out, changed = _watched(functools.partial(f, params), args, kwargs, given)
    return out, Changed(changed)

  def finish(result: Any) -> Any:
    out, new = result
    _put_back(held, new.values)
    return out

  return Functional(function, params, finish=finish)


def _watched(
  f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], given: Any
) -> tuple[Any, dict[int, Any]]:
  """What a call returns, and the new values of variables in its arguments, by their number; `given` in their place."""
  args, kwargs = sharing_as((args, dict(kwargs)), given)
  held, nodes = _variables((args, kwargs)), _nodes((args, kwargs))
  before, rest = [_leaves(variable) for variable in held], [_rest(node) for node in nodes]
  out = f(*args, **kwargs)
  for node, (graph, arrays) in zip(nodes, rest, strict=True):
    found, left = _rest(node)
    if found != graph or any(a is not b for a, b in zip(left, arrays, strict=True)):
      raise ValueError(
        f'the function changes more of an argument, {type(node).__name__}, than the values of its variables: an'
        ' attribute, an array that is no variable, or what it holds. Do that outside of what bind and sparsify take'
      )
  return out, {
    i: variable.get_raw_value() for i, variable in enumerate(held) if not _same(_leaves(variable), before[i])
  }


def _put_back(held: Sequence[nnx.Variable], changed: Mapping[int, Any]) -> None:
  for i, value in changed.items():
    held[i].set_raw_value(value)


def _variables(tree: Any) -> list[nnx.Variable]:
  """The variables in a tree, in their order, each once."""
  found = (node for node in jax.tree.leaves(tree, is_leaf=is_variable) if is_variable(node))
  return list({id(variable): variable for variable in found}.values())


def _nodes(tree: Any) -> list[nnx.Pytree]:
  """The outermost objects of nnx in a tree, variables aside."""

  def is_node(node: Any) -> bool:
    return isinstance(node, nnx.Pytree) and not is_variable(node)

  return [node for node in jax.tree.leaves(tree, is_leaf=is_node) if is_node(node)]


def _rest(node: nnx.Pytree) -> tuple[Any, list[Any]]:
  """What an object is beside the values of its variables."""
  leaves = jax.tree.leaves(node, is_leaf=is_variable)
  return nnx.graphdef(node), [leaf for leaf in leaves if not is_variable(leaf)]


def is_variable(node: Any) -> bool:
  return isinstance(node, nnx.Variable)


def sharing_as(tree: Any, like: Any) -> Any:
  """A tree whose variables are one where those of `like` are: a tree that is taken apart and put together has two."""
  nodes, structure = jax.tree.flatten(tree, is_leaf=is_variable)
  one: dict[int, nnx.Variable] = {}
  for i, original in enumerate(jax.tree.leaves(like, is_leaf=is_variable)):
    if is_variable(original):
      nodes[i] = one.setdefault(id(original), nodes[i])
  return structure.unflatten(nodes)


@as_callable.register(nnx.Module)
def _no_function(model: nnx.Module) -> Callable[..., Any]:
  raise ValueError(
    f'f is an nnx module, {type(model).__name__}, which holds its parameters: give a function of it and the module in'
    ' the place of the parameters, lambda model, x: model(x), model, x'
  )


def _arrays(model: nnx.Module) -> dict[Any, Any]:
  return {path: _leaves(variable) for path, variable in nnx.to_flat_state(nnx.state(model))}


def _leaves(variable: Any) -> dict[Any, Any]:
  """What a variable holds, by path: in one of `nnx.capture` a dictionary grows in place."""
  return dict(jax.tree.leaves_with_path(variable.get_raw_value()))


def _same(found: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
  return found.keys() == before.keys() and all(found[path] is before[path] for path in found)


def _changes(model: nnx.Module, before: Mapping[Any, Any], graphdef: nnx.GraphDef) -> nnx.State:
  """Variables with other arrays than before, and new ones; ValueError if anything else of the model is new."""
  after = dict(nnx.to_flat_state(nnx.state(model)))
  changed = {path: v for path, v in after.items() if path not in before or not _same(_leaves(v), before[path])}
  if any(path not in before for path in after):
    nnx.pop(model, lambda path, _: tuple(path) not in before)
  if nnx.graphdef(model) != graphdef:
    raise ValueError(
      'the function changes more of the model than the values of its variables, an attribute or a layer: do that'
      ' before (model.train(), model.eval(), nnx.pop, say), outside of what bind and sparsify take'
    )
  return nnx.from_flat_state(changed)
