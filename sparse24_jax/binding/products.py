"""What matmuls make of weights, by its axes: some of it is a matrix itself, dense whatever zeros the weight has."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sparse24_jax.binding import _jax
from sparse24_jax.binding.altered import ENTRY_BY_ENTRY
from sparse24_jax.binding.view import follow, View


class Product(NamedTuple):
  """What a matmul makes of a weight.

  Attributes:
    path: of the weight.
    source: the line of the matmul.
    axes: whose each axis is: 'w' the weight's, 'o' the other operand's, 'ow' of both joined; '' a batch axis.
  """

  path: str
  source: str
  axes: tuple[str, ...]


class Operand(NamedTuple):
  """One side of a `dot_general` or of a convolution.

  Attributes:
    products: that it is.
    inputs: whether inputs of the function are in it.
    contract: its axes that are summed over.
    free: its axes that the result has, but for batch axes.
  """

  products: frozenset[Product]
  inputs: bool
  contract: Sequence[int]
  free: Sequence[int]


def product_of(path: str, source: str, sides: Sequence[Operand], weight: int, batch: int) -> Product:
  """What a `dot_general` makes of a weight on one of its sides."""
  axes = ['w' if i == weight else 'o' for i, side in enumerate(sides) for _ in side.free]
  return Product(path, source, (*[''] * batch, *axes))


def matrices(one: Operand, other: Operand) -> list[Product]:
  """The products on one side of a matmul that are a matrix by which inputs on the other are multiplied.

  Nothing of theirs comes from inputs, and the weight's own axes are summed over and left. What else is left is summed
  over, too: queries for several heads are no such matrix, a Kronecker product is.
  """
  if one.inputs or not other.inputs:
    return []

  def of(made: Product, axes: Sequence[int]) -> set[str]:
    return {*''.join(made.axes[a] for a in axes)}

  return [made for made in sorted(one.products) if 'w' in of(made, one.free) <= of(made, one.contract)]


def follow_products(equation: Any, given: Sequence[frozenset[Product]]) -> list[frozenset[Product]]:
  """The products that the results of an equation still are, with their axes."""
  name = _jax.name_of(equation)
  out: list[set[Product]] = [set() for _ in equation.outvars]
  for products, atom in zip(given if name in ENTRY_BY_ENTRY else given[:1], equation.invars, strict=False):
    for made in products:
      for each, axes in zip(out, _axes_of(equation, made.axes, atom, name), strict=False):
        each.add(made._replace(axes=axes))
  return [frozenset(each) for each in out]


def with_axes(products: frozenset[Product], change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> frozenset[Product]:
  return frozenset(made._replace(axes=change(made.axes)) for made in products)


def _axes_of(equation: Any, axes: tuple[str, ...], atom: Any, name: str) -> list[tuple[str, ...]]:
  """Whose each axis of each result is, given those of an operand; none where that is lost."""
  params, (out, *_) = equation.params, equation.outvars
  if name in ENTRY_BY_ENTRY:
    return [axes] if out.aval.ndim == len(axes) else []
  if name == 'broadcast_in_dim':
    places = dict(zip(params['broadcast_dimensions'], axes, strict=True))
    return [tuple(places.get(i, '') for i in range(out.aval.ndim))]
  if name.startswith('reduce_') and 'axes' in params:
    return [tuple(kind for i, kind in enumerate(axes) if i not in params['axes'])]
  if name == 'gather':
    return []
  views = follow(equation, [None, *[0] * (len(equation.invars) - 1)], [View.whole('', atom.aval.shape)]) or ()
  return [tuple(''.join(sorted({*''.join(axes[run.axis] for run in runs)})) for runs in view.axes) for view in views]
