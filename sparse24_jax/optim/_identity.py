"""What a state says of itself: by which projections it was made, and of which phase its last step was.

Both are arrays. What is static, `SparseTrainingState.layouts`, gives an error while a step is traced; but a checkpoint
holds arrays alone, and a state that is read from one has the static parts of the tree that it is read into. What is
wrong is an error where arrays have values. Under `jit`, which raises none, what is computed from such a state is NaN.
"""

from collections.abc import Callable, Iterable, Sequence
import itertools
import math
from typing import Any, NamedTuple
import weakref
import zlib

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from sparse24_jax.binding._jax import programs
from sparse24_jax.layout import Layouts, other_projection
from sparse24_jax.recipe import PhaseName, PHASES, Recipe

# Ours: bytes of a line. A longer one ends in a hash of all of it.
_WIDTH = 64
_NO_STEP = 0
_DENSE_END = 1 + len(PHASES)
# By the identity of a state's counter, that one, and which programs read its masks for which phases.
_READ: dict[int, tuple[Callable[[], Any], list[tuple[Callable[[], Any], PhaseName]]]] = {}


class Identity(NamedTuple):
  """What a state says of itself.

  Attributes:
    made_by: uint8 `[weights x 64]`, the projection of each sparse weight and how the weight is stored, as text, in the
      order of their paths. One line in all if there is none, as Orbax saves no empty array. It has one axis, since what
      has two is divided by who divides weights.
    phase: int32 scalar, of the last step: 0 before the first one, else 1 and the number in `PHASES`; the number after
      these if it was a dense one that came after sparse ones.
  """

  made_by: Array
  phase: Array


def at_start(layouts: Layouts, paths: Iterable[str]) -> Identity:
  return Identity(jnp.asarray(_written(layouts, paths).ravel()), jnp.asarray(_NO_STEP, jnp.int32))


def after_step(identity: Identity, phase: PhaseName) -> Identity:
  code = jnp.full_like(identity.phase, _code(phase))
  if phase == 'dense':
    after_sparse = (identity.phase == _code('sparse')) | (identity.phase == _DENSE_END)
    code += (_DENSE_END - code) * after_sparse.astype(code.dtype)
  return identity._replace(phase=code)


def was_sparse(identity: Identity) -> bool:
  """Whether it is known that the last step was a sparse one."""
  return is_known(identity.phase) and bool((np.asarray(identity.phase) == _code('sparse')).all())


def require(identity: Identity, recipe: Recipe, paths: Sequence[str], phase: PhaseName | None) -> bool | Array:
  """Whether a state serves a recipe; ValueError where it is known that it does not.

  Args:
    identity: of the state.
    recipe: that is to read it.
    paths: of the weights of which the state holds masks.
    phase: in which its masks are to be read, None if that does not matter.
  """
  fine = require_made_by(identity, recipe.layouts, paths)
  if phase is None:
    return fine
  before = _before(recipe, phase)
  if not is_known(identity.phase):
    return fine & jnp.any(identity.phase[..., None] == np.array(before))
  phases = np.asarray(identity.phase)
  if (wrong := phases[~np.isin(phases, before)]).size:
    if (found := _phase(wrong.flat[0])) is None:
      raise ValueError(
        f'the last step of this optimizer state was one of phase number {wrong.flat[0]}, and there are {len(PHASES)}:'
        ' it is damaged, or of another version of this program. Make it by tx.init(params)'
      )
    ended = wrong.flat[0] == _DENSE_END
    again = ended and recipe.phases[0].name == 'dense'
    again = ', after sparse ones (is this a run of more steps in all than before?)' if again else ''
    start = "a first dense phase, dataclasses.replace(recipe, phases=(Phase('dense', 0.1), ...)), for a dense start or "
    raise ValueError(
      f'the last step of this optimizer state was one of phase {found!r}{again}, after which recipe {recipe.name!r} has'
      f' none of phase {phase!r}: if the run ended dense, export params as they are; to prune them all the same say so,'
      f' project(..., phase={phase!r}). Else give sparse_training, sparsify, sparse_variables and project the phase of'
      f' the step, see phase_at, or the recipe {"" if ended else start}further phases to go on after a dense end'
    )
  return fine


