"""The further arguments of `jax.lax.dot_general` that a layer may give to its matmul."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

_DEFAULT = (None, jax.lax.Precision.DEFAULT)


@dataclasses.dataclass(frozen=True)
class Asked:
  """Precision and dtype of a matmul's result, as a model writes them.

  Every matmul of the library sums in float32, in which products of 16-bit operands are exact. So any precision of such
  operands is honoured for free. A wider result is another thing: its gradient is as wide, and kernels take gradients of
  16 bits.

  Attributes:
    precision: as `jax.lax.dot_general` takes it, of the activations and the weight if there are two.
    dtype: name of the dtype of the result, `preferred_element_type`; None is that of the operands.
  """

  precision: Any = None
  dtype: str | None = None

  @classmethod
  def of(cls, precision: Any, preferred_element_type: Any, operands: Any) -> 'Asked':
    """What the arguments of a matmul ask of it, by the dtype of its operands; defaults are left out."""
    pair = tuple(precision) if isinstance(precision, tuple | list) else (precision,)
    pair = tuple(map(_precision, pair))
    plain = all(p in _DEFAULT for p in pair)
    if preferred_element_type is None or jnp.dtype(preferred_element_type) == operands:
      dtype = None
    else:
      dtype = jnp.dtype(preferred_element_type).name
      if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f'preferred_element_type={dtype}: a sparse matmul has floating-point results')
    return cls(None if plain else pair[0] if len(set(pair)) == 1 else pair, dtype)

  def result(self, operands: Any) -> Any:
    """The dtype of the result."""
    return jnp.dtype(operands if self.dtype is None else self.dtype)

  def sums(self) -> Any:
    """The dtype of the sums: float32, or that of a wider result."""
    return jnp.float32 if self.dtype is None else jnp.promote_types(self.dtype, jnp.float32)

  def unfit(self, operands: Any) -> str | None:
    """Why no kernel gives what is asked, or None."""
    if self.dtype is not None and self.dtype != jnp.dtype(operands).name:
      return (
        f'preferred_element_type={self.dtype} makes results and their gradients {self.dtype}, kernels take and give'
        f' {jnp.dtype(operands).name}'
      )
    pair = self.precision if isinstance(self.precision, tuple) else (self.precision,)
    if not all(p is None or isinstance(p, jax.lax.Precision) for p in pair):
      return f'precision={self.precision} names an algorithm, kernels multiply 16 bits and add float32'
    return None

  def unfit_for(self, precision: str) -> str | None:
    """Why a matmul in the precision of a policy is not what is asked, or None."""
    if self.precision is None or precision == 'default':
      return None
    return (
      f'precision={self.precision}, of the layer or of jax.default_matmul_precision: its rule has'
      f' precision={precision!r}, which rounds operands (leave it out, or take a recipe without FP8)'
    )

  def describe(self) -> str:
    """Says it as text, empty if nothing is asked.

    >>> Asked.of('highest', 'float32', 'bfloat16').describe(), Asked.of('default', 'float32', 'float32').describe()
    ('precision=HIGHEST, preferred_element_type=float32', '')
    """
    precision = None if self.precision is None else f'precision={self.precision}'
    dtype = None if self.dtype is None else f'preferred_element_type={self.dtype}'
    return ', '.join(text for text in (precision, dtype) if text)


def _precision(asked: Any) -> Any:
  """A name of JAX's, such as 'float32', as the precision that it stands for; the name of an algorithm as it is."""
  try:
    return jax.lax.Precision(asked) if isinstance(asked, str) else asked
  except ValueError:
    return asked


PLAIN = Asked()
