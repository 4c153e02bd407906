"""S-STE: a continuous projection, so no decay, no mask to refresh and, in the paper, no dense end."""

from typing import Literal

from sparse24_jax.policy import DotPolicy, fp8_precision
from sparse24_jax.projections import soft_threshold_projection
from sparse24_jax.recipe import Recipe, Rule
from sparse24_jax.recipes._registry import register


@register(s_ste_fp8=dict(fp8=True))
def s_ste(
  path: str, *, fp8: bool | Literal['e4m3'] = False, weight_grad: Literal['mvue', 'dense'] = 'mvue',
  refresh_every: int = 40,
) -> Recipe:  # fmt: skip
  """Soft threshold with a frozen scale, MVUE in the weight gradient, dense matmul for the input gradient.

  Args:
    path: regular expression of the weights to make sparse.
    fp8: round the operands of the three matmuls to FP8: e4m3 for weights and activations, e5m2 for output gradients.
      The authors' code takes e5m2 for both operands of the gradients, which loses a bit of the weight and activation.
      `'e4m3'` takes that format for output gradients, too, which is ours.
    weight_grad: `'dense'` takes weight gradients from all of the output gradient, not from an MVUE sample, as
      `DotPolicy` says: less noise for slower steps.
    refresh_every: optimizer steps between measurements of the flip rate, which is that of the one step. Nothing else
      happens then: the scale is frozen, and the pattern follows the weights in every step. 1 costs two passes over the
      weights in every step; 40, the interval of FST, is ours.

  Raises:
    ValueError: `path` is no regular expression, no such `weight_grad`, or `refresh_every` is below 1.

  Source: Hu et al., arXiv 2409.09099, sections 4 and 5.

  >>> import sparse24_jax as s24
  >>> s24.recipes.s_ste('.*/mlp/.*', fp8=True).rules[0].policy.precision
  'fp8'
  """
  policy = DotPolicy(soft_threshold_projection(), weight_grad=weight_grad, precision=fp8_precision(fp8))
  return Recipe('s_ste_fp8' if fp8 else 's_ste', (Rule(path, policy),), refresh_every=refresh_every)
