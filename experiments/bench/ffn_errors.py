"""How exact the feed-forward block's output and gradients are, tensor by tensor."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import statistics
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from experiments.bench.feed_forward import Case, inputs, sparse_step, TINY
from pallas_kernels import _tuning
import sparse24_jax as s24

CHECKED = (1024, 512, 2048)


def gradient_errors(
  case: Case, shape: tuple[int, int, int], implementation: Any, dtype: Any = jnp.bfloat16
) -> dict[str, Any]:
  """Relative Frobenius errors of output and gradients, per tensor.

  MVUE chooses by the values that it is given, so a rounding now and then picks another entry, and a weight gradient
  through it cannot be held to a float32 one. Hence: `exact` against the float32 reference, output and tokens' gradient
  as they are (MVUE does not touch them), weight gradients with the policy less MVUE; `sampled` against the float32
  reference with MVUE and the same key, beside `yardstick`, which is what the plain op gives in the same dtype; and
  `unbiased`, how far the mean of 8 sampled gradients is from the unsampled one over what the distance of one of them
  lets expect (about 1); and, of kernels, `decompressed`: against the same operands, samples and roundings, multiplied
  by XLA, so that what is left is the order of sums, and where a rounding of dz makes MVUE pick another entry.
  """
  weights, x, dy = inputs(case, shape, dtype)
  wide = jax.tree.map(lambda a: a.astype(jnp.float32), (weights, x, dy))
  policy, key = case.policy(implementation), jax.random.key(5)
  plain = dataclasses.replace(policy, implementation='reference')
  without = dict(weight_grad='dense')
  state = case.states(wide[0])

  @functools.cache
  def compiled(policy: s24.DotPolicy) -> Callable[..., Any]:
    return jax.jit(sparse_step(case, policy))

  def run(policy: s24.DotPolicy, args: Any, key: Array = key) -> dict[str, Array]:
    with jax.default_matmul_precision('highest' if args is wide else 'default'):
      y, (dw, dx) = compiled(policy)(*args, state, key)
    return {'y': y, 'dx': dx} | {f'd{name}': value for name, value in dw.items()}

  def errors(found: Any, expected: Any) -> dict[str, float]:
    return {name: float(f'{_tuning.relative_error(found[name], expected[name]):.3e}') for name in expected}

  exact = dataclasses.replace(plain, precision='default')
  unsampled, sampled = run(dataclasses.replace(exact, **without), wide), run(exact, wide)
  args = (weights, x, dy)
  draws = [run(policy, args, jax.random.key(100 + i)) for i in range(8)]
  # The FP8 kernels know no weight gradient without MVUE; the simulation rounds alike.
  target = run(dataclasses.replace(plain if policy.precision != 'default' else policy, **without), args)
  ratio = {}
  for name in (f'd{name}' for name in weights):
    mean = sum(draw[name].astype(jnp.float32) for draw in draws) / len(draws)
    one = statistics.mean(_tuning.relative_error(draw[name], target[name]) for draw in draws)
    ratio[name] = round(_tuning.relative_error(mean, target[name]) / one * len(draws) ** 0.5, 3)
  whole = run(policy, args)
  found = dict(
    shape=shape,
    exact=errors(target | {name: whole[name] for name in ('y', 'dx')}, unsampled),
    sampled=errors(whole, sampled),
    yardstick=errors(run(plain, args), sampled),
    unbiased=ratio,
  )
  if implementation is None:
    return found
  return found | {'decompressed': errors(whole, run(dataclasses.replace(policy, implementation='dense'), args))}


def check(case: Case, options: Any, head: Mapping[str, Any]) -> dict[str, Any]:
  """The record of `gradient_errors` alone."""
  implementation = None if options.tiny or options.implementation == 'auto' else options.implementation
  shape, dtype = (TINY, jnp.float32) if options.tiny else (CHECKED, jnp.bfloat16)
  return dict(
    bench='ffn_check', **head, **case.fields, implementation=implementation or 'auto',
    shape=dict(zip(('tokens', 'd', 'hidden'), shape, strict=True)),
    error=gradient_errors(case, shape, implementation, dtype),
  )  # fmt: skip
