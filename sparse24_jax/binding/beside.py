"""What the matmuls of a function do not tell of its weights: where sums over them go, and what is made of products.

A matmul reads the projected weight. A sum over the weight, a norm say, is of the dense one: right in a penalty, which
is added to the loss, and wrong in what the model computes, as its exported weights give another sum. And a product of a
weight may be a matrix itself (`binding.products`). Where a matmul reads such a sum it is an error. Elsewhere no trace
tells what the model computes from penalties and metrics, nor generated weights from mixed ones: those are notes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse24_jax.binding import _jax
from sparse24_jax.binding.altered import ENTRY_BY_ENTRY
from sparse24_jax.binding.products import follow_products, matrices, Operand, Product, product_of, with_axes
from sparse24_jax.binding.tracing import Traced
from sparse24_jax.binding.view import FOLLOWED
from sparse24_jax.recipe import Rule


class Mark(NamedTuple):
  """What is in a value.

  Attributes:
    weights: paths of those whose entries it holds, changed or not.
    sums: paths of weights that were summed up, and where.
    after: whether the result of a matmul is in it.
    added: the operation that added sums to entries of such a result, or ''.
    inputs: whether the function's arguments behind the parameters are in it, numbers and keys too.
    arrays: whether any arrays are in it that are no weights: inputs, other parameters or constants.
    repeated: whether it repeats an array.
    by_hand: the operation that combined weights with arrays of another shape, as in a matmul by another name, or ''.
    products: of weights, whose axes it has.
  """

  weights: frozenset[str] = frozenset()
  sums: frozenset[tuple[str, str]] = frozenset()
  after: bool = False
  added: str = ''
  inputs: bool = False
  arrays: bool = False
  repeated: bool = False
  by_hand: str = ''
  products: frozenset[Product] = frozenset()


_NONE = Mark()
_MATMULS = ('dot_general', 'ragged_dot_general', 'conv_general_dilated')
# What holds the entries of its operands.
_ENTRIES = ENTRY_BY_ENTRY | FOLLOWED | {'concatenate', 'pad', 'real', 'rev', 'stack'}
_ADDS = ('add', 'add_any', 'sub')
_JOINS = ('concatenate', 'stack')
# What a sum of terms goes through as each term does.
_LINEAR = FOLLOWED | {*_ADDS, *_JOINS, 'cumsum', 'mul', 'neg', 'pad', 'psum', 'reduce_sum', 'rev'}


class Beside(NamedTuple):
  """What is wrong with weights, and what may be, by path."""

  problems: dict[str, list[str]]
  notes: dict[str, list[str]]


def look_beside(traced: Traced, rules: Mapping[str, Rule]) -> Beside:
  """Follows sums over weights, and their products, through a function."""
  walk = _Walk({}, {}, frozenset(path for path, rule in rules.items() if rule.policy.projection is not None))
  marks = []
  for i, leaf in enumerate(traced.leaves):
    path = traced.paths[i] if i < len(traced.paths) else None
    is_array = jnp.ndim(leaf) > 0 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    marks.append(Mark(frozenset((path,))) if path in rules else Mark(inputs=path is None, arrays=is_array))
  for variable, mark in zip(traced.jaxpr.outvars, walk.through(traced.jaxpr, traced.constants, marks), strict=True):
    if mark.added and variable.aval.ndim:
      walk.note(mark.sums, mark.added)
  return Beside(walk.problems, walk.notes)


class _Walk(NamedTuple):
  problems: dict[str, list[str]]
  notes: dict[str, list[str]]
  projected: frozenset[str]

  def refuse(self, sums: Iterable[tuple[str, str]], by: str) -> None:
    """A matmul reads sums over weights."""
    for path, source in self._of_projected(sums):
      _tell(
        self.problems, path, f'{source} reads it as it is stored, dense, and {by} multiplies by what comes of it, where'
        ' the projected weight would give something else (a norm of the weight: a parameter of its own in its place)'
      )  # fmt: skip

  def note(self, sums: Iterable[tuple[str, str]], by: str) -> None:
    """Sums over weights meet what matmuls make, which a model may compute with."""
    for path, source in self._of_projected(sums):
      _tell(
        self.notes, path, f'{path}: {source} reads it as it is stored, dense, and {by} puts what comes of it beside'
        ' what matmuls make. That is right in a penalty or a metric. In what the model computes the projected weight'
        ' would give something else, and so does an exported one: take a parameter in the place of a norm of it,'
        ' or leave the weight dense'
      )  # fmt: skip

  def _of_projected(self, sums: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted(each for each in sums if each[0] in self.projected)

  def through(self, jaxpr: Any, constants: Sequence[Any], marks: Sequence[Mark]) -> list[Mark]:
    known: dict[Any, Mark] = {v: Mark(arrays=jnp.size(c) > 1) for v, c in zip(jaxpr.constvars, constants, strict=True)}
    known.update(zip(jaxpr.invars, marks, strict=True))

    def read(atom: Any) -> Mark:
      return _NONE if _jax.is_literal(atom) else known[atom]

    for equation in jaxpr.eqns:
      known.update(zip(equation.outvars, self._equation(equation, [read(a) for a in equation.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]

  def _equation(self, equation: Any, given: list[Mark]) -> Sequence[Mark]:
    name, params = _jax.name_of(equation), equation.params
    if name == 'scan':
      constants, carried, scanned = _jax.scan_parts(params, given)
      scanned = [_with_axes(mark, lambda axes: axes[1:]) for mark in scanned]
      out = self._loop(equation, params['jaxpr'], constants, carried, scanned)
      n = len(carried)
      return [*out[:n], *(_with_axes(mark, lambda axes: ('', *axes)) for mark in out[n:])]
    if name == 'while':
      n, m = params['cond_nconsts'], params['body_nconsts']
      out = self._loop(equation, params['body_jaxpr'], given[n : n + m], given[n + m :], ())
      (test,) = self._inside(equation, params['cond_jaxpr'], [*given[:n], *out])
      return self._chosen(equation, test, out)
    if name == 'cond':
      branches = [self._inside(equation, branch, given[1:]) for branch in params['branches']]
      return self._chosen(equation, given[0], [_union(marks) for marks in zip(*branches, strict=True)])
    inner = next((params[key] for key in ('jaxpr', 'call_jaxpr') if key in params), None)
    if inner is not None and len(_jax.open_jaxpr(inner)[0].invars) == len(given):
      return self._inside(equation, inner, given)
    if not equation.outvars:  # a call out of the program
      return []
    if name in _MATMULS:
      return [self._matmul(equation, given[:2], name)]
    if name == 'optimization_barrier':
      return given
    found = _union(given)
    # These say the same of the projected weight.
    if name == 'is_finite' or (name == 'ne' and equation.invars[0] is equation.invars[1]):
      found = Mark(after=found.after, inputs=found.inputs, arrays=found.arrays)
    if found.weights:
      found = self._of_weights(equation, given, found, name)
    if not found.weights:
      found = self._met(equation, given, found, name)
    if name == 'broadcast_in_dim':
      found = found._replace(repeated=found.repeated or 1 < _size(equation.invars[0]) < _size(equation.outvars[0]))
    # What is made of inputs twice is an activation; through residual layers it would gather the products of all.
    if not found.products or sum(mark.inputs for mark in given) > 1:
      return [found._replace(products=frozenset())] * len(equation.outvars)
    products = follow_products(equation, [mark.products for mark in given])
    return [found._replace(products=each) for each in products]

  def _inside(self, equation: Any, jaxpr: Any, given: Sequence[Mark]) -> list[Mark]:
    with _jax.inside(equation):
      return self.through(*_jax.open_jaxpr(jaxpr), given)

  def _loop(
    self, equation: Any, body: Any, constants: Sequence[Mark], carried: Sequence[Mark], scanned: Sequence[Mark]
  ) -> list[Mark]:
    """What a body makes of what is carried once that has all that goes round."""
    while True:
      out = self._inside(equation, body, [*constants, *carried, *scanned])
      grown = [_union(pair) for pair in zip(carried, out, strict=False)]
      if grown == list(carried):
        return [*grown, *out[len(grown) :]]
      carried = grown

  def _chosen(self, equation: Any, index: Mark, out: Sequence[Mark]) -> list[Mark]:
    """The results of what an index or a test chooses."""
    index = index._replace(weights=frozenset(), sums=index.sums | self._summed(equation, index), products=frozenset())
    given = [(mark, index) for mark in out]
    return [
      self._met(equation, pair, _union(pair), 'cond', variable)
      for pair, variable in zip(given, equation.outvars, strict=True)
    ]

  def _summed(self, equation: Any, mark: Mark) -> frozenset[tuple[str, str]]:
    return frozenset((path, f'{_jax.name_of(equation)} at {_jax.source_of(equation)}') for path in mark.weights)

  def _of_weights(self, equation: Any, given: Sequence[Mark], found: Mark, name: str) -> Mark:
    """What an equation makes of the entries of weights: others, or a sum over them."""
    if name in _ENTRIES:
      sizes, out = [_size(atom) for atom in equation.invars], _size(equation.outvars[0])
      repeats = any(size < out for mark, size in zip(given, sizes, strict=True) if mark.weights)
      for mark, size in zip(given, sizes, strict=True):
        is_other = mark.arrays and not mark.weights and size > 1
        # A factor along an axis of a weight may be one of the matmul.
        if is_other and (repeats or (name not in ('mul', 'div') and (size < out or mark.repeated))):
          found = found._replace(by_hand=found.by_hand or f'{name} at {_jax.source_of(equation)}')
      if found.after and not found.added:
        found = found._replace(added=f'{name} at {_jax.source_of(equation)}')
      return found
    if found.by_hand:
      for path in found.weights:
        _tell(self.problems, path, f'{found.by_hand}, then {name} at {_jax.source_of(equation)}')
    return found._replace(weights=frozenset(), sums=found.sums | self._summed(equation, found), by_hand='')

  def _met(self, equation: Any, given: Sequence[Mark], found: Mark, name: str, variable: Any = None) -> Mark:
    """The result of an equation in which sums may meet what matmuls make; a scalar of both goes into a loss."""
    if not getattr((variable or equation.outvars[0]).aval, 'ndim', 0):
      return found._replace(added='')
    held = [mark.sums or mark.after for mark in given]
    if not (found.sums and found.after):
      return found
    by = f'{_jax.name_of(equation)} at {_jax.source_of(equation)}'
    if sum(map(bool, held)) > 1:
      if name in _ADDS:
        return found._replace(added=found.added or by)
      fine = name in _JOINS
    else:
      fine = not found.added or name in _LINEAR or (name in ('div', 'select_n') and bool(held[0]) == (name == 'div'))
    if fine:
      return found
    self.note(found.sums, found.added or by)
    return found._replace(sums=frozenset(), added='')

  def _matmul(self, equation: Any, operands: Sequence[Mark], name: str) -> Mark:
    found, source, is_scalar = _union(operands), _jax.source_of(equation), not equation.outvars[0].aval.ndim
    sums, alone = found.sums, not (found.arrays or found.after)
    both = frozenset.intersection(*(mark.weights for mark in operands))
    for path in both - (self.projected if alone else frozenset()):
      _tell(self.problems, path, f'{name} at {source} multiplies it by itself')
    if alone and all(mark.weights or mark.sums for mark in operands):  # in a penalty
      return Mark(sums=sums | self._summed(equation, found), inputs=found.inputs)
    if sums and not is_scalar:
      self.refuse(sums, f'{name} at {source}')
      sums = frozenset()
    sides = _sides(equation, name, operands)
    for one, other in (sides, sides[::-1]) if sides else ():
      for made in matrices(one, other):
        _tell(
          self.notes, made.path, f'{made.path}: the matmul at {made.source} makes a dense matrix of it, by which the'
          f' one at {source} multiplies inputs. That is right of a network that generates weights. Of experts or'
          ' kernels that are mixed, multiply by each and mix the results, or leave them dense'
        )  # fmt: skip
    products = set()
    if name == 'dot_general':
      batch = len(equation.params['dimension_numbers'][1][0])
      for i, mark in enumerate(operands):
        products.update(product_of(path, source, sides, i, batch) for path in mark.weights & self.projected)
    after = found.after or not is_scalar
    return Mark(sums=sums, after=after, inputs=found.inputs, arrays=True, products=frozenset(products))


def _sides(equation: Any, name: str, marks: Sequence[Mark]) -> list[Operand]:
  """The operands of a matmul or a convolution by their axes."""
  shapes = [atom.aval.shape for atom in equation.invars[:2]]
  if name == 'dot_general':
    contract, batch = equation.params['dimension_numbers']
    free = [[i for i in range(len(s)) if i not in (*c, *b)] for s, c, b in zip(shapes, contract, batch, strict=True)]
  elif name == 'conv_general_dilated':
    lhs, rhs, _ = equation.params['dimension_numbers']
    contract, free = (lhs[1:2], rhs[1:]), ((lhs[0], *lhs[2:]), rhs[:1])
  else:
    return []
  return [Operand(mark.products, mark.inputs, c, f) for mark, c, f in zip(marks, contract, free, strict=True)]


def _tell(found: dict[str, list[str]], path: str, text: str) -> None:
  known = found.setdefault(path, [])
  if text not in known:
    known.append(text)


def _size(atom: Any) -> int:
  return math.prod(getattr(atom.aval, 'shape', ()))


def _union(marks: Iterable[Mark]) -> Mark:
  """All that is in some values."""
  marks = [mark for mark in marks if mark != _NONE]
  if len(marks) < 2:
    return marks[0] if marks else _NONE
  return Mark(*(functools.reduce(_either, each) for each in zip(*marks, strict=True)))


def _either(a: Any, b: Any) -> Any:
  return a or b if isinstance(a, str) else a | b


def _with_axes(mark: Mark, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Mark:
  return mark._replace(products=with_axes(mark.products, change)) if mark.products else mark
