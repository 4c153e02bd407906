"""`python -m experiments.bench.ffn --out FILE`: a feed-forward block, forward and backward, against its dense twins.

Timed is one jitted call that takes weights, tokens, the output's cotangent and the projection's state (mask or scale)
and gives the output and the gradients of weights and tokens. Packing, MVUE and quantisation are inside; the search for
masks is not, since training does it every 40 steps (`train_step` has it). The dense twin is the fastest of the forms
in `DENSE_FORMS`; for FP8 there is a dense FP8 twin as well.
"""

from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
import statistics
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from experiments.bench import hlo, measure, trace
from experiments.bench.dense_fp8 import fp8_dot
from pallas_kernels import _compat
import sparse24_jax as s24

MODULE = 'experiments.bench.ffn'
SHAPES = ((16384, 4096, 16384), (32768, 4096, 14336))
TINY = (64, 32, 128)
CHECKED = (1024, 512, 2048)
# Roles and counts of sparse calls in a step: one a matrix, but S-STE's input gradient is dense.
_ROLES = {'fst': hlo.ROLES, 's_ste_fp8': ('forward', 'weight_grad')}


@dataclasses.dataclass(frozen=True)
class Case:
  """One row of the table.

  Attributes:
    method: 'fst' or 's_ste_fp8'.
    activation: 'gelu' (two matrices), or 'silu' with a gate (SwiGLU, three).
    shape: tokens, model width, hidden width.
  """

  method: str
  activation: str
  shape: tuple[int, int, int]

  @property
  def name(self) -> str:
    """What `--select` calls it."""
    block = 'swiglu' if self.gated else self.activation
    return f'{self.method}-{block}-{"x".join(map(str, self.shape))}'

  @property
  def gated(self) -> bool:
    """Whether there is a gate."""
    return self.activation == 'silu'

  @property
  def recipe(self) -> str:
    """The constructor's name, as records have it."""
    return {'fst': 'transposable_srste'}.get(self.method, self.method)

  @property
  def projection(self) -> s24.Projection:
    """Makes the states."""
    return s24.transposable() if self.method == 'fst' else s24.soft_threshold_projection()

  def policy(self, implementation: Any) -> s24.DotPolicy:
    """The recipe's policy with a back end."""
    if self.method == 'fst':
      recipe = s24.recipes.transposable_srste('.*', masked_decay=0.0)
    else:
      recipe = s24.recipes.s_ste('.*', fp8=True)
    return dataclasses.replace(recipe.rules[0].policy, implementation=implementation)


CASES = {
  case.name: case
  for method in ('fst', 's_ste_fp8') for shape in SHAPES for activation in ('gelu', 'silu')
  for case in (Case(method, activation, shape),)
}  # fmt: skip
GROUPS = {'bf16': [n for n in CASES if n.startswith('fst')], 'fp8': [n for n in CASES if n.startswith('s_ste')]}

type Block = Callable[[Mapping[str, Array], Array], Array]


def inputs(case: Case, shape: tuple[int, int, int], dtype: Any = jnp.bfloat16) -> tuple[dict[str, Array], Array, Array]:
  """Weights, tokens and cotangent: random, scaled so that every matrix keeps the variance."""
  tokens, d, hidden = shape
  keys = jax.random.split(jax.random.key(tokens + d), 5)
  sides = {'up': (d, hidden), 'down': (hidden, d)} | ({'gate': (d, hidden)} if case.gated else {})
  weights = {
    name: (jax.random.normal(key, size, jnp.float32) / jnp.sqrt(size[0])).astype(dtype)
    for key, (name, size) in zip(keys, sides.items(), strict=False)
  }
  x, dy = (jax.random.normal(key, (tokens, d), jnp.float32).astype(dtype) for key in keys[3:])
  return weights, x, dy


