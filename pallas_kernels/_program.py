"""Functions that are one program outside of a trace, and those that are traced once a shape."""

from collections.abc import Callable
import functools

import jax


def one_program[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Compiles calls with concrete arrays as a whole, once a shape; in a trace the function is called as it is.

  By itself JAX compiles each operation of such a call, which takes longer.

  Args:
    *static: names of the arguments that are not arrays.

  >>> @one_program('n')
  ... def times(x: jax.Array, n: int) -> jax.Array:
  ...   return x * n
  >>> times(jax.numpy.ones(2), 3).tolist()
  [3.0, 3.0]
  """

  def decorate(f: Callable[P, R]) -> Callable[P, R]:
    program = jax.jit(f, static_argnames=static, inline=True)

    @functools.wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
      traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs)))
      return f(*args, **kwargs) if traced else program(*args, **kwargs)

    return call

  return decorate


def traced_once[**P, R](*static: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Traces a function once a shape: concrete calls run it as one program, in a trace its operations are inlined.

  For functions that look at their arguments alone. What they read elsewhere, which GPU there is say, would stay as it
  was at the first trace of a shape; `one_program` reads it in each trace anew.

  Args:
    *static: names of the arguments that are not arrays.

  >>> @traced_once('n')
  ... def times(x: jax.Array, n: int) -> jax.Array:
  ...   return x * n
  >>> jax.make_jaxpr(times, static_argnums=1)(jax.numpy.ones(2), 3).eqns[0].primitive.name
  'mul'
  """
  return functools.partial(jax.jit, static_argnames=static, inline=jax.Inline.JAX_EARLY)
