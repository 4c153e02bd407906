"""What a whole chain does with sparse weights: whether it trains them, and leaves those of which masks are chosen."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import Array
import jax.numpy as jnp
import optax

from sparse24_jax.layout import Layouts
from sparse24_jax.optim import _left
from sparse24_jax.optim._identity import was_sparse
from sparse24_jax.optim._state import find_state, require_optimizer
from sparse24_jax.optim._training_state import SparseTrainingState
from sparse24_jax.optim._weights import unboxed
from sparse24_jax.rules import leaves_by_path, map_by_path

# Ours: the steps that are tried. A schedule may begin at a rate of zero, or as if it were not there.
_COUNTS = (0, 10, 100, 1000, 10_000)
# Ours: the most micro-batches of `optax.MultiSteps`.
_CALLS = 256
# Ours: which share of its size an update has to change by. Clipping changes it by tenths, rounding by millionths.
_MOVED = 1e-3


class Tried(NamedTuple):
  """The sparse weights that a chain does not train as it should.

  Attributes:
    changed: those that its updates make others than `sparse_training` in it expects, and in which step.
    still: those that no step changes, while it changes other parameters.
    clipped: one whose mask has a part in the updates of other parameters, as its decay has if it is clipped with them;
      None where this was not asked.
    in_front: the one that was asked about, if gradients of what is no link in it have a part in the updates of others,
      as they have if they are clipped with theirs.
    sparse: all of them.
    layouts: for which the states were made.
  """

  changed: dict[str, int]
  still: list[str]
  clipped: str | None
  in_front: str | None
  sparse: list[str]
  layouts: Layouts


def try_chain(
  optimizer: optax.GradientTransformation, params: Any, *, decays: bool = False, links: str | None = None
) -> Tried:
  """What the updates of a chain do to sparse weights.

  It does a few steps and compares as a run does, but looks at all weights. Only shapes, dtypes and shardings of the
  parameters matter, so that neither their size nor what gradients they have hides a change.

  Args:
    optimizer: the chain.
    params: arrays.
    decays: whether pruned weights decay by their gradients, so that `clipped` is asked.
    links: path of a weight whose links come and go, so that `in_front` is asked.

  Raises:
    ValueError: it is no chain, or has not one `sparse_training` in it.
  """
  require_optimizer('optimizer', optimizer, 'tx = sparse_training(optax.adamw(1e-3), recipe)')
  # The updates that the wrapper adds are then those that it hands on, also in 16 bits.
  step = jax.jit(lambda g, s, p: _step(optimizer, g, s, p), compiler_options={'xla_allow_excess_precision': False})
  # Numbers of one sign would show more, but their sums differ by rounding, too. Gradients are mostly of one, as steps
  # of all signs nearly cancel in a sum.
  params, grads = _drawn(params, 0, 0.02, 0.25), _drawn(params, 1, 1.0, 1.0)
  found: dict[str, int] = {}
  updated: set[str] = set()
  clipped = in_front = None
  with _left.watching():
    state = optimizer.init(params)
    for count in _COUNTS:
      state = jax.tree_util.tree_map_with_path(lambda path, leaf, n=count: _at(n, path, leaf), state)
      params, state, ours, sizes = _one_step(step, grads, state, params, count) or _no_step()
      updated |= {path for path, size in sizes.items() if size != 0}
      if count:  # by the first step Adam knows no size, and undoes a clip
        clipped = clipped or (_clipped(step, grads, state, params, ours) if decays else None)
        in_front = in_front or (_in_front(step, grads, state, params, ours, links) if links else None)
      jax.block_until_ready((params, ours))
      found = dict.fromkeys(_left.changed(ours, unboxed(params)), count) | found
  # Where nothing was updated at all, a schedule is zero in the steps that were tried, and nothing is known.
  sparse = [path for path, _ in leaves_by_path(ours.projections)]
  still = [path for path in sparse if path not in updated] if updated else []
  return Tried(found, still, clipped, in_front, sparse, ours.layouts)


def _one_step(
  step: Callable[..., Any], grads: Any, state: Any, params: Any, count: int
) -> tuple[Any, Any, SparseTrainingState, dict[str, float]] | None:
  """Calls of update until there are more than `count` steps, and the sizes of the last updates, by path; or None."""
  for _ in range(_CALLS):
    params, state, sizes = step(grads, state, params)
    ours = find_state(state, SparseTrainingState, 'sparse_training')
    if int(ours.count) > count:
      return params, state, ours, dict(leaves_by_path(jax.device_get(sizes)))
  return None


def _no_step() -> NoReturn:
  raise ValueError(f'optimizer did no step in {_CALLS} updates: check it without optax.MultiSteps around it')


def _step(optimizer: optax.GradientTransformation, grads: Any, state: Any, params: Any) -> tuple[Any, Any, Any]:
  """Parameters and state, and how large the update of each parameter is."""
  loss: dict[str, Any] = {'value': jnp.ones(())}
  try:  # some read the loss, as reduce_on_plateau does: any number serves
    updates, state = optimizer.update(grads, state, params, **loss)
  except TypeError:  # it takes no more, or, as SAM, what it is made of does not
    updates, state = optimizer.update(grads, state, params)
  sizes = jax.tree.map(lambda u: jnp.sum(jnp.abs(u.astype(jnp.float32))), unboxed(updates))
  return optax.apply_updates(params, updates), state, sizes


def _clipped(
  step: Callable[..., Any], grads: Any, state: Any, params: Any, ours: SparseTrainingState
) -> str | None:
  """The first weight with a mask, if the updates of others depend on it where the weight is large."""
  masks = [path for path, leaf in leaves_by_path(ours.projections) if leaf.dtype == bool]
  if not masks:
    return None
  large = _filled(params, masks[0], 1.0)
  calls = [(grads, _masked(state, masks[0], kept), large) for kept in (True, False)]
  return masks[0] if _others_differ(step, calls, masks[0], ours) else None


def _in_front(
  step: Callable[..., Any], grads: Any, state: Any, params: Any, ours: SparseTrainingState, path: str
) -> str | None:
  """The weight, if the updates of others depend on its gradients where it has no links."""
  calls = [(_filled(grads, path, factor), _masked(state, path, False), params) for factor in (0.0, 1.0)]
  is_sparse = path in dict(leaves_by_path(ours.projections)) and was_sparse(ours.identity)
  return path if is_sparse and _others_differ(step, calls, path, ours) else None


def _others_differ(
  step: Callable[..., Any], calls: Sequence[tuple[Any, Any, Any]], path: str, ours: SparseTrainingState
) -> bool:
  """Whether two steps, of gradients, state and parameters, update others than the weight at a path differently."""
  made = [_one_step(step, *call, int(ours.count)) for call in calls]
  if not all(made):  # the optimizer skips a step of such numbers
    return False
  first, second = (done[-1] for done in made if done)
  return any(abs(first[other] - second[other]) > _MOVED * first[other] for other in first if other != path)


def _filled(tree: Any, path: str, factor: float) -> Any:
  """A tree with large numbers, times a factor, at a path."""
  return map_by_path(
    lambda found, w: w * 0 + factor * float(jnp.finfo(w.dtype).max) ** 0.25 if found == path else w, tree
  )


def _masked(state: Any, path: str, kept: bool) -> Any:
  """An optimizer state whose mask at a path keeps all or nothing."""

  def of_one(node: Any) -> Any:
    if not isinstance(node, SparseTrainingState):
      return node
    chosen = map_by_path(lambda found, m: (m & False) | kept if found == path else m, node.projections)
    return node._replace(projections=chosen)

  return jax.tree.map(of_one, state, is_leaf=lambda node: isinstance(node, SparseTrainingState))


def _at(count: int, path: Any, leaf: Any) -> Any:
  """A leaf of an optimizer state; at another step where it counts them, as all of Optax do by this name."""
  return jnp.full_like(leaf, count) if path and getattr(path[-1], 'name', None) == 'count' else leaf


def _drawn(params: Any, seed: int, scale: float, mean: float) -> Any:
  """Numbers of the shapes, dtypes and shardings of parameters."""
  leaves, structure = jax.tree.flatten(params)

  def one(i: int, leaf: Array) -> Array:
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return jnp.zeros_like(leaf) if seed else leaf
    drawn = scale * (jax.random.normal(jax.random.fold_in(jax.random.key(seed), i), leaf.shape) + mean)
    return jax.device_put(drawn.astype(leaf.dtype), leaf.sharding)

  return jax.tree.unflatten(structure, [one(i, leaf) for i, leaf in enumerate(leaves)])
