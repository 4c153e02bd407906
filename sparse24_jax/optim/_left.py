"""Whether a step is given the weights that the step before it left.

Masks are chosen from the weights as `sparse_training` leaves them. What changes its updates behind it, or the
parameters between two steps, makes them masks of other weights, without an error. So a state keeps for a few weights
sums of some entries as it expects them next, and for how many steps in a row they were others. A step reads about
a thousand entries of each, some of every stacked matrix, and nothing waits for the outcome: whoever reads the state
outside of it finds it.

The first sum has entries as they are, and shows the smallest change. In the others each entry has a random sign. The
square of such a sum of changes is on average the sum of their squares (Alon, Matias and Szegedy, 1996), so they show
how far weights are from those that were left, be it by changes that cancel in a plain sum, as those of a run do.

Not all is seen. If there are many weights, eight are looked at. A change below the tolerance for rounding is none: with
bfloat16 parameters most updates are below a weight's own rounding, and so is what a small factor behind makes of them.
"""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
import functools
import math
import sys
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from pallas_kernels._program import traced_once
from sparse24_jax.fingerprint import factors, first_of_all_kinds, sample
from sparse24_jax.layout import NEW_STATE
from sparse24_jax.optim._identity import is_known
from sparse24_jax.optim._weights import is_leaf
from sparse24_jax.projection import Projection, SoftThreshold
from sparse24_jax.rules import leaves_by_path

# Ours: how many weights.
_WEIGHTS = 8
# What is loaded or set differs once, and its masks are chosen anew; what differs again is changed in every step.
_STEPS = 2
# What `missed` is, for ever, after a step that was to choose masks and was told not to, and after one that was given
# weights which are others altogether.
_WITHOUT_MASKS, _OTHERS, _MOST_MISSED = 1e6, 2e6, 1000.0
# Ours: by which share of their size such weights differ. No cast to 16 bits does that, nor one to 8 bits with a scale.
_FAR = 0.1
# Without a scale e4m3 has the multiples of this, and rounds small weights by more than such a share.
_E4M3 = 2.0**-9
# Ours: how many sums of a weight. They tell a distance, as a share of the weight's size, to a fifth: of random changes
# a share of 0.07 is taken for `_FAR` by one weight in 40, and one of 0.12 by four in five.
SUMS = 32
_PUT_IT_INSIDE = (
  'If something behind sparse_training changes the updates, a learning rate say, or something changes the parameters'
  ' between steps, put it inside, sparse_training(optax.chain(optimizer, what_changes_updates), recipe)'
)
_most = contextvars.ContextVar('most', default=_WEIGHTS)


class Left(NamedTuple):
  """What the next step is to be given.

  Attributes:
    sums: float32 `[weights x SUMS]`, of some entries of each of a few weights. It has one axis, since what has two is
      divided by who divides weights.
    missed: float32 `[weights]`, for how many steps in a row each was another.
  """

  sums: Array
  missed: Array


def watched(paths: Sequence[str]) -> list[str]:
  """The weights that are looked at: a few, of all kinds and depths."""
  return first_of_all_kinds(paths, _most.get())


@contextlib.contextmanager
def watching(most: int = sys.maxsize) -> Iterator[None]:
  """So many weights are looked at, in states that are made and steps that are traced here; all if not told."""
  before = _most.set(most)
  try:
    yield
  finally:
    _most.reset(before)


def samples(projections: Any, params: Any) -> list[Array]:
  """Some entries of each watched weight in a tree of parameters, or of their updates."""
  return [sample(w, p.layout_of(w).stacked) for p, w in _paired(projections, params)]


def scaled(projections: Any) -> np.ndarray:
  """For each watched weight, whether its state is a scale frozen at the start, which no new choice of masks mends."""
  found = [p.matrix or p for p, _ in _paired(projections, projections)]
  return np.array([isinstance(p.form, SoftThreshold) for p in found] or [False])


def _paired(projections: Any, tree: Any) -> list[tuple[Projection, Any]]:
  """The projection of each watched weight, with the leaf that `tree` has at its path."""
  leaves = jax.tree.structure(projections, is_leaf=is_leaf).flatten_up_to(tree)
  paired = zip(leaves_by_path(projections, is_leaf=is_leaf), leaves, strict=True)
  sparse = {path: (p, leaf) for (path, p), leaf in paired if isinstance(p, Projection)}
  return [sparse[path] for path in watched(list(sparse))]


@traced_once()
def sums(sampled: Sequence[Array]) -> Array:
  """`[weights x SUMS]`; zeros as of one weight if there is none, as Orbax saves no empty array."""
  return jnp.concatenate([_sums(_terms(w)) for w in sampled] or [jnp.zeros(SUMS, jnp.float32)])


