"""Kernels on arrays that a mesh divides: each device calls the kernel on its part, sums cross devices where they must.

XLA cannot look into a custom call, so by itself it would gather a divided array on every device before one. An op says
here what its arrays have in common (`Rule`), and from the shardings that its arguments turn out to have follow the part
of each device and what is summed:

* On meshes of automatic axes (`jax.jit` of arrays with a `NamedSharding`) shardings are known when XLA compiles:
  `jax.experimental.custom_partitioning`. On a single device that leaves the bare call. JAX names such a call in the
  program by an address of this process, so a program on several devices is not found again in JAX's persistent
  compilation cache; the option that leaves the address out of its keys takes different ops for one, and is refused.
* On meshes of explicit axes they are part of the types: `jax.shard_map` while tracing.
* Inside a `jax.shard_map` over all axes, and in a process with one device, arrays are whole: the bare call.
* On meshes with axes of both kinds `serves` says no, and callers take plain `jax.numpy`.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax._src import sharding_impls  # what reads a sharding of XLA back has no public name
from jax.experimental.custom_partitioning import (
  ArrayMapping,
  CompoundFactor,
  custom_partitioning,
  SdyShardingRule,
)
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels import _device
from pallas_kernels._dispatch import log_once

Array = jax.Array
# A factor's name and how many entries of the array's axis make one unit of it; None for an axis that is not divided.
Axis = tuple[str, int] | None


def serves(*arrays: Any) -> bool:
  """Whether kernels can be called on what is traced.

  Not where a `jax.shard_map` divides over some mesh axes only, nor where a mesh has explicit and automatic axes; of
  this the types of `arrays` tell if no mesh is set.
  """
  manual = jax.sharding.get_abstract_mesh().manual_axes
  return _device.arrays_are_whole() or not (manual or mixed(*arrays))


def mixed(*arrays: Any) -> bool:
  """Whether the mesh that is set, or one in the types of arrays, has explicit and automatic axes."""
  meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays)]
  kinds = (set(mesh.axis_types) for mesh in (jax.sharding.get_abstract_mesh(), *meshes))
  return any({AxisType.Explicit, AxisType.Auto} <= found for found in kinds)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Division:
  """How an array is divided where types say so; a tree without leaves, for residuals that lack the array itself."""

  sharding: NamedSharding | None


def division(x: Array) -> Division:
  """The `Division` of `x`."""
  return Division(None if _explicit_mesh([x]) is None else jax.typeof(x).sharding)


def whole(x: Array, first: int = 0) -> Array:
  """`x` with no axis from `first` on divided, where its type says that a mesh of explicit axes does; else as it is."""
  mesh = _explicit_mesh([x])
  if mesh is None:
    return x
  spec = (*jax.typeof(x).sharding.spec[:first], *(None,) * (x.ndim - first))
  return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))


def whole_groups(x: Array, axis: int, size: int = 4) -> Array:
  """`x` with `axis` whole where types say that devices have parts of its groups of `size`; else as it is.

  Of a mesh with explicit and automatic axes the types know the explicit ones, which is all that it takes.
  """
  sharding, axis = jax.typeof(x).sharding, axis % x.ndim
  mesh = sharding.mesh
  if AxisType.Explicit not in mesh.axis_types:
    return x
  if not sharding.shard_shape(x.shape)[axis] % size:
    return x
  log_once(f'shape {x.shape} is divided as {sharding.spec}, in parts of groups of {size}: axis {axis} is gathered')
  spec = _full(sharding.spec, x.ndim)
  return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec[:axis], None, *spec[axis + 1 :])))


def like(x: Array, other: Array | Division) -> Array:
  """`x` divided as `other` is, where types say how."""
  sharding = (other if isinstance(other, Division) else division(other)).sharding
  return x if sharding is None else jax.sharding.reshard(x, sharding)


def undivided(x: Any) -> str:
  """The description of an array that every device has whole."""
  return ' '.join('.' * jnp.ndim(x))


def axes(text: str) -> tuple[Axis, ...]:
  """'n k*64 .' to (('n', 1), ('k', 64), None)."""
  words = (word.partition('*') for word in text.split())
  return tuple(None if name == '.' else (name, int(size or 1)) for name, _, size in words)


@dataclasses.dataclass(frozen=True)
class Rule:
  """What the axes of an op's arrays have in common.

  An array is described by a string with a word for each axis: 'm k*32' has an axis of m and one of 32 k entries. A
  factor is divided in whole units only, and a mesh axis divides one factor only.

  Attributes:
    arguments: a description for each leaf of the arguments.
    results: one for each leaf of the results.
    order: factors, those first that keep their mesh axes when another wants the same. What is not named stays whole.
    sums: those of them that are summed over; the op adds what its devices have.
  """

  arguments: tuple[str, ...]
  results: tuple[str, ...]
  order: tuple[str, ...]
  sums: tuple[str, ...] = ()

  def units(self, shapes: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Units of each factor that can be divided: of which every array holds the same whole number, two or more."""
    found: dict[str, set[int | None]] = {}
    for text, shape in zip(self.arguments + self.results, [*shapes, *results], strict=True):
      for axis, size in zip(axes(text), shape, strict=True):
        if axis is not None:
          found.setdefault(axis[0], set()).add(None if size % axis[1] else size // axis[1])
    return {name: min(s) for name, s in found.items() if name in self.order and len(s) == 1 and not s & {None, 1}}


@dataclasses.dataclass(frozen=True)
class Shard:
  """The place of a device's part, given to an op's function beside its arrays.

  Attributes:
    divided: mesh axes that divide a factor, by its name.
    units: of each divided factor on this device.
  """

  divided: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  units: Mapping[str, int] = dataclasses.field(default_factory=dict)

  def offset(self, factor: str, unit: int = 1) -> Array | int:
    """The place where this device's part of a factor begins; `unit` of the offset's units make one of the factor's."""
    names = self.divided.get(factor, ())
    return jax.lax.axis_index(names) * (self.units[factor] * unit) if names else 0

  def sums(self, *factors: str) -> bool:
    """Whether one of these factors is divided, so that a sum over it is one over devices."""
    return any(self.divided.get(factor) for factor in factors)

  def count(self, factor: str) -> int:
    """How many devices have parts of a factor."""
    return jax.lax.axis_size(self.divided[factor]) if factor in self.divided else 1

  def sum(self, x: Any, *factors: str) -> Any:
    """`x` summed over the devices that have parts of these factors."""
    names = self._names(factors)
    return jax.lax.psum(x, names) if names else x

  def max(self, x: Any, *factors: str) -> Any:
    """The largest `x` of the devices that have parts of these factors."""
    names = self._names(factors)
    return jax.lax.pmax(x, names) if names else x

  def _names(self, factors: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for factor in factors for name in self.divided.get(factor, ()))


WHOLE = Shard()


@dataclasses.dataclass(frozen=True)
class _Call:
  """An op with everything static about it; hashable, so that compiled calls are found again."""

  op: str
  function: Callable[..., Any]
  options: tuple[tuple[str, Any], ...]
  rule: Rule
  tree: Any
  keys: tuple[Any, ...]

  def __call__(self, shard: Shard, *leaves: Array) -> Any:
    made = [x if k is None else jax.random.wrap_key_data(x, impl=k) for k, x in zip(self.keys, leaves, strict=True)]
    return self.function(shard, *jax.tree.unflatten(self.tree, made), **dict(self.options))


def partitioned(
  op: str, function: Callable[..., Any], rule: Rule, *args: Any, **options: Any
) -> Any:
  """`function(shard, *args, **options)`, on each device's part of the arrays if a mesh divides them.

  On a mesh, calls under `jax.vmap` follow one another.

  Args:
    op: its name, for messages.
    function: a function at the top of a module.
    rule: describes the leaves of `args` and of the result.
    *args: trees of arrays, and of typed random keys.
    **options: hashable.

  Raises:
    ValueError: JAX is told to find programs in its persistent cache without telling ops apart.
  """
  if not serves(*jax.tree.leaves(args)) or _device.arrays_are_whole():
    return function(WHOLE, *args, **options)
  leaves, tree = jax.tree.flatten(args)
  leaves = [x if hasattr(x, 'dtype') else jnp.asarray(x) for x in leaves]
  # A typed key is no array to XLA.
  keys = tuple(jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None for x in leaves)
  leaves = [x if k is None else jax.random.key_data(x) for k, x in zip(keys, leaves, strict=True)]
  texts = tuple(t if k is None else f'{t} .' for k, t in zip(keys, rule.arguments, strict=True))
  rule = dataclasses.replace(rule, arguments=texts)
  call = _Call(op, function, tuple(sorted(options.items())), rule, tree, keys)
  mesh = _explicit_mesh(leaves)
  if mesh is None and jax.config.jax_remove_custom_partitioning_ptr_from_cache_key:
    raise ValueError(
      f'{op}: the option jax_remove_custom_partitioning_ptr_from_cache_key is set, with which JAX takes different '
      "ops on a mesh for one and loads another's program from its persistent cache; unset it"
    )
  one = functools.partial(_when_compiled, call) if mesh is None else functools.partial(_by_types, call, mesh)
  return jax.custom_batching.sequential_vmap(one)(*leaves)


def _explicit_mesh(leaves: Sequence[Array]) -> Any:
  """The mesh whose axes are in the types of `leaves`, or None."""
  for leaf in leaves:
    mesh = jax.typeof(leaf).sharding.mesh
    if mesh.shape and mesh.are_all_axes_explicit:
      return mesh
  return None


def _divide(
  call: _Call, sizes: Mapping[str, int], units: Mapping[str, int], specs: Sequence[Sequence[Any]]
) -> dict[str, tuple[str, ...]]:
  """Mesh axes of each factor, from the shardings of the arguments and, after them, of results."""
  rule, found, taken = call.rule, {}, set()
  texts = (rule.arguments + rule.results)[: len(specs)]
  for factor in rule.order:
    wanted = next((w for t, s in zip(texts, specs, strict=True) if (w := _wanted(t, s, factor))), ())
    names = tuple(name for name in wanted if name not in taken) if factor in units else ()
    while names and units[factor] % math.prod(sizes[name] for name in names):
      names = names[:-1]
    lost = [name for name in wanted if name not in names and sizes[name] > 1]
    if lost:
      why = 'it does not fill its units'
      if set(lost) <= taken:
        why = 'they divide another of its factors'
      elif factor in units:
        why = f'its {units[factor]} units are no multiple of the devices'
      log_once(f'{call.op}: axes {lost} of the mesh do not divide {factor!r}, which is gathered: {why}')
    if names:
      found[factor] = names
      taken.update(names)
  return found


def _wanted(text: str, spec: Sequence[Any], factor: str) -> tuple[str, ...]:
  """Mesh axes that divide `factor` in an array of this sharding."""
  for axis, names in zip(axes(text), spec, strict=True):
    if axis is not None and axis[0] == factor and names:
      return (names,) if isinstance(names, str) else tuple(names)
  return ()


def _spec(text: str, divided: Mapping[str, tuple[str, ...]]) -> PartitionSpec:
  return PartitionSpec(*(None if axis is None else divided.get(axis[0]) for axis in axes(text)))


def _full(spec: Any, ndim: int) -> tuple[Any, ...]:
  return (*spec, *(None,) * (ndim - len(spec)))


def _shard(divided: Mapping[str, tuple[str, ...]], units: Mapping[str, int], sizes: Mapping[str, int]) -> Shard:
  return Shard(divided, {f: units[f] // math.prod(sizes[n] for n in names) for f, names in divided.items()})


def _by_types(call: _Call, mesh: Any, *leaves: Array) -> Any:
  """The op on a mesh of explicit axes."""
  out = _result(call, leaves)
  units = call.rule.units([x.shape for x in leaves], [x.shape for x in jax.tree.leaves(out)])
  specs = [_full(jax.typeof(x).sharding.spec, x.ndim) for x in leaves]
  sizes = dict(mesh.shape)
  divided = _divide(call, sizes, units, specs)
  in_specs = tuple(_spec(text, divided) for text in call.rule.arguments)
  out_specs = jax.tree.unflatten(jax.tree.structure(out), [_spec(text, divided) for text in call.rule.results])
  body = functools.partial(call, _shard(divided, units, sizes))
  mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
  return mapped(*(jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(leaves, in_specs, strict=True)))


def _result(call: _Call, leaves: Sequence[Array]) -> Any:
  """Shapes and dtypes of the op's results."""
  structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
  return jax.eval_shape(functools.partial(call, WHOLE), *structs)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _when_compiled(call: _Call, *leaves: Array) -> Any:
  """The op on a mesh of automatic axes, or on none."""
  out = _result(call, leaves)
  tree = jax.tree.structure(out)
  units = call.rule.units([x.shape for x in leaves], [x.shape for x in jax.tree.leaves(out)])

  def partition(mesh: Any, arguments: Sequence[Any], results: Sequence[Any]) -> Any:
    given = [x.sharding for x in (*arguments, *results)]
    if mesh.empty:
      log_once(f'{call.op}: no mesh is known, its arguments are gathered')
      whole = [sharding_impls.GSPMDSharding.get_replicated(s._device_assignment) for s in given]
      return mesh, flat(WHOLE), tuple(whole[len(arguments) :]), tuple(whole[: len(arguments)])
    sizes = dict(mesh.shape)
    specs = [_known(mesh, x) for x in (*arguments, *results)]
    divided = _divide(call, sizes, units, specs)
    taken, made = (
      tuple(NamedSharding(mesh, _spec(text, divided)) for text in texts)
      for texts in (call.rule.arguments, call.rule.results)
    )
    return mesh, flat(_shard(divided, units, sizes)), made, taken

  def flat(shard: Shard) -> Callable[..., tuple[Array, ...]]:
    def one(*leaves: Array) -> tuple[Array, ...]:
      # JAX traces this on the mesh that is set, and where its axes are explicit asks for shardings of a device's part.
      with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return tuple(jax.tree.leaves(call(shard, *leaves)))

    return one

  program = custom_partitioning(flat(WHOLE))
  program.def_partition(partition, sharding_rule=_shardy(call.rule, units), decode_shardings=False)
  return jax.tree.unflatten(tree, program(*leaves))


def _known(mesh: Any, x: Any) -> tuple[Any, ...]:
  """The mesh axes that divide each axis of an array; none if only a part of a mesh axis would.

  The partitioner divides an array of 12 tiles on a mesh axis of 8 by 4, a part of the axis that has no name. Such an
  array counts as not divided.
  """
  try:
    (spec,) = sharding_impls.parse_flatten_op_sharding(x.sharding._to_xla_hlo_sharding(len(x.shape)), mesh)
  except (KeyError, ValueError, NotImplementedError):
    log_once(f'shape {x.shape} would be divided by a part of an axis of the mesh {dict(mesh.shape)}: it stays whole')
    spec = ()
  return _full(spec, len(x.shape))


def _shardy(rule: Rule, units: Mapping[str, int]) -> SdyShardingRule:
  """The rule as the partitioner reads it: how shardings spread from an array to others."""
  sizes: dict[str, int] = {}
  fixed: list[str] = []
  whole: set[str] = set()

  def mapping(text: str) -> ArrayMapping:
    described = []
    for axis in axes(text):
      if axis is None or axis[0] not in units:
        fixed.append(f'x{len(fixed)}')
        described.append(fixed[-1])
      elif axis[1] == 1:
        whole.add(axis[0])
        described.append(axis[0])
      else:
        fixed.append(f'x{len(fixed)}')
        sizes[axis[0]], sizes[fixed[-1]] = units[axis[0]], axis[1]
        described.append(CompoundFactor(axis[0], fixed[-1]))
    return ArrayMapping(*described)

  arguments, results = tuple(map(mapping, rule.arguments)), tuple(map(mapping, rule.results))
  kept = {axis[0] for text in rule.results for axis in axes(text) if axis is not None}
  return SdyShardingRule(
    arguments, results, reduction_factors=tuple(f for f in rule.sums if f in units and f not in kept),
    need_replication_factors=tuple(fixed), **{f: n for f, n in sizes.items() if f not in whole},
  )  # fmt: skip
