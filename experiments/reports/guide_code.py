"""The lines that train as a contender of a comparison did."""

from experiments.reports.evidence import Option
from experiments.runs.recipes import FFN, LINEAR
from sparse24_jax import recipes

# By the title of an option, or of what a dense model does in FP8: what makes the recipe.
_MADE_BY = {
  'FST': 's24.recipes.transposable_srste({path}, masked_decay={decay:g})',
  'S-STE': 's24.recipes.s_ste({path})',
  'S-STE, FP8': 's24.recipes.s_ste({path}, fp8=True)',
  'SR-STE': "s24.recipes.sr_ste({path}, masked_decay={decay:g}, decay_on='weights')",
  'dense, FP8': "s24.Recipe('fp8', (s24.Rule({path}, s24.DotPolicy(precision='fp8')),))",
}


def code(option: Option, contender: str, *, rate: float, decay: float, hidden: int | None = None) -> list[str]:
  """Lines that train so, of a function `loss_fn(params, tokens)`; none for a dense model in the dtype that it has."""
  narrower = {'half': 2, 'quarter': 4}.get(contender.partition('_ffn')[0])
  lines = [f'# the model: hidden layers of {hidden // narrower} in place of {hidden}'] if narrower and hidden else []
  title = 'dense, FP8' if option.recipe is None and contender.endswith('fp8') else option.title
  if title not in _MADE_BY:
    return lines
  everywhere = contender.endswith('_all') or option.recipe is None
  made = _MADE_BY[title].format(path=f"r'{LINEAR if everywhere else FFN}'", decay=decay)
  phases = option.recipe is not None and len(recipes.KNOWN[option.recipe].example('.*').phases) > 1
  phase, learning_rate = ', phase=phase' * phases, f', learning_rate={rate:g}' * (title == 'SR-STE')
  return [
    *lines,
    f'recipe = {made}',
    'recipe = s24.bind(recipe, loss_fn, params, tokens)',
    *(['phase = s24.phase_at(recipe, step, steps)'] if phases else []),
    f'tx = s24.sparse_training(optax.adamw({rate:g}), recipe{phase}{learning_rate})',
    'opt_state = tx.init(params)',
    f'variables = s24.sparse_variables(params, opt_state, recipe{phase})',
    f'grads = jax.grad(s24.sparsify(loss_fn, recipe{phase}))(params, variables, key, tokens)',
  ]
