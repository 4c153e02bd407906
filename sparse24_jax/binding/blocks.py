"""Finds feed-forward blocks: a matmul, its bias, an activation, perhaps a gate, and the matmul that reads the result.

What follows a matmul entry by entry is put off (`binding.values`). When it reaches the next matmul of a weight, it is
asked which activation it is (`binding.activations`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sparse24_jax.binding.activations import activations, Root, text_of
from sparse24_jax.binding.reading import Reading
from sparse24_jax.binding.values import Block, Columns, Elementwise, Matmul, Part, Value
from sparse24_jax.block_plan import may_end
from sparse24_jax.recipe import Rule

# One matmul gives both, the columns of the first in front.
PAIRS = ('gate_up', 'up_gate')


def by_itself(path: str, source: str) -> str:
  """What is wrong with a weight whose activations are to be sparse, and whose matmul at `source` is in no block."""
  return (
    f'{path}: the rule makes activations sparse, which takes one rule setting for all maps of a block, two matmuls'
    f' with a squared ReLU between them; found the matmul at {source} by itself'
  )


class Apart(NamedTuple):
  """Matmuls that look like a block, but are none: each is an op by itself.

  Attributes:
    maps: the matmuls.
    reason: what is in the way.
  """

  maps: Sequence[Matmul]
  reason: str


def find_block(down: Matmul) -> Block | Apart | None:
  """The block that ends with a matmul, or why the matmuls in front of it are none with it; None if there is none."""
  h = down.other
  if not h.waits:
    return None
  text, read = text_of(h)
  roots = list(dict.fromkeys(root.found for root in read))
  maps = (*roots, down)
  if not roots:
    return None
  if text is None or not 1 <= len(read) <= 2:
    return Apart(maps, 'more than an activation stands between the matmuls, another array or a third matmul')
  out = down.equation.invars[1 - down.side].aval
  x = roots[0].other
  if not all(root.whole for root in read):
    size, columns = roots[0].size, {root.columns for root in read}
    if columns == {Columns(0, size // 2, 2), Columns(1, size // 2, 2)}:
      return Apart(
        maps, 'gate and up are every second column of one weight, and groups of four neighbours hold both: store them'
        ' as halves of the columns, or as [in, 2, hidden]'
      )  # fmt: skip
    halves = {Columns(0, size // 2, 1), Columns(size // 2, size // 2, 1)}
    if len(roots) > 1 or columns != halves or {root.shape for root in read} != {out.shape}:
      return Apart(maps, 'of a matmul it takes some columns, and not one half as gate and the other as up')
  z = jax.ShapeDtypeStruct(read[0].shape, roots[0].equation.outvars[0].aval.dtype)
  if any(found.view.factors for found in maps):
    return Apart(maps, 'a weight of it is multiplied before its matmul')
  if any(root.other.array is not x.array or _of_other(root) != _of_other(roots[0]) for root in roots):
    return Apart(maps, 'gate and up read different arrays')
  if any(root.shape != z.shape for root in read) or z.shape != out.shape:
    return Apart(maps, f'hidden layers of shapes {z.shape} and {out.shape}')
  dtypes = [jnp.dtype(dtype).name for dtype in (x.array.dtype, *(m.dtype for m in roots), out.dtype, down.dtype)]
  if len(set(dtypes)) > 1:
    return Apart(maps, f'it is in several dtypes: {", ".join(dict.fromkeys(dtypes))}')
  found = activations(dtypes[0]).get(text)
  if found is None or len(found[1]) != len(read):
    return Apart(maps, 'what stands between the matmuls is not gelu, silu, relu or squared relu, gated or not')
  order = _order(read, down)
  if order is None:
    return Apart(maps, 'gate, up and the matmul that ends it have their tokens in different orders, or contract others')
  sharding, problem = _sharding(h, read, down)
  if problem is not None:
    return Apart(maps, problem)
  activation, roles = found
  if len(roots) < len(read):
    in_order = sorted(zip(read, roles, strict=True), key=lambda each: each[0].columns or (0, 0))
    return Block(activation, {'_'.join(role for _, role in in_order): roots[0]}, order, sharding)
  return Block(activation, dict(zip(roles, roots, strict=True)), order, sharding)


def _of_other(found: Matmul) -> tuple[Any, Any]:
  """Contracted and batch axes of the activations."""
  contract, batch = found.equation.params['dimension_numbers']
  return contract[1 - found.side], batch[1 - found.side]


def _order(read: Sequence[Root], down: Matmul) -> tuple[int, ...] | None:
  """The order in which the last matmul of a block reads the axes in front of the hidden layer.

  None if that matmul contracts other axes than columns, or takes the pieces of an axis apart.
  """
  lead = read[0].found.lead
  arranged = {root.view.arranged(root.found.lead) for root in read}
  contract, batch = _of_other(down)
  (axes,) = arranged if len(arranged) == 1 else (None,)
  if axes is None or any(axes[place] for place in contract) or any(root.found.side == 0 for root in read):
    return None
  places = (*batch, *(i for i in range(len(axes)) if i not in batch and i not in contract))
  runs = [run for place in places for run in axes[place]]
  shape, joined = read[0].found.result.shape, []
  while runs:
    run, size = runs[0], 1
    # An axis in several pieces, the outer ones first.
    while runs and runs[0].axis == run.axis and runs[0].stride * runs[0].size * size == shape[run.axis]:
      size *= runs.pop(0).size
    if size != shape[run.axis]:
      return None
    joined.append(run.axis)
  kept = [axis for axis in range(lead) if shape[axis] > 1]
  return tuple(kept.index(axis) for axis in joined)


def _sharding(h: Value, read: Sequence[Root], down: Matmul) -> tuple[Any, str | None]:
  """How the model says that a hidden layer is divided, or None; and what keeps a block from saying so."""
  made = [each for each in _waited_for([h]) if isinstance(each, Elementwise)]
  constraints = [each.equation.params for each in made if each.equation.primitive.name == 'sharding_constraint']
  constraints = [params for params in constraints if _places(params)]
  shardings = {params['sharding'] for params in constraints}
  if not shardings:
    return None, None
  contract, batch = _of_other(down)
  lead, result = read[0].found.lead, down.equation.invars[1 - down.side].aval
  axes = read[0].view.arranged(lead)
  in_order = axes is not None and len(axes) == lead + 1 and contract == (lead,)
  if axes is None or not in_order or any(run.axis != i for i, runs in enumerate(axes) for run in runs):
    return None, 'a sharding constraint on its hidden layer, whose axes are not those of its tokens and one of columns'
  if batch:
    return None, 'a sharding constraint on the hidden layer of several experts'
  if len(shardings) > 1:
    return None, f'several sharding constraints on its hidden layer {result.shape}: {", ".join(map(str, shardings))}'
  (sharding,) = shardings
  if not isinstance(sharding, jax.NamedSharding) or any(params.get('layout') for params in constraints):
    return None, f'a sharding constraint on its hidden layer that is no NamedSharding, {sharding}'
  return sharding, None


def _places(params: Mapping[str, Any]) -> bool:
  """Whether a sharding constraint divides or moves an array: one of one device does not, but for memory or layout."""
  sharding = params['sharding']
  if sharding.num_devices > 1 or params.get('layout'):
    return True
  kind = sharding.memory_kind
  return kind is not None and any(kind != device.default_memory().kind for device in sharding.device_set)


def _waited_for(values: Sequence[Value]) -> list[Matmul | Part | Elementwise]:
  """What was put off, and some values wait for."""
  found, known, left = [], set(), list(values)
  while left:
    value = left.pop()
    if id(value) in known or not value.waits or value.made_by is None:
      continue
    known.add(id(value))
    found.append(value.made_by)
    match value.made_by:
      case Part() as part:
        left.append(part.argument)
      case Elementwise() as made:
        left += made.arguments
  return found


def roots_of(values: Sequence[Value]) -> list[Matmul]:
  """The matmuls that some values wait for."""
  return [made for made in _waited_for(values) if isinstance(made, Matmul)]


def why_apart(
  maps: Mapping[str, tuple[Matmul, Reading]], block: Block, rules: Mapping[str, Rule]
) -> str | None:
  """Why a block that was found cannot be one op, by how its matmuls read their weights and by their rules, or None."""
  found, readings = [m for m, _ in maps.values()], [reading for _, reading in maps.values()]
  neurons, batches = {rule.activation for rule in rules.values()}, {reading.batch for reading in readings}
  policies = {role: rule.policy for role, rule in rules.items()}
  down = policies.pop('down')
  if not all(_is_plain_map(role, *each) for role, each in maps.items()):
    return 'a matmul of it has several axes in or out'
  if tuple(block.order[: len(maps['down'][1].batch)]) != tuple(range(len(maps['down'][1].batch))):
    return 'its experts are other ones in the matmul that ends it'
  if neurons != {None} and block.sharding is not None:
    return 'sparse activations do not take the sharding constraint of their hidden layer: leave it out on this mesh'
  if neurons != {None} and set(maps) & set(PAIRS):
    return 'sparse activations are made by blocks without a gate'
  if any(m.bias is not None and m.bias.shape != (reading.columns,) for m, reading in maps.values()):
    return 'its bias is none for each column'
  if len(batches) > 1 or (batches != {()} and any(m.bias is not None for m in found)):
    return 'its experts have biases, or only some of its weights are stacked'
  if any(m.equation.params.get('out_sharding') is not None for m in found):
    return 'a matmul of it asks for a sharding of its result'
  if len(neurons) > 1 or (neurons == {None} and not all(may_end(down, policy) for policy in policies.values())):
    return 'its weights have different policies'
  if neurons == {None} and len({m.asked for m in found}) > 1:
    return 'its matmuls ask for different precisions or dtypes of the result'
  return None


def _is_plain_map(role: str, found: Matmul, reading: Reading) -> bool:
  """Whether a matmul is x times one matrix; a pair may have an axis of two."""
  _, inputs, outputs = reading.axes
  if inputs != 1:
    return False
  return outputs == 1 or (role in PAIRS and reading.in_order)
