"""Expected time of a feed-forward block, forward and backward, part by part: sparse as chosen, dense, dense in FP8."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _device
from pallas_kernels.pack import costs
from sparse24_jax import fp8_times, products
from sparse24_jax.ffn import fuses
from sparse24_jax.fp8_times import total
from sparse24_jax.recipe import Recipe
from sparse24_jax.where_it_pays import LayerGain, where_it_pays


@dataclasses.dataclass(frozen=True)
class Part:
  """A product, or a pass over memory, of a block.

  Attributes:
    name: what it makes.
    ms: expected time; None if nothing near was measured.
  """

  name: str
  ms: float | None


@dataclasses.dataclass(frozen=True)
class BlockGain:
  """A feed-forward block, forward and backward, packing of its weights included and the search for masks not.

  Attributes:
    chosen: what `implementation=None` runs.
    dense: a dense block in 16 bits.
    dense_fp8: a dense block in FP8, all operands scaled by their own largest magnitude, weights anew in every
      micro-batch; empty where the policy is none of FP8.
    packed_bytes: of the operands of its weights.
    saved_bytes: what x and h, which the backward keeps, take less in FP8. The peak of memory need not shrink so: a
      block in FP8 of 16384 tokens, 4096 x 16384 and bfloat16 weights took 2.83 GB with GELU, dense in 16 bits 3.22, but
      4.25 with SwiGLU, dense 3.49.

  >>> from sparse24_jax.block_gain import BlockGain, Part
  >>> block = BlockGain((Part('packed weights', 0.5), Part('y of up', 1.5)), (Part('forward of up', 3.0),), (), 0, 0)
  >>> block.expected_ms, block.gain, block.dense_fp8_ms
  (2.0, 1.5, None)
  """

  chosen: tuple[Part, ...]
  dense: tuple[Part, ...]
  dense_fp8: tuple[Part, ...]
  packed_bytes: int
  saved_bytes: int

  @property
  def expected_ms(self) -> float | None:
    return total(part.ms for part in self.chosen)

  @property
  def dense_ms(self) -> float | None:
    return total(part.ms for part in self.dense)

  @property
  def dense_fp8_ms(self) -> float | None:
    return total(part.ms for part in self.dense_fp8) if self.dense_fp8 else None

  @property
  def gain(self) -> float | None:
    """Dense time over expected time."""
    return _over(self.dense_ms, self.expected_ms)

  @property
  def gain_over_fp8(self) -> float | None:
    """Dense FP8 time over expected time."""
    return _over(self.dense_fp8_ms, self.expected_ms)


def _over(dense: float | None, expected: float | None) -> float | None:
  return None if dense is None or expected is None else dense / expected


def block_gain(
  d: int, hidden: int, recipe: Recipe, *, tokens: int, micro_batches: int = 1, gated: bool = False,
  dtype: Any = jnp.bfloat16, weight_dtype: Any = jnp.bfloat16, device: str | None = None,
) -> BlockGain:  # fmt: skip
  """Expected times of `ffn` on a card under a recipe that fits all of its weights.

  Products are those of `where_it_pays`; what stands between them are passes over memory, at the bandwidth that was
  measured of each, and of XLA's own at that of a copy. The block runs fused where `ffn` fuses it; gate and
  up-projection are then one product. Not modelled: what an activation and its second result add to a product whose
  epilogue makes them, XLA's projection of weights whose product stays dense in 16 bits, and the lower clock of a card
  that is kept busy. Where FP8 would be simulated, nothing is expected.

  Beside eight blocks on an H100, sustained steps take 6 to 19% longer, dense and sparse ones alike; gains are within
  10% of what was measured. Three small GELU blocks, 2048 x 768 x 3072, 2048 x 1024 x 4096 and 4096 x 1024 x 4096,
  measured 0.82, 1.00 and 1.12 where 0.84, 1.03 and 1.14 are expected. Packing is in these; with weights packed before,
  as for all micro-batches of a step but the first, they measured 0.94, 1.14 and 1.20, expected 0.98, 1.23 and 1.26.

  Args:
    d: width of the model.
    hidden: width of the hidden layer.
    recipe: its rules must fit paths such as 'up/kernel', all alike.
    tokens: of a micro-batch on one device.
    micro_batches: of an optimizer step, which share its packing of weights.
    gated: SwiGLU instead of GELU; what an activation computes does not matter to a pass over memory.
    dtype: of activations.
    weight_dtype: of what is packed.
    device: folder of the records, as in `where_it_pays`.

  Raises:
    ValueError: as `where_it_pays`.

  >>> import sparse24_jax as s24
  >>> recipe = s24.recipes.transposable_srste('.*', masked_decay=1e-4)
  >>> block = s24.block_gain(4096, 16384, recipe, tokens=16384, device='nvidia_h100_80gb_hbm3')
  >>> block.gain > 1.4, block.chosen[-1].name
  (True, 'dx of up')
  """
  slug = _device.current().slug if device is None else device
  sizes = {'up': (d, hidden), 'down': (hidden, d)} | ({'gate': (d, hidden)} if gated else {})
  params = {name: {'kernel': jax.ShapeDtypeStruct(size, weight_dtype)} for name, size in sizes.items()}
  found = where_it_pays(params, recipe, tokens=tokens, micro_batches=micro_batches, dtype=dtype, device=slug)
  layers = {layer.path.split('/')[0]: layer for layer in found}
  if missing := sorted(sizes.keys() - layers.keys()):
    raise ValueError(
      f'{recipe.name} makes no sparse weight of {", ".join(f"{name}/kernel" for name in missing)}; block_gain takes a'
      ' recipe whose rules fit all weights of the block'
    )
  plans = {name: _plan(layer) for name, layer in layers.items()}
  in_fp8 = all(plan.fp8 for plan in plans.values())
  card = _Card(slug, tokens, d, hidden, gated, in_fp8, jnp.dtype(dtype), jnp.dtype(weight_dtype).itemsize)
  if fuses(plans, tokens, hidden):
    parts = _fused_fp8(card, layers) if in_fp8 else _fused(card, layers)
  else:
    parts = _composed(card, layers)
  packing = Part('packed weights', total(layer.packing_ms for layer in found))
  return BlockGain(
    (packing, *parts), tuple(_dense(card, layers)), tuple(_dense_fp8(card, layers)) if in_fp8 else (),
    sum(layer.packed_bytes for layer in layers.values()),
    # Gate and up-projection keep one and the same x.
    sum(layer.saved_bytes for name, layer in layers.items() if name != 'gate'),
  )  # fmt: skip


def _plan(layer: LayerGain) -> products.Plan:
  """What `products.plan` says of a weight on that card."""
  chosen = {role.role: role.chosen for role in layer.roles}
  backends = {role: None if name in ('dense', 'dense_fp8', 'simulated') else name for role, name in chosen.items()}
  return products.Plan(**backends, fp8='dense_fp8' in chosen.values())


@dataclasses.dataclass(frozen=True)
class _Card:
  """Whose records are asked, and sizes in entries and bytes an entry."""

  device: str
  tokens: int
  d: int
  hidden: int
  gated: bool
  in_fp8: bool
  dtype: jnp.dtype
  weight_wide: int

  @property
  def wide(self) -> int:
    return self.dtype.itemsize

  @property
  def x(self) -> int:
    return self.tokens * self.d

  @property
  def h(self) -> int:
    return self.tokens * self.hidden

  @property
  def z(self) -> int:
    return self.h * (2 if self.gated else 1)

  @property
  def weight(self) -> int:
    return self.d * self.hidden

  def moved(self, op: str, size: float) -> float | None:
    return costs.expected_ms(self.device, op, round(size))

  @property
  def backward(self) -> str:
    """How records call the backward of the activation, without what it packs."""
    return 'gated_silu_backward' if self.gated else 'gelu_backward'

  def forward_pass(self) -> list[Part]:
    """With a gate the activation is a pass of its own."""
    return [Part('h', self.moved('gated_silu_axis-1', (self.z + self.h) * self.wide))] if self.gated else []

  def joins(self, operand: float) -> list[Part]:
    """With a gate two weights become one operand of so many bytes an entry, and one gradient two."""
    if not self.gated:
      return []
    size = 2 * 2 * self.weight * (operand + self.wide)
    return [Part('joined operands, split dW', self.moved(costs.COPY, size))]


def _product(card: _Card, layers: dict[str, LayerGain], name: str, role: str) -> Part:
  """Gate and up-projection together, on what was chosen for each; twice one of them if nothing near was measured.

  Where both were, on an H100, the joined product took 0.7 to 1.06 times as long as two, 1.0 in the median.
  """
  (found,) = (r for r in layers[name].roles if r.role == role)
  ms = found.product_ms
  if card.gated and name == 'up':
    sizes = card.device, role, card.tokens, card.d, 2 * card.hidden
    times = fp8_times.product_ms(*sizes) if card.in_fp8 else fp8_times.product_16_ms(*sizes, card.dtype.name)
    ms = times.get('dense' if found.chosen == 'dense_fp8' else found.chosen, None if ms is None else 2 * ms)
  return Part(f'{ {"forward": "y", "input_grad": "dx", "weight_grad": "dW"}[role]} of {name}', ms)


def _fused_fp8(card: _Card, layers: dict[str, LayerGain]) -> list[Part]:
  """The chain of `fp8.ffn8`."""
  device, wide = card.device, card.wide
  if card.gated:
    largest = card.moved(f'{card.backward}_amax', (card.h + card.z) * wide)
  else:
    largest = fp8_times.amax_ms(device, card.h, wide)  # the derivative is bounded
  made = (card.h + card.z) * wide + card.z * fp8_times.PACKED
  return [
    Part('x rounded', fp8_times.rounding_ms(device, card.x, wide)),
    *card.joins(fp8_times.PACKED),
    _product(card, layers, 'up', 'forward'),
    *card.forward_pass(),
    Part('h rounded', fp8_times.rounding_ms(device, card.h, wide)),
    _product(card, layers, 'down', 'forward'),
    Part('dy sampled and rounded', fp8_times.sample_ms(device, card.x, wide)),
    _product(card, layers, 'down', 'weight_grad'),
    _product(card, layers, 'down', 'input_grad'),
    Part('largest of dz', largest),
    Part('dz sampled and rounded', card.moved(f'{card.backward}_pack8', made)),
    _product(card, layers, 'up', 'weight_grad'),
    _product(card, layers, 'up', 'input_grad'),
  ]


def _fused(card: _Card, layers: dict[str, LayerGain]) -> list[Part]:
  """The chain of `ffn`."""
  operand = card.wide / 2 + 1 / 8
  made = (card.h + 2 * card.z) * card.wide + card.z * operand
  return [
    *card.joins(2 * operand),
    _product(card, layers, 'up', 'forward'),
    *card.forward_pass(),
    _product(card, layers, 'down', 'forward'),
    Part('dy sampled', card.moved('mvue_pack_axis-2', card.x * (card.wide + operand))),
    _product(card, layers, 'down', 'weight_grad'),
    _product(card, layers, 'down', 'input_grad'),
    Part('dz, and sampled', card.moved(f'{card.backward}_pack_axis-1', made)),
    _product(card, layers, 'up', 'weight_grad'),
    _product(card, layers, 'up', 'input_grad'),
  ]


def _composed(card: _Card, layers: dict[str, LayerGain]) -> list[Part]:
  """Of `dot`s, XLA's passes between them."""
  parts = [Part(f'{r.role} of {name}', r.expected_ms) for name, layer in layers.items() for r in layer.roles]
  return parts + _activation_by_xla(card, layers['up'].roles[0].chosen == 'dense')


