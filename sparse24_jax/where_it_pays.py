"""Which layers of a model gain from sparse products on a card, by what was measured there."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _device, _tuning
from pallas_kernels.pack import costs
from sparse24_jax import products
from sparse24_jax.dot import DotPolicy
from sparse24_jax.projection import Projection
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import match_rules, path_string


@dataclasses.dataclass(frozen=True)
class RoleGain:
  """One product of a layer.

  Attributes:
    role: 'forward', 'input_grad' or 'weight_grad'.
    dense_ms: expected time of the dense product; None if nothing near was measured.
    sparse_ms: of the fastest sparse kernel, likewise; None also if the policy leaves the product dense.
    packing_ms: of the operand that only this product reads: the MVUE sample of the output gradient.
    chosen: what `implementation=None` runs: a back end, or 'dense'.
  """

  role: str
  dense_ms: float | None
  sparse_ms: float | None
  packing_ms: float
  chosen: str

  @property
  def expected_ms(self) -> float | None:
    """Of what is chosen, packing included."""
    ms = self.dense_ms if self.chosen == 'dense' else self.sparse_ms
    return None if ms is None else ms + (0.0 if self.chosen == 'dense' else self.packing_ms)


@dataclasses.dataclass(frozen=True)
class LayerGain:
  """One weight, or one stack of weights of scanned layers.

  Attributes:
    path: of the kernel.
    shape: `(in, out)`.
    layers: how many such weights are stacked.
    roles: the three products of one of them.
    packing_ms: per optimizer step, of the operands of one weight.
    packed_bytes: what the operands of all of them take.
    state_bytes: what their masks or scales take in the optimizer state.
  """

  path: str
  shape: tuple[int, int]
  layers: int
  roles: tuple[RoleGain, ...]
  packing_ms: float
  packed_bytes: int
  state_bytes: int

  @property
  def dense_ms(self) -> float | None:
    """Of the three dense products of one weight."""
    return _sum(role.dense_ms for role in self.roles)

  @property
  def expected_ms(self) -> float | None:
    """Of the three products as chosen, all packing included."""
    products_ms = _sum(role.expected_ms for role in self.roles)
    return None if products_ms is None else products_ms + self.packing_ms

  @property
  def gain(self) -> float | None:
    """Dense time over expected time; below 1 the layer is better left out of the recipe."""
    return None if self.expected_ms is None or self.dense_ms is None else self.dense_ms / self.expected_ms


def _sum(values: Any) -> float | None:
  values = list(values)
  return None if None in values else math.fsum(values)


def where_it_pays(
  params: Any, recipe: Recipe, *, tokens: int, dtype: Any = jnp.bfloat16, device: str | None = None
) -> list[LayerGain]:
  """Expected times of the layers that a recipe makes sparse, from the records of a card.

  Products are those of the nearest measured problem within a factor of two in each size, scaled; passes over memory are
  bytes over the measured bandwidth of their kernel. `implementation=None` makes the same choices: forward and input
  gradient where the kernel measured faster, a sampled weight gradient always. Where that last one loses, the exact
  gradient of `weight_grad='dense'` is faster and has no variance: take it.

  Args:
    params: parameters, or their shapes (`jax.eval_shape` of the model's init).
    recipe: its rules select the layers.
    tokens: tokens of a micro-batch on one device.
    dtype: of activations.
    device: folder of the records under `pallas_kernels/tuned`, such as 'nvidia_h100_80gb_hbm3'; None is this machine's
      card.

  Returns:
    One entry a matched weight, in the order of the tree.

  Raises:
    ValueError: a rule that fits no weight, no positive number of tokens, or a recipe in FP8.

  >>> import jax, sparse24_jax as s24
  >>> params = {'up': {'kernel': jax.ShapeDtypeStruct((4096, 16384), 'bfloat16')}}
  >>> recipe = s24.recipes.transposable_srste('.*', masked_decay=1e-4)
  >>> (layer,) = s24.where_it_pays(params, recipe, tokens=16384, device='nvidia_h100_80gb_hbm3')
  >>> [role.chosen for role in layer.roles], layer.gain > 1.3
  (['mosaic_gpu', 'mosaic_gpu', 'mosaic_gpu'], True)
  """
  if tokens < 1:
    raise ValueError(f'tokens={tokens} must be positive')
  slug = _device.current().slug if device is None else device
  weights = match_rules(params, recipe)
  leaves = {path: leaf for path, leaf in _leaves(params) if path in weights}
  return [
    _layer(path, leaves[path], rule.policy, rule.policy.projection, tokens, jnp.dtype(dtype), slug)
    for path, rule in weights.items() if rule.policy.projection is not None
  ]


def _leaves(params: Any) -> list[tuple[str, Any]]:
  return [(path_string(key_path), leaf) for key_path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]]


def _layer(
  path: str, leaf: Any, policy: DotPolicy, projection: Projection, tokens: int, dtype: jnp.dtype, device: str
) -> LayerGain:
  *lead, d_in, d_out = leaf.shape
  layers, wide = math.prod(lead), jnp.dtype(leaf.dtype).itemsize
  if policy.precision == 'fp8':
    raise ValueError(f"{path}: records hold no times of a layer with precision='fp8'; ask for the recipe without it")
  sparse = products.kernel_roles(policy, d_in, d_out, dtype)
  roles = tuple(_role(role, sparse[role], tokens, d_in, d_out, dtype, device) for role in products.ROLES)
  used = [role for role in roles if role.role != 'weight_grad' and role.chosen != 'dense']
  entries = d_in * d_out
  # Half of the values, and two bits for each of them.
  operand = entries * dtype.itemsize // 2 + entries // 8
  op = 'masked_pack' if projection.transposable else 'soft_threshold_pack_axis-2'
  # A mask, a byte an entry, is made 16 bits a 4x4 block by a pass of XLA's, about as fast, and these are read.
  codes = entries + 2 * (entries // 8) if projection.transposable else 0
  packing = costs.expected_ms(device, op, entries * wide + codes + len(used) * operand) if used else 0.0
  state = jax.eval_shape(projection.init, jax.ShapeDtypeStruct((d_in, d_out), leaf.dtype))
  state_bytes = layers * math.prod(state.shape) * state.dtype.itemsize
  return LayerGain(path, (d_in, d_out), layers, roles, packing or 0.0, layers * len(used) * operand, state_bytes)


def _role(
  role: str, sparse: bool, tokens: int, d_in: int, d_out: int, dtype: jnp.dtype, device: str
) -> RoleGain:
  m, n, k, b_layout = products.ROLES[role](tokens, d_in, d_out)
  key = dict(m=m, n=n, k=k, dtype=dtype.name, out_dtype=dtype.name, b_layout=b_layout, out_layout='nm')
  times = _tuning.expected_ms(device, 'sparse_matmul', key)
  dense = times.pop('dense', None)
  always = sparse and role == 'weight_grad'
  if not sparse or not times:
    return RoleGain(role, dense, None, 0.0, 'mosaic_gpu' if always else 'dense')
  best = min(times, key=times.__getitem__)
  if always and times[best] >= dense:
    best = 'mosaic_gpu'
  packing = 0.0
  if always:
    entries = tokens * d_out
    size = entries * dtype.itemsize + entries * dtype.itemsize // 2 + entries // 8
    packing = costs.expected_ms(device, 'mvue_pack_axis-2', size) or 0.0
  return RoleGain(role, dense, times.get(best), packing, best if always or times[best] < dense else 'dense')


def table(layers: Sequence[LayerGain]) -> str:
  """The gains as text, one line a weight."""
  def ms(value: float | None) -> str:
    return '     -' if value is None else f'{value:6.3f}'

  head = f'{"weight":36} {"in x out":>14} {"layers":>6}  {"dense ms":>8} {"as chosen":>9}  {"gain":>5}  {"packed":>8}'
  lines = [f'{head}  products: ms as chosen (dense)']
  for layer in layers:
    chosen = ', '.join(
      f'{role.role} {role.chosen} {ms(role.expected_ms).strip()} ({ms(role.dense_ms).strip()})' for role in layer.roles
    )
    gain = '    -' if layer.gain is None else f'{layer.gain:5.2f}'
    lines.append(
      f'{layer.path:36} {layer.shape[0]:>6} x {layer.shape[1]:<5} {layer.layers:>6}  {ms(layer.dense_ms):>8}'
      f' {ms(layer.expected_ms):>9}  {gain}  {layer.packed_bytes / 2**20:5.0f} MB  {chosen}'
    )
  for layer in layers:
    for role in layer.roles:
      if role.chosen != 'dense' and role.expected_ms is not None and role.expected_ms > role.dense_ms:
        lines.append(
          f"{layer.path}: the sampled weight gradient loses {role.expected_ms - role.dense_ms:.3f} ms a layer;"
          " weight_grad='dense' is faster and exact"
        )
  return '\n'.join(lines)
