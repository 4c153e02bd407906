"""`python -m experiments.bench.train_step --out FILE`: full training steps of language models against dense twins.

A step is what `experiments.train` compiles: packing of this step's weights, loss and gradients, clipping, masked decay,
AdamW, and the mask search of every 40th step (100th of mixed sparsity); float32 weights and moments, bfloat16 else,
state donated. Steps with and without a mask search are timed apart, and the figure is their mean over a period.

Both twins train the same parameters in turns: the dense step takes weights and moments out of the sparse run's state
and puts them back, so one set of them is in memory. Tokens are random; time does not depend on them.
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import statistics
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import hlo, measure, trace
from experiments.models import gpt2, llama
import sparse24_jax as s24

MODULE = 'experiments.bench.train_step'
REFRESH_EVERY = 40
FFN = r'.*/mlp/.*'
LINEAR = r'.*/(attn|mlp)/.*/kernel'
# Samples where the fused block takes them: elsewhere in a block the exact gradient is as fast.
MIXED: Mapping[str, Mapping[str, Any]] = {
  'mixed_sparsity_24': dict(structure='2:4'),
  'mixed_sparsity_transposable': dict(structure='transposable', mvue_path=FFN),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """One model and how it is trained.

  Attributes:
    model: 'gpt2' or 'llama'.
    size: a key of the model's `SIZES`.
    batch: sequences a step.
    length: positions of a sequence.
    vocab: rows of the embedding.
    remat: recompute blocks in the backward.
    moment: dtype of AdamW's first moment, in both twins.
  """

  model: str
  size: str
  batch: int
  length: int
  vocab: int
  remat: bool
  moment: str = 'float32'


CASES = {
  'gpt2-124m': Case('gpt2', '124m', 32, 1024, 50304, False),
  'gpt2-1558m': Case('gpt2', '1558m', 24, 1024, 50304, True),
  'llama-3b': Case('llama', '3b', 6, 2048, 32000, True, 'bfloat16'),
}
TINY = dict(num_layers=2, num_heads=2, embed_dim=32, seq_len=16)


class State(NamedTuple):
  """What a step carries."""

  params: Any
  opt_state: Any


def make_model(case: Case, options: Any) -> Any:
  """The linen model of a case, in bfloat16 with float32 parameters."""
  family, make = (gpt2, gpt2.GPT2) if case.model == 'gpt2' else (llama, llama.Llama)
  layers = {'num_layers': options.layers} if options.layers else {}
  fields: dict[str, Any] = layers | dict(
    dtype='bfloat16', scan_layers=not options.unroll, remat=case.remat, attention=options.attention,
    fused_mlp=not options.plain_mlp,
  )  # fmt: skip
  if options.tiny:
    fields |= TINY | {'attention': 'xla'}
    fields |= dict(num_kv_heads=1, hidden_dim=64) if case.model == 'llama' else {}
    return make(family.make_config('nano', vocab_size=64, **fields))
  return make(family.make_config(case.size, vocab_size=case.vocab, seq_len=case.length, **fields))


def recipe_of(name: str) -> s24.Recipe:
  """The recipe by the name that records have."""
  if name == 'transposable_srste':
    return s24.recipes.transposable_srste(FFN, masked_decay=6e-5, refresh_every=REFRESH_EVERY)
  if name in MIXED:  # every linear layer of a block; early in the run, where all places of the masks are taken
    return s24.recipes.mixed_sparsity(LINEAR, total_steps=300_000, **MIXED[name])
  return s24.recipes.s_ste(FFN, fp8=name == 's_ste_fp8')


def adamw(moment: str) -> optax.GradientTransformation:
  """The optimizer of both twins: decay on matrices only; a rate small enough to train on noise for ever."""

  def is_matrix(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ('kernel', 'embedding'), params)

  return optax.adamw(1e-6, b1=0.9, b2=0.95, weight_decay=0.1, mask=is_matrix, mu_dtype=moment)


def make_optimizer(recipe: s24.Recipe | None, moment: str) -> optax.GradientTransformation:
  """Clipping, then AdamW; the recipe's wrapper, if there is one, around AdamW, or around both where links grow."""
  clip = optax.clip_by_global_norm(1.0)
  if recipe is None:
    return optax.chain(clip, adamw(moment))
  if _grows(recipe):
    return s24.sparse_training(optax.chain(clip, adamw(moment)), recipe, phase='sparse')
  return optax.chain(clip, s24.sparse_training(adamw(moment), recipe, phase='sparse'))


