"""A function of an nnx model as a pure function of its parameters: what `bind`, `check` and `sparsify` trace."""

from collections.abc import Callable, Iterable, Mapping
import functools
from typing import Any

from flax import nnx
import jax

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
  """A call `f(model, *args)`, made with copies; `finish` puts back what it changed of their variables.

  Args:
    model: holds parameters and whatever else.
    f: called with the copy.
    args: its other arguments; what holds no parameters may hold variables, as `nnx.Rngs` or a cache does.
    kwargs: likewise.
    prepare: changes the copy of the model before the call.

  Raises:
    ValueError: an argument beside the model holds parameters, or variables of the model.
  """
  beside = _beside((args, kwargs))
  _check_beside(model, beside)
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)

  def function(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
    copy = nnx.merge(graphdef, params, rest)
    prepare(copy)
    return _called(lambda arguments: f(arguments[0], *arguments[1], **arguments[2]), (copy, args, kwargs))

  return Functional(function, params, (rest,), functools.partial(_put_back, [model, *beside]))


@functional.register(object)
def _of_arrays(params: Any, f: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Functional:
  """A call `f(params, *args)`, as of a model: what its other arguments hold changes, too."""
  if not (beside := _beside((args, kwargs))):
    return Functional(f, params)
  _check_beside(None, beside)

  def function(params: Any, *args: Any, **kwargs: Any) -> Any:
    return _called(lambda arguments: f(params, *arguments[0], **arguments[1]), (args, kwargs))

  return Functional(function, params, finish=functools.partial(_put_back, beside))


def _called(f: Callable[[Any], Any], arguments: Any) -> tuple[Any, nnx.State]:
  """What a call with copies of the arguments returns, and what it changed of those that hold variables."""
  # With the arrays' own variables a change would reach the caller's, from inside the trace.
  copies = nnx.clone(_beside(arguments))
  before, graph, new = _arrays(copies), nnx.graphdef(copies), iter(copies)
  out = f(jax.tree.map(lambda node: next(new) if _is_held(node) else node, arguments, is_leaf=_stops))
  return out, _changes(copies, before, graph)


def _put_back(nodes: list[Any], result: Any) -> Any:
  out, changed = result
  nnx.update(nodes, changed)
  return out


def _beside(arguments: Any) -> list[Any]:
  """The arguments that hold variables, in their order."""
  return [node for node in jax.tree.leaves(arguments, is_leaf=_stops) if _is_held(node)]


def _is_held(node: Any) -> bool:
  return isinstance(node, nnx.Pytree | nnx.Variable)


def _stops(node: Any) -> bool:
  return _is_held(node) or isinstance(node, nnx.State)


def _check_beside(model: nnx.Module | None, beside: Iterable[Any]) -> None:
  """ValueError for parameters beside the model, and for a variable that stands in two places, so is two in a trace."""
  seen = set() if model is None else set(map(id, _variables(model)))
  for node in beside:
    variables = _variables(node)
    if any(isinstance(variable, nnx.Param) for variable in variables):
      raise ValueError(
        f'{type(node).__name__} as an argument beside the model holds parameters, which no rule would match: make both'
        ' parts of one model; or, where it is not trained, pass nnx.state(...) of it and merge it in the function'
      )
    if seen & set(map(id, variables)):
      raise ValueError(
        f'{type(node).__name__} as an argument has variables of the model, or of another argument, so that a call would'
        ' change two copies of them: give it once'
      )
    seen.update(map(id, variables))


def _variables(node: Any) -> list[nnx.Variable]:
  return [found for _, found in nnx.iter_graph([node]) if isinstance(found, nnx.Variable)]


def sharing_as(tree: Any, like: Any) -> Any:
  """A tree whose variables are one where those of `like` are: a tree that is taken apart and put together has two."""

  def is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)

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


def _arrays(model: Any) -> dict[Any, Any]:
  return {path: _leaves(variable) for path, variable in nnx.to_flat_state(nnx.state(model))}


def _leaves(variable: Any) -> dict[Any, Any]:
  """What a variable holds, by path: in one of `nnx.capture` a dictionary grows in place."""
  return dict(jax.tree.leaves_with_path(variable.get_raw_value()))


def _same(found: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
  return found.keys() == before.keys() and all(found[path] is before[path] for path in found)


def _changes(model: Any, before: Mapping[Any, Any], graphdef: nnx.GraphDef) -> nnx.State:
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