def _dense(card: _Card, layers: dict[str, LayerGain]) -> list[Part]:
  parts = [Part(f'{r.role} of {name}', r.dense_ms) for name, layer in layers.items() for r in layer.roles]
  return parts + _activation_by_xla(card, True)


def _dense_fp8(card: _Card, layers: dict[str, LayerGain]) -> list[Part]:
  """All operands both ways round; XLA finds the largest magnitude of h and dz in the passes that make them."""
  device, wide = card.device, card.wide
  weight = fp8_times.rounding_ms(device, card.weight, card.weight_wide)
  return [
    *(Part(f'{r.role} of {name}', r.dense_fp8_ms) for name, layer in layers.items() for r in layer.roles),
    Part('rounded weights', None if weight is None else len(layers) * weight),
    Part('x and dy rounded', total([fp8_times.rounding_ms(device, card.x, wide)] * 2)),
    Part('h and dz rounded', total(fp8_times.both_ways_ms(device, n, wide) for n in (card.h, card.z))),
    *_activation_by_xla(card, False),
  ]


def _activation_by_xla(card: _Card, in_product: bool) -> list[Part]:
  """The activation forward and backward, and with a gate the sum of two gradients of x.

  Without a gate XLA makes h `in_product`, a dense one of 16 bits, and once more beside dz.
  """
  if in_product and not card.gated:
    size = 4 * card.h
  else:
    size = (card.z + card.h) + (card.h + 2 * card.z) + (3 * card.x if card.gated else 0)
  return [Part('h and dz', card.moved(costs.COPY, size * card.wide))]