def require_made_by(identity: Identity, layouts: Layouts, paths: Sequence[str]) -> bool | Array:
  """Whether the states of the weights at `paths` are those that `layouts` tell of, ValueError as above."""
  own = _written(layouts, paths)
  if identity.made_by.shape[-1:] != (own.size,):
    known = math.prod(identity.made_by.shape[-1:]) // _WIDTH
    raise ValueError(
      f'the optimizer state says by what the states of {known} weights were made, and holds those of {len(paths)}: a'
      ' part of it was taken from another state. Make it by tx.init(params)'
    )
  if not is_known(identity.made_by):
    return jnp.all(identity.made_by == own.ravel())
  made_by = np.asarray(identity.made_by).reshape(-1, *own.shape)
  if made_by.dtype != np.uint8:
    raise ValueError(
      f'the optimizer state says in {made_by.dtype} by what its masks were made, which is text in uint8: it was cast or'
      ' averaged. Average parameters alone, and take the state of the last step'
    )
  for path, found, wanted in zip(sorted(paths), made_by.swapaxes(0, 1), own, strict=False):
    if (other := (found != wanted).any(-1)).any():
      raise ValueError(other_projection(path, _read(found[other.argmax()]), _read(wanted)))
  return True


def note_read(count: Any, phase: PhaseName) -> None:
  """Notes for which phase masks are read, in a trace, of the state with this counter."""
  for leaf in jax.tree.leaves(count):  # in a box of nnx
    if isinstance(leaf, jax.core.Tracer):
      key = id(leaf)
      if key not in _READ:
        _READ[key] = weakref.ref(leaf, lambda _, key=key: _READ.pop(key, None)), []
      _READ[key][1].append((weakref.ref(next(programs())), phase))


def require_read(count: Any, phase: PhaseName) -> None:
  """ValueError if the model of a step that is traced is that of another phase than its optimizer.

  Branches of a `cond` may close over one state for steps of two phases: each is a program by itself. A sparse step that
  is all in a branch, as in `optax.MultiSteps`, has other tracers than what reads for it outside; what reads dense alone
  there has no sparse step.
  """
  here, *around = programs()
  found, notes = _READ.get(id(count), (lambda: None, []))
  phases = _read_in(here, notes) if found() is count else set()
  everywhere = [note for _, of_one in _READ.values() for note in of_one]
  nearest = next(filter(None, (_read_in(program, everywhere) for program in (here, *around))), set())
  if nearest == {'dense'} and not _read_in(here, everywhere):
    phases = nearest
  if phases and phase not in phases:
    raise ValueError(
      f'this step updates in phase {phase!r}, and reads the masks of its optimizer in phase {min(phases)!r}: give'
      ' sparse_training, sparsify and sparse_variables one phase, that of the step, see phase_at. For a figure of the'
      f' other phase beside the loss say so, project(..., phase={min(phases)!r})'
    )


def _read_in(program: Any, notes: Iterable[tuple[Callable[[], Any], PhaseName]]) -> set[PhaseName]:
  return {phase for at, phase in notes if at() is program}


def _written(layouts: Layouts, paths: Iterable[str]) -> np.ndarray:
  """Lines of text of one width, in the order of the paths."""
  lines = [layouts.describe(path).encode() for path in sorted(paths)] or [b'']
  fitting = [
    line if len(line) <= _WIDTH else line[: _WIDTH - 9] + f' {zlib.crc32(line):08x}'.encode() for line in lines
  ]
  return np.stack([np.frombuffer(line.ljust(_WIDTH, b'\0'), np.uint8) for line in fitting])


def _read(line: np.ndarray) -> str:
  return line.tobytes().rstrip(b'\0').decode(errors='replace')


def _code(phase: PhaseName) -> int:
  return 1 + PHASES.index(phase)


def _phase(code: Any) -> str | None:
  """The phase that a number of a state names, or None: it may be that of a file from elsewhere."""
  return ({_code(name): name for name in PHASES} | {_DENSE_END: 'dense'}).get(code)


def _before(recipe: Recipe, phase: PhaseName | None) -> list[int]:
  """The steps after which one of a phase may come."""
  names = [each.name for each in recipe.phases]
  codes = [_NO_STEP]
  for i, (a, b) in enumerate([*itertools.pairwise(names), (phase, phase)]):
    if b == phase and a:
      codes.append(_code(a))
      # Of a dense step by itself nothing is known before it: a state that was carried over, or an older one.
      codes += [_DENSE_END] if a == 'dense' and (a == b or 'sparse' in names[:i]) else []
  return codes


def is_known(x: Any, *, wait: bool = False) -> bool:
  """Whether an array can be read by each process, at once unless it may `wait`."""
  if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
    return isinstance(x, np.ndarray | np.generic)
  return not x.is_deleted() and (wait or x.is_ready()) and (x.is_fully_addressable or x.is_fully_replicated)
