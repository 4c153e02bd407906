"""The activations' kernels, checked and timed: `python -m pallas_kernels bench gated_activation`."""

import concurrent.futures
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _passes, _triton
from pallas_kernels._passes import difference, differing
from pallas_kernels.gated_activation import arg_specs
from pallas_kernels.gated_activation import reference as gated_reference
from pallas_kernels.gated_activation.arg_specs import E5M2, F32, ORIGIN
from pallas_kernels.pack import reference

gated = _triton.kernels('pallas_kernels.gated_activation.triton')
BF16 = jnp.bfloat16


def check() -> list[dict[str, Any]]:
  """Every kernel against the reference on the GPU."""
  kinds = [('silu', True), ('gelu', True), ('gelu', False), ('squared_relu', False)]
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    return [*pool.map(_compared, kinds), *pool.map(_compared8, [('silu', True), ('gelu', False)])]


def _compared(job: tuple[str, bool]) -> dict[str, Any]:
  name, gate = job
  features, tokens = 512, 260
  dh = jax.random.normal(jax.random.key(0), (tokens, features), BF16)
  z = 2 * jax.random.normal(jax.random.key(1), (tokens, features * (2 if gate else 1)), BF16)
  options, key = dict(activation=name, gated=gate), jax.random.key(2)
  dz, operand = gated.activation_backward_pack(dh, z, key, origin=(0, 0, 0), **options)
  pick = functools.partial(reference.mvue_pack, axis=-2, origin=(0, 0, 0), dtype=BF16)
  counts = differing(operand, jax.jit(pick)(dz, key))
  error = difference(dz, gated_reference.activation_backward(dh, z, **options))
  return dict(op='activation_backward_pack', **options, differing=counts, error=error)


def _compared8(job: tuple[str, bool]) -> dict[str, Any]:
  name, gate = job
  features, tokens = 512, 260
  dh = jax.random.normal(jax.random.key(0), (tokens, features), BF16)
  z = 2 * jax.random.normal(jax.random.key(1), (tokens, features * (2 if gate else 1)), BF16)
  options, key, scale = dict(activation=name, gated=gate), jax.random.key(2), F32(5000)
  made = jax.jit(functools.partial(gated.activation_backward_pack8, dtype=E5M2, **ORIGIN, **options))(
    dh, z, key, scale
  )  # fmt: skip
  dz, _ = gated.activation_backward_pack(dh, z, key, **ORIGIN, **options)
  pick = functools.partial(reference.mvue_pack8, axis=-2, dtype=E5M2, **ORIGIN)
  counts = differing(made, jax.jit(pick)(dz, key, scale))
  return dict(op='activation_backward_pack8', **options, differing=counts)


OP = _passes.Op('gated_activation', arg_specs.cases, check)
arguments = _passes.bench_arguments
run = functools.partial(_passes.bench, OP)
