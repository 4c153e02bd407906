"""The feed-forward block that is timed: its cases, the library's form of it, and its dense twins in plain JAX."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

import sparse24_jax as s24

TINY = (64, 32, 128)
RECIPES = {
  'fst': s24.recipes.transposable_srste('.*', masked_decay=0.0),
  's_ste_fp8': s24.recipes.s_ste('.*', fp8=True),
  'fst_fp8': s24.recipes.transposable_srste('.*', masked_decay=0.0, fp8=True),
}
DENSE_FORMS = ('plain', 'features_first', 'recompute')


@dataclasses.dataclass(frozen=True)
class Case:
  """One row of the table.

  Attributes:
    method: a key of `RECIPES`.
    activation: 'gelu' (two matrices), or 'silu' with a gate (SwiGLU, three).
    shape: tokens, model width, hidden width.
  """

  method: str
  activation: str
  shape: tuple[int, int, int]

  @property
  def name(self) -> str:
    """What `--select` calls it."""
    block = 'swiglu' if self.gated else self.activation
    return f'{self.method}-{block}-{"x".join(map(str, self.shape))}'

  @property
  def gated(self) -> bool:
    """Whether there is a gate."""
    return self.activation == 'silu'

  @property
  def fp8(self) -> bool:
    """Whether its matmuls are in FP8."""
    return self.policy(None).precision != 'default'

  @property
  def fields(self) -> dict[str, str]:
    """What records say of every case."""
    return dict(
      op='ffn', recipe=RECIPES[self.method].name,
      activation='swiglu' if self.gated else self.activation,
      dtype='float8' if self.fp8 else 'bfloat16',
    )  # fmt: skip

  def states(self, weights: Mapping[str, Array]) -> dict[str, Array]:
    """The projection's state of each weight."""
    projection = self.policy(None).projection
    assert projection is not None
    return {name: projection.init(w) for name, w in weights.items()}

  def policy(self, implementation: Any) -> s24.DotPolicy:
    """The recipe's policy with a back end."""
    return dataclasses.replace(RECIPES[self.method].rules[0].policy, implementation=implementation)


# Takes weights and tokens.
type Block = Callable[[Mapping[str, Array], Array], Array]


def inputs(case: Case, shape: tuple[int, int, int], dtype: Any = jnp.bfloat16) -> tuple[dict[str, Array], Array, Array]:
  """Weights, tokens and cotangent: random, scaled so that every matrix keeps the variance."""
  tokens, d, hidden = shape
  keys = jax.random.split(jax.random.key(tokens + d), 5)
  sides = {'up': (d, hidden), 'down': (hidden, d)} | ({'gate': (d, hidden)} if case.gated else {})
  weights = {
    name: (jax.random.normal(key, size, jnp.float32) / jnp.sqrt(size[0])).astype(dtype)
    for key, (name, size) in zip(keys, sides.items(), strict=False)
  }
  x, dy = (jax.random.normal(key, (tokens, d), jnp.float32).astype(dtype) for key in keys[3:])
  return weights, x, dy


def dense_block(case: Case, form: str = 'plain', dot: Callable[[Array, Array], Array] = jnp.dot) -> Block:
  """The dense twin in plain JAX.

  Args:
    case: says which activation.
    form: 'plain' has tokens first; 'features_first' keeps the hidden activations [hidden, tokens], as the sparse
      kernels do; 'recompute' keeps only the inputs of the activation for the backward.
    dot: multiplies `[tokens, in]` and `[in, out]`.
  """

  def activate(up: Array, gate: Array | None) -> Array:
    return jax.nn.gelu(up) if gate is None else jax.nn.silu(gate) * up

  if form == 'recompute':
    activate = jax.checkpoint(activate)

  def first(x: Array, w: Array) -> Array:
    return jax.lax.dot_general(w, x, (((0,), (1,)), ((), ())))

  def block(weights: Mapping[str, Array], x: Array) -> Array:
    into = first if form == 'features_first' else dot
    gate = into(x, weights['gate']) if case.gated else None
    h = activate(into(x, weights['up']), gate)
    if form == 'features_first':
      return jax.lax.dot_general(h, weights['down'], (((0,), (0,)), ((), ())))
    return dot(h, weights['down'])

  return block


def dense_step(block: Block) -> Callable[..., Any]:
  """(weights, x, dy) -> (y, (gradients of the weights, of x))."""

  def step(weights: Mapping[str, Array], x: Array, dy: Array) -> tuple[Array, Any]:
    y, vjp = jax.vjp(block, weights, x)
    return y, vjp(dy)

  return step


def sparse_step(case: Case, policy: s24.DotPolicy) -> Callable[..., Any]:
  """(weights, x, dy, state, key) -> (y, (gradients of the weights, of x))."""

  def step(weights: Any, x: Array, dy: Array, state: Any, key: Array) -> tuple[Array, Any]:
    def block(weights: Mapping[str, Array], x: Array) -> Array:
      return s24.ffn(
        x, weights['up'], weights['down'], state, policy=policy, activation=case.activation,
        w_gate=weights.get('gate'), key=key,
      )  # fmt: skip

    return dense_step(block)(weights, x, dy)

  return step
