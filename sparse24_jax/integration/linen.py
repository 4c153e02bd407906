"""Flax linen: a model with its matched weights sparse, by the trace of what its `apply` computes.

The wrapper shares its scope with the model, so the parameter tree is the model's own. A call runs the model as a pure
function of its variables, and puts back what it changed.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import inspect
import types
from typing import Any

from flax import linen as nn
import jax

from sparse24_jax.binding.origin import MADE_OF
from sparse24_jax.binding.tracing import as_callable, functional
from sparse24_jax.binding.transform import is_state, run_sparse
from sparse24_jax.recipe import Recipe, Rule
from sparse24_jax.rules import leaves_by_path, listed, matched_rules, nested, rule_for

COLLECTION = 'sparse24'
RNG = 'mvue'
_CALLS = 'sparse24_calls'
_PLAIN = 'sparse24_plain'  # of a class of a dense phase: the one in whose place it stands


class SparseModule(nn.Module):
  """A model with the recipe's policies in its matmuls; made by `sparsify`.

  Parameters, checkpoints, arguments and methods are those of the model. Apply it with the collection `'sparse24'`
  (`sparse_variables`) and, where gradients are taken with MVUE, an rng named `'mvue'`.
  """

  # The model's own names live in the scope that both share: no model has this one.
  sparse24_model: nn.Module
  recipe: Recipe

  def setup(self):
    nn.share_scope(self, self.sparse24_model)

  def __call__(self, *args, **kwargs):
    return self._run('__call__', args, kwargs)

  def sparse24_run(self, method: str, *args, **kwargs):
    """Another method of the model, by name, with its matched weights sparse."""
    return self._run(method, args, kwargs)

  @nn.nowrap
  def __getattr__(self, name: str) -> Any:
    try:
      return super().__getattr__(name)
    except AttributeError:
      # Not by an attribute of this object, which Flax would look for here again.
      method = inspect.getattr_static(type(vars(self).get('sparse24_model')), name, None)
      if name.startswith('_') or not inspect.isfunction(method):
        raise

    def by_name(module: Any, *args: Any, **kwargs: Any) -> Any:
      return module.sparse24_run(name, *args, **kwargs)

    by_name.__name__ = name
    return types.MethodType(by_name, self)

  @nn.nowrap
  def apply(self, variables: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
    return super().apply(variables, *args, method=self._by_name(method), **kwargs)

  @nn.nowrap
  def init_with_output(self, rngs: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
    """By the model itself: the same key makes the same weights."""
    method = self._by_name(method)
    out, variables = self.sparse24_model.init_with_output(rngs, *args, method=method, **kwargs)
    self._check_params(method, variables)
    return out, variables

  @nn.nowrap
  def _check_params(self, method: str | None, variables: Mapping[str, Any]) -> None:
    if method in (None, '__call__') and 'params' in variables:  # another one need not make all parameters
      matched_rules(variables['params'], self.recipe)

  @nn.nowrap
  def _by_name(self, method: Any) -> Any:
    """The name of a method of the model, or of one of ours: as a function it would look here for the model's parts."""
    function = getattr(method, '__func__', method)
    name = getattr(function, '__name__', '')
    is_ours = isinstance(getattr(method, '__self__', None), SparseModule)
    of_model = function is not None and getattr(type(self.sparse24_model), name, None) is function
    return name if is_ours or of_model else method

  def _run(self, method: str, args: tuple, kwargs: dict):
    if self.is_initializing():  # as a part of another model
      out = getattr(self.sparse24_model, method)(*args, **kwargs)
      self._check_params(method, self.variables)
      return out
    scope = self.scope
    assert scope is not None
    model = self.sparse24_model.clone(parent=None)
    collections = dict(self.variables)
    params, states = collections.pop('params', {}), collections.pop(COLLECTION, {})
    found = dict(leaves_by_path(states, is_leaf=is_state))
    own = {path: state for path, state in found.items() if _of_fingerprint(path) or rule_for(path, self.recipe)}
    if not self.recipe.fraction_of('sparse'):
      _refuse(own)
    # A part that is sparse by itself, or that calls `sparse24_jax.dot`, finds what is its own.
    if others := {path: state for path, state in found.items() if path not in own}:
      collections[COLLECTION] = nested(others)
    streams = {name: rng.as_jax_rng() for name, rng in scope.rngs.items()}
    # The first call has the streams of the plain model; another one, in the same apply, others.
    calls = scope.__dict__.setdefault(_CALLS, [0])
    if calls[0]:
      streams = {name: jax.random.fold_in(rng, calls[0]) for name, rng in streams.items()}
    calls[0] += 1
    key = streams.get(RNG)
    stack = nn.module._context.capture_stack
    capture = stack[-1] if stack else False

    def function(params: Any, collections: Any, streams: Any, args: tuple, kwargs: dict) -> Any:
      variables = {'params': params, **collections}
      out = model.apply(
        variables, *args, rngs=streams, mutable=scope.mutable, method=method, capture_intermediates=capture, **kwargs
      )
      return (out, {}) if scope.mutable is False else out

    rest = (collections, streams, args, kwargs)
    call = functional(params, function, rest, {})
    out, changed = call.finish(run_sparse(self.recipe, call.function, params, own, key, *rest))
    if capture and method == '__call__' and capture(self, method):  # Flax adds what this call returns
      captured = changed.get('intermediates', {})
      if method in captured:
        captured[method] = captured[method][:-1]
    for name, values in changed.items():
      for entry, value in values.items():
        scope.put_variable(name, entry, value)
    return out