def _grows(recipe: s24.Recipe) -> bool:
  return any(rule.policy.projection and rule.policy.projection.update for rule in recipe.rules)


def make_step(model: Any, recipe: s24.Recipe | None, moment: str = 'float32') -> Callable[..., Any]:
  """(state, tokens [B, T + 1], key) -> (state, loss); dense without a recipe, else of the recipe's sparse phases."""
  tx = make_optimizer(recipe, moment)
  net = model if recipe is None else s24.sparsify(model, recipe, phase='sparse')

  def loss_fn(params: Any, states: Any, tokens: Array, key: Array) -> Array:
    variables = {'params': params} if recipe is None else {'params': params, 'sparse24': states}
    logits = net.apply(variables, tokens[:, :-1], rngs={'mvue': key})
    with jax.named_scope('loss'):
      return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

  def step(state: State, tokens: Array, key: Array) -> tuple[State, Array]:
    states = None
    if recipe is not None:
      with jax.named_scope('pack'):
        states = s24.sparse_variables(state.params, state.opt_state, recipe, phase='sparse')
    loss, grads = jax.value_and_grad(loss_fn)(state.params, states, tokens, key)
    with jax.named_scope('optimizer'):
      updates, opt_state = tx.update(grads, state.opt_state, state.params)
      return State(optax.apply_updates(state.params, updates), opt_state), loss

  return step


def dense_part(state: State) -> State:
  """What the dense twin trains of a sparse run's state: the weights, and the state of clipping and AdamW."""
  sparse, outer = _wrapper(state)
  return State(state.params, (*outer, sparse.inner_state) if outer else sparse.inner_state)


def with_dense_part(state: State, dense: State) -> State:
  """The sparse run's state with the dense twin's weights and moments."""
  sparse, outer = _wrapper(state)
  return _wrapped(dense.params, sparse._replace(inner_state=dense.opt_state[1] if outer else dense.opt_state), outer)


def at_step(state: State, count: int) -> State:
  """The sparse run's state with another number of steps done, which decides when masks are searched next."""
  sparse, outer = _wrapper(state)
  return _wrapped(state.params, sparse._replace(count=jnp.full_like(sparse.count, count)), outer)


def _wrapper(state: State) -> tuple[s24.SparseTrainingState, tuple[Any, ...]]:
  """The state of the recipe's wrapper, and what stands before it in a chain."""
  if isinstance(state.opt_state, s24.SparseTrainingState):
    return state.opt_state, ()
  *outer, sparse = state.opt_state
  return sparse, tuple(outer)


def _wrapped(params: Any, sparse: s24.SparseTrainingState, outer: tuple[Any, ...]) -> State:
  return State(params, (*outer, sparse) if outer else sparse)


