"""FST, fully sparse training: all three matmuls sparse, masked decay on gradients, a dense end."""

from collections.abc import Callable
from typing import Any, Literal

from sparse24_jax.policy import DotPolicy, fp8_precision
from sparse24_jax.projections import transposable
from sparse24_jax.recipe import Phase, Recipe, Rule
from sparse24_jax.recipes._registry import register


@register(dict(masked_decay=6e-5), transposable_srste_fp8=dict(fp8=True))
def transposable_srste(
  path: str,
  *,
  masked_decay: float | Callable[[Any], Any],
  fp8: bool | Literal['e4m3'] = False,
  refresh_every: int = 40,
  dense_fraction: float = 1 / 6,
  weight_grad: Literal['mvue', 'dense'] = 'mvue',
) -> Recipe:
  """Transposable masks, MVUE in the weight gradient, masked decay on gradients, dense fine-tuning at the end.

  Args:
    path: regular expression of the weights to make sparse; the paper takes the feed-forward layers.
    masked_decay: the factor lambda of lambda (1 - M) W, which is added to the clipped gradient and pulls pruned weights
      to zero. It depends on the model and the length of the run: 2e-5 (GPT-2 124M, 1,600 steps) to 6e-3 (0.1 M
      parameters, 4,000 steps) served so far, and 6e-5 (124M) to 2e-4 (350M) in the released runs of 300,000 steps.
      `tune_masked_decay` finds it.
    fp8: round the operands of the three matmuls to FP8, as `s_ste` does; here the input gradient too is sparse. The
      dense end is in FP8 too. Ours: the paper trains in 16 bits.
    refresh_every: optimizer steps between mask searches; values are followed at every step.
    dense_fraction: share of the steps, at the end, that run dense; 0 keeps the run sparse.
    weight_grad: `'dense'` takes weight gradients from all of the output gradient, not from an MVUE sample, as
      `DotPolicy` says: less noise for slower steps.

  Raises:
    ValueError: `dense_fraction` is not in [0, 1), or no such `weight_grad`.

  Source: Hu et al., arXiv 2404.01847, sections 3 to 5; constants of the released training scripts.

  >>> import sparse24_jax as s24
  >>> recipe = s24.recipes.transposable_srste('.*/mlp/.*', masked_decay=6e-5)
  >>> recipe.refresh_every, [phase.name for phase in recipe.phases]
  (40, ['sparse', 'dense'])
  """
  if not 0 <= dense_fraction < 1:
    raise ValueError(f'dense_fraction={dense_fraction} must be in [0, 1)')
  phases = (Phase('sparse', 1 - dense_fraction),) + ((Phase('dense', dense_fraction),) if dense_fraction else ())
  policy = DotPolicy(
    transposable(), input_grad='sparse', weight_grad=weight_grad, precision=fp8_precision(fp8)
  )
  return Recipe(
    'transposable_srste_fp8' if fp8 else 'transposable_srste', (Rule(path, policy),), masked_decay=masked_decay,
    refresh_every=refresh_every, phases=phases,
  )  # fmt: skip
