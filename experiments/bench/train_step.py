"""`python -m experiments.bench.train_step --out FILE`: full training steps of language models against dense twins.

A step is what `experiments.runs.programs` compiles: packing of this step's weights, loss and gradients, clipping,
masked decay, AdamW, and the mask search of every 40th step (100th of mixed sparsity; of soft thresholds the flip
rate's); float32 weights and moments, bfloat16 else, state donated. Steps with and without a mask search are timed
apart, and the figure is their mean over a period.
"""

from collections.abc import Mapping, Sequence
import statistics
from typing import Any

from experiments.bench import hlo, measure, trace
from experiments.bench.twins import activations, CASES, recipe_of, RECIPES, Twins
from experiments.runs.models import layers
from pallas_kernels import _bench
from sparse24_jax.recipe import Recipe

MODULE = 'experiments.bench.train_step'


def run(name: str, options: Any, head: Mapping[str, Any], clock: _bench.Clock) -> dict[str, Any]:
  """Measures one model and returns its record."""
  # No burst may reach a search, which the last step of a period makes, unless every step does.
  every = recipe_of(options.recipe).refresh_every
  if 1 < every <= options.steps + 1:
    raise ValueError(f'--steps {options.steps}: a burst must be shorter than the period of {every} steps')
  twins = Twins(CASES[name], options, clock)
  calls = twins.calls
  losses = {twin: float(call()) for twin, call in calls.items()}
  clock.lap(f'first steps, losses {losses}')

  def burst(twin: str) -> list[float]:
    twins.at(0)
    return _bench.stream_ms(calls[twin], options.steps, depth=2)

  rows = _bench.in_turns(calls, options.rounds, burst)
  clock.lap('time')
  # One step at a time: the choice whether to search waits for the host, so a stream would hide where a step ends.
  refresh: dict[str, list[float]] = {'plain': [], 'search': []}
  for _ in range(options.refreshes if twins.recipe.refresh_every > 1 else 0):
    for kind, count in (('plain', 0), ('search', twins.recipe.refresh_every - 1)):
      twins.at(count)
      refresh[kind].append(measure.alone_ms(twins.sparse, twins.state))
  clock.lap('time refreshes')
  for twin, compiled in twins.compiled.items():
    rows[twin]['memory_gb'] = _bench.memory(compiled)
    rows[twin]['recomputed'] = hlo.recomputed(compiled.as_text())
  profile = None
  if options.explain:
    twins.at(0)
    profile = trace.explain(calls, twins.compiled, 2)
    clock.lap('profile')
  return _record(twins, options, head, rows, refresh) | dict(profile=profile, headline=not options.tiny)


def run_speedup(recipe: Recipe, ms: float, rows: Mapping[str, Any]) -> dict[str, float]:
  """How many times faster than each twin a whole run is, with sparse steps of `ms` and the dense steps of the twin.

  Nothing where these are in FP8, as no twin is.
  """
  share = recipe.fraction_of('sparse')
  if share < 1 and recipe.in_dense_phase() is not None:
    return {}
  return {name: round(1 / (1 - share + share * ms / row['median_ms']), 4) for name, row in rows.items()}


def _record(
  twins: Twins, options: Any, head: Mapping[str, Any], rows: dict[str, Any], refresh: Mapping[str, list[float]]
) -> dict[str, Any]:
  """What is recorded of the twins' timings, `rows`, and of single steps with a search and without."""
  sparse, case, config = rows.pop('sparse'), twins.case, twins.model.config
  alone = {kind: statistics.median(samples) if samples else 0.0 for kind, samples in refresh.items()}
  search_ms = alone['search'] - alone['plain']
  amortised = sparse['median_ms'] + search_ms / twins.recipe.refresh_every

  def speed(ms: float) -> float:
    return round(twins.tokens_a_step / ms * 1e3, 1)

  for row in rows.values():
    row['tokens_per_s'] = speed(row['median_ms'])
  policy, summed = activations(twins.recipe), twins.tokens_a_step
  pattern = {}
  if policy:  # of each group of tokens four are packed as 2:4
    summed = 4 * summed // policy.tokens.group
    pattern = dict(
      pattern=str(policy.features), dense_features=policy.dense_features,
      token_pattern=None if policy.tokens == policy.features else str(policy.tokens),
    )
  return dict(
    bench='train_step', **head, op='train_step', model=case.name, recipe=twins.recipe.name, **pattern,
    parameters=layers.param_count(twins.state.params), dtype=twins.dtype,
    shape=dict(batch=len(twins.tokens), length=twins.tokens.shape[1] - 1, layers=config.num_layers,
               d=config.embed_dim, hidden=config.hidden_dim, vocab=config.vocab_size),
    remat=config.remat, scan_layers=config.scan_layers, attention=config.attention,
    moment=case.moment,
    mode='step', implementation=options.implementation, **sparse,
    refresh_samples_ms=refresh, search_ms=round(search_ms, 4), refresh_every=twins.recipe.refresh_every,
    amortised_ms=round(amortised, 4), tokens_per_s=speed(amortised), baselines=rows,
    speedup=_bench.speedup(rows, amortised),
    sparse_share=round(twins.recipe.fraction_of('sparse'), 4),
    run_speedup=run_speedup(twins.recipe, amortised, rows),
    sparse_calls=hlo.sparse_calls(twins.compiled['sparse'].as_text(), tokens=summed),
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected models; returns the number that failed."""
  parser = measure.parser(MODULE, __doc__, list(CASES), ['gpt2-124m'])
  parser.add_argument('--batch', type=int, help="sequences a step (default: the case's)")
  parser.add_argument('--recipe', default='transposable_srste', choices=RECIPES, help='(default: %(default)s)')
  parser.add_argument('--implementation', default='auto', help="of the policy (default: the records' choice)")
  parser.add_argument('--refreshes', type=int, default=4, help='mask searches to time (default: %(default)s)')
  options = parser.parse_args(argv)
  measure.check_gpu(parser, options)
  head = measure.environment(MODULE, argv)

  def summary(record: Mapping[str, Any]) -> str:
    twins = (
      f'{twin} {row["median_ms"]:.2f} ms, x{record["speedup"][twin]:.3f}' for twin, row in record['baselines'].items()
    )
    return (
      f'{record["median_ms"]:.2f} ms, with refreshes {record["amortised_ms"]:.2f} ms'
      f' (a search {record["search_ms"]:.2f} ms), {record["tokens_per_s"]:.0f} tokens/s; {", ".join(twins)};'
      f' {record["sparse_share"]:.0%} of a run are such steps; calls {record["sparse_calls"]}'
    )

  names = options.select
  return _bench.run_each(names, lambda name: run(name, options, head, _bench.Clock()), options.out, summary)


if __name__ == '__main__':
  raise SystemExit(main())
