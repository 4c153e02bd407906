"""What the interpreter knows of the values that it computes with, and who carries out the matmuls that it finds."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array
import jax.numpy as jnp

from sparse24_jax.asked import Asked
from sparse24_jax.binding import _jax
from sparse24_jax.binding.view import follow, View
from sparse24_jax.layout import Layout


class Altered(NamedTuple):
  """A value made of a weight, entry by entry, that is no view of it any more: `w * scale`, say.

  Attributes:
    path: of the weight.
    by: the primitive that made it.
    source: the line of the model.
    mixed: whether something else than numbers went in as well, activations say.
  """

  path: str
  by: str
  source: str
  mixed: bool = False


# Primitives whose result has an entry for each entry of the weight.
ENTRY_BY_ENTRY = frozenset((
  'abs', 'add', 'add_any', 'and', 'cbrt', 'ceil', 'clamp', 'convert_element_type', 'copy', 'cos', 'div', 'eq', 'erf',
  'erfc', 'exp', 'exp2', 'expm1', 'floor', 'ge', 'gt', 'integer_pow', 'is_finite', 'le', 'log', 'log1p', 'logistic',
  'lt', 'max', 'min', 'mul', 'name', 'ne', 'neg', 'not', 'or', 'pow', 'reduce_precision', 'rem', 'round', 'rsqrt',
  'select_n', 'sign', 'sin', 'sqrt', 'square', 'sub', 'tan', 'tanh', 'xor',
))  # fmt: skip


def harmless(by: str) -> bool:
  """Whether a primitive may read a weight besides the matmuls that are sparse: a norm, say."""
  return by.startswith(('reduce', 'arg'))


@dataclasses.dataclass(eq=False)
class Value:
  """An array of the model, and what it is.

  Attributes:
    held: the array; None until something asks for it, if it was put off.
    mark: what it is of a weight, if anything.
    state: of that weight, less the axes that loops took.
    unscaled: of a view with factors the entries of the weight without them.
    row: a vector along the last axis that this repeats, as the bias of a layer does.
    repeated: the array that a broadcast made it of, and the axes of this that are those of the array.
    norms: paths of the weights that it was summed up from, a norm say, by whatever came between.
    made_by: how to make it, of a value that was put off: a matmul that may be part of a block, or what follows it.
  """

  held: Any = None
  mark: View | Altered | None = None
  state: Any = None
  unscaled: Any = None
  row: Any = None
  repeated: tuple[Any, tuple[int, ...]] | None = None
  norms: frozenset[str] = frozenset()
  made_by: 'Matmul | Part | Elementwise | None' = None

  @property
  def view(self) -> View | None:
    return self.mark if isinstance(self.mark, View) else None

  @property
  def stored(self) -> Any:
    """The entries of the weight, of a view."""
    return self.array if self.unscaled is None else self.unscaled

  @property
  def waits(self) -> bool:
    return self.held is None and self.made_by is not None

  @property
  def array(self) -> Any:
    if self.held is None and self.made_by is not None:
      self.held = self.made_by.make()
    return self.held


@dataclasses.dataclass(eq=False)
class Elementwise:
  """One equation on entries, put off."""

  equation: Any
  arguments: Sequence[Value]

  def make(self) -> Any:
    (out,) = _jax.rebind(self.equation, [argument.array for argument in self.arguments])
    return out


@dataclasses.dataclass(eq=False)
class Part:
  """Some columns of what a matmul gives, put off: gate or up, where one weight holds both.

  Attributes:
    equation: that takes them.
    argument: of which it takes them, the whole or a larger part.
    index: of the results of the equation the one that is meant.
    whole: the matmul.
    view: which entries of its result they are.
    results: of the equation, once it has run; all of its parts share them, as one split has one transpose.
  """

  equation: Any
  argument: Value
  index: int
  whole: 'Matmul'
  view: View
  results: list[Any]

  @classmethod
  def of(cls, equation: Any, value: Value) -> 'list[Part] | None':
    """What an equation takes of a matmul or of a part of one; None if it mixes tokens, or takes none."""
    made = value.made_by
    if not isinstance(made, Matmul | Part) or equation.primitive.name not in ('reshape', 'slice', 'split', 'squeeze'):
      return None
    whole, view = (made.whole, made.view) if isinstance(made, Part) else (made, None)
    shape = whole.equation.outvars[0].aval.shape
    views = follow(equation, [None], [view or View.whole('', shape)])
    tokens = View.whole('', shape).axes[: whole.lead]
    if whole.side == 0 or views is None or any(found.axes[: whole.lead] != tokens for found in views):
      return None
    results: list[Any] = []
    return [cls(equation, value, index, whole, found, results) for index, found in enumerate(views)]

  @property
  def columns(self) -> tuple[int, int] | None:
    """Where they start and how many they are, of the columns of the matmul side by side; None if they are apart."""
    lead, start, size = self.whole.lead, 0, 1
    if len(self.view.axes) != lead + 1:
      return None
    strides = {axis: math.prod(self.view.shape[axis + 1 :]) for axis in range(lead, len(self.view.shape))}
    for run in reversed(self.view.axes[-1]):
      if run.axis not in strides or run.stride * strides[run.axis] != size:
        return None
      size *= run.size
    for axis, offset in enumerate(self.view.offsets):
      if axis not in strides and not (isinstance(offset, int) and offset == 0):
        return None
      start += offset * strides.get(axis, 0)
    return start, size

  def make(self) -> Any:
    if not self.results:
      self.results.extend(_jax.rebind(self.equation, [self.argument.array]))
    return self.results[self.index]


@dataclasses.dataclass(eq=False)
class Matmul:
  """One `dot_general` that reads a weight.

  Attributes:
    equation: of the jaxpr.
    side: of its operands the one that is the weight, 0 or 1.
    arguments: both operands.
    key: of its random sample; None where no gradient is sampled.
    matmuls: what carries it out.
    bias: `[out]`, that is added to it, or None.
    added: the equation that adds the bias.
    rounded: whether its result, wider than the operands, is rounded to their dtype by what follows it.
    block: the activation and the other maps of the feed-forward block that it ends, or None.
    origin: the equation that it is known by, of one that was turned around.
  """

  equation: Any
  side: int
  arguments: Sequence[Value]
  key: Any
  matmuls: Any
  bias: Any = None
  added: Elementwise | None = None
  rounded: bool = False
  block: tuple[str, Mapping[str, 'Matmul']] | None = None
  origin: Any = None

  def __post_init__(self):
    self.origin = self.origin or self.equation

  def turned(self, transpose: Any) -> 'Matmul | None':
    """`(w @ x).T` as `x.T @ w.T`, the weight on the right: what Equinox' layers are under `vmap`; None of others."""
    contract, batch = self.equation.params['dimension_numbers']
    b = len(batch[0])
    w, x = (atom.aval.ndim - len(contract[0]) for atom in self.equation.invars[:2])
    if self.side or self.bias is not None or self.rounded or self.equation.params.get('out_sharding') is not None:
      return None
    if tuple(transpose.params['permutation']) != (*range(b), *range(w, w + x - b), *range(b, w)):
      return None
    precision = self.equation.params['precision']
    equation = self.equation.replace(
      invars=self.equation.invars[::-1], outvars=transpose.outvars,
      params=self.equation.params | {
        'dimension_numbers': (contract[::-1], batch[::-1]),
        'precision': precision[::-1] if isinstance(precision, tuple) else precision,
      },
    )  # fmt: skip
    return Matmul(equation, 1, self.arguments[::-1], self.key, self.matmuls, origin=self.origin)

  @property
  def weight(self) -> Value:
    return self.arguments[self.side]

  @property
  def view(self) -> View:
    """What of its weight it reads."""
    assert self.weight.view is not None
    return self.weight.view

  @property
  def other(self) -> Value:
    return self.arguments[1 - self.side]

  @property
  def lead(self) -> int:
    """How many axes of its result are stacked ones or tokens; with the weight on the right they come first."""
    (contract, _), _ = self.equation.params['dimension_numbers']
    return self.equation.invars[0].aval.ndim - len(contract)

  @property
  def operands(self) -> Any:
    """The dtype of the operands."""
    return jnp.result_type(*(atom.aval.dtype for atom in self.equation.invars[:2]))

  @property
  def asked(self) -> Asked:
    """Precision and dtype of the result."""
    precision = self.equation.params['precision']
    if self.side == 0 and isinstance(precision, tuple):
      precision = precision[::-1]
    return Asked.of(precision, None if self.rounded else self.equation.outvars[0].aval.dtype, self.operands)

  @property
  def dtype(self) -> Any:
    """Of the result."""
    return self.operands if self.rounded else self.equation.outvars[0].aval.dtype

  def force(self) -> None:
    """Makes the operands that wait."""
    for argument in self.arguments:
      _ = argument.array

  def make(self) -> Any:
    with _jax.under(self.equation):
      if self.block is not None:
        activation, maps = self.block
        out = self.matmuls.block(activation, {**maps, 'down': self})
        if out is not None:
          return out
      if self.added is None:
        return self.matmuls.matmul(self)
    return self.added.make()