def block_table(block: BlockGain, *, parts: bool = False) -> str:
  """A block's gain as a line of text, with `parts` all of its parts below."""

  def ms(value: float | None) -> str:
    return '-' if value is None else f'{value:.2f} ms'

  def ratio(value: float | None) -> str:
    return '-' if value is None else f'{value:.2f}x'

  line = f'one block: {ms(block.expected_ms)} as chosen, {ms(block.dense_ms)} dense, {ratio(block.gain)}'
  if block.dense_fp8:
    line += f'; {ms(block.dense_fp8_ms)} dense in FP8, {ratio(block.gain_over_fp8)}'
  line += f'; {block.packed_bytes / 2**20:.0f} MB packed'
  if block.saved_bytes:
    line += f', x and h kept in 8 bits: {block.saved_bytes / 2**20:.0f} MB less'
  if not parts:
    return line
  return '\n'.join([line, *_listed('as chosen', block.chosen), *_listed('dense', block.dense),
                    *_listed('dense in FP8', block.dense_fp8)])  # fmt: skip


def _listed(title: str, parts: Sequence[Part]) -> list[str]:
  lines = [f'  {part.name:28} {"-" if part.ms is None else f"{part.ms:.3f}":>8}' for part in parts]
  return [f' {title}, ms:', *lines] if parts else []
