"""Layers and blocks in FP8 for tests: what is drawn, which policies, which tolerances, and one call with gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import formats
from pallas_kernels.operand import from_operand
import sparse24_jax as s24
from sparse24_jax import linear_layer
from tests import oracles

BF16, F32 = jnp.bfloat16, jnp.float32
D, HIDDEN, OUT, TOKENS = 16, 64, 24, (2, 8)
SHAPES = {'up': (D, HIDDEN), 'down': (HIDDEN, OUT), 'gate': (D, HIDDEN)}
KEY = jax.random.key(7)
PROJECTION = s24.soft_threshold_projection()
SIMULATED = s24.DotPolicy(PROJECTION, weight_grad='mvue', precision='fp8', implementation='reference')
KERNELS = dataclasses.replace(SIMULATED, implementation='dense')  # their path, multiplied decompressed
TRANSPOSABLE = s24.transposable()
MASKED = dataclasses.replace(KERNELS, projection=TRANSPOSABLE, input_grad='sparse')
CHOOSES = dataclasses.replace(SIMULATED, implementation=None)
# One rounding of the result to bfloat16, and here and there a rounding that turned with the order of a sum.
TOLERANCE = 5e-3
# In a block such a turn goes on through matmuls, and in e5m2 it is a quarter of a number.
FLIPS = 1e-2
# Three bits of mantissa in e4m3, two in e5m2, after scales that are not those of the simulation.
NOISE = 0.15


def draw(seed: int, *shape: int, dtype=BF16):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def draw_weight(seed: int, *shape: int, dtype=BF16):
  """Draws numbers of few bits, so that the soft threshold's differences are exact."""
  return jnp.asarray(np.random.default_rng(seed).integers(-120, 121, shape) / 64, dtype)


def block(policy, activation, x, weights, biases, states, key):
  return s24.ffn(
    x, weights['up'], weights['down'], states, policy=policy, activation=activation, w_gate=weights.get('gate'),
    key=key, **{f'b_{role}': b for role, b in biases.items()},
  )  # fmt: skip


# Roundings to bfloat16 stay where they are written; casts to 8 bits are long code, which takes twice as long to compile
# optimised.
OPTIONS = {'xla_allow_excess_precision': False, 'xla_backend_optimization_level': 0}
jit = functools.partial(jax.jit, compiler_options=OPTIONS)


@functools.partial(jit, static_argnums=(0, 1))
def ffn_and_gradients(policy, activation, x, weights, biases, states, dy, key):
  y, vjp = jax.vjp(lambda x, w, b: block(policy, activation, x, w, b, states, key), x, weights, biases)
  return y, *vjp(dy)


@functools.partial(jit, static_argnums=0)
def dot_and_gradients(policy, x, w, state, dz, key):
  z, vjp = jax.vjp(lambda x, w: s24.dot(x, w, state, policy=policy, key=key), x, w)
  return z, *vjp(dz)


init = jax.jit(PROJECTION.init)
init_masks = jax.jit(TRANSPOSABLE.init)
pack_weight = jit(functools.partial(linear_layer.pack_weight, KERNELS, dtype=BF16))


def problem(*, gated: bool, biased: bool, tokens=TOKENS, init=init):
  """(x, weights, biases, states, cotangent of y)."""
  roles = ('up', 'down', 'gate') if gated else ('up', 'down')
  weights = {role: draw_weight(i, *SHAPES[role]) for i, role in enumerate(roles)}
  biases = {role: draw(10 + i, SHAPES[role][1]) for i, role in enumerate(roles)} if biased else {}
  states = {role: init(w) for role, w in weights.items()}
  return draw(20, *tokens, D), weights, biases, states, draw(21, *tokens, OUT)


def unpacked(packed: s24.PackedWeight) -> np.ndarray:
  """What the forward reads, float64 `[in, out]`, not scaled back."""
  return oracles.wide(formats.decompress(from_operand(packed.operand('forward')))).T
