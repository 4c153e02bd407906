"""Which matmuls of a whole step read a weight as it is, and which read what a mask was laid over.

`bind` follows a model's weights to its matmuls before anything is sparse. Here a step is looked at as it is run, with
its backward pass and its optimizer: from the arrays that go in, weights and their states, along every equation.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from sparse24_jax.binding import _jax


class Marks(NamedTuple):
  """What of sparse weights is in a value, by keys that the caller chose.

  Attributes:
    dense: weights, as they are stored or with their entries arranged, cast or scaled.
    states: masks, scales or packed operands.
    sparse: weights over which a state of theirs was laid.
  """

  dense: frozenset[Any] = frozenset()
  states: frozenset[Any] = frozenset()
  sparse: frozenset[Any] = frozenset()


class Found(NamedTuple):
  """Where matmuls read the weights, as lines of the program.

  Attributes:
    dense: by key, those that read a weight as it is.
    sparse: by key, those that read a projected weight.
  """

  dense: dict[Any, list[str]]
  sparse: dict[Any, list[str]]


_NONE = Marks()
_MATMULS = frozenset(('dot_general', 'ragged_dot_general', 'conv_general_dilated'))
# A sum with something else is another weight, or a gradient with decay.
_SUMS = frozenset(('add', 'add_any', 'sub'))
_TESTS = frozenset(('eq', 'ne', 'lt', 'le', 'gt', 'ge', 'is_finite'))
# A mask or a scale acts by these.
_LAID_OVER = frozenset(('mul', 'div', 'select_n', 'and', 'or', 'xor'))
# Of all the arguments are those of a jaxpr inside.
_CALLS = frozenset((
  'jit', 'checkpoint', 'custom_jvp_call', 'custom_vjp_call', 'custom_vmap_call', 'custom_partitioning', 'shard_map',
  'eval_jaxpr', 'remat_opt',
))  # fmt: skip


def follow_weights(jaxpr: Any, marks: Sequence[Marks]) -> Found:
  """What the matmuls of a jaxpr read, whose arguments are marked."""
  flow = _Flow(Found({}, {}))
  flow.through(jaxpr, marks)
  return flow.found


class _Flow(NamedTuple):
  found: Found

  def through(self, jaxpr: Any, marks: Sequence[Marks]) -> list[Marks]:
    opened, _ = _jax.open_jaxpr(jaxpr)
    known: dict[Any, Marks] = dict(zip(opened.invars, marks, strict=True))

    def read(atom: Any) -> Marks:
      return _NONE if _jax.is_literal(atom) else known.get(atom, _NONE)

    for equation in opened.eqns:
      given = [read(atom) for atom in equation.invars]
      if any(mark != _NONE for mark in given):
        out = self.equation(equation, given)
        known.update(zip(equation.outvars, out, strict=True))
    return [read(atom) for atom in opened.outvars]

  def equation(self, equation: Any, given: Sequence[Marks]) -> list[Marks]:
    name, params, outs = _jax.name_of(equation), equation.params, len(equation.outvars)
    inner = next((params[key] for key in ('jaxpr', 'call_jaxpr', 'call', 'fwd_jaxpr') if key in params), None)
    if name == 'scan':
      constants, carried, _ = _jax.scan_parts(params, given)
      return self._loop(inner, given, given[len(constants) : len(constants) + len(carried)], outs)
    if name == 'while':
      n, m = params['cond_nconsts'], params['body_nconsts']
      self.through(params['cond_jaxpr'], [*given[:n], *given[n + m :]])
      return self._loop(params['body_jaxpr'], given[n:], given[n + m :], outs)
    if name == 'cond':
      branches = [self.through(branch, given[1:]) for branch in params['branches']]
      return [_union(marks) for marks in zip(*branches, strict=True)]
    if name in _CALLS and inner is not None:
      return self.through(inner, given)
    if name in _MATMULS:
      self._note(equation, given[:2])
      return [_NONE] * outs
    if _is_kernel(name) and any(mark.sparse for mark in given):
      self._note(equation, [mark._replace(dense=frozenset()) for mark in given])
      return [_NONE] * outs
    return [_made(name, given)] * outs

  def _loop(self, body: Any, given: Sequence[Marks], carried: Sequence[Marks], outs: int) -> list[Marks]:
    """A carry is in each pass what it was in the first: weights stay weights when a step is done."""
    out = self.through(body, given)
    return [_union(pair) for pair in zip(out, [*carried, *[_NONE] * (outs - len(carried))], strict=True)]

  def _note(self, equation: Any, operands: Sequence[Marks]) -> None:
    source = _jax.source_of(equation)
    for operand in operands:
      for known, keys in ((self.found.dense, operand.dense), (self.found.sparse, operand.sparse - operand.dense)):
        for key in keys:
          lines = known.setdefault(key, [])
          if source not in lines:
            lines.append(source)


def _made(name: str, given: Sequence[Marks]) -> Marks:
  """What is in the result of an equation."""
  found = _union(given)
  if name.startswith(('reduce_', 'arg')) and name != 'reduce_precision':
    return found._replace(dense=frozenset())
  if name in _TESTS:
    return Marks(states=found.states | found.sparse)
  if name in _SUMS:
    return Marks(
      frozenset.intersection(*(mark.dense for mark in given)), found.states,
      frozenset.intersection(*(mark.dense | mark.sparse for mark in given)) & found.sparse,
    )  # fmt: skip
  if name in _LAID_OVER or _is_kernel(name):  # one that is given a weight and its state packs it
    laid = frozenset(
      key for i, mark in enumerate(given) for key in mark.dense
      if any(key in other.states | other.sparse for j, other in enumerate(given) if j != i)
    )  # fmt: skip
    return Marks(found.dense - laid, found.states - laid, found.sparse | laid)
  return found


def _is_kernel(name: str) -> bool:
  return name.endswith(('_kernel', '_call'))


def _union(marks: Sequence[Marks]) -> Marks:
  return Marks(*(frozenset().union(*each) for each in zip(*marks, strict=True))) if marks else _NONE
