"""Which layers of a model gain from sparse products on a card, by what was measured there."""

from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _device
from pallas_kernels.pack import costs
from sparse24_jax import fp8_times, products
from sparse24_jax._kernels_here import has_hopper_kernel
from sparse24_jax.fp8_times import total
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projection import Projection
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import leaves_by_path, match_rules


@dataclasses.dataclass(frozen=True)
class RoleGain:
  """One product of a layer.

  Attributes:
    role: 'forward', 'input_grad' or 'weight_grad'.
    dense_ms: expected time of the dense product in 16 bits; None if nothing near was measured.
    sparse_ms: of the fastest sparse kernel, likewise; None also if the policy leaves the product dense.
    packing_ms: of the passes that only this product needs: the MVUE sample of the output gradient; in FP8 the rounding
      of what the forward reads, and of the gradient. None where a pass was not measured, as sampling by XLA was not.
    chosen: what `implementation=None` runs, with cuSPARSELt installed, and of a card without records as if it were a
      Hopper: a back end, 'dense', 'dense_fp8', or 'simulated', see `LayerGain`.
    dense_fp8_ms: as `dense_ms`, in FP8; None also where the policy is none of FP8.
  """

  role: str
  dense_ms: float | None
  sparse_ms: float | None
  packing_ms: float | None
  chosen: str
  dense_fp8_ms: float | None = None

  @property
  def product_ms(self) -> float | None:
    """Of the product that is chosen."""
    return {'dense': self.dense_ms, 'dense_fp8': self.dense_fp8_ms}.get(self.chosen, self.sparse_ms)

  @property
  def expected_ms(self) -> float | None:
    """Of what is chosen, packing included."""
    return total((self.product_ms, self.packing_ms))


@dataclasses.dataclass(frozen=True)
class LayerGain:
  """One weight, or one stack of weights of scanned layers.

  Attributes:
    path: of the kernel.
    shape: `(in, out)`.
    layers: how many such weights are stacked.
    roles: the three products of one of them.
    packing_ms: of the operands of one weight, which are packed once per optimizer step: the share of a micro-batch.
      None where a pass was not measured.
    packed_bytes: what the operands of all of them take.
    state_bytes: what their masks or scales take in the optimizer state.
    saved_bytes: what the x that the backward of all of them keeps takes less in FP8, at a byte an entry.
    dense_fp8_ms: of one weight's three dense products in FP8, with the passes that round all operands both ways; None
      where the policy is none of FP8.
    simulated: why no kernel serves a policy of FP8. Its products are then simulated in wider ones, slower than dense
      ones by a time that nobody measured: `expected_ms` is None.

  >>> from sparse24_jax.where_it_pays import LayerGain, RoleGain
  >>> roles = (RoleGain('forward', 2.0, 1.0, 0.0, 'mosaic_gpu'), RoleGain('input_grad', 2.0, None, 0.0, 'dense'))
  >>> layer = LayerGain('up/kernel', (64, 256), 1, roles, packing_ms=0.2, packed_bytes=0, state_bytes=0)
  >>> layer.dense_ms, layer.expected_ms, layer.gain
  (4.0, 3.2, 1.25)
  """

  path: str
  shape: tuple[int, int]
  layers: int
  roles: tuple[RoleGain, ...]
  packing_ms: float | None
  packed_bytes: int
  state_bytes: int
  saved_bytes: int = 0
  dense_fp8_ms: float | None = None
  simulated: str | None = None

  @property
  def dense_ms(self) -> float | None:
    """Of the three dense products of one weight."""
    return total(role.dense_ms for role in self.roles)

  @property
  def expected_ms(self) -> float | None:
    """Of the three products as chosen, all packing included."""
    return total((self.packing_ms, *(role.expected_ms for role in self.roles)))

  @property
  def gain(self) -> float | None:
    """Dense time over expected time, of the layer by itself; below 1 it is better left out of the recipe."""
    return None if self.expected_ms is None or self.dense_ms is None else self.dense_ms / self.expected_ms