def _terms(w: Array) -> Array:
  """What is added up to the sum of some entries, and to those in which each has a random sign: `[SUMS, ...]`."""
  return w.astype(jnp.float32)[None] * _factors(w.shape)


def _sums(terms: Array) -> Array:
  return jnp.sum(terms, axis=range(1, terms.ndim))


def _and_rest(w: Array) -> Array:
  """The sums, and behind them how far the entries are from numbers of e4m3, in the same pass: none if they are such."""
  rest = jnp.abs(w.astype(jnp.float32) - jnp.round(w.astype(jnp.float32) / _E4M3) * _E4M3)
  return _sums(jnp.concatenate([_terms(w), rest[None]]))


@functools.cache
def _factors(shape: tuple[int, ...]) -> np.ndarray:
  """The factors of each sum: one constant, which XLA multiplies by and adds in one kernel."""
  signs = np.random.default_rng(0).choice(np.float32([-1, 1]), (SUMS, *shape))
  signs[0] = 1
  return signs * factors(shape)


def at_start(sampled: Sequence[Array]) -> Left:
  """What a new state holds, before its first update."""
  return Left(sums(sampled), jnp.zeros(max(len(sampled), 1), jnp.float32))


def kept(left: Left) -> Array:
  """For each watched weight, whether dense steps were given another altogether, to whose masks no step has seen since.

  `missed` has half a step more then.
  """
  return (left.missed < _MOST_MISSED) & (left.missed % 1 > 0)


@traced_once('sparse')
def given(
  left: Left, sampled: Sequence[Array], refused: Array | bool = False, unmended: Array | bool = False, *,
  sparse: bool = True,
) -> Left:  # fmt: skip
  """What a state knows once a step is given weights: for how many steps in a row they were not those that were left.

  Args:
    left: by the step before.
    sampled: what the step is given.
    refused: for each weight, whether it may not be another altogether.
    unmended: for each, whether no mask or scale is chosen anew after this step. If another altogether comes to a dense
      step then, the next sparse one that mends nothing either refuses it.
    sparse: whether the step is.
  """
  if not sampled:
    return left
  found, before = jnp.stack([_and_rest(w) for w in sampled]), left.sums.reshape(-1, SUMS)
  found, rest = found[:, :SUMS], found[:, SUMS]
  changes = found - before
  moved, squares = (jnp.mean(jnp.square(each[:, 1:]), axis=1) for each in (changes, found))
  far = jnp.abs(changes[:, 0]) > jnp.sqrt(squares) * np.array([_rounding(w) for w in sampled], np.float32)
  missed = jnp.where(far, jnp.minimum(jnp.floor(left.missed) + 1, _MOST_MISSED - 1), 0.0)
  # Zeros, too, are numbers of e4m3, but are no weights that were rounded.
  rounded = ((rest == 0) & (squares > 0)).astype(jnp.float32)
  others = moved > squares * _FAR**2 + rounded * np.array([_e4m3_rounding(w.shape) for w in sampled], np.float32)
  unserved = unmended & (kept(left) | others) if not sparse else False
  missed += jnp.where(unserved, 0.5, 0.0)
  missed = jnp.where(others & refused | (kept(left) & unmended & sparse), _OTHERS, missed)
  return left._replace(missed=jnp.where(left.missed > _MOST_MISSED, left.missed, missed))


def without_masks(left: Left, due: Array) -> Left:
  """Notes that a step chose no masks, if it was `due` to choose them."""
  return left._replace(missed=jnp.where(due, jnp.float32(_WITHOUT_MASKS), left.missed))


def still_refused(new: Left, old: Left) -> Left:
  """What a new state holds in the place of an old one: refused, if that was."""
  worst = jnp.max(old.missed, axis=-1, keepdims=True)
  return new._replace(missed=jnp.where(worst > _MOST_MISSED, worst, new.missed))


def serves(left: Left) -> bool | Array:
  """Whether the masks of a state may be read, where `check_left` does not know."""
  return True if is_known(left.missed) else jnp.all(left.missed <= _MOST_MISSED)


