"""The feed-forward layer for linen models: one module, dense by itself, one fused op under `sparsify`."""

from collections.abc import Mapping
import dataclasses
from typing import Any, Literal

from flax import linen as nn
import jax
from jax import Array
import jax.numpy as jnp

from sparse24_jax.activation_sparsity import ActivationPolicy, neuron_level_ffn
from sparse24_jax.clusters import with_neurons
from sparse24_jax.dot import dot, DotPolicy
from sparse24_jax.ffn import ACTIVATIONS, ffn
from sparse24_jax.products import add_bias, projection_state

COLLECTION = 'sparse24'


@dataclasses.dataclass(frozen=True)
class SparseHook:
  """What `sparsify` lends a `Sparse24MLP` for one call.

  Attributes:
    policies: by role, 'up', 'down' and 'gate'; a role that no rule matches is absent.
    key: for MVUE, or None.
    activation: how the activations are made sparse, or None.
  """

  policies: Mapping[str, DotPolicy]
  key: Array | None
  activation: ActivationPolicy | None = None


class Sparse24MLP(nn.Module):
  """act(x W_up) W_down, or with a gate (act(x W_gate) * (x W_up)) W_down.

  Parameters are those of two or three `nn.Dense` under the names given, so it takes the place of such a layer, its
  checkpoints and the rules of a recipe included. By itself it is dense. Under `sparsify`, when one policy serves all
  its kernels, it is `sparse24_jax.ffn`; when policies differ, each product has its own; when the rules ask for sparse
  activations, it is `sparse24_jax.neuron_level_ffn`.

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
  activation: Literal['gelu', 'silu', 'relu', 'squared_relu'] = 'gelu'
  gated: bool = False
  use_bias: bool = False
  dtype: Any = None
  param_dtype: Any = jnp.float32
  kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init
  out_kernel_init: nn.initializers.Initializer | None = None
  names: tuple[str, ...] = ('up', 'down', 'gate')
  sparse: SparseHook | None = None

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
    arrays = [x, *(a for kernel, bias, _ in maps.values() for a in (kernel, bias))]
    x, *rest = nn.dtypes.promote_dtype(*arrays, dtype=self.dtype)
    weights = {f'w_{role}': w for role, w in zip(maps, rest[::2], strict=True)}
    biases = {f'b_{role}': b for role, b in zip(maps, rest[1::2], strict=True)}
    hook = SparseHook({}, None) if self.sparse is None else self.sparse
    if hook.activation is not None:
      return self._neuron_level(x, weights, biases, maps, hook.activation)
    policies = {hook.policies.get(role) for role in maps}
    if len(policies) == 1 and (policy := policies.pop()) is not None:
      state = {role: state for role, (_, _, state) in maps.items()}
      return ffn(x, **weights, **biases, state=state, policy=policy, activation=self.activation, key=hook.key)
    return self._apart(x, weights, biases, {role: state for role, (_, _, state) in maps.items()}, hook)

  def _neuron_level(self, x: Array, weights: Any, biases: Any, maps: Any, policy: ActivationPolicy) -> Array:
    """With sparse activations."""
    if self.gated or self.activation != 'squared_relu':
      found = f'{self.activation!r}{" with a gate" if self.gated else ""}'
      raise ValueError(f"sparse activations take activation='squared_relu' without a gate, found {found}")
    state = with_neurons({role: projection_state(state) for role, (_, _, state) in maps.items()}, policy)
    return neuron_level_ffn(x, weights['w_up'], weights['w_down'], state, policy=policy, **biases)

  def _apart(self, x: Array, weights: Any, biases: Any, states: Any, hook: SparseHook) -> Array:
    """Each map by itself."""

    def linear(role: str, x: Array) -> Array:
      policy, w, bias = hook.policies.get(role), weights[f'w_{role}'], biases[f'b_{role}']
      if policy is None:
        z = jnp.dot(x, w)
      else:
        # Roles draw independently.
        key = None if hook.key is None else jax.random.fold_in(hook.key, ('up', 'down', 'gate').index(role))
        z = dot(x, w, states[role], policy=policy, key=key)
      return add_bias(z, bias)

    act = ACTIVATIONS[self.activation]
    h = act(linear('gate', x)) * linear('up', x) if self.gated else act(linear('up', x))
    return linear('down', h)


class _Map(nn.Module):
  """Holds the parameters of a linear map, `[in, out]` and `[out]`, and reads its projection state if there is one."""

  shape: tuple[int, int]
  use_bias: bool
  param_dtype: Any
  kernel_init: nn.initializers.Initializer

  @nn.compact
  def __call__(self) -> tuple[Array, Array | None, Any]:
    kernel = self.param('kernel', self.kernel_init, self.shape, self.param_dtype)
    bias = self.param('bias', nn.initializers.zeros_init(), self.shape[1:], self.param_dtype) if self.use_bias else None
    state = self.get_variable(COLLECTION, 'kernel') if self.has_variable(COLLECTION, 'kernel') else None
    return kernel, bias, state
