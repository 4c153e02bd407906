"""One matmul: with a packed operand on a kernel, or plain."""

from typing import Any, Literal

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import AxisType

from pallas_kernels.operand import SparseOperand
from pallas_kernels.sparse_matmul import api
from sparse24_jax.asked import Asked, PLAIN

# Which of a layer's three matmuls.
Role = Literal['forward', 'input_grad', 'weight_grad']


def multiply(
  role: Role, a: SparseOperand, b: Array, *, backend: str | None, bias: Array | None = None,
  activation: str | None = None, keep_preactivation: bool = False, scales: tuple[Any, Any] = (None, None),
  alpha: float = 1.0, amax: bool = False, b_layout: str = 'nk', dtype: Any = None,
) -> Any:  # fmt: skip
  """`sparse_matmul` in a role: D `[..., m]` from b `[..., k]`, for a weight gradient from `[k, n]` or `[n, k]`.

  With `keep_preactivation` or `amax` a tuple, as there. The role names the call in profiles and compiled programs.
  """

  def one(a, b, bias, scales):
    return api.sparse_matmul(
      a, b, bias=bias, a_scale=scales[0], b_scale=scales[1], activation=activation, out_dtype=dtype, b_layout=b_layout,
      alpha=alpha, out_layout='nm', keep_preactivation=keep_preactivation, amax=amax, implementation=backend,
    )  # fmt: skip

  lead = b.shape[:-1] if b_layout == 'nk' else b.shape[-1:]
  # Neither kernel has a batching rule: under vmap they run one after the other.
  with jax.named_scope(role):
    d = jax.custom_batching.sequential_vmap(one)(a, b.reshape(-1, b.shape[-1]), bias, scales)
    if role == 'forward':
      # XLA joins a kernel with what writes its result into the residuals of a scan; where the result is read as well,
      # the kernel then runs twice.
      d = jax.lax.optimization_barrier(d)
  return jax.tree.map(lambda x: x.reshape(*lead, -1) if x.ndim else x, d)


def matmul(a: Array, b: Array, like: Array | None = None, *, asked: Asked = PLAIN, dtype: Any = None) -> Array:
  """a b over a's last and b's first axis, in `dtype`, which is that of `a`; sharded as `like` if need be."""
  # On a mesh of explicit axes JAX does not choose how a matmul is sharded; a gradient is sharded as its variable.
  sharding = None if like is None else jax.typeof(like).sharding
  if sharding is not None and AxisType.Explicit not in sharding.mesh.axis_types:
    sharding = None
  d = jnp.dot(a, b, precision=asked.precision, preferred_element_type=asked.sums(), out_sharding=sharding)
  return d.astype(a.dtype if dtype is None else dtype)


def add_bias(z: Array, bias: Array | None) -> Array:
  """z `[..., out]` plus a bias `[out]`, or None; ranks are made equal, as JAX can be told to ask."""
  return z if bias is None else z + bias.astype(z.dtype).reshape((1,) * (z.ndim - 1) + (-1,))