def dense_block(case: Case, form: str = 'plain', dot: Callable[[Array, Array], Array] = jnp.dot) -> Block:
  """The dense twin in plain JAX.

  Args:
    case: says which activation.
    form: 'plain' has tokens first; 'features_first' keeps the hidden activations [hidden, tokens], as the sparse
      kernels do; 'recompute' keeps only the inputs of the activation for the backward.
    dot: multiplies `[tokens, in]` and `[in, out]`.
  """

  def activate(up: Array, gate: Array | None) -> Array:
    return jax.nn.gelu(up) if gate is None else jax.nn.silu(gate) * up

  if form == 'recompute':
    activate = jax.checkpoint(activate)

  def first(x: Array, w: Array) -> Array:
    return jax.lax.dot_general(w, x, (((0,), (1,)), ((), ())))

  def block(weights: Mapping[str, Array], x: Array) -> Array:
    into = first if form == 'features_first' else dot
    gate = into(x, weights['gate']) if case.gated else None
    h = activate(into(x, weights['up']), gate)
    if form == 'features_first':
      return jax.lax.dot_general(h, weights['down'], (((0,), (0,)), ((), ())))
    return dot(h, weights['down'])

  return block


DENSE_FORMS = ('plain', 'features_first', 'recompute')


def sparse_block(case: Case, policy: s24.DotPolicy, state: Mapping[str, Array], key: Array) -> Block:
  """The library's block with the states given."""

  def block(weights: Mapping[str, Array], x: Array) -> Array:
    return s24.ffn(
      x, weights['up'], weights['down'], state, policy=policy, activation=case.activation,
      w_gate=weights.get('gate'), key=key,
    )  # fmt: skip

  return block


def dense_step(block: Block) -> Callable[..., Any]:
  """(weights, x, dy) -> (y, (gradients of the weights, of x))."""

  def step(weights: Mapping[str, Array], x: Array, dy: Array) -> tuple[Array, Any]:
    y, vjp = jax.vjp(block, weights, x)
    return y, vjp(dy)

  return step


def sparse_step(case: Case, policy: s24.DotPolicy) -> Callable[..., Any]:
  """(weights, x, dy, state, key) -> (y, (gradients of the weights, of x))."""

  def step(weights: Any, x: Array, dy: Array, state: Any, key: Array) -> tuple[Array, Any]:
    return dense_step(sparse_block(case, policy, state, key))(weights, x, dy)

  return step


def compile_step(step: Callable[..., Any], args: Sequence[Any]) -> Any:
  """The compiled step, or the exception that stands in a refused one's place."""
  try:
    return jax.jit(step).lower(*args).compile()
  except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
    return error


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
  state = {name: case.projection.init(w) for name, w in wide[0].items()}

  @functools.cache
  def compiled(policy: s24.DotPolicy) -> Callable[..., Any]:
    return jax.jit(sparse_step(case, policy))

  def run(policy: s24.DotPolicy, args: Any, key: Array = key) -> dict[str, Array]:
    with jax.default_matmul_precision('highest' if args is wide else 'default'):
      y, (dw, dx) = compiled(policy)(*args, state, key)
    return {'y': y, 'dx': dx} | {f'd{name}': value for name, value in dw.items()}

  def errors(found: Any, expected: Any) -> dict[str, float]:
    return {name: float(f'{measure.relative_error(found[name], expected[name]):.3e}') for name in expected}

  exact = dataclasses.replace(plain, precision='default')
  unsampled, sampled = run(dataclasses.replace(exact, **without), wide), run(exact, wide)
  args = (weights, x, dy)
  draws = [run(policy, args, jax.random.key(100 + i)) for i in range(8)]
  # The FP8 kernels know no weight gradient without MVUE; the simulation rounds alike.
  target = run(dataclasses.replace(plain if policy.precision == 'fp8' else policy, **without), args)
  ratio = {}
  for name in (f'd{name}' for name in weights):
    mean = sum(draw[name].astype(jnp.float32) for draw in draws) / len(draws)
    one = statistics.mean(measure.relative_error(draw[name], target[name]) for draw in draws)
    ratio[name] = round(measure.relative_error(mean, target[name]) / one * len(draws) ** 0.5, 3)
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
  implementation = None if options.tiny else {'auto': None}.get(options.implementation, options.implementation)
  dtype = jnp.float32 if options.tiny else jnp.bfloat16
  error = gradient_errors(case, TINY if options.tiny else CHECKED, implementation, dtype)
  return dict(
    bench='ffn_check', **head, op='ffn', recipe=case.recipe, activation='swiglu' if case.gated else case.activation,
    dtype='float8' if case.method == 's_ste_fp8' else 'bfloat16', implementation=implementation or 'auto',
    shape=dict(zip(('tokens', 'd', 'hidden'), error['shape'], strict=True)), error=error,
  )  # fmt: skip


