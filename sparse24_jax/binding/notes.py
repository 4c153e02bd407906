"""What the matmuls of a traced function read of its weights, written down: `bind` makes its value of it."""

from collections.abc import Mapping, Sequence

import jax
from jax import Array

from sparse24_jax.binding import _jax
from sparse24_jax.binding.altered import Altered
from sparse24_jax.binding.beside import look_beside
from sparse24_jax.binding.blocks import why_apart
from sparse24_jax.binding.interpreter import run
from sparse24_jax.binding.keys import Keys
from sparse24_jax.binding.reading import read, Reading, UnreadableError
from sparse24_jax.binding.tracing import Traced
from sparse24_jax.binding.values import Block, Matmul, Place
from sparse24_jax.binding.view import View
from sparse24_jax.layout import Layout
from sparse24_jax.recipe import Rule

_JOINS = (
  ' joins it with other arrays, or its own parts in another order (multiply by each, in a loop over layers, say, in'
  ' place of a scan of their stack, or store them as one parameter)'
)
_INSTEAD = {
  'concatenate': _JOINS,
  'stack': _JOINS,
  'broadcast_in_dim': (
    ' repeats it (repeat what its matmul gives; in a loop each turn may read it itself: jax.lax.scan(f, x, None,'
    ' length=n))'
  ),
  'conv_general_dilated': (
    ' is a convolution, and no matmul (of patches that do not overlap: reshape the input to patches, and multiply)'
  ),
  'gather': (
    ' looks rows up, puts them in another order, or takes a matrix for each token (layers in an order of yours: scan'
    ' over their numbers and read w[i]; rows or columns: reorder what the matmul is given, or gives; experts:'
    ' jax.lax.ragged_dot, or all by einsum)'
  ),
  'rev': ' turns it round (layers: jax.lax.scan(..., reverse=True); else turn what the matmul is given, or gives)',
  'what a cond returns': ' (put the matmul into its branches)',
  'pad': ' adds entries to it (pad what the matmul is given, or gives)',
}
_BEFORE = {
  'add': ' (where it adds a low rank: x @ w + (x @ a) @ b, and not x @ (w + a @ b))',
  'mul': ' (a scale for each example: (x * s) @ w, and not x @ (s * w))',
}


def how_lost(mark: View | Altered, by: str, source: str) -> str:
  """Says at which operation a weight can no longer be followed."""
  if not isinstance(mark, Altered):
    return f'{by} at {source}{_INSTEAD.get(by, "")}'
  if by.endswith('dot_general'):
    return f'{mark.by} at {mark.source} changes it before a matmul reads it{_BEFORE.get(mark.by, "")}'
  return f'{mark.by} at {mark.source} changes it, then it goes into {by} at {source}'


class Notes:
  """Reads matmuls by writing them down; see `binding.values.Reader`."""

  def __init__(self, rules: Mapping[str, Rule]):
    self.rules = rules
    self.readings: dict[str, list[tuple[Matmul, Reading]]] = {}
    # Of each matmul of a block: the activation, its role, and the paths of all by role.
    self.blocks: dict[tuple[str, int], tuple[str, str, tuple[tuple[str, str], ...]]] = {}
    self.reasons: dict[tuple[str, int], str] = {}
    self.problems: dict[str, list[str]] = {}
    self.others: dict[str, list[str]] = {}  # what may be wrong
    self.places: dict[Place, dict[str, str]] = {}  # where weights went that nothing follows, unless into penalties

  def matmul(self, found: Matmul) -> Array:
    path, source = found.view.path, found.source
    known = self.readings.setdefault(path, [])
    # A loop may trace its body more than once, and two calls of one function share their equations.
    if not any(_same_reading(other, found) for other, _ in known):
      try:
        known.append((found, read(found)))
      except UnreadableError as problem:
        self.problem(path, f'{found.equation.primitive.name} at {source}: {problem}')
    (out,) = _jax.rebind(found.equation, [value.array for value in found.arguments])
    return out.astype(found.dtype) if found.rounded else out

  def ragged(self, found: Matmul) -> Array:
    return self.matmul(found)

  def layout_of(self, path: str) -> Layout:
    raise AssertionError(f'{path} has no state while notes are taken')

  def block(self, block: Block) -> None:
    maps = block.maps
    try:
      read_by = {role: (found, read(found)) for role, found in maps.items()}
    except UnreadableError:  # `matmul` says so
      return
    reason = why_apart(read_by, block, {role: self.rules[found.view.path] for role, found in maps.items()})
    if (maps['down'].view.path, id(maps['down'].origin)) in self.blocks:
      self._no_block(list(maps.values()), 'the matmul that reads its result begins another block')
    elif reason is not None:
      self._no_block(list(maps.values()), reason)
    else:
      paths = tuple((role, found.view.path) for role, found in maps.items())
      for role, found in maps.items():
        self.blocks[found.view.path, id(found.origin)] = block.activation, role, paths

  def apart(self, maps: Sequence[Matmul], reason: str) -> None:
    for found in maps:
      self.reasons.setdefault((found.view.path, id(found.origin)), reason)

  def _no_block(self, maps: Sequence[Matmul], reason: str) -> None:
    """Notes why these matmuls are not one block, in place of any reason noted before."""
    self.reasons |= {(found.view.path, id(found.origin)): reason for found in maps}

  def lost(self, mark: View | Altered, by: str, source: str, at: Place | None = None) -> None:
    if at is None:
      self.problem(mark.path, how_lost(mark, by, source))
    else:
      self.places.setdefault(at, {})[mark.path] = how_lost(mark, by, source)

  def problem(self, path: str, text: str) -> None:
    """What is wrong with a weight."""
    known = self.problems.setdefault(path, [])
    if text not in known:
      known.append(text)


def _same_reading(one: Matmul, other: Matmul) -> bool:
  starts = [[start if isinstance(start, int) else None for start in found.view.offsets] for found in (one, other)]
  return one.origin is other.origin and one.view.axes == other.view.axes and starts[0] == starts[1]


def take_notes(traced: Traced, rules: Mapping[str, Rule]) -> Notes:
  """What the matmuls of a function read of its matched parameters."""
  notes, marks = Notes(rules), traced.marks(rules)

  def interpreted(arrays: Sequence[Array]) -> list[Array]:
    values = run(traced.jaxpr, traced.constants, traced.values(arrays, marks, {}), Keys(None), notes)
    return [value.array for value in values]

  with jax.check_tracer_leaks(False):  # notes hold what a trace knew, and nothing computes with it
    jax.eval_shape(interpreted, traced.leaves)
  beside = look_beside(traced, rules, notes.places)
  notes.others |= beside.notes
  for path, texts in beside.problems.items():
    for text in texts:
      notes.problem(path, text)
  return notes
