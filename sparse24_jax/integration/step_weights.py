"""What each update of a traced step is given: its weights, and the matmuls on the way to their gradients."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp

from sparse24_jax.binding._jax import checkpoint_name_of, equations_of
from sparse24_jax.binding.flow import follow_weights, Found, Marks, Read, UNSURE, Weight
from sparse24_jax.binding.origin import MADE_OF, NNX_MADE_OF
from sparse24_jax.optim import DENSE_UPDATE, name_of, SparseTrainingState
from sparse24_jax.policy import PrecisionName
from sparse24_jax.recipe import PhaseName
from sparse24_jax.rules import is_array, leaves_by_path


class Argument(NamedTuple):
  """What an array among the arguments is.

  Attributes:
    path: among the arguments.
    weight: that it may be, by its path, shape and dtype.
    state_of: path of the weight that it may be the state of.
    ours: whether the state of `sparse_training` holds it.
  """

  path: str
  weight: Weight | None = None
  state_of: str | None = None
  ours: bool = False

  def marks(self, folders: Collection[str]) -> Marks:
    """What the array marks, if parameters are in these folders."""
    if self.weight is not None:
      return Marks(dense=frozenset((self.weight,) if self.weight.folder in folders else ()))
    found = _state(self.state_of, folders) if self.state_of else Marks()
    return found if self.ours else found.of_update(UNSURE)


def _state(path: str, folders: Iterable[str]) -> Marks:
  return Marks(states=frozenset(Weight(folder, path) for folder in folders))


def is_ours(node: Any) -> bool:
  """Whether it is the state of `sparse_training`."""
  return isinstance(node, SparseTrainingState)


def arguments_of(tree: Any, masks: Mapping[str, Any]) -> list[Argument]:
  """Tells what each array is: by its place in a state of `sparse_training`, elsewhere by its name."""
  found = []
  for path, node in leaves_by_path(tree, is_leaf=is_ours):
    if not is_ours(node):
      found += [_outside(path, node, masks)] if is_array(node) else []
      continue
    for name, field in zip(node._fields, node, strict=True):
      leaves = [(weight, leaf) for weight, leaf in leaves_by_path(field) if is_array(leaf)]
      found += [Argument(path, state_of=weight if name == 'projections' else None, ours=True) for weight, _ in leaves]
  return found


def _outside(path: str, leaf: Any, masks: Mapping[str, Any]) -> Argument:
  """Tells by its path whether an array is a weight or a state; fingerprints are neither."""
  if f'/{MADE_OF}/' in f'/{path}' or NNX_MADE_OF in path:
    return Argument(path)
  for name, state in masks.items():
    folder, found, rest = f'/{path}/'.rpartition(f'/{name}/')
    if not found:
      continue
    masked = jnp.issubdtype(state.dtype, jnp.bool_)
    fits = leaf.shape == state.shape if masked else leaf.ndim >= state.ndim + 2
    if fits and not rest and jnp.issubdtype(leaf.dtype, jnp.floating):
      return Argument(path, weight=Weight(folder, name))
    return Argument(path, state_of=name)
  return Argument(path)


class ReadBy(NamedTuple):
  """What one update says of a weight: the arguments that it trains, and the matmuls on the way to the gradients.

  And whether the program adds to them what something behind `sparse_training` has multiplied, not what it returned, and
  the precision that its rule has.
  """

  trained: frozenset[Weight]
  reads: Sequence[Read]
  altered: bool = False
  asked: PrecisionName = 'default'


def has_dense_update(jaxpr: Any) -> bool:
  """Whether a traced step has an update of a dense phase."""
  return any(checkpoint_name_of(equation) == DENSE_UPDATE for equation in equations_of(jaxpr))


def follow_updates(
  jaxpr: Any, given: Sequence[Argument], folders: Sequence[str], phase: PhaseName = 'sparse'
) -> Sequence[Mapping[str, ReadBy]]:
  """Follows weights through a step, and from the updates that it makes on through the next one.

  Returns:
    What each update of a phase says of each weight, by path, in the order of the program.
  """
  paths = list(dict.fromkeys(argument.state_of for argument in given if argument.ours and argument.state_of))
  made = {name_of('states', path): _state(path, folders) for path in paths}
  weights_of = {path: _state(path, folders).states for path in paths}
  made |= {name_of('updates', path): Marks(updates=weights_of[path], handed=weights_of[path]) for path in paths}
  if phase == 'dense':  # where a mask counts, whoever chose it
    made |= {name_of('chosen', path): _state(path, folders) for path in paths}
  found = follow_weights(jaxpr, [argument.marks(folders) for argument in given], made)
  kinds = ('weights', 'gradients') if phase == 'sparse' else ('dense weights', 'dense gradients')
  weights, gradients = ({path: found.named.get(name_of(kind, path), []) for path in paths} for kind in kinds)
  updates = []
  for i in range(max(map(len, weights.values()))):
    before, after = ([(path, each[i]) for path, each in of.items() if i < len(each)] for of in (weights, gradients))
    trained = {path: frozenset(w for w in named.weights if w.path == path) for path, named in before}
    reads = list(dict.fromkeys(read for _, named in after for read in named.reads))
    touched = frozenset().union(*(named.touched for _, named in after))
    ours = {path: trained.get(path, frozenset()) for path in paths}
    updates.append({
      path: ReadBy(
        ours[path], _reads(path, ours[path], reads, touched, found), any(w.name in found.altered for w in ours[path]),
        'fp8' if name_of('fp8', path) in found.named else 'default',
      )
      for path in paths
    })  # fmt: skip
  return updates


def _reads(
  path: str, trained: Set[Weight], reads: Sequence[Read], touched: Set[Weight], found: Found
) -> Sequence[Read]:
  """The matmuls of a weight on the way to the gradients, which are made by `reads` and of the weights `touched`."""
  names = {weight.name for weight in trained}
  mine = [read for read in reads if read.weight.name in names]
  if mine or names & {weight.name for weight in touched}:
    return mine
  # Of one matmul and a linear loss, the gradient does not depend on the weight.
  if mine := [read for read in found.reads if read.weight.name in names]:
    return mine
  # A weight that nothing is computed from has a copy that is, in fewer bits say.
  return [read for read in reads if read.weight.path == path]
