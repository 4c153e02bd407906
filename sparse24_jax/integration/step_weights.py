"""What each update of a traced step is given: its weights, and the matmuls on the way to their gradients."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax.numpy as jnp

from sparse24_jax.binding._jax import checkpoint_name_of, equations_of
from sparse24_jax.binding.flow import follow_weights, Found, Marks, Named, Read, UNSURE, Weight
from sparse24_jax.binding.origin import MADE_OF, NNX_MADE_OF
from sparse24_jax.optim import DENSE_UPDATE, name_of, SparseTrainingState
from sparse24_jax.policy import PrecisionName
from sparse24_jax.recipe import PhaseName, PHASES
from sparse24_jax.rules import is_array, leaves_by_path


class Argument(NamedTuple):
  """What an array among the arguments is.

  Attributes:
    path: among the arguments.
    weight: that it may be, by its path, shape and dtype.
    state_of: path of the weight that it may be the state of.
    optimizer: number of the state of `sparse_training` that holds it, if one does.
  """

  path: str
  weight: Weight | None = None
  state_of: str | None = None
  optimizer: int | None = None

  def marks(self, folders: Sequence[Collection[str]]) -> Marks:
    """What the array marks, if the parameters of each optimizer are in these folders."""
    every = frozenset[str]().union(*folders)
    if self.weight is not None:
      return Marks(dense=frozenset((self.weight,) if self.weight.folder in every else ()))
    if self.state_of is None:
      return Marks()
    if self.optimizer is None:
      return _state(self.state_of, every).of_update(UNSURE)
    return _state(self.state_of, folders[self.optimizer])


def _state(path: str, folders: Iterable[str]) -> Marks:
  return Marks(states=frozenset(Weight(folder, path) for folder in folders))


def is_ours(node: Any) -> bool:
  """Whether it is the state of `sparse_training`."""
  return isinstance(node, SparseTrainingState)


def arguments_of(tree: Any, masks: Sequence[Mapping[str, Any]]) -> list[Argument]:
  """Tells what each array is: by its place in a state of `sparse_training`, elsewhere by its name.

  Args:
    tree: the arguments.
    masks: of each optimizer, by the path of their weight.
  """
  found, optimizer = [], 0
  for path, node in leaves_by_path(tree, is_leaf=is_ours):
    if not is_ours(node):
      found += [_outside(path, node, masks)] if is_array(node) else []
      continue
    for name, field in zip(node._fields, node, strict=True):
      leaves = [(weight, leaf) for weight, leaf in leaves_by_path(field) if is_array(leaf)]
      found += [Argument(path, None, weight if name == 'projections' else None, optimizer) for weight, _ in leaves]
    optimizer += 1
  return found


def _outside(path: str, leaf: Any, masks: Sequence[Mapping[str, Any]]) -> Argument:
  """Tells by its path whether an array is a weight or a state; fingerprints are neither."""
  if f'/{MADE_OF}/' in f'/{path}' or NNX_MADE_OF in path:
    return Argument(path)
  weights, states = [], []
  for name in dict.fromkeys(name for of_one in masks for name in of_one):
    folder, found, rest = f'/{path}/'.rpartition(f'/{name}/') if name else (f'/{path}', '/', '')
    fits = any(_fits(leaf, of_one[name]) for of_one in masks if name in of_one)
    if found and fits and not rest and jnp.issubdtype(leaf.dtype, jnp.floating):
      weights.append(Weight(folder, name))
    elif found and name:
      states.append(name)
  # The name of one weight may end that of another.
  if weights:
    return Argument(path, weight=max(weights, key=lambda weight: len(weight.path)))
  return Argument(path, state_of=max(states, key=len, default=None))


def _fits(leaf: Any, state: Any) -> bool:
  """Whether an array has the shape of the weight of a state."""
  return leaf.shape == state.shape if jnp.issubdtype(state.dtype, jnp.bool_) else leaf.ndim >= state.ndim + 2


class ReadBy(NamedTuple):
  """What one update says of a weight: the arguments that it trains, and the matmuls on the way to the gradients.

  And whether the gradients are computed from it, by matmuls or otherwise, whether the program adds to them what
  something behind `sparse_training` has multiplied, not what it returned, the precision that its rule has, and whether
  the program returns the state that the update made.
  """

  trained: frozenset[Weight]
  reads: Sequence[Read]
  touched: bool = True
  altered: bool = False
  asked: PrecisionName = 'default'
  returned: bool = True

  @property
  def unread(self) -> bool:
    """Whether the loss does not look at the weight, as that of another task."""
    return bool(self.trained) and not self.reads and not self.touched


# By the folder of what an optimizer trains, '' of a single one, and by the path of a weight.
Updates = Mapping[tuple[str, str], Sequence[ReadBy]]


def has_dense_update(jaxpr: Any) -> bool:
  """Whether a traced step has an update of a dense phase."""
  return any(checkpoint_name_of(equation) == DENSE_UPDATE for equation in equations_of(jaxpr))


def trained_by_each(jaxpr: Any, given: Sequence[Argument], folders: Sequence[Collection[str]]) -> list[set[str]]:
  """Of the folders whose parameters an optimizer may train those that it does, as its first update in a step says.

  All that it may train if the step makes no update of it.
  """
  numbered = [[*each, str(i)] for i, each in enumerate(folders)]
  found, trained = follow_weights(jaxpr, [a.marks(numbered) for a in given], {}), [set[str]() for _ in folders]
  for path in dict.fromkeys(a.state_of for a in given if a.optimizer is not None and a.state_of is not None):
    for phase in PHASES:
      weights, states = (found.named.get(name_of(kind, path, phase), []) for kind in ('weights', 'given states'))
      for before, state in zip(weights, states, strict=True):
        for i in (int(of.folder) for of in state.states if of.path == path and of.folder.isdigit()):
          trained[i] |= {w.folder for w in before.weights if w.path == path}
  return [each or set(may) for each, may in zip(trained, folders, strict=True)]


def follow_updates(
  jaxpr: Any, given: Sequence[Argument], folders: Sequence[Collection[str]], phase: PhaseName = 'sparse'
) -> Updates:
  """Follows weights through a step, and from the updates that it makes on through the next one.

  Args:
    jaxpr: of the step.
    given: what its arguments are.
    folders: of each optimizer's parameters among them.
    phase: whose updates are meant.

  Returns:
    What each update of a phase says of a weight, as in the program.
  """
  several, every = len(folders) > 1, frozenset[str]().union(*folders)
  paths = list(dict.fromkeys(a.state_of for a in given if a.optimizer is not None and a.state_of is not None))
  made = {name_of('states', path): _state(path, every) for path in paths}
  weights_of = {path: _state(path, every).states for path in paths}
  made |= {name_of('updates', path): Marks(updates=weights_of[path], handed=weights_of[path]) for path in paths}
  if phase == 'dense':  # where a mask counts, whoever chose it
    made |= {name_of('chosen', path): _state(path, every) for path in paths}
  found = follow_weights(jaxpr, [argument.marks(folders) for argument in given], made)
  weights, gradients = (
    {path: found.named.get(name_of(kind, path, phase), []) for path in paths} for kind in ('weights', 'gradients')
  )
  optimizers: dict[str, dict[str, list[tuple[frozenset[Weight], Named]]]] = {}
  for path in paths:
    for before, after in zip(weights[path], gradients[path], strict=True):
      if not before.touched:  # of nothing that the step is given: another optimizer, all of which is constant
        continue
      trained = frozenset(w for w in before.weights if w.path == path)
      folder = min((w.folder for w in trained), default='') if several else ''
      optimizers.setdefault(folder, {}).setdefault(path, []).append((trained, after))
  said: dict[tuple[str, str], list[ReadBy]] = {}
  for folder, named in optimizers.items():
    for i in range(max(map(len, named.values()))):
      update = {path: each[i] for path, each in named.items() if i < len(each)}
      reads = list(dict.fromkeys(read for _, after in update.values() for read in after.reads))
      touched = frozenset().union(*(after.touched for _, after in update.values()))
      for path, (trained, _) in update.items():
        said.setdefault((folder, path), []).append(_read_by(path, trained, reads, touched, found))
  return said


def _read_by(
  path: str, trained: frozenset[Weight], reads: Sequence[Read], touched: Set[Weight], found: Found
) -> ReadBy:
  """What an update says of the weight that it trains; its gradients are made by `reads`, of the weights `touched`."""
  in_fp8 = {w.name for named in found.named.get(name_of('fp8', path), []) for w in named.weights}
  return ReadBy(
    trained,
    _reads(path, trained, reads, touched, found),
    bool({w.name for w in trained} & {w.name for w in touched}),
    any(w.name in found.altered for w in trained),
    'fp8' if any(w.name in in_fp8 for w in trained) else 'default',
    any(w.name in found.returned for w in trained),
  )


def _reads(
  path: str, trained: Set[Weight], reads: Sequence[Read], touched: Set[Weight], found: Found
) -> Sequence[Read]:
  """The matmuls of a weight on the way to the gradients, which are made by `reads` and of the weights `touched`."""
  names = {weight.name for weight in trained}
  mine = [read for read in reads if read.weight.name in names]
  if mine or names & {weight.name for weight in touched}:
    return mine
  # Of one matmul and a linear loss, the gradient does not depend on the weight. Other steps of a program may read it.
  updates = {UNSURE, *(weight.update for weight in trained)}
  if mine := [read for read in found.reads if read.weight.name in names and read.weight.update in updates]:
    return mine
  # A weight that nothing is computed from has a copy that is, in fewer bits say.
  return [read for read in reads if read.weight.path == path]
