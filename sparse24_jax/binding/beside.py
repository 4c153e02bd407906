"""What the matmuls of a function do not tell of its weights: where sums over them go, and what is made of products.

A matmul reads the projected weight. A sum over the weight, a norm say, is of the dense one: right in a penalty, which
is added to the loss, and wrong in what the model computes, as its exported weights give another sum. And a product of a
weight may be a matrix itself (`binding.products`). Where a matmul reads such a sum it is an error. Elsewhere no trace
tells what the model computes from penalties and metrics, nor generated weights from mixed ones: those are notes.

What another operation makes of a weight, a sort say, is followed as a sum is. It is an error where that would be a
note, or where inputs meet the weight in it: no penalty reads it there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse24_jax.binding import _jax
from sparse24_jax.binding.altered import asks_if_a_number, ENTRY_BY_ENTRY
from sparse24_jax.binding.products import follow_products, matrices, Operand, Product, product_of, with_axes
from sparse24_jax.binding.tracing import Traced
from sparse24_jax.binding.values import Place
from sparse24_jax.binding.view import FOLLOWED
from sparse24_jax.recipe import Rule


class Mark(NamedTuple):
  """What is in a value.

  Attributes:
    weights: paths of those whose entries it holds, changed or not.
    sums: paths of weights that were summed up, and where.
    after: whether the result of a matmul is in it.
    numbers: whether numbers made of such results are in it: losses, say.
    added: the operation that added sums to entries of such a result, or multiplied inputs by them, or ''. A sum over
      all of that is a penalty still.
    scaled: the operation that multiplied such results and sums, or '': no penalty if it is all that a function returns.
    inputs: whether the function's arguments behind the parameters are in it, numbers and keys too.
    arrays: whether any arrays are in it that are no weights: inputs, other parameters or constants.
    data: whether arrays are in it that may be data: inputs or constants, other than as such numbers.
    repeated: whether it repeats an array.
    by_hand: the operation that combined weights with arrays of another shape, as in a matmul by another name, or ''.
    products: of weights, whose axes it has.
  """

  weights: frozenset[str] = frozenset()
  sums: frozenset[tuple[str, str]] = frozenset()
  after: bool = False
  numbers: bool = False
  added: str = ''
  scaled: str = ''
  inputs: bool = False
  arrays: bool = False
  data: bool = False
  repeated: bool = False
  by_hand: str = ''
  products: frozenset[Product] = frozenset()


_WRITES = ('swap', 'addupdate')
_NONE = Mark()
# What holds the entries of its operands.
_ENTRIES = ENTRY_BY_ENTRY | FOLLOWED | {'concatenate', 'pad', 'real', 'rev', 'stack'}
_ADDS = ('add', 'add_any', 'sub')
_JOINS = ('concatenate', 'stack')
_SCALES = ('and', 'div', 'mul')
# What a sum of terms goes through as each term does.
_LINEAR = FOLLOWED | {*_ADDS, *_JOINS, 'cumsum', 'mul', 'neg', 'pad', 'psum', 'reduce_sum', 'rev'}


class Beside(NamedTuple):
  """What is wrong with weights, and what may be, by path."""

  problems: dict[str, list[str]]
  notes: dict[str, list[str]]


def look_beside(traced: Traced, rules: Mapping[str, Rule], lost: Mapping[Place, Mapping[str, str]]) -> Beside:
  """Follows sums over weights, and their products, through a function.

  Args:
    traced: the function.
    rules: of its weights.
    lost: by place and path what to say of a weight that went where nothing follows it, unless into a penalty.
  """
  texts = frozenset(each for found in lost.values() for each in found.items())
  projected = frozenset(path for path, rule in rules.items() if rule.policy.projection is not None)
  walk = _Walk({}, {}, projected, lost, texts, set())
  marks = []
  for i, leaf in enumerate(traced.leaves):
    path = traced.paths[i] if i < len(traced.paths) else None
    is_array = jnp.ndim(leaf) > 0 and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    other = Mark(inputs=path is None, arrays=is_array, data=is_array and path is None)
    marks.append(Mark(frozenset((path,))) if path in rules else other)
  results = walk.through(traced.jaxpr, marks)
  for variable, mark in zip(traced.jaxpr.outvars, results, strict=True):
    is_array = _ndim(variable) > 0
    by = (is_array and mark.added) or ((mark.after or len(results) == 1) and mark.scaled)
    if by or (is_array and mark.data):
      walk.note(mark.sums | {(path, 'a result') for path in mark.weights if by}, by or 'a result')
  for place in lost.keys() - walk.seen:
    for path, text in lost[place].items():
      _tell(walk.problems, path, text)
  return Beside(walk.problems, walk.notes)


class _Walk(NamedTuple):
  problems: dict[str, list[str]]
  notes: dict[str, list[str]]
  projected: frozenset[str]
  lost: Mapping[Place, Mapping[str, str]]
  texts: frozenset[tuple[str, str]]
  seen: set[Place]

  def refuse(self, sums: Iterable[tuple[str, str]], by: str) -> None:
    """A matmul reads sums over weights."""
    for path, source in self._of_projected(sums):
      _tell(
        self.problems, path, f'{source} reads it as it is stored, dense, and {by} multiplies by what comes of it, where'
        ' the projected weight would give something else (a norm of the weight: a parameter of its own in its place)'
      )  # fmt: skip

  def note(self, sums: Iterable[tuple[str, str]], by: str) -> None:
    """Sums over weights meet inputs or what matmuls make, which a model may compute with."""
    for path, source in self._of_projected(sums):
      _tell(
        self.notes, path, f'{path}: {source} reads it as it is stored, dense, and {by} puts what comes of it beside'
        ' inputs, or what matmuls make of them. That is right in a penalty or a metric. In what the model computes the'
        ' projected weight would give something else, and so does an exported one: take a parameter in the place of a'
        ' norm of it, a matmul in the place of a sum of products, or leave the weight dense'
      )  # fmt: skip

  def _of_projected(self, sums: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those over projected weights; what nothing follows is a problem of its weight."""
    for path, text in self.texts.intersection(sums):
      _tell(self.problems, path, text)
    return sorted(each for each in sums if each[0] in self.projected and each not in self.texts)

  def through(self, jaxpr: Any, marks: Sequence[Mark]) -> list[Mark]:
    known: dict[Any, Mark] = dict(zip(jaxpr.invars, marks, strict=True))
    for variable in jaxpr.constvars:
      many = math.prod(variable.aval.shape) > 1
      known[variable] = Mark(arrays=many, data=many)

    def read(atom: Any) -> Mark:
      return _NONE if _jax.is_literal(atom) else known[atom]

    for equation in jaxpr.eqns:
      out = self._equation(equation, [read(atom) for atom in equation.invars])
      for variable, mark in zip(equation.outvars, out, strict=True):
        known[variable] = mark if _ndim(variable) else _number(mark)
      if _jax.name_of(equation) in _WRITES:  # a Ref, which has what was written to it from here on
        ref, written = equation.invars[:2]
        known[ref] = _union([known[ref], read(written)])
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
    place = id(equation), tuple(bool(mark.weights) for mark in given)
    if place in self.lost:
      return self._lost(equation, given, place)
    if not equation.outvars:  # a call out of the program
      return []
    if name in _jax.MATMULS:
      return [self._matmul(equation, given[:2], name)]
    if name == 'optimization_barrier':
      return given
    found = _union(given)
    if asks_if_a_number(equation):
      found = Mark(
        after=found.after, numbers=found.numbers, inputs=found.inputs, arrays=found.arrays, data=found.data
      )
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
      return self.through(_jax.open_jaxpr(jaxpr)[0], given)

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

  def _lost(self, equation: Any, given: Sequence[Mark], place: Place) -> list[Mark]:
    """What comes of weights that nothing follows; of a penalty or a metric only where no data meets them."""
    self.seen.add(place)
    found, texts = _union(given), self.lost[place]
    for path, text in texts.items() if equation.outvars and (found.data or found.after) else ():
      _tell(self.problems, path, text)
    others = found._replace(weights=found.weights - texts.keys())
    if others.weights and (name := _jax.name_of(equation)) in _jax.MATMULS:  # which still reads the others
      made = self._matmul(equation, [mark._replace(weights=mark.weights.difference(texts)) for mark in given[:2]], name)
      return [made._replace(sums=made.sums | texts.items())]
    sums = found.sums | self._summed(equation, others) | texts.items()
    found = found._replace(weights=frozenset(), sums=sums, by_hand='', products=frozenset())
    return [found] * len(equation.outvars)

  def _summed(self, equation: Any, mark: Mark) -> frozenset[tuple[str, str]]:
    return frozenset((path, f'{_jax.name_of(equation)} at {_jax.source_of(equation)}') for path in mark.weights)

  def _of_weights(self, equation: Any, given: Sequence[Mark], found: Mark, name: str) -> Mark:
    """What an equation makes of the entries of weights: others, or a sum over them."""
    if name in _ENTRIES:
      sizes, out = [_size(atom) for atom in equation.invars], _size(equation.outvars[0])
      repeats = any(size < out for mark, size in zip(given, sizes, strict=True) if mark.weights)
      for mark, size in zip(given, sizes, strict=True):
        is_other = mark.arrays and not mark.weights and size > 1 and (repeats or size < out or mark.repeated)
        # A factor along an axis of a weight may be one of the matmul.
        if is_other and (repeats or name not in ('mul', 'div')):
          found = found._replace(by_hand=found.by_hand or f'{name} at {_jax.source_of(equation)}')
        elif is_other and mark.data:
          found = found._replace(added=found.added or f'{name} at {_jax.source_of(equation)}')
      if found.after and not found.added:
        found = found._replace(added=f'{name} at {_jax.source_of(equation)}')
      return found
    if found.by_hand and found.data and _ndim(equation.outvars[0]):
      for path in found.weights:
        _tell(self.problems, path, f'{found.by_hand}, then {name} at {_jax.source_of(equation)}')
    sums = found.sums | self._summed(equation, found)
    if found.added and found.after:
      self.note(sums, found.added)
    return found._replace(weights=frozenset(), sums=sums, added=found.added or found.by_hand, by_hand='')

  def _met(self, equation: Any, given: Sequence[Mark], found: Mark, name: str, variable: Any = None) -> Mark:
    """The result of an equation in which sums may meet data and what matmuls make; a scalar goes into a loss."""
    if not found.sums:
      return found
    by, out = f'{_jax.name_of(equation)} at {_jax.source_of(equation)}', variable or equation.outvars[0]
    adds, scales, kind, fine = name in _ADDS, name in _SCALES, '', True
    alone = [bool(mark.sums) and not (mark.after or mark.numbers) for mark in given]
    others = [mark for mark, each in zip(given, alone, strict=True) if not each]
    meets = any(alone) and any(mark.after or mark.numbers for mark in others)
    held = [bool(mark.sums or mark.after) for mark in given]
    sizes = [_size(atom) for atom in equation.invars]
    of_data = any(alone) and any(mark.data for mark in others)
    is_lost = of_data and any(mark.inputs for mark in others) and not self.texts.isdisjoint(found.sums)
    # Whether a sum is repeated, for each token say.
    repeats = any(each and (m.repeated or n < _size(out)) for each, m, n in zip(alone, given, sizes, strict=False))
    if not _ndim(out):
      if adds and any(mark.numbers and not mark.scaled for mark in given):
        return found._replace(scaled='')  # a term of a loss
      kind = 'scaled' if meets and scales else ''
    elif found.after and sum(held) > 1:
      kind = 'added' if adds else 'scaled' if scales and any(alone) and not repeats else ''
      fine = name in _JOINS
    elif is_lost or (repeats and ((scales and (meets or of_data)) or (adds and meets))):
      kind = 'added'
    elif meets and scales:
      kind = 'scaled'
    else:
      is_met = (found.added and (found.after or found.numbers or found.data)) or (found.scaled and found.after)
      fine = not is_met or name in _LINEAR or (name in ('div', 'select_n') and held[0] == (name == 'div'))
    if kind:
      return found._replace(**{kind: getattr(found, kind) or by})
    if fine:
      return found
    self.note(found.sums, found.added or found.scaled or by)
    return found._replace(sums=frozenset(), added='', scaled='')

  def _matmul(self, equation: Any, operands: Sequence[Mark], name: str) -> Mark:
    found, source, is_scalar = _union(operands), _jax.source_of(equation), not equation.outvars[0].aval.ndim
    sums, alone = found.sums, not (found.arrays or found.after)
    both = frozenset.intersection(*(mark.weights for mark in operands))
    for path in both - (self.projected if alone else frozenset()):
      _tell(self.problems, path, f'{name} at {source} multiplies it by itself')
    if alone and all(mark.weights or mark.sums for mark in operands):  # in a penalty
      return Mark(sums=sums | self._summed(equation, found), inputs=found.inputs)
    if is_scalar:
      for mark, other in zip(operands, operands[::-1], strict=True):
        for path in mark.weights if other.inputs else ():
          _tell(self.problems, path, f'{name} at {source} multiplies all its entries by inputs: a score, not a matrix')
      given = [mark._replace(weights=_NONE.weights, sums=mark.sums | self._summed(equation, mark)) for mark in operands]
      return self._met(equation, given, _union(given), 'mul')._replace(products=frozenset())
    if found.scaled:
      self.note(sums, found.scaled)
    else:
      self.refuse(sums, f'{name} at {source}')
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
    return Mark(after=True, inputs=found.inputs, arrays=True, data=found.data, products=frozenset(products))


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


def _number(mark: Mark) -> Mark:
  """What is in a scalar."""
  is_loss = mark.numbers or mark.after
  return mark._replace(after=False, numbers=is_loss, data=mark.data and not is_loss, added='', repeated=False)


def _tell(found: dict[str, list[str]], path: str, text: str) -> None:
  known = found.setdefault(path, [])
  if text not in known:
    known.append(text)


def _ndim(variable: Any) -> int:
  return getattr(variable.aval, 'ndim', 0)


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
