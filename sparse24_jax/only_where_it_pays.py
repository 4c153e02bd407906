"""A recipe without the layers that a GPU is expected to run slower sparse than dense."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
import dataclasses
import logging
from typing import Any, NamedTuple

import jax.numpy as jnp

from sparse24_jax.availability import log_once
from sparse24_jax.block_gain import block_gain
from sparse24_jax.block_plan import may_end
from sparse24_jax.policy import DotPolicy
from sparse24_jax.recipe import Recipe, Rule
from sparse24_jax.rules import keep_dense, leaves_by_path, listed, match_rules
from sparse24_jax.where_it_pays import LayerGain, where_it_pays


def only_where_it_pays(
  params: Any, recipe: Recipe, *, tokens: int, micro_batches: int = 1, dtype: Any = jnp.bfloat16,
  device: str | None = None,
) -> Recipe:  # fmt: skip
  """`recipe` with a rule in front that keeps dense what would be slower sparse.

  A recipe says what is trained, and so runs as it is, also where that is slower: nothing exchanges its sampled
  gradients for exact ones in silence. This leaves layers out once, before training, by the records of a GPU. Which
  ones is then a part of the recipe and of its description, and stays the same wherever the run goes on.

  A layer or block is kept if one of its matmuls or passes has no record near it, since then no time can be expected; a
  warning says so once.
  Blocks with sparse activations are kept too: they choose for themselves.

  Layers of one feed-forward block are counted together, see `block_gain`, all others alone, see `where_it_pays`. A
  recipe that `bind` made knows the blocks; one whose gate and up are one weight is counted by its layers. For a recipe
  by itself, layers are a block if they stand in one module and have one policy, and if they are all of it that
  map d features to h or h to d: one back, `down`, and one or two there, `up` and `gate`. Shapes tell no more: query and
  output projections of attention, 1024 x 2048 and 2048 x 1024 in one module, count as a block then. Layers that no
  kernel serves are counted alone.

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
  counted = dict(tokens=tokens, micro_batches=micro_batches, dtype=dtype, device=device)
  layers = {layer.path: layer for layer in where_it_pays(params, keep_dense(params, recipe, choosing), **counted)}
  policies = {path: rules[path].policy.of_matrix for path in layers}
  known = recipe.blocks
  blocks = _by_shapes(layers, policies) if known is None else _as_bound(known, layers)
  slow, unknown = set(), set()
  for block in blocks:
    first = block.paths[0]
    of_block = Recipe(recipe.name, (Rule('down/.*', policies[block.down]), Rule('.*', policies[first])))
    gated, weight_dtype = len(block.paths) == 3, stored[first]
    gain = block_gain(block.d, block.hidden, of_block, gated=gated, weight_dtype=weight_dtype, **counted).gain
    slow |= set(block.paths) if gain is not None and gain < 1 else set()
    unknown |= set(block.paths) if gain is None else set()
  alone = layers.keys() - {path for block in blocks for path in block.paths}
  slow |= {path for path in alone if (gain := layers[path].gain) is not None and gain < 1}
  unknown |= {path for path in alone if layers[path].gain is None and layers[path].plain is None}
  if unknown:
    log_once(
      f'{listed(sorted(unknown))}: left as the recipe has them, since nothing near them was measured on'
      f' {device or "this machine"}. device= takes the records of another GPU', level=logging.WARNING,
    )  # fmt: skip
  return keep_dense(params, recipe, [path for path in layers if path in slow])


class _Block(NamedTuple):
  """Layers that are priced as one: d features to `hidden` and back."""

  d: int
  hidden: int
  paths: tuple[str, ...]
  down: str  # the last of them


def _as_bound(blocks: Iterable[Mapping[str, str]], layers: Mapping[str, LayerGain]) -> list[_Block]:
  """The blocks that `bind` found."""
  found = []
  for paths in blocks:
    shapes = {role: layers[path].shape for role, path in paths.items() if path in layers}
    if shapes.keys() != paths.keys() or 'up' not in shapes or any(layers[path].plain for path in paths.values()):
      continue
    if shapes['down'] == shapes['up'][::-1]:
      in_order = sorted(paths.values(), key=lambda path: path == paths['down'])
      found.append(_Block(*shapes['up'], tuple(in_order), paths['down']))
  return found


def _by_shapes(layers: Mapping[str, LayerGain], policies: Mapping[str, DotPolicy]) -> list[_Block]:
  """What must be blocks, by the shapes of the layers of a module."""
  together = defaultdict(list)
  for path, layer in layers.items():
    # The last of a block may have an exact gradient where the others are sampled.
    policy = dataclasses.replace(policies[path], weight_grad='dense')
    together[tuple(path.split('/')[:-2]), policy, tuple(sorted(layer.shape))].append(path)
  found = []
  for paths in together.values():
    shapes = Counter(layers[path].shape for path in paths)
    d, hidden = min(shapes)
    up_and_down = shapes in ({(d, hidden): 1, (hidden, d): 1}, {(d, hidden): 2, (hidden, d): 1})
    if not (d < hidden and up_and_down) or any(layers[path].plain for path in paths):
      continue
    (down,) = (path for path in paths if layers[path].shape == (hidden, d))
    first = [path for path in paths if path != down]
    if len({policies[path] for path in first}) == 1 and may_end(policies[down], policies[first[0]]):
      found.append(_Block(d, hidden, (*first, down), down))
  return found
