"""Which derivatives a sparse matmul has: the first one, in reverse."""

from typing import Any

import jax


def once[T](operands: T) -> T:
  """What it is given; ValueError where a gradient is differentiated that was made with it.

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
    ' s24.project(params, opt_state, recipe), which is straight through in every derivative, at dense speed. A gradient'
    ' that is only a number to the loss, as of FGSM, is taken in front of it, or of jax.lax.stop_gradient of all that'
    ' it depends on'
  )