class Twins:
  """Both compiled steps over one state."""

  def __init__(self, case: Case, options: Any, clock: measure.Clock):
    self.recipe = measure.with_implementation(recipe_of(options.recipe), options.implementation)
    self.model = make_model(case, options)
    batch, length = (4, TINY['seq_len']) if options.tiny else (options.batch or case.batch, case.length)
    self.tokens_a_step = batch * length
    rng = np.random.default_rng(0)
    self.tokens = jnp.asarray(rng.integers(0, self.model.config.vocab_size, (batch, length + 1), dtype=np.int32))
    self.key = jax.random.key(1)

    def init() -> State:
      params = self.model.init(jax.random.key(0), self.tokens[:1, :-1])['params']
      return State(params, make_optimizer(self.recipe, case.moment).init(params))

    abstract = jax.eval_shape(init)
    jobs = {'sparse': (make_step(self.model, self.recipe, case.moment), abstract)}
    if not options.sparse_only:
      jobs['dense'] = (make_step(self.model, None, case.moment), jax.eval_shape(dense_part, abstract))

    def compile_one(job: tuple[Callable[..., Any], Any]) -> Any:
      return jax.jit(job[0], donate_argnums=0).lower(job[1], self.tokens, self.key).compile()

    # Before there is a state: autotuning needs memory too.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
      self.compiled = dict(zip(jobs, pool.map(compile_one, jobs.values()), strict=True))
    clock.lap('compile ' + ' and '.join(jobs))
    for name, compiled in self.compiled.items():
      again = hlo.recomputed(compiled.as_text())
      warning = f'; SHORT OF MEMORY: XLA computes {again} instructions again' if again else ''
      print(f'  memory of {name}: {measure.memory(compiled)} GB{warning}', flush=True)
    self.state = jax.block_until_ready(jax.jit(init)())
    clock.lap('initialise')

  def sparse(self) -> Array:
    """One sparse step; returns its loss."""
    self.state, loss = self.compiled['sparse'](self.state, self.tokens, self.key)
    return loss

  def dense(self) -> Array:
    """One dense step; returns its loss."""
    dense, loss = self.compiled['dense'](dense_part(self.state), self.tokens, self.key)
    self.state = with_dense_part(self.state, dense)
    return loss

  def at(self, count: int) -> None:
    """Sets the number of steps done, which decides when masks are searched next."""
    self.state = at_step(self.state, count)


def run(name: str, options: Any, head: Mapping[str, Any], clock: measure.Clock) -> dict[str, Any]:
  """Measures one model and returns its record."""
  # No burst may reach a search: step 40 of a period makes it.
  if options.steps + 1 >= REFRESH_EVERY:  # of other recipes the period is longer, or every step searches
    raise ValueError(f'--steps {options.steps}: a burst must be shorter than the period of {REFRESH_EVERY} steps')
  case = CASES[name]
  if options.remat != 'auto':
    case = dataclasses.replace(case, remat=options.remat == 'block')
  twins = Twins(case, options, clock)
  calls = {twin: getattr(twins, twin) for twin in twins.compiled}
  losses = {twin: float(call()) for twin, call in calls.items()}
  clock.lap(f'first steps, losses {losses}')
  counts = hlo.sparse_calls(twins.compiled['sparse'].as_text(), tokens=twins.tokens_a_step)
  bursts: dict[str, list[list[float]]] = {twin: [] for twin in calls}
  for r in range(options.rounds):
    for twin in list(calls) if r % 2 == 0 else list(calls)[::-1]:
      twins.at(0)
      bursts[twin].append(measure.stream_ms(calls[twin], options.steps, depth=2))
  clock.lap('time')
  # One step at a time: the choice whether to search waits for the host, so a stream would hide where a step ends.
  refresh: dict[str, list[float]] = {'plain': [], 'search': []}
  for _ in range(options.refreshes):
    for kind, count in (('plain', 0), ('search', twins.recipe.refresh_every - 1)):
      twins.at(count)
      refresh[kind].append(measure.alone_ms(twins.sparse, twins.state))
  clock.lap('time refreshes')
  rows = {twin: measure.timing(bursts[twin]) for twin in calls}
  for twin, compiled in twins.compiled.items():
    rows[twin]['memory_gb'] = measure.memory(compiled)
    rows[twin]['recomputed'] = hlo.recomputed(compiled.as_text())
  profile = None
  if options.explain:
    twins.at(0)
    profile = trace.explain(calls, twins.compiled, 2, options.trace and options.trace / name)
    clock.lap('profile')
  return _record(case, twins, options, head, rows, refresh, counts, profile)


