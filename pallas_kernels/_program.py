"""Functions that are one program outside of a trace, and in one are traced once a shape."""

from collections.abc import Callable
import functools

import jax


def one_program[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Compiles calls with concrete arrays as a whole, once a shape; in a trace the operations stand where it is called.

  By itself JAX compiles each operation of a concrete call, and traces the function anew for each call in a trace, which
  both take longer.

  Args:
    *static: names of the arguments that are not arrays.

  >>> @one_program('n')
  ... def times(x: jax.Array, n: int) -> jax.Array:
  ...   return x * n
  >>> times(jax.numpy.ones(2), 3).tolist()
  [3.0, 3.0]
  """

  def decorate(f: Callable[P, R]) -> Callable[P, R]:
    program = jax.jit(f, static_argnames=static, inline=jax.Inline.JAX_EARLY)

    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
      return program(*args, **kwargs)

    return call

  return decorate
