"""The activations' kernels, checked and timed: `python -m pallas_kernels bench gated_activation`."""

import concurrent.futures
import functools
from typing import Any

import jax

from pallas_kernels import _passes, _triton
from pallas_kernels._passes import difference, differing
from pallas_kernels.gated_activation import arg_specs
from pallas_kernels.gated_activation import reference as gated_reference
from pallas_kernels.gated_activation.arg_specs import BF16, E5M2, F32, ORIGIN
from pallas_kernels.pack import reference
from pallas_kernels.pack.reference import Packed

gated = _triton.kernels('pallas_kernels.gated_activation.triton')


def check() -> list[dict[str, Any]]:
  """Every kernel against the reference on the GPU."""
  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    return list(pool.map(_compared, [('silu', True), ('gelu', True), ('gelu', False), ('squared_relu', False)]))


def _compared(job: tuple[str, bool]) -> dict[str, Any]:
  name, gate = job
  features, tokens = 512, 260
  dh = jax.random.normal(jax.random.key(0), (tokens, features), BF16)
  z = 2 * jax.random.normal(jax.random.key(1), (tokens, features * (2 if gate else 1)), BF16)
  options, key = dict(activation=name, gated=gate), jax.random.key(2)

  def both(pack: Any, *args: jax.Array, **options: Any) -> tuple[Packed, Packed]:
    """In 16 bits, and in float8."""
    in_16_bits, in_float8 = (jax.jit(functools.partial(pack, dtype=d, **ORIGIN, **options)) for d in (BF16, E5M2))
    return in_16_bits(*args), in_float8(*args, F32(5000))

  made, made8 = both(gated.activation_backward_pack, dh, z, key, **options)
  # Exponentials round otherwise than XLA's; what is picked from their dz is exact.
  picked, picked8 = both(reference.mvue_pack, made.dense, key)
  counts = [*differing(made.operand, picked.operand), *differing(made8, picked8)]
  error = difference(made.dense, gated_reference.activation_backward(dh, z, **options))
  return dict(op='activation_backward_pack', **options, differing=counts, error=error)


OP = _passes.Op('gated_activation', arg_specs.cases, check)
arguments = _passes.bench_arguments
run = functools.partial(_passes.bench, OP)
