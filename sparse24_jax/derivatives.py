"""Which derivatives a sparse matmul has: the first one, in reverse."""

from typing import Any

import jax


def once[T](operands: T) -> T:
  """What it is given; a gradient taken through it raises ValueError where it is differentiated again.

  Kernels and samples have no second derivative, and that of plain matmuls would not be straight through.
  """
  return _once(operands)


@jax.custom_jvp
def _once(operands: Any) -> Any:
  return operands


@_once.defjvp
def _twice(primals: Any, tangents: Any) -> Any:
  raise ValueError(
    'the gradient of a sparse matmul is differentiated again, and it has first derivatives only, by jax.grad and'
    ' jax.vjp: kernels and samples have no others. For a loss that holds a gradient differentiate the plain function at'
    ' s24.project(params, opt_state, recipe), which is straight through in every derivative, at dense speed. If the'
    ' inner gradient is a constant to the loss, as in FGSM, compute it before the loss, or give its inputs to'
    ' jax.lax.stop_gradient'
  )
