"""`jax.jit` for tests in which compiling takes most of the time and what is compiled runs once or twice."""

import functools

import jax

OPTIONS = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
jit = functools.partial(jax.jit, compiler_options=OPTIONS)