def where_it_pays(
  params: Any, recipe: Recipe, *, tokens: int, micro_batches: int = 1, dtype: Any = jnp.bfloat16,
  device: str | None = None,
) -> list[LayerGain]:  # fmt: skip
  """Expected times of the layers that a recipe makes sparse, from the records of a card.

  Products are those of the nearest measured problem within a factor of two in each size, scaled; passes over memory are
  bytes over the measured bandwidth of their kernel, and 5 us each. Times of float16 are those of bfloat16 where none
  near was measured. `implementation=None` makes the same choices: kernels where they measured faster, and on Hopper for
  a sampled weight gradient always.

  Each layer is counted by itself. A feed-forward block that runs fused shares passes among its layers: `block_gain`,
  not the gains of its layers, says whether it pays, and whether the exact gradient of `weight_grad='dense'`, which
  fuses less, pays more. What does not pay is left out of a recipe by a rule in front of the others,
  `Rule(path, DotPolicy())`: the first that matches decides. `only_where_it_pays` writes that rule.

  Of a recipe in FP8 the forward and the weight gradient are sparse, the input gradient is a dense product in FP8; what
  is dense in `LayerGain.dense_ms` and in its gain has 16 bits all the same, as it is without the recipe.

  Records are made in short bursts, and a card that is kept busy runs at a lower clock. Beside eight feed-forward blocks
  on an H100, see `block_gain`, sustained steps take 6 to 19% longer, dense and sparse ones alike; gains are within
  10% of what was measured.

  Args:
    params: parameters, or their shapes (`jax.eval_shape` of the model's init).
    recipe: its rules select the layers.
    tokens: tokens of a micro-batch on one device.
    micro_batches: of an optimizer step. Weights are packed for all of them at once, where `sparse_variables` is called
      outside of their loop.
    dtype: of activations.
    device: folder of the records under `pallas_kernels/tuned`, such as 'nvidia_h100_80gb_hbm3'; None is this machine's
      card.

  Returns:
    One entry a matched weight, in the order of the tree.

  Raises:
    ValueError: a rule that fits no weight, or no positive number of tokens or micro-batches.

  >>> import jax, sparse24_jax as s24
  >>> params = {'up': {'kernel': jax.ShapeDtypeStruct((4096, 16384), 'bfloat16')}}
  >>> recipe = s24.recipes.transposable_srste('.*', masked_decay=1e-4)
  >>> (layer,) = s24.where_it_pays(params, recipe, tokens=16384, device='nvidia_h100_80gb_hbm3')
  >>> [role.chosen for role in layer.roles], layer.gain > 1.3
  (['mosaic_gpu', 'mosaic_gpu', 'mosaic_gpu'], True)
  """
  for name, number in (('tokens', tokens), ('micro_batches', micro_batches)):
    if number < 1:
      raise ValueError(f'{name}={number} must be positive')
  slug = _device.current().slug if device is None else device
  weights = match_rules(params, recipe)
  leaves = {path: leaf for path, leaf in leaves_by_path(params) if path in weights}
  layers = [
    _layer(path, leaves[path], rule.policy, rule.policy.projection, tokens, jnp.dtype(dtype), slug)
    for path, rule in weights.items() if rule.policy.projection is not None
  ]
  packing = [None if layer.packing_ms is None else layer.packing_ms / micro_batches for layer in layers]
  return [dataclasses.replace(layer, packing_ms=ms) for layer, ms in zip(layers, packing, strict=True)]


