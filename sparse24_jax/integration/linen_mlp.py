"""The feed-forward layer for linen models: one module, dense by itself, one fused op under `sparsify`."""

import functools
from typing import Any

from flax import linen as nn
from jax import Array
import jax.numpy as jnp

from pallas_kernels.activations import activation_of, Name


class Sparse24MLP(nn.Module):
  """act(x W_up) W_down, or with a gate (act(x W_gate) * (x W_up)) W_down.

  It is two or three `nn.Dense` under the names given, and takes the place of such layers, their checkpoints and rules
  included. By itself it is dense. `sparsify` finds the block in it, as it does in layers of yours: under one policy for
  all of its kernels it is `sparse24_jax.ffn`, and with rules for sparse activations `sparse24_jax.neuron_level_ffn`.

  Attributes:
    hidden: features of the hidden layer.
    features: features of the output; None is those of the input.
    activation: 'gelu' (tanh form), 'gelu_exact' (by erf), 'silu', 'relu' or 'squared_relu'.
    gated: whether there is a gate; 'silu' makes SwiGLU, 'gelu' GEGLU.
    use_bias: whether the linear maps have biases.
    dtype: compute dtype; None is the dtype of input and parameters.
    param_dtype: dtype of the parameters.
    kernel_init: of the maps into the hidden layer.
    out_kernel_init: of the map out of it; None is `kernel_init`.
    names: of the maps up, down and, with a gate, gate.

  >>> import jax, jax.numpy as jnp, sparse24_jax as s24
  >>> mlp = s24.linen.Sparse24MLP(hidden=64)
  >>> variables = mlp.init(jax.random.key(0), jnp.ones((8, 16)))
  >>> jax.tree.map(jnp.shape, variables['params'])
  {'down': {'kernel': (64, 16)}, 'up': {'kernel': (16, 64)}}
  """

  hidden: int
  features: int | None = None
  activation: Name = 'gelu'
  gated: bool = False
  use_bias: bool = False
  dtype: Any = None
  param_dtype: Any = jnp.float32
  kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init
  out_kernel_init: nn.initializers.Initializer | None = None
  names: tuple[str, ...] = ('up', 'down', 'gate')

  @nn.compact
  def __call__(self, x: Array) -> Array:
    if len(self.names) < (3 if self.gated else 2):
      raise ValueError(f'names={self.names} must name up, down{" and gate" if self.gated else ""}')
    dense = functools.partial(nn.Dense, use_bias=self.use_bias, dtype=self.dtype, param_dtype=self.param_dtype)
    into = functools.partial(dense, self.hidden, kernel_init=self.kernel_init)
    features = x.shape[-1] if self.features is None else self.features
    down = dense(features, kernel_init=self.out_kernel_init or self.kernel_init, name=self.names[1])
    act, up = activation_of(self.activation).function, into(name=self.names[0])(x)
    return down(act(into(name=self.names[2])(x)) * up if self.gated else act(up))
