"""Minimum-variance unbiased 2:4 estimates of gradients."""

from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from pallas_kernels.two_of_four import mvue
from sparse24_jax.numerics import check_finite
from sparse24_jax.sizes import tokens_of
from sparse24_jax.weight_errors import WeightError, weights_named


def mvue24(
  x: Array,
  key: Array,
  *,
  axis: int = -1,
  origin: tuple[Array | int, Array | int, Array | int] = (0, 0, 0),
) -> Array:
  """A random array with at most two non-zeros in each group of four along `axis`, whose expectation is `x`.

  With a_i = |x_i| and S their sum in a group, entry i is kept with probability pi_i = min(1, 2 a_i / S) and value
  x_i / pi_i; where one entry exceeds the sum of the others it is kept as it is, and one of the others with probability
  a_i / (sum of the others). This has the smallest summed variance of all unbiased 2:4 estimators: S^2 / 2 - sum a^2, or
  R^2 - (a_1^2 + a_2^2 + a_3^2) with R = a_1 + a_2 + a_3 the sum of the others. The papers' code draws twice without
  replacement, which is unbiased too and has more variance.

  Zeros stay zero and cause no NaN. Values beyond the dtype are clipped to its largest; magnitudes below 2^-124 may
  count as zero. A NaN or an infinity makes the first two entries of its group NaN, and is an error under
  `jax.experimental.checkify`.

  Args:
    x: any shape whose length along `axis` is a multiple of four; float32, bfloat16 or float16. Probabilities are
      computed in float32.
    key: a JAX random key. The uniforms are a function of the key and of a group's coordinates, so they do not
      depend on sharding, tiling or back end.
    axis: the grouped axis: the contracted one of the matmul that uses the result.
    origin: (batch, group, column) of the first group when `x` is a part of a larger array, inside `shard_map` say;
      `batch` counts the leading axes, `group` groups along `axis`, `column` the remaining last axis, in fours.

  Returns:
    Shape and dtype of `x`.

  Raises:
    ValueError: `x` cannot be grouped.

  Source: Chmiel et al., arXiv 2203.10991 (the estimator and its optimality); Hu et al., arXiv 2404.01847, section 4.2
  (its use in the weight gradient).

  >>> import jax, jax.numpy as jnp, sparse24_jax as s24
  >>> x = jnp.array([0.5, -1.0, 2.0, 0.5])
  >>> keys = jax.random.split(jax.random.key(0), 20_000)
  >>> samples = jax.vmap(lambda key: s24.mvue24(x, key))(keys)
  >>> int((samples != 0).sum(-1).max()), bool(jnp.abs(samples.mean(0) - x).max() < 0.03)
  (2, True)
  """
  check_finite(x, 'x')
  return mvue.mvue24(jnp.asarray(x), key, axis=axis, origin=origin)


class Sampled(NamedTuple):
  """What is sampled, for errors: paths of weights, and of which shard the tokens are; empty if nothing is known."""

  weights: tuple[str, ...] = ()
  shard: str = ''


def what_is_sampled(x: Array, weight_grad: str, key: Array | None) -> Sampled:
  """The weights of `errors_name` and the shard, where a gradient would be an error.

  Empty where it would be none, so that layers that are alike have one trace.
  """
  if weight_grad == 'dense' or (key is not None and tokens_of(x) % 4 == 0):
    return Sampled()
  axes = ', '.join(map(repr, sorted(jax.sharding.get_abstract_mesh().manual_axes)))
  return Sampled(weights_named(), f' on one shard of a shard_map over {axes}' if axes else '')


def check_sampling(x: Array, weight_grad: str, key: Array | None, of: Sampled) -> None:
  """Checks what MVUE needs, only where a gradient is taken: evaluation needs no key and takes any length."""
  if weight_grad == 'dense':
    return
  where = f'{", ".join(of.weights)}{of.shard}: ' if any(of) else ''
  if key is None:
    raise WeightError(
      f'{where}weight_grad={weight_grad!r} needs a random key: f(params, variables, key, ...) of a function that'
      f" sparsify made, apply(..., rngs={{'mvue': key}}) of a linen model (under nn.scan let it through with"
      f" split_rngs={{..., 'mvue': True}}), sparsify(model, recipe, rngs=nnx.Rngs(mvue=0)) of an nnx one, or"
      ' dot(..., key=...)',
      *of.weights,
    )
  tokens = tokens_of(x)
  if tokens % 4:
    raise WeightError(
      f'{where}weight_grad={weight_grad!r} groups tokens in fours: x of shape {x.shape} has {tokens} tokens. Make batch'
      " times sequence a multiple of four on each shard, or give the rule weight_grad='dense'",
      *of.weights,
    )