def _record(
  case: Case, twins: Twins, options: Any, head: Mapping[str, Any], rows: dict[str, Any],
  refresh: Mapping[str, list[float]],
  counts: Mapping[str, int], profile: Any,
) -> dict[str, Any]:  # fmt: skip
  sparse, config = rows.pop('sparse'), twins.model.config
  alone = {kind: statistics.median(samples) if samples else 0.0 for kind, samples in refresh.items()}
  search_ms = alone['search'] - alone['plain'] if twins.recipe.refresh_every > 1 else 0.0
  amortised = sparse['median_ms'] + search_ms / twins.recipe.refresh_every

  def speed(ms: float) -> float:
    return round(twins.tokens_a_step / ms * 1e3, 1)

  for row in rows.values():
    row['tokens_per_s'] = speed(row['median_ms'])
  share = sum(phase.fraction for phase in twins.recipe.phases if phase.name == 'sparse')
  return dict(
    bench='train_step', **head, op='train_step', model=f'{case.model}-{case.size}', recipe=twins.recipe.name,
    parameters=gpt2.param_count(twins.state.params), dtype='float8' if 'fp8' in twins.recipe.name else 'bfloat16',
    shape=dict(batch=len(twins.tokens), length=twins.tokens.shape[1] - 1, layers=config.num_layers,
               d=config.embed_dim, hidden=config.hidden_dim, vocab=config.vocab_size),
    remat=config.remat, scan_layers=config.scan_layers, attention=config.attention, fused_mlp=config.fused_mlp,
    moment=case.moment,
    mode='step', implementation=options.implementation, **sparse,
    refresh_samples_ms=refresh, search_ms=round(search_ms, 4), refresh_every=twins.recipe.refresh_every,
    amortised_ms=round(amortised, 4), tokens_per_s=speed(amortised), baselines=rows,
    speedup={twin: round(row['median_ms'] / amortised, 4) for twin, row in rows.items()},
    # Of a whole run, whose other phases are dense.
    sparse_share=round(share, 4),
    run_speedup={t: round(1 / (1 - share + share * amortised / row['median_ms']), 4) for t, row in rows.items()},
    sparse_calls=counts, profile=profile, headline=not options.tiny,
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected models; returns the number that failed."""
  parser = measure.parser(MODULE, __doc__, list(CASES), ['gpt2-124m'])
  parser.add_argument('--batch', type=int, help="sequences a step (default: the case's)")
  parser.add_argument('--layers', type=int, help="blocks (default: the model's)")
  recipes = ('transposable_srste', 's_ste', 's_ste_fp8', *MIXED)
  parser.add_argument('--recipe', default=recipes[0], choices=recipes, help='(default: %(default)s)')
  parser.add_argument('--implementation', default='auto', help="of the policy (default: the records' choice)")
  parser.add_argument('--remat', default='auto', choices=('auto', 'none', 'block'), help='recompute blocks or not')
  parser.add_argument('--attention', default='cudnn', choices=('cudnn', 'xla'))
  parser.add_argument('--unroll', action='store_true', help='a Python loop over layers in place of a scan')
  parser.add_argument('--plain-mlp', action='store_true', help='Dense layers in place of the fused feed-forward layer')
  parser.add_argument('--sparse-only', action='store_true', help='no dense twin')
  parser.add_argument('--refreshes', type=int, default=4, help='mask searches to time (default: %(default)s)')
  options = parser.parse_args(argv)
  measure.check_card(parser, options)
  head = measure.environment(MODULE, argv)
  failed = 0
  for name in options.select:
    clock = measure.Clock()
    try:
      record = run(name, options, head, clock)
    except (ValueError, RuntimeError) as error:
      print(f'{name}: failed: {type(error).__name__}: {str(error)[:800]}', flush=True)
      failed += 1
      continue
    measure.append(options.out, record)
    print(
      f'{name}: {record["median_ms"]:.2f} ms, with refreshes {record["amortised_ms"]:.2f} ms'
      f' (a search {record["search_ms"]:.2f} ms), {record["tokens_per_s"]:.0f} tokens/s; '
      + ', '.join(f'{twin} {row["median_ms"]:.2f} ms, x{record["speedup"][twin]:.3f}'
                  for twin, row in record['baselines'].items())
      + f'; {record["sparse_share"]:.0%} of a run are such steps; calls {record["sparse_calls"]}', flush=True,
    )  # fmt: skip
  return failed


if __name__ == '__main__':
  raise SystemExit(main())
