"""The feed-forward layer for nnx models: two or three `nnx.Linear`, one fused op under `sparsify`."""

from typing import Any

from flax import nnx
from jax import Array
import jax.numpy as jnp

from pallas_kernels.activations import activation_of, Name


class Sparse24MLP(nnx.Module):
  """act(x W_up) W_down, or with a gate (act(x W_gate) * (x W_up)) W_down.

  Its maps `up`, `down` and `gate` are `nnx.Linear`. By itself it is dense. `sparsify` finds the block in it, as it does
  with two or three layers of yours: under one policy for all of its kernels it is `sparse24_jax.ffn`, and with rules
  for sparse activations `sparse24_jax.neuron_level_ffn`.

  Args:
    features: of input and output.
    hidden: of the hidden layer.
    activation: 'gelu' (tanh form), 'gelu_exact' (by erf), 'silu', 'relu' or 'squared_relu'.
    gated: whether there is a gate; 'silu' makes SwiGLU, 'gelu' GEGLU.
    use_bias: whether the maps have biases.
    dtype: compute dtype; None is the dtype of input and parameters.
    param_dtype: dtype of the parameters.
    rngs: with a stream for 'params'.

  >>> from flax import nnx
  >>> import jax.numpy as jnp, sparse24_jax as s24
  >>> s24.nnx.Sparse24MLP(16, 64, gated=True, activation='silu', rngs=nnx.Rngs(0))(jnp.ones((8, 16))).shape
  (8, 16)
  """

  def __init__(
    self,
    features: int,
    hidden: int,
    *,
    activation: Name = 'gelu',
    gated: bool = False,
    use_bias: bool = False,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
  ):
    kwargs = dict(use_bias=use_bias, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
    self.up = nnx.Linear(features, hidden, **kwargs)
    self.down = nnx.Linear(hidden, features, **kwargs)
    self.gate = nnx.Linear(features, hidden, **kwargs) if gated else None
    self.activation = activation

  def __call__(self, x: Array) -> Array:
    act = activation_of(self.activation).function
    h = act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x)
    return self.down(h)