def check_left(state: Any, *, wait: bool = True) -> None:
  """ValueError if step after step was given other weights than the one before had left.

  Args:
    state: of `sparse_training`; nothing is known of what is traced.
    wait: for a step that is still running; if not, nothing is said of it.
  """
  missed = state.left.missed
  if not is_known(missed, wait=wait):
    return
  steps = np.atleast_1d(missed)
  steps = steps.reshape(-1, steps.shape[-1]).max(0)  # of all states that are vmapped
  if not np.isfinite(steps).all():  # which is neither few steps nor many
    raise ValueError(
      'the optimizer state says of the weights that it knows that they were others for a number of steps that is not'
      ' finite: it is damaged, or computed from numbers that are not. Make it by tx.init(params)'
    )
  if steps.max() < _STEPS:
    return
  path = watched([path for path, _ in leaves_by_path(state.projections)])[int(steps.argmax())]
  if steps.max() >= _OTHERS:
    raise ValueError(
      f'{path}: update was given other weights than the update, or the init, before had left. Masks, scales and moments'
      ' are of those: restore parameters and optimizer state of one step. For weights of another run make a state of'
      ' them, tx.init(params). For ones that are set on purpose, averaged or clipped, make, before the update,'
      f' {NEW_STATE}. {_PUT_IT_INSIDE}'
    )
  if steps.max() > _MOST_MISSED:
    raise ValueError(
      'a step that was to choose masks was told refresh=False, so that they are those of older weights: call update'
      ' with refresh=refresh_at(recipe, step), where step counts optimizer steps from zero, or without refresh'
    )
  raise ValueError(
    f'{path}: {int(steps.max())} steps in a row, update was given other weights than the update before had left. Masks'
    f' are chosen from those that sparse_training leaves: they belong to weights that are not trained. {_PUT_IT_INSIDE}'
    f'. Then go on with {NEW_STATE}'
  )


def changed(state: Any, params: Any, *, wait: bool = False) -> list[str]:
  """The watched weights that differ from what the last step left, for a state that has just made a step.

  Nothing is said of what is traced, nor, unless told to `wait`, of what is still computed: a loop that asks is not to
  wait for its last step.
  """
  return [path for path, missed in _compared(state, params, wait=wait).items() if missed]


def unchanged(state: Any, params: Any) -> bool:
  """Whether it is known that the watched weights are those that the last step left."""
  compared = _compared(state, params, wait=False)
  return bool(compared) and not any(compared.values())


def unserved(state: Any, params: Any, *, wait: bool = False) -> list[str]:
  """The watched weights that the state does not serve.

  A mask is for one weight. A scale is for all weights of a run, and not for others altogether.
  """
  states = dict(leaves_by_path(state.projections))
  return [
    path for path, missed in _compared(state, params, wait=wait).items()
    if missed and (jnp.issubdtype(states[path].dtype, jnp.bool_) or missed >= _OTHERS)
  ]  # fmt: skip


def _compared(state: Any, params: Any, *, wait: bool) -> dict[str, float]:
  """For each watched weight 0 if it is the one that was left, `_OTHERS` if it is another altogether."""
  leaves, paths = dict(leaves_by_path(params)), watched([path for path, _ in leaves_by_path(state.projections)])
  weights = [leaves[path] for path in paths]
  if not all(_is_there(x, wait=wait) for x in (*state.left, *weights)):
    return {}
  if state.left.missed.ndim != 1:
    return {}
  stacked = tuple(state.layouts.layout_of(path, w.ndim).stacked for path, w in zip(paths, weights, strict=True))
  missed = _missed(jax.tree.map(np.asarray, state.left), weights, stacked)  # the state may lie on another device
  return {} if isinstance(missed, jax.core.Tracer) else dict(zip(paths, np.asarray(missed).tolist(), strict=False))


def _is_there(x: Any, *, wait: bool) -> bool:
  """Whether an array can be read by this process alone, at once unless it may `wait`."""
  if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
    return isinstance(x, np.ndarray)
  return x.is_fully_addressable and not x.is_deleted() and (wait or x.is_ready())


@traced_once('stacked')
def _missed(left: Left, weights: Sequence[Array], stacked: Sequence[Sequence[int]]) -> Array:
  sampled = [sample(w, axes) for w, axes in zip(weights, stacked, strict=True)]
  return given(left._replace(missed=jnp.zeros_like(left.missed)), sampled, True).missed


def _e4m3_rounding(shape: tuple[int, ...]) -> float:
  """The square of a sum of what e4m3 without a scale rounds off small entries."""
  # A twelfth for numbers between two steps, and half as much again since sums tell it to a fifth.
  return float(np.square(factors(shape)).sum() * _E4M3**2 / 8)


def _rounding(w: Array) -> float:
  """The share of the entries' norm by which two sums may differ because XLA rounds what it adds in two ways."""
  eps = 0.0 if w.dtype.itemsize > 2 else float(jnp.finfo(w.dtype).eps)
  return 1.3 * eps + 6.4 * float(jnp.finfo(jnp.float32).eps) * math.sqrt(w.size)
