"""`python -m experiments.bench.untouched --out FILE`: an untouched model against one with the library's layer.

GPT-2 with linen's own Dense, gelu, Dense is made sparse by the trace of `s24.sparsify`, which finds its blocks; its
twin has `Sparse24MLP` in their place. The recipe, the parameters and their paths are the same, so both steps train one
state in turns. Recorded are the time of both, their ratio, and the calls of sparse kernels that each compiled to.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import hlo, measure, twins
from experiments.models import layers

MODULE = 'experiments.bench.untouched'


def run(name: str, options: Any, head: Mapping[str, Any], clock: measure.Clock) -> dict[str, Any]:
  """Measures one model and returns its record."""
  case = twins.CASES[name]
  recipe = measure.with_implementation(twins.recipe_of(options.recipe), options.implementation)
  options.unroll = not options.scan
  models = {}
  for twin, plain in (('layer', False), ('untouched', True)):
    options.plain_mlp = plain
    models[twin] = twins.make_model(case, options)
  config = models['layer'].config
  batch, length = (4, twins.TINY['seq_len']) if options.tiny else (options.batch or case.batch, case.length)

  def init() -> twins.State:
    params = models['layer'].init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))['params']
    return twins.State(params, twins.make_optimizer(recipe, case.moment).init(params))

  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch, length + 1), dtype=np.int32)
  tokens, key = jax.device_put(tokens), jax.random.key(1)
  shapes = jax.eval_shape(init)
  jobs = {
    twin: (jax.jit(twins.make_step(model, recipe, case.moment), donate_argnums=0), (shapes, tokens, key))
    for twin, model in models.items()
  }
  compiled = measure.compile_all(jobs, needed=jobs)
  clock.lap('compile both')
  held = {'state': jax.block_until_ready(jax.jit(init)())}

  def step(twin: str) -> Any:
    held['state'], loss = compiled[twin](held['state'], tokens, key)
    return loss

  calls = {twin: lambda twin=twin: step(twin) for twin in jobs}
  losses = {twin: float(call()) for twin, call in calls.items()}
  clock.lap(f'first steps, losses {losses}')
  bursts: dict[str, list[list[float]]] = {twin: [] for twin in calls}
  for twin in measure.turns(calls, options.rounds):
    held['state'] = twins.at_step(held['state'], 0)  # no burst reaches a mask search
    bursts[twin].append(measure.stream_ms(calls[twin], options.steps, depth=2))
  clock.lap('time')
  rows = {twin: measure.timing(found) for twin, found in bursts.items()}
  tokens_a_step = batch * length
  sparse_calls = {twin: hlo.sparse_calls(step.as_text(), tokens=tokens_a_step) for twin, step in compiled.items()}
  return dict(
    bench='untouched', **head, op='train_step', model=case.name, recipe=recipe.name,
    parameters=layers.param_count(shapes.params),
    shape=dict(batch=batch, length=length, layers=config.num_layers, d=config.embed_dim, hidden=config.hidden_dim,
               vocab=config.vocab_size),
    scan_layers=config.scan_layers, remat=config.remat, implementation=options.implementation, twins=rows,
    untouched_over_layer=round(rows['untouched']['median_ms'] / rows['layer']['median_ms'], 4),
    sparse_calls=sparse_calls, same_calls=sparse_calls['layer'] == sparse_calls['untouched'],
    headline=not options.tiny,
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected models; returns the number that failed."""
  names = [name for name, case in twins.CASES.items() if case.model == 'gpt2']
  parser = measure.parser(MODULE, __doc__, names, ['gpt2-124m'])
  parser.add_argument('--batch', type=int, help="sequences a step (default: the case's)")
  parser.add_argument('--layers', type=int, help="blocks (default: the model's)")
  parser.add_argument('--recipe', default=twins.RECIPES[0], choices=twins.RECIPES[:3], help='(default: %(default)s)')
  parser.add_argument('--implementation', default='auto', help="of the policy (default: the records' choice)")
  parser.add_argument('--attention', default='cudnn', choices=('cudnn', 'xla'))
  parser.add_argument('--scan', action='store_true', help='a scan over layers, in place of each on its own')
  options = parser.parse_args(argv)
  measure.check_gpu(parser, options)
  head = measure.environment(MODULE, argv)

  def summary(record: Mapping[str, Any]) -> str:
    times = ', '.join(f'{twin} {row["median_ms"]:.2f} ms' for twin, row in record['twins'].items())
    same = 'the same' if record['same_calls'] else 'OTHER'
    return f'{times}: x{record["untouched_over_layer"]:.4f}, {same} sparse calls {record["sparse_calls"]["untouched"]}'

  return measure.run_each(
    options.select, lambda name: run(name, options, head, measure.Clock()), options.out, summary
  )


if __name__ == '__main__':
  raise SystemExit(main())
