"""What the interpreter knows of the values that it computes with, and who carries out the matmuls that it finds."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any, NamedTuple, Protocol

from jax import Array
import jax.numpy as jnp

from sparse24_jax.asked import Asked
from sparse24_jax.binding import _jax
from sparse24_jax.binding.altered import Altered
from sparse24_jax.binding.view import follow, View
from sparse24_jax.layout import Layout


class Row(NamedTuple):
  """A vector that an array repeats, and the axis of the array along which it lies, as the bias of a layer does."""

  array: Any
  axis: int


@dataclasses.dataclass(eq=False)
class Value:
  """An array of the model, and what it is.

  Attributes:
    held: the array; None until something asks for it, if it was put off.
    mark: what it is of a weight, if anything.
    state: of that weight, less the axes that loops took.
    unscaled: of a view with factors the entries of the weight without them.
    row: a vector that this repeats.
    repeated: the array that a broadcast made it of, and the axes of this that are those of the array.
    made_by: how to make it, of a value that was put off: a matmul that may be part of a block, or what follows it.
  """

  held: Any = None
  mark: View | Altered | None = None
  state: Any = None
  unscaled: Any = None
  row: Row | None = None
  repeated: tuple[Any, tuple[int, ...]] | None = None
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


class Block(NamedTuple):
  """The maps into the hidden layer, the activation between them and the map out of it.

  Attributes:
    activation: its name.
    maps: 'up' and perhaps 'gate', or one weight that holds both, 'gate_up' or 'up_gate'; and 'down', once that runs.
    order: in front of the columns their results have axes of experts and tokens, which the map out has in this order;
      those of length one are left out.
    sharding: of the hidden layer, `[tokens..., hidden]`, where the model says how it is divided.
  """

  activation: str
  maps: Mapping[str, 'Matmul']
  order: tuple[int, ...]
  sharding: Any = None


@dataclasses.dataclass(eq=False)
class Elementwise:
  """One equation on entries, put off."""

  equation: Any
  arguments: Sequence[Value]

  def make(self) -> Any:
    (out,) = _jax.rebind(self.equation, [argument.array for argument in self.arguments])
    return out


class Columns(NamedTuple):
  """Columns of a matmul, side by side: where they start, how many they are and how far apart."""

  start: int
  size: int
  stride: int


@dataclasses.dataclass(eq=False)
class Part:
  """A matmul's result in another order, or some of its columns, computed later: gate or up, if one weight holds both.

  Attributes:
    run: computes all results of one equation from `argument`.
    argument: the whole, or a larger part of it.
    index: which result of `run` this part is.
    root: the whole result of the matmul.
    view: which entries of the whole these are.
    results: what `run` returned, once it has run; all of its parts share them, as one split has one transpose.
    told: whether the equation also says something of them: a name for `jax.checkpoint`, or how they are divided.
  """

  run: Callable[[Any], Sequence[Any]]
  argument: Value
  index: int
  root: Value
  view: View
  results: list[Any]
  told: bool = False

  @classmethod
  def of(cls, equation: Any, value: Value) -> list[Value] | None:
    """What an equation makes of a matmul or of a part of one; None if it takes some of the tokens."""
    made = value.made_by
    if not isinstance(made, Matmul | Part) or equation.primitive.name not in (*_ORDERS, *_TOLD):
      return None
    root, view = (made.root, made.view) if isinstance(made, Part) else (value, None)
    whole = root.made_by
    assert isinstance(whole, Matmul)
    if whole.side == 0:
      return None
    views = follow(equation, [None], [view or whole.result])
    if views is None or any(found.arranged(whole.lead) is None for found in views):
      return None
    results: list[Any] = []
    run, told = functools.partial(_run, equation), equation.primitive.name in _TOLD or getattr(made, 'told', False)
    return [
      root if found == whole.result and not told else Value(made_by=cls(run, value, index, root, found, results, told))
      for index, found in enumerate(views)
    ]

  @classmethod
  def in_order(cls, root: Value, order: tuple[int, ...]) -> Value:
    """The result of a matmul with its axes in another order."""
    whole = root.made_by
    assert isinstance(whole, Matmul)
    if order == tuple(range(len(order))):
      return root
    view = dataclasses.replace(whole.result, axes=tuple(whole.result.axes[i] for i in order))

    def run(array: Any) -> list[Any]:
      with _jax.under(whole.origin):
        return [jnp.transpose(array, order)]

    return Value(made_by=cls(run, root, 0, root, view, []))

  @property
  def whole(self) -> 'Matmul':
    assert isinstance(self.root.made_by, Matmul)
    return self.root.made_by

  @property
  def order(self) -> tuple[int, ...] | None:
    """The order of the whole's axes in this part; None if it is not all of the whole."""
    left, order = dict(enumerate(self.whole.result.axes)), []
    for runs in self.view.axes:
      place = next((place for place, each in left.items() if each == runs), None)
      if place is None:
        return None
      order.append(place)
      del left[place]
    return None if left else tuple(order)

  @property
  def columns(self) -> Columns | None:
    """Which columns of the matmul these are; None if they are apart, or lie along several axes."""
    lead, start, size, stride = self.whole.lead, 0, 1, 0
    strides = {axis: math.prod(self.view.shape[axis + 1 :]) for axis in range(lead, len(self.view.shape))}
    axes = [runs for runs in self.view.axes if runs and runs[0].axis >= lead]
    if len(axes) != 1:
      return None
    for run in reversed(axes[0]):
      stride = stride or run.stride * strides[run.axis]
      if run.stride * strides[run.axis] != size * stride:
        return None
      size *= run.size
    for axis, factor in strides.items():
      start += self.view.offsets[axis] * factor
    return Columns(start, size, stride)

  def make(self) -> Any:
    if not self.results:
      self.results.extend(self.run(self.argument.array))
    return self.results[self.index]


