"""Flax nnx: hooks as data in the layers' own `dot_general` attribute."""

from collections.abc import Callable
from typing import Any
import zlib

from flax import nnx
import jax
from jax import Array

from sparse24_jax.activation_sparsity import ActivationPolicy
from sparse24_jax.dot import check_layer_precision, dot_general, DotPolicy
from sparse24_jax.products import projection_state
from sparse24_jax.recipe import PhaseName, Recipe
from sparse24_jax.rules import errors_name, match_rules, NEEDS_BLOCK

RNG = 'mvue'
HOOK = 'dot_general'
HOOK_CLASS = 'dot_general_cls'  # of nnx.LinearGeneral
STATE = 'state'


class SparseVariable(nnx.Variable):
  """Holds the projection state of one weight: read by the forward, written by `nnx.update` after a step."""


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

  def __call__(self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, **kwargs):
    del preferred_element_type, kwargs  # sums are float32, the result has the dtype of lhs
    state, key = self.projection_state(), self.draw()
    with errors_name(self.path):
      if self.activation is not None:
        raise ValueError(NEEDS_BLOCK)
      check_layer_precision(precision)
      return dot_general(lhs, rhs, dimension_numbers, state, policy=self.policy, key=key)

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
  for module_path, module in list(nnx.iter_modules(model)):
    path = '/'.join(map(str, (*module_path, 'kernel')))
    if path not in rules or not hasattr(module, HOOK):
      continue
    rule = rules.pop(path)
    policy = rule.policy
    kernel = module.kernel[...]
    state = states.get(path)
    if policy.projection is not None and state is None:
      state = policy.projection.init(kernel)
    plain_class = getattr(module, HOOK_CLASS, None)
    # Axes in front of the layer's own are stacked layers; batch axes of nnx.LinearGeneral are run at once.
    stacked = kernel.shape[: -2 - len(getattr(module, 'batch_axis', ()))]
    streams = _streams(rngs, stacked)
    hook = SparseDot(policy, path, state, streams, getattr(module, HOOK), plain_class, rule.activation)
    setattr(module, HOOK, nnx.data(hook))
    if plain_class is not None:
      setattr(module, HOOK_CLASS, None)  # Flax would prefer it to the hook
  if rules:
    raise ValueError(
      f'{list(rules)} match rules of recipe {recipe.name!r}, but their layers have no dot_general attribute (nnx.Linear'
      ' and nnx.LinearGeneral do); narrow the rule, or call sparse24_jax.dot in the layer'
    )
  return model


def _streams(rngs: nnx.Rngs | None, layers: tuple[int, ...]) -> nnx.Rngs | None:
  """Independent streams for one layer, or for a stack of layers that nnx.scan runs."""
  if rngs is None:
    return None
  if RNG not in rngs:
    raise ValueError(f'rngs has streams {list(rngs)}, none named {RNG!r}: pass nnx.Rngs({RNG}=seed)')
  return rngs.split(layers) if layers else rngs.fork()


def sparse_state(states: dict[str, Array], params: nnx.State) -> nnx.State:
  """What `nnx.update(model, ...)` takes to bring the states into the model's hooks."""
  modules = {'/'.join(map(str, path)): path[:-1] for path, _ in nnx.to_flat_state(params)}
  return nnx.from_flat_state(
    {(*modules[path], HOOK, STATE): SparseVariable(state) for path, state in states.items()}
  )
