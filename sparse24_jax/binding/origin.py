"""What states were made of and for, so that a forward with other weights, or by another recipe, is noticed.

A packed weight belongs to the step in which it was packed, and a mask to the weights that a step left. A forward in the
trace that made the states gets the very arrays that the fingerprints are of, and compares nothing. One flag remains
there, traced with the optimizer's state: whether that state serves the recipe. The policies are numbers, which the
trace knows.
"""

from collections.abc import Callable, Iterable, Mapping
import dataclasses
import functools
import re
from typing import Any, NamedTuple
import weakref
import zlib

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from sparse24_jax.fingerprint import counts_of, fingerprint, first_of_all_kinds, was_changed
from sparse24_jax.policy import DotPolicy
from sparse24_jax.rules import listed

# Beside the states of a function's or a linen model's weights. No module and no parameter has this name.
MADE_OF = 'made of'
NNX_MADE_OF = 'sparse24/made_of/'
# Whether the optimizer state that states were taken from serves the recipe, a bool.
FITS, NNX_FITS = f'{MADE_OF}/fits', 'sparse24/fits'
# The numbers of the policies that states were made for, uint32 `[policies]`.
POLICIES, NNX_POLICIES = f'{MADE_OF}/policies', 'sparse24/policies'
# Policies as texts, by the numbers that this process gave them.
_POLICY_OF: dict[int, str] = {}
# Ours: how many weights are looked at. Others than those of the step are so in all of its weights.
_WEIGHTS = 4
# By the identity of a fingerprint, that one and the weight that it is of, as long as they are there.
_WEIGHT_OF: dict[int, tuple[Callable[[], Any], Callable[[], Any]]] = {}

Weights = Mapping[str, tuple[Array, tuple[int, ...]]]
# What is static of it, as text, and the sums: a dictionary of an array, for whoever saves, maps or casts variables.
Fingerprint = dict[str, Array]


_TEXT = re.compile(r'(\w+) (\d{1,18}(?:x\d{1,18})*) of (\d{1,18}(?:x\d{1,18})*)')


class Known(NamedTuple):
  """A fingerprint and what it is of.

  Attributes:
    sums: float32 `[3]`, the last one a number of what they are of, see `_code`.
    shape: of the weight, which a shard has not.
    dtype: its name.
    counts: how many entries were read along each axis, which follow how the weight was divided.
  """

  sums: Array
  shape: tuple[int, ...]
  dtype: str
  counts: tuple[int, ...]

  def is_of(self, w: Any) -> bool:
    return self.shape == tuple(w.shape)


def of_weights(weights: Weights) -> dict[str, Fingerprint]:
  """Fingerprints of a few weights, given with their stacked axes, by path."""
  return fingerprints({path: weights[path] for path in first_of_all_kinds(weights, _WEIGHTS)})


def fingerprints(weights: Weights) -> dict[str, Fingerprint]:
  """Fingerprints of all these weights, by path. While they live, `is_of` knows which array each was made of."""
  counts = {path: counts_of(w, stacked) for path, (w, stacked) in weights.items()}
  codes = tuple(_code(weights[path][0].shape, each) for path, each in counts.items())
  made = _made({path: w for path, (w, _) in weights.items()}, tuple(counts.items()), codes)
  for path, of in made.items():
    key, origin = id(of), _origin(weights[path][0])
    _WEIGHT_OF[key] = weakref.ref(of, lambda _, key=key: _WEIGHT_OF.pop(key, None)), weakref.ref(origin)
  return {path: {_text(weights[path][0], counts[path]): of} for path, of in made.items()}


def _text(w: Array, counts: tuple[int, ...]) -> str:
  return f'{jnp.result_type(w).name} {_entries(w.shape, counts)}'


def _entries(shape: tuple[int, ...], counts: tuple[int, ...]) -> str:
  return f'{"x".join(map(str, shape))} of {"x".join(map(str, counts))}'


def _code(shape: tuple[int, ...], counts: tuple[int, ...]) -> int:
  """A checksum of a weight's shape and of the counts of entries read, below 2^24: a float32 array holds it exactly."""
  return zlib.crc32(_entries(shape, counts).encode()) % 2**24


