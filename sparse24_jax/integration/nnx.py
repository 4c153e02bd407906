"""Flax nnx: hooks as data in the layers' own `dot_general` attribute."""

from collections.abc import Callable
import inspect
import types
from typing import Any
import zlib

from flax import nnx
import jax
from jax import Array

from sparse24_jax.activation_sparsity import ActivationPolicy
from sparse24_jax.dot import check_layer, dot_general, DotPolicy, note_replaced
from sparse24_jax.linear_layer import projection_state
from sparse24_jax.recipe import PhaseName, Recipe, Rule
from sparse24_jax.rules import errors_name, match_rules, NEEDS_BLOCK

RNG = 'mvue'
HOOK = 'dot_general'
HOOK_CLASS = 'dot_general_cls'  # of nnx.LinearGeneral
STATE = 'state'
# What a method names that gets to a layer's matmul: the hook, or the layer that has it.
_REACH = {HOOK, 'super', '__call__'}


class SparseVariable(nnx.Variable):
  """Holds the projection state of one weight: read by the forward, written by `nnx.update` after a step.

  >>> from flax import nnx
  >>> import jax, sparse24_jax as s24
  >>> model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
  >>> model = s24.sparsify(model, s24.recipes.ste('.*/kernel'))
  >>> [state.shape for state in jax.tree.leaves(nnx.state(model, s24.SparseVariable))]
  [(8, 16)]
  """


class SparseDot(nnx.Module):
  """The `dot_general` of one layer.

  Attributes:
    policy: how its matmuls are done.
    activation: how the activations of its block are made sparse, or None.
    state: `SparseVariable`, or None for a policy without projection.
    rngs: streams with one named `'mvue'`, or None.
  """

  def __init__(
    self,
    policy: DotPolicy,
    path: str,
    state: Array | None,
    rngs: nnx.Rngs | None,
    plain: Callable,
    plain_class: Callable | None = None,
    activation: ActivationPolicy | None = None,
  ):
    self.policy = policy
    self.activation = activation
    self.path = path
    self.plain, self.plain_class = plain, plain_class  # what stood in its place
    self.state = None if state is None else SparseVariable(state)
    self.rngs = rngs
    # Streams that were given one seed still draw differently in each layer.
    self.fold = zlib.crc32(path.encode())

  def __call__(
    self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, *, out_sharding=None, **kwargs
  ):
    del kwargs
    state, key = self.projection_state(), self.draw()

    def run(lhs, rhs, state, key):
      return dot_general(lhs, rhs, dimension_numbers, state, policy=self.policy, key=key)

    with errors_name(self.path):
      if self.activation is not None:
        raise ValueError(NEEDS_BLOCK)
      check_layer(precision, preferred_element_type, lhs.dtype)
      # The compiler divides the three matmuls and their packing by itself, so that types need not say how.
      divided: Any = run if out_sharding is None else jax.sharding.auto_axes(run, out_sharding=out_sharding)
      return divided(lhs, rhs, state, key)

  def projection_state(self) -> Any:
    """The state that the layer's weight is projected or packed under; None without projection."""
    return None if self.state is None else self.state.get_value()

  def draw(self) -> Array | None:
    """A key for MVUE, which advances the layer's stream; None where none is needed or none is there."""
    if self.policy.weight_grad == 'dense' or self.rngs is None:
      return None
    return jax.random.fold_in(self.rngs[RNG](), self.fold)


