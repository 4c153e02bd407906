"""The feed-forward layer for linen models: one module, dense by itself, one fused op under `sparsify`."""

from typing import Any

from flax import linen as nn
from jax import Array
import jax.numpy as jnp

from pallas_kernels.activations import activation_of, Name
from sparse24_jax.matmuls import add_bias


class Sparse24MLP(nn.Module):
  """act(x W_up) W_down, or with a gate (act(x W_gate) * (x W_up)) W_down.

  Parameters are those of two or three `nn.Dense` under the names given, so it takes the place of such a layer, its
  checkpoints and the rules of a recipe included. By itself it is dense. `sparsify` finds the block in it, as it finds
  that of two or three Dense layers: under one policy for all of its kernels it is `sparse24_jax.ffn`, and with rules
  for sparse activations `sparse24_jax.neuron_level_ffn`.

  Attributes:
    hidden: features of the hidden layer.
    features: features of the output; None is those of the input.
    activation: 'gelu' (tanh form), 'silu', 'relu' or 'squared_relu'.
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

  @property
  def roles(self) -> dict[str, str]:
    """The name of each map by its role."""
    roles = ('up', 'down', 'gate') if self.gated else ('up', 'down')
    if len(self.names) < len(roles):
      raise ValueError(f'names={self.names} must name {roles}')
    return dict(zip(roles, self.names, strict=False))

  @nn.compact
  def __call__(self, x: Array) -> Array:
    features = x.shape[-1] if self.features is None else self.features
    shapes = {'up': (x.shape[-1], self.hidden), 'down': (self.hidden, features), 'gate': (x.shape[-1], self.hidden)}
    maps = {}
    for role, name in self.roles.items():
      init = self.out_kernel_init if role == 'down' and self.out_kernel_init else self.kernel_init
      maps[role] = _Map(shapes[role], self.use_bias, self.param_dtype, init, name=name)()
    arrays = [x, *(array for pair in maps.values() for array in pair)]
    x, *rest = nn.dtypes.promote_dtype(*arrays, dtype=self.dtype)
    weights, biases = dict(zip(maps, rest[::2], strict=True)), dict(zip(maps, rest[1::2], strict=True))
    hidden = {role: add_bias(jnp.dot(x, weights[role]), biases[role]) for role in maps if role != 'down'}
    act = activation_of(self.activation).function
    h = act(hidden['gate']) * hidden['up'] if self.gated else act(hidden['up'])
    return add_bias(jnp.dot(h, weights['down']), biases['down'])


class _Map(nn.Module):
  """Holds the parameters of a linear map, `[in, out]` and `[out]`."""

  shape: tuple[int, int]
  use_bias: bool
  param_dtype: Any
  kernel_init: nn.initializers.Initializer

  @nn.compact
  def __call__(self) -> tuple[Array, Array | None]:
    kernel = self.param('kernel', self.kernel_init, self.shape, self.param_dtype)
    bias = self.param('bias', nn.initializers.zeros_init(), self.shape[1:], self.param_dtype) if self.use_bias else None
    return kernel, bias