def known_of(fingerprint: Fingerprint) -> Known:
  """Parses what `fingerprints` made; ValueError for anything else, since variables may come from any file."""
  found = [_TEXT.fullmatch(text) for text in fingerprint]
  for each, sums in zip(found, fingerprint.values(), strict=True):
    shape, counts = (_numbers(each[i]) if each else () for i in (2, 3))
    good = len(shape) == len(counts) and all(min(n, 1) <= k <= n for k, n in zip(counts, shape, strict=True))
    if each and good and len(found) == 1:
      return Known(sums, shape, each[1], counts)
  raise ValueError(
    f'variables have {list(fingerprint)} under {MADE_OF!r}, which is no fingerprint of a weight: they were changed or'
    ' damaged; make them by sparse_variables(params, opt_state, recipe)'
  )


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(map(int, text.split('x')))


def others(states: Mapping[str, Any], weights: Weights) -> dict[str, Array]:
  """Whether each weight differs from the one that its state was made of, by path.

  Args:
    states: by path, as `sparse_variables` gives them.
    weights: those that a forward is given, with their stacked axes. The result leaves out shards, weights without a
      fingerprint, and those that are known to be the same.
  """
  known: dict[str, Known] = {}
  alone: set[str] = set()
  for whole, state in states.items():
    if whole.startswith(f'{MADE_OF}/') and whole not in (FITS, POLICIES):
      path, _, text = whole.removeprefix(f'{MADE_OF}/').rpartition('/')
      known[path] = known_of({text: state})
    elif whole.startswith(NNX_MADE_OF) and (path := whole.removeprefix(NNX_MADE_OF)) in weights:
      w, stacked = weights[path]
      if is_fingerprint(state):
        known[path] = known_of(state.fingerprint())
      else:  # an array alone, of a pure dictionary: whether it is of a weight divided as this one, it says itself
        alone.add(path)
        known[path] = Known(state, tuple(w.shape), w.dtype.name, counts_of(w, stacked))
  mine = {}
  for path in first_of_all_kinds((path for path in known if path in weights), _WEIGHTS):
    w, of = weights[path][0], known[path]
    # A cast to bfloat16 is seen through, one to or from float16 is not.
    dtypes = {of.dtype, w.dtype.name}
    seen = len(dtypes) == 1 or 'float16' not in dtypes
    if of.is_of(w) and seen and not is_of(of.sums, w):
      mine[path] = of
  if not mine:
    return {}
  found = changed({path: jax.lax.stop_gradient(weights[path][0]) for path in mine}, mine)
  for path in alone & mine.keys():
    found[path] &= mine[path].sums[-1] == _code(mine[path].shape, mine[path].counts)
  return found


def known(flag: Any) -> Array:
  """A flag as an array, of which a trace still knows what is known: a forward in it then computes nothing of this."""
  if isinstance(flag, jax.core.Tracer):
    return flag
  with jax.ensure_compile_time_eval():
    return jnp.asarray(flag)


def served(states: Mapping[str, Any], policies: Mapping[str, DotPolicy]) -> list[Array]:
  """What only a run tells of whether states were taken from an optimizer state, and made, for this recipe.

  Args:
    states: by path, with `FITS` and `POLICIES` among them, or those of nnx.
    policies: the recipe's, of the weights that these are the states of.

  Raises:
    ValueError: it is known that they were not.
  """
  flags = require_fits(states.get(FITS, states.get(NNX_FITS))), _require_policies(states, policies)
  return [flag for flag in flags if flag is not None]


def require_fits(fits: Any) -> Array | None:
  """The flag where only a run tells; ValueError where it is known, and the state does not fit."""
  if fits is None or isinstance(fits, jax.core.Tracer):
    return fits
  if not np.asarray(fits).all():
    raise ValueError(
      'variables were made from an optimizer state that does not serve this recipe, phase or model: call'
      ' sparse_variables(params, opt_state, recipe, phase=phase) outside of jit, which says for which weight and why'
    )
  return None


def numbers_of(policies: Iterable[DotPolicy]) -> Array:
  """The numbers of the policies of some weights, each once."""
  return known(np.array(sorted(set(map(_number, policies))), np.uint32))