class Reader(Protocol):
  """Who carries out the matmuls of matched weights: one that takes notes, or one that makes them sparse."""

  def matmul(self, found: Matmul) -> Array:
    """The result of one matmul."""
    ...

  def ragged(self, found: Matmul) -> Array:
    """The result of one `ragged_dot_general`."""
    ...

  def block(self, activation: str, maps: Mapping[str, Matmul]) -> Array | None:
    """The result of a block of the maps 'up', 'down' and perhaps 'gate'; None leaves them by themselves."""
    ...

  def layout_of(self, path: str) -> Layout:
    """How the matmuls read a weight that has a state."""
    ...

  def apart(self, maps: Sequence[Matmul], reason: str) -> None:
    """Why matmuls are in no block."""
    ...

  def lost(self, mark: View | Altered, by: str, source: str) -> None:
    """A weight went where nothing follows it."""
    ...


@dataclasses.dataclass
class Keys:
  """One random key a matmul: the same one each time that the same function is traced."""

  key: Array | None
  count: int = 0

  def next(self) -> Array | None:
    self.count += 1
    return None if self.key is None else jax.random.fold_in(self.key, self.count)

  def inside(self, key: Array | None) -> 'Keys':
    """For a part of the function that is given the key as an argument."""
    return Keys(key, self.count)
