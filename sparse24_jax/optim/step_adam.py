"""Adam for STEP: learns its second moment in the dense phase and holds it in the sparse one."""

from collections.abc import Iterator
import contextlib
import contextvars
import re
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import optax

from sparse24_jax.optim._state import find_state
from sparse24_jax.recipe import check_phase, PhaseName
from sparse24_jax.rules import leaves_by_path

_NONE_YET = jnp.finfo(jnp.float32).max
_around: contextvars.ContextVar[PhaseName | None] = contextvars.ContextVar('around', default=None)


@contextlib.contextmanager
def inside_of(phase: PhaseName | None) -> Iterator[None]:
  """Updates in here have to be of this phase; of any if None."""
  before = _around.set(phase)
  try:
    yield
  finally:
    _around.reset(before)


class StepAdamState(NamedTuple):
  """Adam's state and the recent changes of its second moment.

  Attributes:
    count: int32 scalar, steps done.
    mu: first moments, a tree like the parameters.
    nu: second moments; held in the sparse phase.
    changes: float32 [window], mean |nu_t - nu_{t-1}| over the watched parameters in the last 1 / (1 - b2) dense steps;
      the largest float32 where there was none yet: a checkpoint of infinities would be taken for a diverged run.
  """

  count: Array
  mu: Any
  nu: Any
  changes: Array


def scale_by_step_adam(
  b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, phase: PhaseName, path: str = '.*'
) -> optax.GradientTransformation:
  """Adam's direction; in the sparse phase mu_hat / (sqrt(nu) + eps^0.75) with `nu` as the dense phase left it.

  As in the paper `nu` is then not corrected for its start at zero: after n dense steps the first sparse ones are
  1 / sqrt(1 - b2^n) times as long. Let the dense phase last 1 / (1 - b2) steps and more, or take a lower b2.

  Args:
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    phase: `'dense'` or `'sparse'`, that of the `sparse_training` around it; one state serves both.
    path: regular expression of the parameters whose second moments are watched; the paper takes those to be pruned.

  Raises:
    ValueError: `b2` is not in [0, 1), `phase` is unknown, or `path` matches no parameter; of `update`, inside of
      `sparse_training` for `recipes.step`, the phase is another there.

  Source: Lu et al., arXiv 2302.01172, algorithm 1.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> dense, sparse = (s24.scale_by_step_adam(b2=0.5, phase=phase) for phase in ('dense', 'sparse'))
  >>> grads = {'w': jnp.array([2.0])}
  >>> _, state = dense.update(grads, dense.init(grads))
  >>> direction, state = sparse.update(grads, state)  # 2 / (sqrt(2) + 1e-6)
  >>> state.nu['w'].item(), round(direction['w'].item(), 4)
  (2.0, 1.4142)
  """
  check_phase(phase)
  if not 0 <= b2 < 1:
    raise ValueError(f'b2={b2} must be at least 0 and less than 1: second moments are watched over 1 / (1 - b2) steps')
  window = max(1, round(1 / (1 - b2)))

  def init(params: Any) -> StepAdamState:
    if jax.tree.leaves(params):  # a group of weights may have none
      _watched(params, path)
    mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return StepAdamState(jnp.zeros((), jnp.int32), mu, nu, jnp.full((window,), _NONE_YET, jnp.float32))

  def update(updates: Any, state: StepAdamState, params: Any = None):
    if (around := _around.get()) not in (None, phase):
      raise ValueError(
        f'phase={phase!r} of step_adam, inside of sparse_training with phase={around!r}, whose recipe holds the second'
        ' moment in sparse phases and learns it in dense ones: build both for each phase,'
        ' sparse_training(step_adam(learning_rate, phase=phase), recipe, phase=phase), see phase_at'
      )
    count = optax.safe_increment(state.count)
    mu = optax.tree.update_moment(updates, state.mu, b1, 1)
    mu_hat = optax.tree.bias_correction(mu, b1, count)
    if phase == 'sparse':
      direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps**0.75), mu_hat, state.nu)
      return direction, StepAdamState(count, mu, state.nu, state.changes)
    nu = optax.tree.update_moment(updates, state.nu, b2, 2)
    nu_hat = optax.tree.bias_correction(nu, b2, count)
    direction = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
    changes = state.changes.at[state.count % window].set(_mean_change(nu, state.nu, path))
    return direction, StepAdamState(count, mu, nu, changes)

  return optax.GradientTransformation(init, update)


def _mean_change(new: Any, old: Any, path: str) -> Array:
  """Mean |new - old| over the leaves whose path matches, float32 scalar."""
  watched = _watched(jax.tree.map(lambda a, b: jnp.abs(a - b).astype(jnp.float32), new, old), path)
  return jnp.stack([jnp.sum(leaf) for leaf in watched]).sum() / float(sum(leaf.size for leaf in watched))


def _watched(tree: Any, path: str) -> list[Array]:
  if not (found := [leaf for name, leaf in leaves_by_path(tree) if re.fullmatch(path, name)]):
    raise ValueError(f'path={path!r} matches no parameter')
  return found


def step_adam(
  learning_rate: optax.ScalarOrSchedule,
  b1: float = 0.9,
  b2: float = 0.999,
  eps: float = 1e-8,
  *,
  phase: PhaseName,
  weight_decay: float = 0.0,
  path: str = '.*',
) -> optax.GradientTransformation:
  """`scale_by_step_adam` with decoupled weight decay and a learning rate: the inner optimizer of `recipes.step`.

  Args:
    learning_rate: a number, or a schedule.
    b1: see `scale_by_step_adam`, as for `b2`, `eps`, `phase` and `path`.
    weight_decay: of every parameter, times the learning rate.

  Raises:
    ValueError: see `scale_by_step_adam`.

  >>> import jax.numpy as jnp, optax, sparse24_jax as s24
  >>> params = {'mlp': {'kernel': jnp.eye(4)}}
  >>> recipe = s24.recipes.step('mlp/.*')
  >>> build = lambda phase: s24.sparse_training(s24.step_adam(1e-3, phase=phase), recipe, phase=phase)
  >>> tx = {phase: build(phase) for phase in ('dense', 'sparse')}
  >>> state = tx['dense'].init(params)
  >>> _, state = tx['dense'].update(params, state, params)
  >>> nu = state.inner_state[0].nu['mlp']['kernel']
  >>> _, state = tx['sparse'].update(params, state, params)
  >>> bool((nu == state.inner_state[0].nu['mlp']['kernel']).all())
  True
  """
  return optax.chain(
    scale_by_step_adam(b1, b2, eps, phase=phase, path=path),
    optax.add_decayed_weights(weight_decay),
    optax.scale_by_learning_rate(learning_rate),
  )


def step_has_settled(opt_state: Any, *, eps: float = 1e-8) -> Array:
  """Whether the second moment changed by less than `eps` a step, on average over the window: when STEP switches.

  Args:
    opt_state: of `step_adam`, bare or inside of others.
    eps: the `eps` of the optimizer.

  Returns:
    bool scalar; False until the window is full.

  Raises:
    ValueError: the state holds no `StepAdamState`, or several.

  Source: Lu et al., arXiv 2302.01172, equation 7.

  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> tx = s24.step_adam(1e-3, b2=0.5, phase='dense')
  >>> state = tx.init({'w': jnp.ones(4)})
  >>> bool(s24.step_has_settled(state))
  False
  """
  return jnp.mean(find_state(opt_state, StepAdamState, 'step_adam').changes) < eps
