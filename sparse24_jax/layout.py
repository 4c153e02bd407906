"""Which axes of a stored weight are which to the matmul that reads it."""

import dataclasses
import math

import jax
from jax import Array
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Layout:
  """The roles of the axes of a weight as it is stored. Every axis has one role.

  The matrix of a weight is `[stacked..., in, out]`: contracted axes joined to `in`, outputs joined to `out`, each in
  the order in which they are stored. Groups of four lie along `in`, or along `out` for the input gradient.

  Attributes:
    stacked: axes of which one entry at a time meets a matmul: scanned layers, experts, gate and up in one array.
    contracted: axes that the matmul sums over.
    outputs: axes of its result.

  >>> import jax.numpy as jnp
  >>> query = Layout(stacked=(), contracted=(0,), outputs=(1, 2))  # [embed, heads, head_dim]
  >>> query.matrix(jnp.ones((32, 4, 8))).shape
  (32, 32)
  >>> Layout(stacked=(1,), contracted=(2,), outputs=(0,)).matrix(jnp.ones((5, 3, 8))).shape  # [out, layers, in]
  (3, 8, 5)
  """

  stacked: tuple[int, ...]
  contracted: tuple[int, ...]
  outputs: tuple[int, ...]

  def __post_init__(self):
    axes = self.order
    if sorted(axes) != list(range(len(axes))) or not self.contracted or not self.outputs:
      raise ValueError(f'{self} must give each axis one role, and one or more to contracted and to outputs')
    for role in (self.stacked, self.contracted, self.outputs):
      if list(role) != sorted(role):
        raise ValueError(f'{self} must name the axes of a role in the order in which they are stored')

  @classmethod
  def standard(cls, ndim: int) -> 'Layout':
    """`[stacked..., in, out]`, as in the kernel of a Flax Dense layer, by itself or in layers stacked in front."""
    return cls(tuple(range(ndim - 2)), (ndim - 2,), (ndim - 1,))

  @property
  def order(self) -> tuple[int, ...]:
    return (*self.stacked, *self.contracted, *self.outputs)

  @property
  def is_standard(self) -> bool:
    return self == Layout.standard(len(self.order))

  def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of `[stacked..., in, out]`."""

    def size(axes: tuple[int, ...]) -> int:
      return math.prod(shape[axis] for axis in axes)

    return (*(shape[axis] for axis in self.stacked), size(self.contracted), size(self.outputs))

  def matrix(self, w: Array) -> Array:
    """A weight, or its mask, as `[stacked..., in, out]`."""
    if self.is_standard:
      return w
    return jnp.transpose(w, self.order).reshape(self.matrix_shape(w.shape))

  def stored(self, matrix: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `matrix`, for a weight that is stored with `shape`."""
    if self.is_standard:
      return matrix
    ordered = matrix.reshape(tuple(shape[axis] for axis in self.order))
    return jnp.transpose(ordered, tuple(self.order.index(axis) for axis in range(len(shape))))

  def describe(self) -> str:
    """The axes by role, as text for tables and checkpoints.

    >>> Layout((0,), (1,), (2, 3)).describe()
    'stacked 0, in 1, out 2 3'
    """
    roles = (('stacked', self.stacked), ('in', self.contracted), ('out', self.outputs))
    return ', '.join(f'{name} {" ".join(map(str, axes))}' for name, axes in roles if axes)

  @classmethod
  def described(cls, text: str) -> 'Layout':
    """The layout that `describe` says in words."""
    roles = {role: tuple(map(int, axes)) for role, *axes in (part.split() for part in text.split(', '))}
    return cls(roles.get('stacked', ()), roles['in'], roles['out'])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layouts:
  """The layouts of the weights that are stored otherwise than as `[stacked..., in, out]`, with states made for them.

  Masks of two layouts may have one shape, so what is made under a recipe says under which layouts.

  Attributes:
    of: (path, layout as text), in the order of the tree.
  """

  of: tuple[tuple[str, str], ...] = ()

  def layout_of(self, path: str, ndim: int) -> Layout:
    """The layout of a weight by its path.

    >>> Layouts((('query', 'in 0, out 1 2'),)).layout_of('query', 3)
    Layout(stacked=(), contracted=(0,), outputs=(1, 2))
    """
    text = dict(self.of).get(path)
    return Layout.standard(ndim) if text is None else Layout.described(text)

  def require(self, others: 'Layouts') -> None:
    """ValueError unless a state that was made under these layouts serves a recipe with others."""
    if self != others:
      path, _ = sorted(set(self.of) ^ set(others.of))[0]
      made, wanted = (dict(layouts.of).get(path, '[stacked..., in, out]') for layouts in (self, others))
      raise ValueError(
        f'{path}: its state was made for a weight stored as {made}, and the recipe takes it for {wanted}: give'
        ' sparse_training, sparse_variables, sparsify and project one recipe, the one that bind returned'
      )
