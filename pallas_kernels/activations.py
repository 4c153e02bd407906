"""The activation functions that ops, kernels and blocks know, in one table; Triton's form is in `gated_activation`."""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Literal

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

Name = Literal['gelu', 'gelu_exact', 'silu', 'relu', 'squared_relu']

# Of the tanh form: 0.5 z (1 + tanh(GELU (z + GELU_CUBE z^3))).
GELU, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


@dataclasses.dataclass(frozen=True)
class Activation:
  """One of them.

  Attributes:
    function: of any floating dtype, with JAX's derivative.
    in_kernel: of float32, written out in what Mosaic GPU lowers: no function with a derivative of its own.
    value_and_slope: float32 z -> (activation, derivative).
    written: other ways in which models write it, by which a trace knows it.
    steepest: a bound of the derivative, or None where there is none.
  """

  function: Callable[[Array], Array]
  in_kernel: Callable[[Array], Array]
  value_and_slope: Callable[[Array], tuple[Array, Array]]
  written: tuple[Callable[[Array], Array], ...] = ()
  steepest: float | None = None


def _gelu(z: Array) -> Array:
  return 0.5 * z * (1.0 + jnp.tanh(GELU * (z + GELU_CUBE * (z * z * z))))


def _gelu_and_slope(z: Array) -> tuple[Array, Array]:
  # 0.5 (1 + tanh(y)) = sigmoid(2 y): one exponential, and the derivative needs nothing more.
  s = jax.nn.sigmoid(2 * GELU * (z + GELU_CUBE * z * z * z))
  return z * s, s + z * s * (1 - s) * (2 * GELU) * (1 + 3 * GELU_CUBE * z * z)


# The tail of the normal distribution, by Abramowitz and Stegun, 7.1.26: within 1e-7 by an exponential and a quotient.
NORMAL = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
NORMAL_STEP = 0.3275911


def _normal(z: Array) -> tuple[Array, Array]:
  """(distribution, density) of the normal distribution at float32 z, in what Mosaic GPU lowers."""
  t = jnp.abs(z) * math.sqrt(0.5)
  k = 1.0 / (1.0 + NORMAL_STEP * t)
  bell = jnp.exp(-(t * t))
  series = k * 0.0
  for c in NORMAL:
    series = (series + c) * k
  tail = 0.5 * series * bell
  return jnp.where(z < 0, tail, 1.0 - tail), bell * (1 / math.sqrt(2 * math.pi))


def _gelu_exact(z: Array) -> Array:
  return z * _normal(z)[0]


def _gelu_exact_and_slope(z: Array) -> tuple[Array, Array]:
  share, density = _normal(z)
  return z * share, share + z * density


def _by_erf(z: Array) -> Array:
  return 0.5 * z * (1 + jax.lax.erf(z / math.sqrt(2)))


def _silu(z: Array) -> Array:
  return z * jax.lax.logistic(z)


def _silu_and_slope(z: Array) -> tuple[Array, Array]:
  s = jax.nn.sigmoid(z)
  return z * s, s * (1 + z * (1 - s))


def _relu(z: Array) -> Array:
  return jnp.where(z > 0, z, 0.0)


def _relu_in_kernel(z: Array) -> Array:
  return jnp.where(z <= 0, 0.0, z)  # NaN stays NaN


def _relu_and_slope(z: Array) -> tuple[Array, Array]:
  return jnp.maximum(z, 0), (z > 0).astype(z.dtype)


def _squared_relu_and_slope(z: Array) -> tuple[Array, Array]:
  r = jnp.maximum(z, 0)
  return r * r, 2 * r


ACTIVATIONS: dict[str, Activation] = {
  'gelu': Activation(
    jax.nn.gelu, _gelu, _gelu_and_slope, steepest=1.13,
    written=(lambda z: 0.5 * z * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),),
  ),
  'gelu_exact': Activation(
    functools.partial(jax.nn.gelu, approximate=False), _gelu_exact, _gelu_exact_and_slope, steepest=1.13,
    written=(_by_erf, lambda z: z * 0.5 * (1 + jax.lax.erf(z / math.sqrt(2)))),
  ),
  'silu': Activation(
    jax.nn.silu, _silu, _silu_and_slope, steepest=1.1, written=(_silu, lambda z: jax.lax.logistic(z) * z)
  ),
  'relu': Activation(jax.nn.relu, _relu_in_kernel, _relu_and_slope, steepest=1.0, written=(_relu,)),
  'squared_relu': Activation(
    lambda z: jnp.square(jax.nn.relu(z)), lambda z: jnp.square(_relu_in_kernel(z)), _squared_relu_and_slope,
    # The derivative of all is zero at zero. They differ at NaN and minus infinity alone.
    written=(
      lambda z: jnp.square(jnp.maximum(z, 0)), lambda z: jnp.square(jnp.maximum(0, z)), lambda z: jnp.clip(z, 0) ** 2,
      lambda z: z * jax.nn.relu(z), lambda z: jax.nn.relu(z) * z, lambda z: jnp.square(_relu(z)),
      lambda z: jnp.where(z > 0, z * z, 0),
    ),
  ),
}  # fmt: skip


def activation_of(name: str) -> Activation:
  """The activation of a name.

  Raises:
    ValueError: unknown.

  >>> activation_of('relu').steepest
  1.0
  """
  if name not in ACTIVATIONS:
    raise ValueError(f'activation={name!r}: known are {sorted(ACTIVATIONS)}')
  return ACTIVATIONS[name]
