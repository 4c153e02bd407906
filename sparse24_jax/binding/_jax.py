"""The few things that the trace needs of JAX's own insides, and where versions differ."""

from collections.abc import Iterator, Sequence
import contextlib
import contextvars
import re
from typing import Any, NamedTuple

import jax
from jax._src import core, source_info_util
from jax._src.interpreters import partial_eval
from jax.extend import core as jex


def programs() -> Iterator[Any]:
  """The programs being traced here, from the inside out; a branch of a `cond` counts by itself.

  Derivatives and batches are a part of what they are in.
  """
  trace = core.trace_ctx.trace
  while (outer := getattr(trace, 'parent_trace', None)) is not None:
    if isinstance(trace, partial_eval.DynamicJaxprTrace):
      yield trace
    trace = outer
  yield trace


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
  """The equations of a jaxpr, closed or not, and its constants."""
  return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, 'jaxpr') and hasattr(jaxpr, 'consts') else (jaxpr, ())


def equations_of(jaxpr: Any) -> Iterator[Any]:
  """All equations of a jaxpr, those inside of others too."""
  for equation in open_jaxpr(jaxpr)[0].eqns:
    yield equation
    for param in equation.params.values():
      for inner in param if isinstance(param, tuple | list) else (param,):
        if hasattr(open_jaxpr(inner)[0], 'eqns'):
          yield from equations_of(inner)


def is_literal(atom: Any) -> bool:
  return isinstance(atom, jex.Literal)


def variable(shape: Sequence[int], dtype: Any) -> Any:
  """The result of an equation that is written here."""
  return jex.Var(jax.core.ShapedArray(tuple(shape), dtype))


def is_drop(variable: Any) -> bool:
  return isinstance(variable, jex.DropVar)


MATMULS = ('dot_general', 'ragged_dot_general', 'conv_general_dilated')
# What hands on its operand as it is: on another device, divided in another way, or varying over other axes.
MOVES = ('copy', 'copy_p', 'device_put', 'mesh_cast', 'pcast', 'pvary', 'reshard', 'sharding_constraint')


def rebind(equation: Any, arrays: Sequence[Any]) -> list[Any]:
  """Runs an equation on other arguments, under its own names and settings."""
  params = equation.primitive.get_bind_params(equation.params)
  with under(equation):
    out = equation.primitive.bind(*arrays, **params)
  return list(out) if equation.primitive.multiple_results else [out]


_enclosing: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar('enclosing', default=())


@contextlib.contextmanager
def inside(equation: Any) -> Iterator[None]:
  """What has no source line here has that of an equation: a call, a loop."""
  token = _enclosing.set((*_enclosing.get(), equation))
  try:
    yield
  finally:
    _enclosing.reset(token)


@contextlib.contextmanager
def under(equation: Any) -> Iterator[None]:
  """Operations are traced here with the names, the source line and the settings of an equation."""
  info = equation.source_info
  names = source_info_util.current_name_stack() + info.name_stack
  with inside(equation), source_info_util.user_context(info.traceback, name_stack=names), equation.ctx.manager:
    yield


# Ops of this library that are traced once for layers that are alike: their lines are those of the first call.
_TRACED_ONCE = ('_sparse24_dot', '_sparse24_ffn')
# Libraries whose layers call matmuls on behalf of a model.
_IN_A_LIBRARY = re.compile(r'-packages[/\\](flax|equinox|jaxtyping)[/\\]')


def source_of(equation: Any) -> str:
  """`file.py:12:4 (function)` of the model's line that made an equation.

  JAX's own functions may keep none of what they are made of: then of the call. So it is asked for where the call is
  followed (`inside`), and not later.
  """
  of_a_library, calls = None, [equation, *reversed(_enclosing.get())]
  ops = (i for i, call in enumerate(calls) if name_of(call) == 'jit' and call.params['name'] in _TRACED_ONCE)
  for call in calls[max(ops, default=0) :]:
    for frame in source_info_util.user_frames(call.source_info.traceback):
      line = f'{frame.file_name}:{frame.start_line}:{frame.start_column} ({frame.function_name})'
      if not _IN_A_LIBRARY.search(line):
        return line
      of_a_library = of_a_library or line
  return of_a_library or 'an unknown line'


def is_backward(equation: Any) -> bool:
  """Whether an equation, or a call around it, is of a backward pass in the function itself."""
  names = (name for call in (equation, *_enclosing.get()) for name in call.source_info.name_stack.stack)
  return any(isinstance(name, source_info_util.Transform) and name.name == 'transpose' for name in names)


def scan_parts(params: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
  """What goes into a scan: constants, what is carried, what is scanned over."""
  constants, carried, scanned = params['ft_in'].update(values).unpack()
  return list(constants), list(carried), list(scanned)


class ShardMap(NamedTuple):
  """What a `shard_map` was called with, and its jaxpr."""

  jaxpr: Any
  mesh: Any
  in_specs: Sequence[Any]
  out_specs: Sequence[Any]
  axis_names: frozenset[str]
  check_vma: bool


def shard_map_parts(params: Any) -> ShardMap:
  names = frozenset(params['newly_manual_axes'] if 'newly_manual_axes' in params else params['manual_axes'])
  return ShardMap(
    params['jaxpr'], params['mesh'], params['in_specs'], params['out_specs'], names, params['check_vma']
  )


def name_of(equation: Any) -> str:
  """The name of a primitive, the same in all versions of JAX."""
  name: str = equation.primitive.name
  return {'pjit': 'jit', 'closed_call': 'jit', 'core_call': 'jit', 'remat2': 'checkpoint', 'remat': 'checkpoint'}.get(
    name, name
  )


def is_fp8(variable: Any) -> bool:
  """Whether a variable of a jaxpr holds numbers of 8 bits."""
  return 'float8' in str(getattr(variable.aval, 'dtype', ''))


def checkpoint_name_of(equation: Any) -> str | None:
  """What `jax.ad_checkpoint.checkpoint_name` calls a value, if the equation is its; `jax_remat3` has it otherwise."""
  if equation.primitive.name == 'name':
    return equation.params['name']
  inner = equation.params.get('_prim')
  return inner.name if type(inner).__name__ == 'CheckpointName' else None
