"""Expected time of a feed-forward block, forward and backward, part by part: sparse as chosen, dense, dense in FP8."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sparse24_jax.availability import priced_on
from sparse24_jax.block_plan import BlockPlan, may_end, plan_block
from sparse24_jax.neuron_plan import plan_neurons, priced_neurons
from sparse24_jax.policy import ActivationPolicy
from sparse24_jax.priced import BlockGain, Part, priced
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import match_rules
from sparse24_jax.steps import total
from sparse24_jax.weight_errors import errors_name
from sparse24_jax.where_it_pays import require_positive, require_timed


def block_gain(
  d: int, hidden: int, recipe: Recipe, *, tokens: int, micro_batches: int = 1, gated: bool = False,
  dtype: Any = jnp.bfloat16, weight_dtype: Any = jnp.bfloat16, device: str | None = None,
) -> BlockGain:  # fmt: skip
  """Expected times of `ffn` on a GPU under a recipe that fits all of its weights.

  Matmuls are those of `where_it_pays`; what stands between them are passes over memory, at the bandwidth that was
  measured of each, and of XLA's own at that of a copy. The block runs fused where `ffn` fuses it; gate and
  up-projection are then one matmul. Not modelled: what an activation and its second result add to a matmul whose
  epilogue makes them, XLA's projection of weights whose matmul stays dense in 16 bits, and the lower clock of a GPU
  that is kept busy. Where FP8 would be simulated, nothing is expected.

  A recipe with sparse activations has the squared-ReLU block, which stays dense where its kernels are not known to pay;
  `why_dense` says why. It packs its weights in every micro-batch and takes them in `dtype` only, so `micro_batches` and
  `weight_dtype` change nothing. A cast of weights that are stored in another dtype is not counted, nor is it in the
  dense block.

  `docs/speed.md` says how near these gains come to measured ones.

  Args:
    d: width of the model.
    hidden: width of the hidden layer.
    recipe: its rules must fit paths such as 'up/kernel' and 'down/kernel'.
    tokens: of a micro-batch on one device.
    micro_batches: of an optimizer step, which share its packing of weights.
    gated: SwiGLU instead of GELU; what an activation computes does not matter to a pass over memory.
    dtype: of activations.
    weight_dtype: of what is packed.
    device: folder of the records, as in `where_it_pays`.

  Raises:
    ValueError: as `where_it_pays`, but for sparse activations, which have no gate; or the weights of the block have
      several policies, of activations too.

  >>> import sparse24_jax as s24
  >>> recipe = s24.recipes.transposable_srste('.*', masked_decay=1e-4)
  >>> block = s24.block_gain(4096, 16384, recipe, tokens=16384, device='nvidia_h100_80gb_hbm3')
  >>> block.gain > 1.4, block.chosen[-1].name
  (True, 'dx of up')
  """
  require_positive(d=d, hidden=hidden, tokens=tokens, micro_batches=micro_batches)
  on = priced_on(device)
  sides = {'up': (d, hidden), 'down': (hidden, d)} | ({'gate': (d, hidden)} if gated else {})
  params = {name: {'kernel': jax.ShapeDtypeStruct(side, weight_dtype)} for name, side in sides.items()}
  rules = match_rules(params, recipe)
  activations = {path: rules[path].activation if path in rules else None for path in ('up/kernel', 'down/kernel')}
  if any(rule.activation is not None for rule in rules.values()):
    if gated:
      raise ValueError(f'{recipe.name} makes the activations of a squared-ReLU block sparse, which has no gate')
    # What `neuron_level_ffn` runs in the sparse phase; it packs its weights in every micro-batch.
    return priced_neurons(plan_neurons(_shared(activations, recipe), tokens, d, hidden, dtype, on=on), on.device.slug)
  policies = {path.split('/')[0]: rule.policy for path, rule in rules.items() if rule.policy.projection is not None}
  if missing := sorted(sides.keys() - policies.keys()):
    raise ValueError(
      f'{recipe.name} makes no sparse weight of {", ".join(f"{name}/kernel" for name in missing)}; block_gain takes a'
      ' recipe whose rules fit all weights of the block'
    )
  policy = policies['up']
  down = policies['down']
  if others := [name for name in sides if policies[name] != policy and not (name == 'down' and may_end(down, policy))]:
    raise ValueError(
      f'{recipe.name} has another policy for up/kernel than for {", ".join(f"{name}/kernel" for name in others)}; a'
      ' block runs by one, so price its layers by where_it_pays'
    )
  require_timed('up/kernel', policy)
  with errors_name(*(f'{name}/kernel' for name in sides)):
    plan = plan_block(policy.of_matrix, tokens, sides, dtype, down=down.of_matrix, on=on)
  return price_block(plan, jnp.dtype(weight_dtype).itemsize, micro_batches, on.device.slug)


def price_block(plan: BlockPlan, stored: int, micro_batches: int, device: str) -> BlockGain:
  """The times of a block by the records of a GPU; its weights, of `stored` bytes an entry, are packed once a step."""
  packed = [layer.packing(stored).expected_ms(device) for layer in plan.layers.values()]
  packing = Part('packed weights', total(None if ms is None else ms / micro_batches for ms in packed))
  chosen, dense, dense_fp8 = (priced(of, device) for of in (plan.steps, plan.dense_steps, plan.rival_steps(stored)))
  return BlockGain(
    (packing, *chosen), dense, dense_fp8, plan.packed_bytes, plan.saved_bytes, plan.plain, plan.simulated
  )


def _shared(activations: Mapping[str, ActivationPolicy | None], recipe: Recipe) -> ActivationPolicy:
  """The one activation policy of all weights of a block, which are named by their paths."""
  policy, *others = activations.values()
  if policy is None or any(other != policy for other in others):
    found = '; '.join(f'{path} has {policy or "none"}' for path, policy in activations.items())
    raise ValueError(
      f'{recipe.name} has not one activation policy for the weights of the block: {found}; a block runs by one, so give'
      ' the rules of both weights the same, as recipes.neuron_level does'
    )
  return policy


BLOCK_LEGEND = (
  'The block is its layers, forward and backward, with what stands between them, which goes into the matmuls where they'
  ' are fused. sparse: as the recipe runs it in its sparse steps, with all packing; dense: in bfloat16; dense FP8: with'
  ' the rounding of all operands. Each matmul stands with its kernel: a sparse one, such as mosaic_gpu, or dense.'
)


def block_table(block: BlockGain) -> str:
  """A block's times as a line of text, and what it takes of memory."""

  def ms(value: float | None) -> str:
    return '-' if value is None else f'{value:.2f} ms'

  fp8 = f', {ms(block.dense_fp8_ms)} dense FP8' if block.dense_fp8 else ''
  line = f'one block: {ms(block.expected_ms)} sparse, {ms(block.dense_ms)} dense{fp8}'
  line += f'; {block.packed_bytes / 2**20:.0f} MB of packed weights'
  return line + (f'; x and h in 8 bits save {block.saved_bytes / 2**20:.0f} MB' if block.saved_bytes else '')


