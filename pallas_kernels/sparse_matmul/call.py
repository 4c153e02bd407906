"""What a back end of `sparse_matmul` is asked for beside A and B."""

import dataclasses
from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp


class Vectors(NamedTuple):
  """What A . B is divided by and what is added to it, in float32.

  Attributes:
    bias: [M], or None.
    a_scale: scalar or [M], what A was multiplied with before; None for 1.
    b_scale: scalar or [N], what B was.
  """

  bias: Array | None = None
  a_scale: Array | None = None
  b_scale: Array | None = None

  @property
  def scalars(self) -> list[Array]:
    """The scales that are one number."""
    return [scale for scale in (self.a_scale, self.b_scale) if scale is not None and scale.ndim == 0]


@dataclasses.dataclass(frozen=True)
class Call:
  """How B lies, and what is to be returned.

  Attributes:
    out_dtype: dtype of D.
    b_layout: B is [N, K] ('nk') or [K, N] ('kn').
    out_layout: D is [M, N] ('mn') or [N, M] ('nm').
    activation: a key of `ACTIVATIONS`, or None.
    keep_preactivation: whether Z, which the activation is applied to, is returned beside D.
    alpha: what A . B is multiplied with.
    amax: whether the largest magnitude of D as it is stored is returned, too, last.
  """

  out_dtype: jnp.dtype
  b_layout: str
  out_layout: str
  activation: str | None = None
  keep_preactivation: bool = False
  alpha: float = 1.0
  amax: bool = False

  def sizes(self, a: Any, b: Array) -> tuple[int, int, int]:
    """(M, N, K)."""
    (m, k), n = a.shape, b.shape[0 if self.b_layout == 'nk' else 1]
    return m, n, k

  def is_plain(self, vectors: Vectors) -> bool:
    """Whether D is A . B, and nothing follows."""
    return self.activation is None and self.alpha == 1 and not self.amax and all(x is None for x in vectors)
