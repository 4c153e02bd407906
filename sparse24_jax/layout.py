"""Which axes of a stored weight are which to the matmul that reads it."""

from collections.abc import Iterable
import dataclasses
import math
import re

import jax
from jax import Array
import jax.numpy as jnp

# What to make for weights that a state does not serve.
NEW_STATE = (
  'a state of the weights as they are, carry_over(tx.init(params), opt_state), which keeps the moments, the count of'
  ' steps and the masks and scales that still fit'
)


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

  @property
  def turned(self) -> 'Layout':
    """That of a matmul which reads the matrix transposed."""
    return Layout(self.stacked, self.outputs, self.contracted)

  def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the matrix, `[stacked..., in, out]`."""

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


@dataclasses.dataclass(frozen=True, eq=False)
class MadeBy:
  """The projections that states were made by: masks of two searches may have one shape.

  Equal if the kinds are. It is part of a state's tree structure, and there patterns are not to count: `jax.tree.map`,
  the carry of a scan and the branches of a `cond` take states of two recipes that differ in words alone. A program
  that was compiled for states of one kind does not take those of another.

  Attributes:
    of: (pattern, kind of projection or None), in the order of the rules.
  """

  of: tuple[tuple[str, str | None], ...] = ()

  @property
  def kinds(self) -> frozenset[str]:
    return frozenset(kind for _, kind in self.of if kind is not None)

  def __eq__(self, other: object) -> bool:
    return self.kinds == other.kinds if isinstance(other, MadeBy) else NotImplemented

  def __hash__(self) -> int:
    return hash(self.kinds)

  def kind_of(self, path: str) -> str | None:
    """The projection of the first rule that matches the weight."""
    return next((kind for pattern, kind in self.of if re.fullmatch(pattern, path)), None)

  def require(self, others: 'MadeBy', paths: Iterable[str]) -> None:
    """ValueError unless a state that was made under these rules serves others."""
    for path in paths:
      made, wanted = self.kind_of(path), others.kind_of(path)
      if made is not None and wanted is not None and made != wanted:
        raise ValueError(other_projection(path, made, wanted))


def other_projection(path: str, made: str, wanted: str) -> str:
  """The error for a state that another projection made."""
  return (
    f'{path}: its state was made by projection {made!r}, and the recipe has {wanted!r}. To go on with another recipe'
    f' make {NEW_STATE}'
  )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Layouts:
  """The layouts of the weights that are stored otherwise than as `[stacked..., in, out]`, with states made for them.

  Masks of two layouts may have one shape, so what is made under a recipe says under which layouts, and by which
  projections. This is static, for errors while a step is traced; `SparseTrainingState.identity` says it in an array.

  Attributes:
    of: (path, layout as text), in the order of the tree.
    made_by: the projections of the recipe.
  """

  of: tuple[tuple[str, str], ...] = ()
  made_by: MadeBy = MadeBy()

  def layout_of(self, path: str, ndim: int) -> Layout:
    """The layout of a weight by its path.

    >>> Layouts((('query', 'in 0, out 1 2'),)).layout_of('query', 3)
    Layout(stacked=(), contracted=(0,), outputs=(1, 2))
    """
    text = dict(self.of).get(path)
    return Layout.standard(ndim) if text is None else Layout.described(text)

  def describe(self, path: str) -> str:
    """The projection of a weight, and how the weight is stored if not as `[stacked..., in, out]`."""
    return ', '.join(filter(None, (self.made_by.kind_of(path), dict(self.of).get(path))))

  def require(self, others: 'Layouts', paths: Iterable[str]) -> None:
    """ValueError unless states of the weights at `paths` that were made under these serve a recipe with others."""
    if differing := sorted(set(self.of) ^ set(others.of)):
      path, _ = differing[0]
      made, wanted = (dict(layouts.of).get(path, '[stacked..., in, out]') for layouts in (self, others))
      raise ValueError(
        f'{path}: its state was made for a weight stored as {made}, and the recipe takes it for {wanted}: give'
        ' sparse_training, sparse_variables, sparsify and project one recipe, the one that bind returned'
      )
    self.made_by.require(others.made_by, paths)