_TOLD = ('name',)
_ORDERS = ('reshape', 'slice', 'split', 'squeeze', 'transpose', 'unstack')


def _run(equation: Any, array: Any) -> Sequence[Any]:
  return _jax.rebind(equation, [array])


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
    block: the feed-forward block that it ends, or None.
    origin: the equation that it is known by, of one whose operands were swapped.
    source: the line of the model.
    backward: whether the model takes a gradient, in whose backward pass it stands.
  """

  equation: Any
  side: int
  arguments: Sequence[Value]
  key: Any
  matmuls: Any
  bias: Any = None
  added: Elementwise | None = None
  rounded: bool = False
  block: Block | None = None
  origin: Any = None
  source: str = ''
  backward: bool = False

  def __post_init__(self):
    self.origin = self.origin or self.equation
    self.backward = self.backward or _jax.is_backward(self.origin)
    self.source = self.source or _jax.source_of(self.origin)

  @property
  def result(self) -> View:
    """All of its result."""
    return View.whole('', self.equation.outvars[0].aval.shape)

  @property
  def size(self) -> int:
    """How many columns it has."""
    return math.prod(self.equation.outvars[0].aval.shape[self.lead :])

  def as_value(self) -> Value:
    """The result as a value. `w @ x` becomes `(x.T @ w.T).T`, so that the weight is always on the right."""
    contract, batch = self.equation.params['dimension_numbers']
    b, precision = len(batch[0]), self.equation.params['precision']
    if self.side or self.equation.params.get('out_sharding') is not None:
      return Value(made_by=self)
    w, x = (atom.aval.ndim - len(contract[0]) for atom in self.equation.invars[:2])
    shape, dtype = self.equation.outvars[0].aval.shape, self.equation.outvars[0].aval.dtype
    equation = self.equation.replace(
      invars=self.equation.invars[::-1],
      outvars=[_jax.variable((*shape[:b], *shape[w:], *shape[b:w]), dtype)],
      params=self.equation.params | {
        'dimension_numbers': (contract[::-1], batch[::-1]),
        'precision': precision[::-1] if isinstance(precision, tuple) else precision,
      },
    )  # fmt: skip
    swapped = Matmul(equation, 1, self.arguments[::-1], self.key, self.matmuls, origin=self.origin)
    return Part.in_order(Value(made_by=swapped), (*range(b), *range(x, x + w - b), *range(b, x)))

  @property
  def weight(self) -> Value:
    return self.arguments[self.side]

  @property
  def view(self) -> View:
    """The part of its weight that it reads."""
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
    """The dtype of the result."""
    return self.operands if self.rounded else self.equation.outvars[0].aval.dtype

  def force(self) -> None:
    """Makes the operands that wait."""
    for argument in self.arguments:
      _ = argument.array

  def make(self) -> Any:
    with _jax.under(self.equation):
      if self.block is not None:
        out = self.matmuls.block(self.block._replace(maps={**self.block.maps, 'down': self}))
        if out is not None:
          return out
      if self.added is None:
        return self.matmuls.matmul(self)
    return self.added.make()


# The identity of an equation, and which of its operands are weights.
Place = tuple[int, tuple[bool, ...]]


class Reader(Protocol):
  """Who carries out the matmuls of matched weights: one that takes notes, or one that makes them sparse."""

  def matmul(self, found: Matmul) -> Array:
    """The result of one matmul."""
    ...

  def ragged(self, found: Matmul) -> Array:
    """The result of one `ragged_dot_general`."""
    ...

  def block(self, block: Block) -> Array | None:
    """The result of a block; None leaves its maps by themselves."""
    ...

  def layout_of(self, path: str) -> Layout:
    """How the matmuls read a weight that has a state."""
    ...

  def apart(self, maps: Sequence[Matmul], reason: str) -> None:
    """Why matmuls are in no block."""
    ...

  def lost(self, mark: View | Altered, by: str, source: str, at: Place | None = None) -> None:
    """A weight went where nothing follows it; at a place, perhaps into a penalty, which `beside` tells."""
    ...
