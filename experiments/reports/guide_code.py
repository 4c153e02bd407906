"""The lines that train as a contender of a comparison did: recipe, optimizer, schedule and step."""

from experiments.reports.evidence import block_of, contender_of, NAMES, narrowed
from experiments.runs.race.contenders import layers_of
from experiments.runs.race.programs import B2, CLIP, WEIGHT_DECAY
from experiments.runs.recipes import FFN
from sparse24_jax import recipes

# By the title of an option: what makes the recipe.
_MADE_BY = {
  'FST': 's24.recipes.transposable_srste({path}, masked_decay={decay:g})',
  'FST, FP8': 's24.recipes.transposable_srste({path}, masked_decay={decay:g}, fp8=True)',
  'S-STE': 's24.recipes.s_ste({path})',
  'S-STE, FP8': 's24.recipes.s_ste({path}, fp8=True)',
  'SR-STE': "s24.recipes.sr_ste({path}, masked_decay={decay:g}, decay_on='weights')",
}
_DENSE_FP8 = "s24.Recipe('fp8', (s24.Rule({path}, s24.DotPolicy(precision='fp8')),))"


def code(
  contender: str, *, rate: float, decay: float, found: str, hidden: int | None = None,
  schedule: tuple[float, float] = (0.1, 0.1),
) -> list[str]:  # fmt: skip
  """Lines that train so, of a function `loss_fn(params, tokens)`.

  Args:
    contender: of `NAMES`.
    rate: the peak.
    decay: masked decay, which not all recipes have.
    found: how the rate was, in words.
    hidden: the width of the hidden layer that is asked about.
    schedule: shares of the warm-up and the last rate, see `Evidence`.

  Returns:
    No recipe for a dense model in the dtype that it has.
  """
  its, (recipe, width, fp8) = contender_of(contender), block_of(contender)
  lines = []
  if width != 1 and hidden:
    lines.append(f'# The model: hidden layers of {narrowed(hidden, contender):,} in place of {hidden:,}.')
  if its.size:
    layers, d = layers_of(its.size)
    lines.append(f'# The model: {layers} layers of width {d:,}, hidden layers of {4 * d:,}.')
  if recipe is None and not fp8:
    return lines
  path = repr(its.fp8 if recipe is None else its.kwargs.get('path', FFN))
  made = (_MADE_BY[NAMES[contender].title] if recipe else _DENSE_FP8).format(path=f'r{path}', decay=decay)
  phases = recipe is not None and len(recipes.KNOWN[recipe].example('.*').phases) > 1
  phase, learning_rate = ', phase=phase' * phases, ', learning_rate=rate' * (recipe == 'sr_ste')
  warm, last = schedule
  tx = f'tx = optax.chain(clip, s24.sparse_training(adamw, recipe{phase}{learning_rate}))'
  return [
    *lines,
    '# Once.',
    f'recipe = {made}',
    'recipe = s24.bind(recipe, loss_fn, params, tokens)',
    f'warm_up = max(1, round({warm:.3g} * steps))',
    f'# The peak {found}: search your own.',
    f'rate = optax.warmup_cosine_decay_schedule(0.0, {rate:g}, warm_up, steps, {last * rate:.3g})',
    'matrices = jax.tree.map(lambda w: w.ndim > 1, params)',
    f'adamw = optax.adamw(rate, b2={B2}, weight_decay={WEIGHT_DECAY}, mask=matrices)',
    f'clip = optax.clip_by_global_norm({CLIP})',
    *(['phase = s24.phase_at(recipe, 0, steps)'] if phases else []),
    tx,
    'opt_state = tx.init(params)',
    f'# In each step, with a new key{"; compile one step a phase" * phases}.',
    *(['phase = s24.phase_at(recipe, step, steps)', tx] if phases else []),
    f'variables = s24.sparse_variables(params, opt_state, recipe{phase})',
    f'grads = jax.grad(s24.sparsify(loss_fn, recipe{phase}))(params, variables, key, tokens)',
    'updates, opt_state = tx.update(grads, opt_state, params)',
    'params = optax.apply_updates(params, updates)',
  ]
