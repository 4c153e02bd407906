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
    shape: of it.
    contract: its axes that are summed over.
    free: its axes that the result has, but for batch axes.
  """

  products: frozenset[Product]
  inputs: bool
  shape: tuple[int, ...]
  contract: Sequence[int]
  free: Sequence[int]


def product_of(path: str, source: str, sides: Sequence[Operand], weight: int, batch: int) -> Product:
  """What a `dot_general` makes of a weight on one of its sides."""
  axes = [('w' if i == weight else 'o') if side.shape[a] > 1 else '' for i, side in enumerate(sides) for a in side.free]
  return Product(path, source, (*[''] * batch, *axes))


class Matrix(NamedTuple):
  """A product that is a matrix by which inputs are multiplied: what to say of it, and whether it is surely wrong."""

  product: Product
  text: str
  wrong: bool


def matrices(one: Operand, other: Operand, source: str) -> list[Matrix]:
  """The products of weights among the operands of a matmul by which it multiplies inputs."""
  found = []
  # Of two matrices, the heads of queries and keys say, neither is what the other's rows are multiplied by.
  of_matrix = {a for made in other.products for a in other.free if made.axes[a] == 'w'}
  rows = any(other.shape[a] > 1 and a not in of_matrix for a in other.free)
  for made in sorted(one.products) if other.inputs else ():
    summed, left = ({*''.join(made.axes[a] for a in axes)} for axes in (one.contract, one.free))
    if left != {'w'} or not summed:
      continue
    text = f'the matmul at {made.source} makes a dense matrix of it, by which the matmul at {source} multiplies inputs'
    if 'w' in summed and not one.inputs:
      text = f'{text} (multiply these by each matrix that the weight holds, and mix the results)'
      found.append(Matrix(made, text, wrong=True))
    elif 'w' in summed and rows:
      text = f'{text}. That is right of a network that generates weights. Of experts or kernels that are mixed,'
      found.append(Matrix(made, f'{text} multiply by each and mix the results', wrong=False))
    elif 'w' not in summed and not one.inputs:
      text = f'{text}. That is right of a memory that tokens attend to. If the first matmul resizes or rotates the'
      found.append(Matrix(made, f'{text} weight, do that to the parameters, once', wrong=False))
  return found


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
