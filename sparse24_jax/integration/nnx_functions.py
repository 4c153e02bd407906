"""A function of an nnx model as a pure function of its parameters: what `bind`, `check` and `sparsify` trace."""

from collections.abc import Callable, Mapping
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
  """A call `f(model, *args)`, made with a copy of the model; `finish` puts back what it changed of the variables.

  Args:
    model: holds parameters and whatever else.
    f: called with the copy.
    args: its other arguments.
    kwargs: likewise.
    prepare: changes the copy before the call.

  Raises:
    ValueError: an argument beside the model holds variables.
  """
  _check_arguments(args, kwargs)
  graphdef, params, rest = nnx.split(model, nnx.Param, ...)

  def function(params: Any, rest: Any, *args: Any, **kwargs: Any) -> Any:
    # With the arrays' own variables a change would reach the caller's, from inside the trace.
    copy = nnx.merge(graphdef, params, rest, copy=True)
    prepare(copy)
    before, graph = _arrays(copy), nnx.graphdef(copy)
    out = f(copy, *args, **kwargs)
    return out, _changes(copy, before, graph)

  def finish(result: Any) -> Any:
    out, changed = result
    nnx.update(model, changed)
    return out

  return Functional(function, params, (rest,), finish)


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


def _check_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
  """ValueError for what holds state beside the model, whose changes would be lost."""

  def stops(node: Any) -> bool:
    return isinstance(node, nnx.Pytree | nnx.Variable | nnx.State)

  for node in jax.tree.leaves((args, dict(kwargs)), is_leaf=stops):
    if isinstance(node, nnx.Pytree | nnx.Variable):
      raise ValueError(
        f'{type(node).__name__} as an argument beside the model: what the function changes of it would be lost. Keep it'
        ' in the model (nnx.Dropout(..., rngs=rngs)), make it, say a cache, in a function of the model and sparsify'
        ' that one, or pass arrays and keys'
      )