def run(case: Case, options: Any, head: Mapping[str, Any], clock: measure.Clock) -> dict[str, Any]:
  """Measures one case and returns its record."""
  shape = TINY if options.tiny else case.shape
  implementation = {'auto': None}.get(options.implementation, options.implementation)
  dtype = jnp.bfloat16
  if options.tiny:  # XLA's CPU lacks some products of bfloat16.
    implementation, dtype = None, jnp.float32
  policy = case.policy(implementation)
  weights, x, dy = jax.jit(lambda: inputs(case, shape, jnp.float32))()
  weights = {name: w.astype(dtype if options.weights == 'bfloat16' else jnp.float32) for name, w in weights.items()}
  x, dy = x.astype(dtype), dy.astype(dtype)
  state = jax.jit(lambda w: {name: case.projection.init(value) for name, value in w.items()})(weights)
  sparse_args = (weights, x, dy, state, jax.random.key(7))

  def narrow(step: Callable[..., Any]) -> Callable[..., Any]:
    """The cast of wide weights is part of the step, for every twin."""
    if options.weights == 'bfloat16':
      return step

    def cast(weights: Any, *rest: Any) -> Any:
      y, vjp = jax.vjp(lambda w: jax.tree.map(lambda a: a.astype(dtype), w), weights)
      out, (dw, dx) = step(y, *rest)
      return out, (vjp(dw)[0], dx)

    return cast

  jobs: dict[str, Any] = {'sparse': (narrow(sparse_step(case, policy)), sparse_args)}
  for form in DENSE_FORMS:
    jobs[f'dense {form}'] = (narrow(dense_step(dense_block(case, form))), sparse_args[:3])
  if case.method == 's_ste_fp8':
    for form in ('plain', 'recompute'):
      jobs[f'dense_fp8 {form}'] = (narrow(dense_step(dense_block(case, form, fp8_dot))), sparse_args[:3])
  with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
    compiled = dict(zip(jobs, pool.map(lambda job: compile_step(*job), jobs.values()), strict=True))
  clock.lap(f'compile {len(jobs)} steps')
  if isinstance(compiled['sparse'], Exception):
    raise compiled['sparse']
  for name in [name for name, f in compiled.items() if isinstance(f, Exception)]:
    print(f'  {name} does not compile: {str(compiled.pop(name))[:300]}', flush=True)
  calls = {name: lambda f=f, args=jobs[name][1]: f(*args) for name, f in compiled.items()}
  text = compiled['sparse'].as_text()
  counts = hlo.sparse_calls(text, tokens=shape[0])
  # Gate and up-projection are one product.
  if not options.tiny and implementation and sum(counts.values()) < 2 * len(_ROLES[case.method]):
    raise ValueError(f'the compiled step lacks sparse matmuls in {_ROLES[case.method]}; it has {counts}')

  heat = {name: statistics.median(measure.stream_ms(call, options.steps)) for name, call in calls.items()}
  clock.lap('first heat: ' + ', '.join(f'{name} {ms:.3f} ms' for name, ms in heat.items()))
  kinds = ('dense', 'dense_fp8') if case.method == 's_ste_fp8' else ('dense',)
  best = {
    kind: min((n for n in heat if n.split()[0] == kind), key=heat.__getitem__, default=None) for kind in kinds
  }
  twins = {'sparse': calls['sparse']} | {kind: calls[name] for kind, name in best.items() if name}
  bursts = measure.interleave(twins, rounds=options.rounds, steps=options.steps)
  clock.lap('second heat')
  rows = {name: measure.timing(bursts[name]) for name in twins}
  for name in twins:
    key = name if name == 'sparse' else best[name]
    # Not beside a trace: both want the one profiling interface of the driver.
    if jax.default_backend() == 'gpu' and not options.explain:
      rows[name]['device_ms'] = _compat.median_ms(compiled[key], jobs[key][1], 5)
    rows[name]['memory_gb'] = measure.memory(compiled[key])
    rows[name]['form'] = key
  profile = None
  if options.explain:
    programs = {name: compiled[row['form']] for name, row in rows.items()}
    profile = trace.explain(twins, programs, 3, options.trace and options.trace / case.name)
    clock.lap('profile')
  error = None
  if not options.skip_check and case.shape == SHAPES[0]:  # The shape that is checked is one and the same.
    error = gradient_errors(case, TINY if options.tiny else CHECKED, implementation, dtype)
    clock.lap(f'errors {error}')
  sparse = rows.pop('sparse')
  flops = 6 * shape[0] * shape[1] * shape[2] * len(weights)
  return dict(
    bench='ffn', **head, op='ffn', recipe=case.recipe, activation='swiglu' if case.gated else case.activation,
    dtype='float8' if case.method == 's_ste_fp8' else 'bfloat16', weights=options.weights,
    shape=dict(tokens=shape[0], d=shape[1], hidden=shape[2]), mode='forward_and_vjp',
    implementation=implementation or 'auto', **sparse, baselines=rows,
    speedup={name: round(row['median_ms'] / sparse['median_ms'], 4) for name, row in rows.items()},
    heat_ms={name: round(ms, 4) for name, ms in heat.items()}, tflops=flops / sparse['median_ms'] / 1e9,
    sparse_calls=counts, error=error, profile=profile, headline=not options.tiny and options.weights == 'bfloat16',
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected cases; returns the number that failed."""
  parser = measure.parser(MODULE, __doc__, [*GROUPS, *CASES], ['bf16'])
  parser.add_argument(
    '--weights', default='bfloat16', choices=('bfloat16', 'float32'), help='stored weights (default: %(default)s)'
  )
  parser.add_argument(
    '--implementation', default='mosaic_gpu', help="of the policy; 'auto' follows the records (default: %(default)s)"
  )
  checks = parser.add_mutually_exclusive_group()
  checks.add_argument('--skip-check', action='store_true', help='no comparison of gradients with the reference')
  checks.add_argument('--check-only', action='store_true', help='only that comparison; nothing is timed')
  options = parser.parse_args(argv)
  measure.check_card(parser, options)
  head = measure.environment(MODULE, argv)
  names = [name for chosen in options.select for name in GROUPS.get(chosen, [chosen])]
  if options.check_only:  # of one shape, whatever the shape that is timed
    names = list({(CASES[name].method, CASES[name].activation): name for name in reversed(names)}.values())[::-1]
  failed = 0
  for name in names:
    clock = measure.Clock()
    try:
      if options.check_only:
        record = check(CASES[name], options, head)
        print(f'{name}: {record["error"]}', flush=True)
        measure.append(options.out, record)
        continue
      record = run(CASES[name], options, head, clock)
    except (ValueError, RuntimeError) as error:
      print(f'{name}: failed: {type(error).__name__}: {str(error)[:600]}', flush=True)
      failed += 1
      continue
    measure.append(options.out, record)
    ratios = ', '.join(f'x{ratio:.3f} over {kind}' for kind, ratio in record['speedup'].items())
    print(f'{name}: {record["median_ms"]:.3f} ms, {ratios}; calls {record["sparse_calls"]}', flush=True)
  return failed


if __name__ == '__main__':
  raise SystemExit(main())
