"""A recipe without the layers that a GPU is expected to run slower sparse than dense."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from sparse24_jax.block_gain import block_gain
from sparse24_jax.policy import DotPolicy
from sparse24_jax.recipe import Recipe, Rule
from sparse24_jax.rules import keep_dense, leaves_by_path, match_rules
from sparse24_jax.where_it_pays import LayerGain, where_it_pays


def only_where_it_pays(
  params: Any, recipe: Recipe, *, tokens: int, micro_batches: int = 1, dtype: Any = jnp.bfloat16,
  device: str | None = None,
) -> Recipe:  # fmt: skip
  """`recipe` with a rule in front that keeps dense what would be slower sparse.

  A recipe says what is trained, and so runs as it is, also where that is slower: nothing exchanges its sampled
  gradients for exact ones in silence. This leaves layers out once, before training, by the records of a GPU. Which
  ones is then a part of the recipe and of its description, and stays the same wherever the run goes on.

  A layer or block is kept if one of its matmuls or passes has no record near it, since then no time can be expected.
  Blocks with sparse activations are kept too: they choose for themselves.

  Layers are taken for one feed-forward block, see `block_gain`, if they stand in one module and have one policy, and if
  they are all of it that map d features to h or h to d: one back, `down`, and one or two there, `up` and `gate`. Shapes
  tell no more: query and output projections of attention, 1024 x 2048 and 2048 x 1024 in one module, count as a block.
  All others are counted alone, see `where_it_pays`.

  Args:
    params: parameters, or their shapes (`jax.eval_shape` of the model's init).
    recipe: its rules select the layers; bound, unless they are kernels with two axes, see `where_it_pays`.
    tokens: of a micro-batch on one device.
    micro_batches: of an optimizer step. The more they are that share a packing of weights, the smaller is a block that
      pays.
    dtype: of activations.
    device: folder of the records, as in `where_it_pays`.

  Returns:
    The recipe itself if every layer pays.

  Raises:
    ValueError: as `where_it_pays`.

  >>> import jax, sparse24_jax as s24
  >>> kernel = lambda *shape: {'kernel': jax.ShapeDtypeStruct(shape, 'float32')}
  >>> params = {f'mlp_{d}': {'up': kernel(d, 4 * d), 'down': kernel(4 * d, d)} for d in (768, 4096)}
  >>> recipe = s24.recipes.transposable_srste('.*', masked_decay=1e-4)
  >>> faster = s24.only_where_it_pays(params, recipe, tokens=2048, device='nvidia_h100_80gb_hbm3')
  >>> [rule.path for rule in faster.rules]
  ['mlp_768/down/kernel|mlp_768/up/kernel', '.*']
  """
  rules = match_rules(params, recipe)
  choosing = [path for path, rule in rules.items() if rule.activation is not None]
  stored = {path: leaf.dtype for path, leaf in leaves_by_path(params) if path in rules}
  together = defaultdict(list)
  counted = dict(tokens=tokens, micro_batches=micro_batches, dtype=dtype, device=device)
  for layer in where_it_pays(params, keep_dense(params, recipe, choosing), **counted):
    parent = tuple(layer.path.split('/')[:-2])
    together[parent, rules[layer.path].policy, tuple(sorted(layer.shape))].append(layer)

  def gain(group: Sequence[LayerGain], policy: DotPolicy) -> float | None:
    if not _is_block(group):
      return group[0].gain
    d, hidden = min(layer.shape for layer in group)
    return block_gain(
      d, hidden, Recipe(recipe.name, (Rule('.*', policy),)), gated=len(group) == 3,
      weight_dtype=stored[group[0].path], **counted,
    ).gain  # fmt: skip

  slow = []
  for (_, policy, _), layers in together.items():
    for group in [layers] if _is_block(layers) else [[layer] for layer in layers]:
      expected = gain(group, policy)
      if expected is not None and expected < 1:
        slow += [layer.path for layer in group]
  return keep_dense(params, recipe, slow)


def _is_block(layers: Sequence[LayerGain]) -> bool:
  """Whether these are up, down and perhaps gate, all on kernels where the GPU has them: others are not fused."""
  shapes = Counter(layer.shape for layer in layers)
  d, hidden = min(shapes)
  up_and_down = shapes in ({(d, hidden): 1, (hidden, d): 1}, {(d, hidden): 2, (hidden, d): 1})
  return d < hidden and up_and_down and not any(layer.plain for layer in layers)
