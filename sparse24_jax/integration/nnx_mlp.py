"""The feed-forward layer for nnx models: three `nnx.Linear`, one fused op when their hooks agree."""

from typing import Any

from flax import nnx
from jax import Array
import jax.numpy as jnp

from pallas_kernels.activations import activation_of, Name
from sparse24_jax.activation_sparsity import neuron_level_ffn
from sparse24_jax.clusters import with_neurons
from sparse24_jax.ffn import ffn
from sparse24_jax.integration.nnx import SparseDot
from sparse24_jax.linear_layer import projection_state


class Sparse24MLP(nnx.Module):
  """act(x W_up) W_down, or with a gate (act(x W_gate) * (x W_up)) W_down.

  Its maps `up`, `down` and `gate` are `nnx.Linear`, which `sparsify` finds like any other. Where one policy serves all
  of them the layer is `sparse24_jax.ffn`, otherwise one matmul after the other.

  Args:
    features: of input and output.
    hidden: of the hidden layer.
    activation: 'gelu' (tanh form), 'silu', 'relu' or 'squared_relu'.
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
    self.dtype = dtype

  def __call__(self, x: Array) -> Array:
    maps = {'up': self.up, 'down': self.down} | ({} if self.gate is None else {'gate': self.gate})
    hooks = {role: linear.dot_general for role, linear in maps.items() if isinstance(linear.dot_general, SparseDot)}
    settings = {(hook.policy, hook.activation) for hook in hooks.values()}
    activations = {activation for _, activation in settings}
    whole = len(hooks) == len(maps)
    if activations - {None}:
      return self._neuron_level(x, maps, hooks, activations)
    if len(settings) != 1 or not whole:
      act = activation_of(self.activation).function
      h = act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x)
      return self.down(h)
    x, arrays = self._arrays(x, maps)
    state = {role: hook.projection_state() for role, hook in hooks.items()}
    (policy, _), key = settings.pop(), hooks['up'].draw()
    return ffn(x, **arrays, state=state, policy=policy, activation=self.activation, key=key)

  def _neuron_level(self, x: Array, maps: dict, hooks: dict, policies: set) -> Array:
    """With sparse activations."""
    if self.gate is not None or self.activation != 'squared_relu':
      found = f'{self.activation!r}{" with a gate" if self.gate is not None else ""}'
      raise ValueError(f"sparse activations take activation='squared_relu' without a gate, found {found}")
    if len(policies) > 1 or len(hooks) < len(maps):
      raise ValueError('sparse activations take one rule setting for all maps of the layer')
    x, arrays = self._arrays(x, maps)
    policy = policies.pop()
    state = with_neurons({role: projection_state(hook.projection_state()) for role, hook in hooks.items()}, policy)
    return neuron_level_ffn(x, arrays.pop('w_up'), arrays.pop('w_down'), state, policy=policy, **arrays)

  def _arrays(self, x: Array, maps: dict) -> tuple[Array, dict[str, Array]]:
    """The input, kernels and biases in the compute dtype, by the names of `ffn`'s arguments."""
    kernels = {f'w_{role}': linear.kernel[...] for role, linear in maps.items()}
    biases = {f'b_{role}': linear.bias[...] for role, linear in maps.items() if linear.bias is not None}
    arrays = kernels | biases
    x, *cast = nnx.nn.dtypes.promote_dtype((x, *arrays.values()), dtype=self.dtype)
    return x, dict(zip(arrays, cast, strict=True))