def verdict(block: BlockGain, exact: float | None = None) -> str:
  """What the times of a block come to, in a sentence or two; `exact` is the gain with exact weight gradients.

  >>> print(verdict(BlockGain((Part('all', 1.0),), (Part('all', 1.25),), (), 0, 0)))
  Sparse, these layers are expected to run 1.25 times faster than dense bfloat16.
  >>> print(verdict(BlockGain((Part('all', 1.0),), (Part('all', 0.9),), (), 0, 0)))
  Sparse, these layers are expected to run slower than dense bfloat16 (0.90 times as fast): train them in dense
  bfloat16.
  """
  if block.why_dense is not None:
    return f'These layers stay dense: {block.why_dense}.'
  if block.simulated is not None:
    return f'How fast these layers run is not known: FP8 would be simulated: {block.simulated}.'
  if block.gain is None:
    return 'How fast these layers run sparse is not known: nothing near them was measured.'
  rivals = {'dense bfloat16': block.gain, 'dense FP8': block.gain_over_fp8}
  gains = {rival: round(gain, 2) for rival, gain in rivals.items() if gain is not None}
  said = f'Sparse, these layers are expected to run {" and ".join(_compared(gains[rival], rival) for rival in gains)}'
  if exact is not None and round(exact, 2) > max(round(block.gain, 2), 1):
    return f"{said}. With exact weight gradients, weight_grad='dense', {_compared(round(exact, 2), 'dense bfloat16')}."
  fastest = min(gains, key=gains.__getitem__)
  return f'{said}: train them in {fastest}.' if gains[fastest] < 1 else f'{said}.'


def _compared(gain: float, rival: str) -> str:
  if gain == 1:
    return f'as fast as {rival}'
  return f'{gain:.2f} times faster than {rival}' if gain > 1 else f'slower than {rival} ({gain:.2f} times as fast)'


def explain(block: BlockGain) -> str:
  """What runs for a block, in order, with expected milliseconds and what it keeps; then the matmuls of dense twins.

  >>> parts = Part('packed weights', 0.5), Part('y of up', 1.5, 'mosaic_gpu', kept=2**29)
  >>> print(explain(BlockGain(parts, (), (), 0, 0)))
   sparse, ms:
    packed weights                               0.500
    y of up                      mosaic_gpu      1.500  keeps 512 MB
  """
  chains = {'sparse': block.chosen, 'dense': block.dense, 'dense in FP8': block.dense_fp8}
  lines = []
  for title, parts in chains.items():
    lines += [f' {title}, ms:'] if parts else []
    lines += [f'  {p.name:28} {p.by:12} {"-" if p.ms is None else f"{p.ms:.3f}":>8}{_notes(p)}' for p in parts]
  return '\n'.join(lines)


def _notes(part: Part) -> str:
  kept = f'  keeps {part.kept / 2**20:.0f} MB' if part.kept else ''
  return kept if part.checked is None else f'{kept}  checked here: {part.checked:.2f} times dense'
