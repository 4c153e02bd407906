"""`python -m experiments.bench.block --out FILE`: a transformer block, forward and backward, with and without sparsify.

Both twins are one linen block with the same parameters (float32, computing in bfloat16) and the same attention; the
sparse one goes through `sparsify`. Packing, which reads the float32 weights, is inside the timed step.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import optax

from experiments.bench import hlo, measure, trace
from experiments.models import gpt2, llama
import sparse24_jax as s24

MODULE = 'experiments.bench.block'
RECIPES = {
  'fst': s24.recipes.transposable_srste('mlp/.*', masked_decay=6e-5),
  's_ste_fp8': s24.recipes.s_ste('mlp/.*', fp8=True),
}
# Batch, positions; 16,384 tokens as in the feed-forward benchmark.
SHAPE, TINY = (8, 2048), (2, 32)


def make_block(name: str, *, tiny: bool, attention: str) -> Any:
  """A block of width 4096: 'gpt2' with a feed-forward layer of 16,384 and GELU, 'llama' with 14,336 and SwiGLU."""
  common = dict(vocab_size=64, num_layers=1, dtype='bfloat16', attention='xla' if tiny else attention)
  common |= dict(seq_len=TINY[1], embed_dim=64, num_heads=4) if tiny else dict(seq_len=SHAPE[1], embed_dim=4096)
  if name == 'gpt2':
    return gpt2.Block(gpt2.GPT2Config(**{'num_heads': 32, **common}))
  hidden = 192 if tiny else 14336
  sizes = {'num_heads': 32, 'num_kv_heads': 4 if tiny else 8, 'hidden_dim': hidden}
  return llama.Block(llama.LlamaConfig(**{**sizes, **common}))


CASES = {f'{method}-{model}': (method, model) for method in RECIPES for model in ('gpt2', 'llama')}
GROUPS = {'bf16': ['fst-gpt2', 'fst-llama'], 'fp8': ['s_ste_fp8-gpt2', 's_ste_fp8-llama']}


def dense_step(block: Any) -> Callable[..., Any]:
  """(params, x, dy) -> (y, gradients of params and x)."""

  def step(params: Any, x: Array, dy: Array) -> Any:
    y, vjp = jax.vjp(lambda params, x: block.apply({'params': params}, x), params, x)
    return y, vjp(dy)

  return step


def sparse_step(block: Any, recipe: s24.Recipe) -> Callable[..., Any]:
  """(params, x, dy, opt_state, key) -> (y, gradients of params and x)."""
  model = s24.sparsify(block, recipe)

  def step(params: Any, x: Array, dy: Array, opt_state: Any, key: Array) -> Any:
    states = s24.sparse_variables(params, opt_state, recipe)

    def apply(params: Any, x: Array) -> Array:
      return model.apply({'params': params, 'sparse24': states}, x, rngs={'mvue': key})

    y, vjp = jax.vjp(apply, params, x)
    return y, vjp(dy)

  return step


def run(name: str, options: Any, head: Mapping[str, Any], clock: measure.Clock) -> dict[str, Any]:
  """Measures one case and returns its record."""
  method, model_name = CASES[name]
  recipe = measure.with_implementation(RECIPES[method], options.implementation)
  block = make_block(model_name, tiny=options.tiny, attention=options.attention)
  batch, length = TINY if options.tiny else (options.batch, SHAPE[1])
  keys = jax.random.split(jax.random.key(0), 3)
  shape = (batch, length, block.config.embed_dim)
  x, dy = (jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16) for key in keys[:2])
  params = jax.jit(block.init)(keys[2], x[:1])['params']
  opt_state = jax.jit(s24.sparse_training(optax.identity(), recipe).init)(params)
  clock.lap('initialise')
  jobs = {
    'sparse': (jax.jit(sparse_step(block, recipe)), (params, x, dy, opt_state, jax.random.key(3))),
    'dense': (jax.jit(dense_step(block)), (params, x, dy)),
  }
  compiled = measure.compile_all(jobs, needed=jobs)
  clock.lap('compile')
  calls = {twin: functools.partial(f, *jobs[twin][1]) for twin, f in compiled.items()}
  counts = hlo.sparse_calls(compiled['sparse'].as_text(), tokens=batch * length)
  bursts = measure.interleave(calls, rounds=options.rounds, steps=options.steps)
  clock.lap('time')
  rows = {twin: measure.timing(bursts[twin]) | {'memory_gb': measure.memory(compiled[twin])} for twin in calls}
  profile = None
  if options.explain:
    profile = trace.explain(calls, compiled, 3, options.trace and options.trace / name)
    clock.lap('profile')
  sparse = rows.pop('sparse')
  config = block.config
  return dict(
    bench='block', **head, op='transformer_block', model=model_name, recipe=recipe.name,
    dtype='float8' if method == 's_ste_fp8' else 'bfloat16', attention=config.attention,
    shape=dict(batch=batch, length=length, d=config.embed_dim, hidden=config.hidden_dim), mode='forward_and_vjp',
    implementation=options.implementation, **sparse, baselines=rows,
    speedup=measure.speedup(rows, sparse['median_ms']),
    tokens_per_s=round(batch * length / sparse['median_ms'] * 1e3), sparse_calls=counts, profile=profile,
    headline=not options.tiny,
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected cases; returns the number that failed."""
  parser = measure.parser(MODULE, __doc__, [*GROUPS, *CASES], ['fst-gpt2'])
  parser.add_argument('--batch', type=int, default=SHAPE[0], help='sequences of 2,048 (default: %(default)s)')
  parser.add_argument('--implementation', default='auto', help="of the policy (default: the records' choice)")
  parser.add_argument('--attention', default='cudnn', choices=('cudnn', 'xla'))
  options = parser.parse_args(argv)
  measure.check_gpu(parser, options)
  head = measure.environment(MODULE, argv)

  def summary(record: Mapping[str, Any]) -> str:
    dense = record['baselines']['dense']['median_ms']
    return (
      f'{record["median_ms"]:.3f} ms, dense {dense:.3f} ms, x{record["speedup"]["dense"]:.3f};'
      f' calls {record["sparse_calls"]}'
    )

  names = measure.selected(options, GROUPS)
  return measure.run_each(names, lambda name: run(name, options, head, measure.Clock()), options.out, summary)


if __name__ == '__main__':
  raise SystemExit(main())