def _layer(
  path: str, leaf: Any, policy: DotPolicy, projection: Projection, tokens: int, dtype: jnp.dtype, device: str
) -> LayerGain:
  *lead, d_in, d_out = leaf.shape
  layers, wide = math.prod(lead), jnp.dtype(leaf.dtype).itemsize
  sparse = products.kernel_roles(policy, d_in, d_out, dtype)
  entries = d_in * d_out
  state = jax.eval_shape(projection.init, jax.ShapeDtypeStruct((d_in, d_out), leaf.dtype))
  state_bytes = layers * math.prod(state.shape) * state.dtype.itemsize
  layer = functools.partial(LayerGain, path, (d_in, d_out), layers, state_bytes=state_bytes)
  simulated = _why_simulated(policy, d_in, d_out, dtype, device) if policy.precision == 'fp8' else None
  if simulated is not None:
    roles = (_role(role, False, tokens, d_in, d_out, dtype, device) for role in products.ROLES)
    roles = tuple(dataclasses.replace(role, chosen='simulated') for role in roles)
    return layer(roles, packing_ms=0.0, packed_bytes=0, simulated=simulated)
  if policy.precision == 'fp8':
    roles = tuple(_role8(role, sparse[role], tokens, d_in, d_out, dtype, device) for role in products.ROLES)
    # Operand, dense copy, factor.
    packed = entries // 2 + entries // 8 + entries + 4
    return layer(
      roles, packing_ms=fp8_times.packing_ms(device, d_in, d_out, wide), packed_bytes=layers * packed,
      saved_bytes=layers * tokens * d_in * (dtype.itemsize - 1),
      dense_fp8_ms=fp8_times.dense_layer_ms(device, tokens, d_in, d_out, dtype.itemsize, wide),
    )  # fmt: skip
  roles = tuple(_role(role, sparse[role], tokens, d_in, d_out, dtype, device) for role in products.ROLES)
  used = [role for role in roles if role.role != 'weight_grad' and role.chosen != 'dense']
  # Half of the values, and two bits for each of them.
  operand = entries * dtype.itemsize // 2 + entries // 8
  op = 'masked_pack' if projection.transposable else 'soft_threshold_pack_axis-2'
  # A mask, a byte an entry, is made 16 bits a 4x4 block by a pass of XLA's, about as fast, and these are read.
  codes = entries + 2 * (entries // 8) if projection.transposable else 0
  packing = costs.expected_ms(device, op, entries * wide + codes + len(used) * operand) if used else 0.0
  return layer(roles, packing_ms=packing, packed_bytes=layers * len(used) * operand)


def _why_simulated(policy: DotPolicy, d_in: int, d_out: int, dtype: jnp.dtype, device: str) -> str | None:
  unfit = products._unfit(policy, d_in, d_out, dtype)
  return f'{device} has no FP8 kernels, Hopper has' if unfit is None and not has_hopper_kernel(device) else unfit


def _role8(
  role: str, sparse: bool, tokens: int, d_in: int, d_out: int, dtype: jnp.dtype, device: str
) -> RoleGain:
  times = fp8_times.product_ms(device, role, tokens, d_in, d_out)
  dense8, dense = times.pop('dense', None), fp8_times.dense_16_ms(device, role, tokens, d_in, d_out, dtype.name)
  packing = fp8_times.role_packing_ms(device, role, tokens, d_in, d_out, dtype.itemsize)
  if not sparse:
    return RoleGain(role, dense, None, packing, 'dense_fp8', dense8)
  # Gradients are sampled into an operand, which only a kernel reads.
  loses = role == 'forward' and dense8 is not None and min(times.values(), default=dense8) >= dense8
  return RoleGain(role, dense, times.get('mosaic_gpu'), packing, 'dense_fp8' if loses else 'mosaic_gpu', dense8)


def _role(
  role: str, sparse: bool, tokens: int, d_in: int, d_out: int, dtype: jnp.dtype, device: str
) -> RoleGain:
  times = fp8_times.product_16_ms(device, role, tokens, d_in, d_out, dtype.name)
  dense = times.pop('dense', None)
  sampled = sparse and role == 'weight_grad'
  always = sampled and has_hopper_kernel(device)
  fastest = min(times, key=times.__getitem__, default=None) if sparse else None
  wins = fastest is not None and times[fastest] < dense
  if not (always or wins):
    return RoleGain(role, dense, times.get(fastest), None if sampled else 0.0, 'dense')
  if not times:
    return RoleGain(role, dense, None, 0.0, 'mosaic_gpu')
  chosen, packing = fastest if wins else 'mosaic_gpu', 0.0
  if sampled:
    entries = tokens * d_out
    size = entries * dtype.itemsize + entries * dtype.itemsize // 2 + entries // 8
    packing = costs.expected_ms(device, 'mvue_pack_axis-2', size)
  return RoleGain(role, dense, times.get(chosen), packing, chosen)


def table(layers: Sequence[LayerGain]) -> str:
  """The gains as text, one line a weight; with columns of FP8 where a recipe has that."""
  in_fp8 = any(layer.dense_fp8_ms is not None or layer.saved_bytes for layer in layers)
  head = f'{"weight":36} {"in x out":>14} {"layers":>6}  {"dense ms":>8} {"as chosen":>9}  {"gain":>5}  {"packed":>8}'
  if in_fp8:
    head += f'  {"dense FP8":>9} {"over it":>7}  {"x saved":>8}'
  lines = [f'{head}  products: ms as chosen (dense)']
  for layer in layers:
    chosen = ', '.join(
      f'{r.role} {r.chosen} {_ms(r.expected_ms).strip()} ({_ms(r.dense_ms).strip()})' for r in layer.roles
    )
    line = (
      f'{layer.path:36} {layer.shape[0]:>6} x {layer.shape[1]:<5} {layer.layers:>6}  {_ms(layer.dense_ms):>8}'
      f' {_ms(layer.expected_ms):>9}  {_ratio(layer.dense_ms, layer.expected_ms)}  {layer.packed_bytes / 2**20:5.0f} MB'
    )
    if in_fp8:
      over = _ratio(layer.dense_fp8_ms, layer.expected_ms)
      line += f'  {_ms(layer.dense_fp8_ms):>9} {over:>7}  {layer.saved_bytes / 2**20:5.0f} MB'
    lines.append(f'{line}  {chosen}')
  return '\n'.join(lines + [note for layer in layers for note in _notes(layer)])


def _ms(value: float | None) -> str:
  return '     -' if value is None else f'{value:6.3f}'


def _ratio(dense: float | None, expected: float | None) -> str:
  return '    -' if dense is None or expected is None else f'{dense / expected:5.2f}'


def _notes(layer: LayerGain) -> list[str]:
  if layer.simulated is not None:
    return [f'{layer.path}: FP8 would be simulated: {layer.simulated}']
  unknown = ', '.join(f'{r.role} {r.chosen}' for r in layer.roles if r.product_ms is None)
  why = 'nothing within a factor of two in each size was measured, so chosen blindly'
  return [f'{layer.path}: {why}: {unknown}'] if unknown else []