def sparsify(model: nnx.Module, recipe: Recipe, *, phase: PhaseName, rngs: nnx.Rngs | None) -> nnx.Module:
  """A copy of `model`, hooks in the layers that the recipe matches, or hooks taken out for a dense phase."""
  model = nnx.clone(model)
  states = {}  # of hooks that are there already: a scale is frozen, a mask waits for its refresh
  for _, module in nnx.iter_modules(model):
    if isinstance(hook := getattr(module, HOOK, None), SparseDot):
      # Not a packed weight, which is that of one step.
      states[hook.path] = projection_state(hook.projection_state())
      setattr(module, HOOK, nnx.static(hook.plain))
      if hook.plain_class is not None:
        setattr(module, HOOK_CLASS, nnx.static(hook.plain_class))
  rules = match_rules(nnx.state(model, nnx.Param), recipe)
  if phase == 'dense':
    return model
  layers = {
    '/'.join(map(str, (*module_path, 'kernel'))): module
    for module_path, module in nnx.iter_modules(model)
    if hasattr(module, 'kernel')
  }
  # Layers that share a kernel have one path among the parameters, and so one hook.
  names = {id(module.kernel): path for path, module in layers.items() if path in rules}
  hooks: dict[str, SparseDot] = {}
  missed = [path for path in rules if path not in layers]
  for path, module in layers.items():
    name = names.get(id(module.kernel))
    if name is None:
      continue
    if not _calls_hook(module):
      missed.append(path)
      continue
    if name not in hooks:
      hooks[name] = _hook(name, rules[name], module, states.get(name), rngs)
    setattr(module, HOOK, nnx.data(hooks[name]))
    if getattr(module, HOOK_CLASS, None) is not None:
      setattr(module, HOOK_CLASS, None)  # Flax would prefer it to the hook
  if missed:
    raise ValueError(
      f'{sorted(missed)} match rules of recipe {recipe.name!r}, but their layers have no dot_general attribute'
      ' (nnx.Linear and nnx.LinearGeneral do), or a __call__ of their own and no method that calls it or a parent;'
      ' narrow the rule, or call sparse24_jax.dot in the layer and leave its rule out of the recipe given to sparsify'
    )
  return model


def _calls_hook(layer: nnx.Module) -> bool:
  """Whether a forward can get to the hook: False if no method beside Flax's own names `dot_general` or its parent's."""
  own = [c for c in type(layer).__mro__ if not c.__module__.startswith('flax.')]
  if not any('__call__' in vars(c) for c in own):
    return hasattr(layer, HOOK)
  methods = [inspect.unwrap(f) for c in own for f in vars(c).values() if callable(f)]
  return hasattr(layer, HOOK) and any(_names(f.__code__) & _REACH for f in methods if hasattr(f, '__code__'))


def _names(code: types.CodeType) -> set[str]:
  """What code, and the functions in it, name."""
  inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
  return set(code.co_names).union(*map(_names, inner))


def _hook(path: str, rule: Rule, layer: nnx.Module, state: Array | None, rngs: nnx.Rngs | None) -> SparseDot:
  kernel = layer.kernel.get_value()
  if isinstance(kernel, jax.ShapeDtypeStruct):
    raise ValueError(f'{path}: the model is abstract; sparsify it inside nnx.eval_shape')
  if rule.policy.projection is not None and state is None:
    state = rule.policy.projection.init(kernel)
  plain, plain_class = getattr(layer, HOOK), getattr(layer, HOOK_CLASS, None)
  note_replaced(path, plain, plain_class)
  # Axes in front of the layer's own are stacked layers; batch axes of nnx.LinearGeneral are run at once.
  stacked = kernel.shape[: -2 - len(getattr(layer, 'batch_axis', ()))]
  return SparseDot(rule.policy, path, state, _streams(rngs, stacked), plain, plain_class, rule.activation)


def _streams(rngs: nnx.Rngs | None, layers: tuple[int, ...]) -> nnx.Rngs | None:
  """Independent streams for one layer, or for a stack of layers that nnx.scan runs."""
  if rngs is None:
    return None
  if not isinstance(rngs, nnx.Rngs):
    raise ValueError(f'rngs must be streams, nnx.Rngs({RNG}=seed), found {type(rngs).__name__}')
  if RNG not in rngs:
    raise ValueError(f'rngs has streams {list(rngs)}, none named {RNG!r}: pass nnx.Rngs({RNG}=seed)')
  return rngs.split(layers) if layers else rngs.fork()


def sparse_state(states: dict[str, Array], params: nnx.State) -> nnx.State:
  """What `nnx.update(model, ...)` takes to bring the states into the model's hooks."""
  hooked = {path: state for path, state in states.items() if path.rpartition('/')[-1] == 'kernel'}
  if states and not hooked:
    raise ValueError(
      f'{sorted(states)} are no kernels of layers, which alone have hooks; for weights that a forward of yours reads,'
      ' call sparse_variables with nnx.to_pure_dict(nnx.state(model, nnx.Param)), which gives a tree of their states'
    )
  modules = {'/'.join(map(str, path)): path[:-1] for path, _ in nnx.to_flat_state(params)}
  return nnx.from_flat_state(
    {(*modules[path], HOOK, STATE): SparseVariable(state) for path, state in hooked.items()}
  )