@as_callable.register(nn.Module)
def _applied(model: nn.Module) -> Callable[..., Any]:
  model = plain_of(model)
  return lambda params, *args, **kwargs: model.apply({'params': params}, *args, **kwargs)


def plain_of(model: nn.Module) -> nn.Module:
  """The model by itself, of one that was sparsified."""
  if isinstance(model, SparseModule):
    return model.sparse24_model
  return getattr(type(model), _PLAIN)(**_fields(model)) if hasattr(type(model), _PLAIN) else model


def of_dense_phase(model: nn.Module, recipe: Recipe) -> nn.Module:
  """The model of a dense phase, which refuses the states of a sparse one: it would pass over them, and stay dense.

  The plain model, but for layers in FP8.
  """
  if dense := recipe.in_dense_phase():
    return SparseModule(model, dense)
  if model.parent is not None:  # a part of a model, which is not applied
    return model
  return _dense(type(model), tuple(rule for rule in recipe.rules if not rule.is_plain))(**_fields(model))


@functools.cache
def _dense(plain: type[nn.Module], rules: tuple[Rule, ...]) -> type[nn.Module]:
  """The class of `of_dense_phase`: of the same name, and its models are equal to the plain ones."""

  def refuse_states(variables: Any) -> None:
    states = variables.get(COLLECTION, {}) if isinstance(variables, Mapping) else {}
    sparse = Recipe('sparse', rules)
    _refuse(path for path, _ in leaves_by_path(states, is_leaf=is_state) if rule_for(path, sparse))

  def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_states(variables)
    return plain.apply(self, variables, *args, **kwargs)

  def bind(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
    refuse_states(variables)
    return plain.bind(self, variables, *args, **kwargs)

  own = {
    'apply': apply, 'bind': bind, _PLAIN: plain, '__module__': plain.__module__, '__doc__': plain.__doc__,
    '__eq__': lambda self, other: isinstance(other, nn.Module) and plain_of(self) == plain_of(other),
    '__hash__': lambda self: hash(plain_of(self)),
    '__reduce__': lambda self: (_again, (plain_of(self), rules)),
  }  # fmt: skip
  make: Any = type(plain)
  return make(plain.__name__, (plain,), own)


def _refuse(paths: Iterable[str]) -> None:
  if given := [path for path in paths if not _of_fingerprint(path)]:
    raise ValueError(
      f"{listed(given)}: the model was made for phase 'dense', and is given sparse states, over which it would"
      " pass: give sparse_variables the phase of the model, phase='dense', or make the model of the sparse phase,"
      " sparsify(model, recipe, phase='sparse')"
    )


def _again(model: nn.Module, rules: tuple[Rule, ...]) -> nn.Module:
  """Makes the class anew for pickle, which does not find one that is made here."""
  return of_dense_phase(model, Recipe('dense', rules))


def _fields(model: nn.Module) -> dict[str, Any]:
  return {field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.init}


def _of_fingerprint(path: str) -> bool:
  return path.startswith(f'{MADE_OF}/')