def _number(policy: DotPolicy) -> int:
  """Tells policies apart by what their states are, whatever runs them, samples for them and stores the weight."""
  text = repr(dataclasses.replace(policy.of_matrix, implementation=None, weight_grad='dense'))
  number = zlib.crc32(text.encode())
  _POLICY_OF[number] = text
  return number


def _require_policies(states: Mapping[str, Any], policies: Mapping[str, DotPolicy]) -> Array | None:
  """Whether states were made for these policies; None where that is known, or where nothing says for which."""
  found = states.get(POLICIES, states.get(NNX_POLICIES))
  if found is None:
    return None
  own = {path: _number(policy) for path, policy in policies.items()}
  if isinstance(found, jax.core.Tracer):
    return jnp.isin(np.array(sorted(set(own.values())), np.uint32), found).all()
  numbers = np.asarray(found).ravel().tolist()
  if unlike := [path for path, number in own.items() if number not in numbers]:
    made_for = ', '.join(_POLICY_OF.get(number, 'a policy of another process') for number in numbers)
    raise ValueError(
      f'{listed(unlike)}: variables were made for {made_for}, and the recipe has {_POLICY_OF[own[unlike[0]]]}: give'
      ' sparse_training, sparse_variables and sparsify one recipe'
    )
  return None


def is_fingerprint(node: Any) -> bool:
  """Whether it is the variable of an nnx model that holds one."""
  return hasattr(type(node), 'fingerprint')


def is_of(fingerprint: Any, w: Any) -> bool:
  """Whether it is known to be of this very array; False where only a comparison tells."""
  found, of = _WEIGHT_OF.get(id(fingerprint), (lambda: None,) * 2)
  return found() is fingerprint and of() is _origin(w)


def _origin(w: Any) -> Any:
  """The array that a transform for derivatives wraps."""
  return _origin(w.primal) if hasattr(w, 'primal') else w


class Changed(NamedTuple):
  """What a call changes of variables, its model's and its arguments': counters go on where a result is `spoiled`."""

  values: Any


def spoiled(out: Any, fine: Array) -> Any:
  """A result that nobody takes for one, unless it is fine; booleans stay, and so do random keys.

  Its floating-point numbers are NaN, and their gradients. Integers, tokens say, are the least of their dtype, or where
  that is 0 the largest, but for those in `Changed`.
  """
  factor = jnp.where(fine, 1.0, jnp.nan)

  def one(y: Any) -> Any:
    if isinstance(y, Changed):
      return jax.tree.map(number, y)
    dtype = jnp.result_type(y)
    if jnp.issubdtype(dtype, jnp.integer):
      return jnp.where(fine, y, jnp.asarray(jnp.iinfo(dtype).min or jnp.iinfo(dtype).max, dtype))
    return number(y)

  def number(y: Any) -> Any:
    dtype = jnp.result_type(y)
    return y * factor.astype(dtype) if jnp.issubdtype(dtype, jnp.inexact) else y

  return jax.tree.map(one, out, is_leaf=lambda y: isinstance(y, Changed))


def changed(weights: Mapping[str, Array], known: Mapping[str, Known]) -> dict[str, Array]:
  """Whether weights are others than those of the fingerprints, by path."""
  sums, counts = ({path: getattr(of, name) for path, of in known.items()} for name in ('sums', 'counts'))
  return _changed(dict(weights), sums, tuple(counts.items()))


_Counts = tuple[tuple[str, tuple[int, ...]], ...]


@functools.partial(jax.jit, static_argnums=(1, 2), inline=True)
def _made(weights: dict[str, Array], counts: _Counts, codes: tuple[int, ...]) -> dict[str, Array]:
  sums = {path: fingerprint(weights[path], each) for path, each in counts}
  return {path: jnp.append(of, jnp.float32(code)) for (path, of), code in zip(sums.items(), codes, strict=True)}


@functools.partial(jax.jit, static_argnums=2, inline=True)
def _changed(weights: dict[str, Array], known: dict[str, Array], counts: _Counts) -> dict[str, Array]:
  return {path: was_changed(weights[path], each, known[path][:2]) for path, each in counts}
