"""`python -m experiments.bench.mesh --out FILE`: data-parallel steps on the GPUs of this machine, sparse against dense.

Plain `jax.jit` of arrays with a `NamedSharding` over a mesh of automatic axes: weights, moments and masks on every
device, tokens divided. Both twins run on all devices in turns. `--one` times the share of one device on one device
alone as well, which says what the communication costs.

Before anything is timed the gradients are compared with those of one device: the sample of MVUE bit for bit, those of
the block and of a small model by their relative error. A check beyond its limit fails.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import re
import statistics
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

from experiments.bench import feed_forward, hlo, measure, twins
from experiments.models import gpt2
from pallas_kernels import _tuning
import sparse24_jax as s24
from sparse24_jax import products

MODULE = 'experiments.bench.mesh'
TOKENS, WHOLE = PartitionSpec('data'), PartitionSpec()
FFN_CASES = {
  case.name: case for case in (feed_forward.Case('fst', act, (32768, 4096, 16384)) for act in ('gelu', 'silu'))
}  # fmt: skip
# Twice the batch of the measurements on one device.
STEP_CASES = {
  'gpt2-774m': twins.Case('gpt2', '774m', 32, 1024, 50304, True),
  'gpt2-1558m': twins.Case('gpt2', '1558m', 48, 1024, 50304, True),
  'llama-3b': twins.Case('llama', '3b', 12, 2048, 32000, True, 'bfloat16'),
}
CHECKED = (4096, 1024, 4096)
# Relative errors, ours: sums over devices are rounded to bfloat16 one by one. The last is a median, see `check_gpt2`.
BLOCK_LIMIT, MODEL_LIMIT, SAMPLED_LIMIT = 5e-3, 2e-2, 5e-2


def make_mesh(devices: int) -> Mesh:
  """A mesh of the first devices, all along 'data', whose axis XLA divides by itself."""
  return Mesh(np.array(jax.devices()[:devices]), ('data',))


def place(mesh: Mesh, tree: Any, spec: PartitionSpec) -> Any:
  """The arrays of a tree on the mesh."""
  return jax.device_put(tree, NamedSharding(mesh, spec))


def communication(text: str) -> dict[str, int]:
  """How often a compiled program lets devices exchange arrays, by the kind of exchange.

  >>> communication('%a = f32[2] all-reduce(%b)\\n%c = (f32[2], f32[4]) all-gather-start(%d)')
  {'all-reduce': 1, 'all-gather': 1}
  """
  kinds = re.findall(r' = .*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(', text)
  return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def _errors(found: Any, expected: Any) -> dict[str, float]:
  """Relative errors by path; leaves are fetched, since they lie on different devices."""
  host = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), (found, expected))
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(host[1])]
  pairs = zip(jax.tree.leaves(host[0]), jax.tree.leaves(host[1]), strict=True)
  return {path: float(f'{_tuning.relative_error(a, b):.3e}') for path, (a, b) in zip(paths, pairs, strict=True)}


def _check_limits(errors: Mapping[str, float], limit: float) -> None:
  """ValueError with those that are larger than the limit, or NaN."""
  beyond = {name: error for name, error in errors.items() if not error <= limit}
  if beyond:
    raise ValueError(f'errors against one device must be at most {limit}, found {beyond}')


def check_sample(mesh: Mesh, implementation: str, tiny: bool) -> dict[str, Any]:
  """Share of the entries of a sample that differ from one device's; ValueError unless 0."""
  tokens, width = (512, 64) if tiny else (2048, 1024)
  dz = jax.random.normal(jax.random.key(0), (tokens, width), jnp.bfloat16)
  identity = jnp.eye(tokens, dtype=jnp.bfloat16)  # its product with the sample is the sample
  f = jax.jit(lambda dz, x: products.sampled_weight_grad(dz, jax.random.key(3), x, backend=implementation))
  expected, found = f(dz, identity), f(*place(mesh, (dz, identity), TOKENS))
  differ = np.asarray(found, np.float32) != np.asarray(expected, np.float32)
  kept = float((np.asarray(expected, np.float32) != 0).mean())
  _check_limits({'differ': float(differ.mean())}, 0.0)
  return dict(differ=float(differ.mean()), kept=kept)


def check_ffn(mesh: Mesh, implementation: str, tiny: bool) -> dict[str, Any]:
  """Errors of the block's output and gradients against one device, GELU and SwiGLU; ValueError beyond the limit."""
  found = {}
  for activation in ('gelu', 'silu'):
    case = feed_forward.Case('fst', activation, (512, 64, 128) if tiny else CHECKED)
    weights, x, dy = feed_forward.inputs(case, case.shape)
    state = case.states(weights)
    step = jax.jit(feed_forward.sparse_step(case, case.policy(implementation)))
    expected = step(weights, x, dy, state, jax.random.key(7))
    (x, dy), (weights, state) = place(mesh, (x, dy), TOKENS), place(mesh, (weights, state), WHOLE)
    found[activation] = _errors(step(weights, x, dy, state, jax.random.key(7)), expected)
    _check_limits({f'{activation} {path}': error for path, error in found[activation].items()}, BLOCK_LIMIT)
  return found


def check_gpt2(mesh: Mesh, implementation: str, tiny: bool) -> dict[str, Any]:
  """Largest and median error of the gradients of two blocks of GPT-2 against one device, with MVUE and without.

  MVUE chooses by the values that it is given, so there a rounding upstream picks other entries now and then; hence the
  limit on its median alone.

  Raises:
    ValueError: an error is beyond its limit.
  """
  fields = twins.TINY | dict(embed_dim=64, seq_len=64) if tiny else dict(num_layers=2, seq_len=512)
  config = gpt2.make_config(
    'nano' if tiny else '124m', vocab_size=512, dtype='bfloat16', scan_layers=True, remat=True,
    attention='xla' if tiny else 'cudnn', fused_mlp=True, **fields,
  )  # fmt: skip
  model = gpt2.GPT2(config)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 512, (8, config.seq_len + 1), dtype=np.int32))
  params = jax.jit(lambda: model.init(jax.random.key(0), tokens[:1, :-1])['params'])()
  found = {}
  for name in ('sampled', 'unsampled'):
    recipe = measure.with_implementation(twins.recipe_of('transposable_srste'), implementation)
    if name == 'unsampled':
      rules = (dataclasses.replace(r, policy=dataclasses.replace(r.policy, weight_grad='dense')) for r in recipe.rules)
      recipe = dataclasses.replace(recipe, rules=tuple(rules))
    grads = jax.jit(_gradients(model, recipe))
    expected = grads(params, tokens)
    errors = _errors(grads(place(mesh, params, WHOLE), place(mesh, tokens, TOKENS)), expected)
    worst = max(errors, key=errors.__getitem__)
    found[name] = dict(largest=errors[worst], of=worst, median=statistics.median(errors.values()), loss=errors['[0]'])
    if name == 'sampled':
      _check_limits({'sampled, median': found[name]['median']}, SAMPLED_LIMIT)
    else:
      _check_limits({f'unsampled {worst}': errors[worst]}, MODEL_LIMIT)
  return found


CHECKS = {'check-sample': check_sample, 'check-ffn': check_ffn, 'check-gpt2': check_gpt2}


def _gradients(model: Any, recipe: s24.Recipe) -> Callable[[Any, Array], Any]:
  """(params, tokens) -> (loss, gradients) of the first step of a run."""
  net, tx = s24.sparsify(model, recipe), s24.sparse_training(optax.sgd(1e-3), recipe)

  def gradients(params: Any, tokens: Array) -> Any:
    states = s24.sparse_variables(params, tx.init(params), recipe)

    def loss(params: Any) -> Array:
      variables = {'params': params, 'sparse24': states}
      logits = net.apply(variables, tokens[:, :-1], rngs={'mvue': jax.random.key(1)})
      return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return jax.value_and_grad(loss)(params)

  return gradients


def _rows(calls: Mapping[str, Any], compiled: Mapping[str, Any], options: Any) -> dict[str, dict[str, Any]]:
  """Times of the twins in turns, with what their programs hold."""
  bursts = measure.interleave(calls, rounds=options.rounds, steps=options.steps)
  rows = {name: measure.timing(bursts[name]) for name in calls}
  for name, row in rows.items():
    row |= dict(memory_gb=measure.memory(compiled[name]), communication=communication(compiled[name].as_text()))
  return rows


def run_ffn(name: str, mesh: Mesh, options: Any, head: Mapping[str, Any], clock: measure.Clock) -> dict[str, Any]:
  """The block on all devices; every form of the dense twin that `ffn` has."""
  case = FFN_CASES[name]
  shape = (512, 64, 128) if options.tiny else case.shape
  policy = case.policy(options.implementation)
  rows: dict[str, Any] = {}
  split, whole = NamedSharding(mesh, TOKENS), NamedSharding(mesh, WHOLE)
  for devices, tokens in ((mesh.size, shape[0]), *([(1, shape[0] // mesh.size)] if options.one else [])):
    weights, x, dy = jax.jit(lambda tokens=tokens: feed_forward.inputs(case, (tokens, *shape[1:])))()
    state = jax.jit(case.states)(weights)
    key, shardings = jax.random.key(7), {}
    if devices > 1:
      (x, dy), (weights, state, key) = place(mesh, (x, dy), TOKENS), place(mesh, (weights, state, key), WHOLE)
      shardings = dict(out_shardings=(split, (whole, split)))
    jobs = {'sparse': (jax.jit(feed_forward.sparse_step(case, policy), **shardings), (weights, x, dy, state, key))}
    for form in feed_forward.DENSE_FORMS:
      step = feed_forward.dense_step(feed_forward.dense_block(case, form))
      jobs[f'dense {form}'] = (jax.jit(step, **shardings), (weights, x, dy))
    compiled = measure.compile_all(jobs, needed=jobs)
    calls = {name: functools.partial(f, *jobs[name][1]) for name, f in compiled.items()}
    heat = {name: statistics.median(measure.stream_ms(call, options.steps)) for name, call in calls.items()}
    best = min((name for name in heat if name != 'sparse'), key=heat.__getitem__)
    clock.lap(f'{devices} device(s), first heat {({name: round(ms, 3) for name, ms in heat.items()})}')
    made = _rows({'sparse': calls['sparse'], 'dense': calls[best]}, compiled | {'dense': compiled[best]}, options)
    made['dense']['form'] = best
    counts = hlo.sparse_calls(compiled['sparse'].as_text(), tokens=tokens // devices)
    rows |= made | {'counts': counts} if devices > 1 else {f'{name}_one_device': row for name, row in made.items()}
    clock.lap('second heat')
  sparse, counts = rows.pop('sparse'), rows.pop('counts')
  return dict(
    bench='mesh', **head, **case.fields, shape=dict(tokens=shape[0], d=shape[1], hidden=shape[2]),
    mode='forward_and_vjp', mesh=dict(mesh.shape), implementation=options.implementation, **sparse, baselines=rows,
    speedup=measure.speedup(rows, sparse['median_ms']),
    sparse_calls=counts, headline=not options.tiny,
  )  # fmt: skip


def run_step(name: str, mesh: Mesh, options: Any, head: Mapping[str, Any], clock: measure.Clock) -> dict[str, Any]:
  """A training step without mask search on all devices, as `train_step` makes it; state donated, one of both twins."""
  pair = twins.Twins(STEP_CASES[name], options, clock, mesh)
  losses = {twin: float(call()) for twin, call in pair.calls.items()}
  clock.lap(f'first steps, losses {losses}')
  rows = _rows(pair.calls, pair.compiled, options)
  clock.lap('heat')
  for row in rows.values():
    row['tokens_per_s'] = round(pair.tokens_a_step / row['median_ms'] * 1e3, 1)
  sparse, config = rows.pop('sparse'), pair.model.config
  batch, positions = pair.tokens.shape
  return dict(
    bench='mesh', **head, op='train_step', model=name, recipe=pair.recipe.name, dtype='bfloat16',
    shape=dict(batch=batch, length=positions - 1, layers=config.num_layers, d=config.embed_dim),
    mode='step', mesh=dict(mesh.shape), implementation=options.implementation, **sparse, baselines=rows,
    speedup=measure.speedup(rows, sparse['median_ms']),
    sparse_calls=hlo.sparse_calls(pair.compiled['sparse'].as_text(), tokens=pair.tokens_a_step // mesh.size),
    headline=not options.tiny,
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected checks and cases; returns the number that failed."""
  choices = [*CHECKS, *FFN_CASES, *STEP_CASES]
  parser = measure.parser(MODULE, __doc__, choices, [*CHECKS, 'fst-gelu-32768x4096x16384', 'gpt2-774m'])
  parser.add_argument('--implementation', default='mosaic_gpu', help='of the policy (default: %(default)s)')
  parser.add_argument('--devices', type=int, help='devices of the mesh (default: all)')
  parser.add_argument('--one', action='store_true', help="time one device's share of the block on one device as well")
  parser.add_argument('--batch', type=int, help="sequences a step (default: the case's)")
  parser.add_argument('--layers', type=int, help="blocks (default: the model's)")
  parser.set_defaults(recipe='transposable_srste', sparse_only=False, unroll=False, plain_mlp=False, attention='cudnn')
  options = parser.parse_args(argv)
  measure.check_card(parser, options)
  head, mesh = measure.environment(MODULE, argv), make_mesh(options.devices or jax.device_count())

  def run(name: str) -> dict[str, Any]:
    if name not in CHECKS:
      return (run_ffn if name in FFN_CASES else run_step)(name, mesh, options, head, measure.Clock())
    error = CHECKS[name](mesh, options.implementation, options.tiny)
    return dict(bench='mesh_check', **head, op=name, mesh=dict(mesh.shape), implementation=options.implementation,
                error=error)  # fmt: skip

  def summary(record: Mapping[str, Any]) -> str:
    if record['bench'] == 'mesh_check':
      return str(record['error'])
    return (
      f'on {mesh.size} devices {record["median_ms"]:.3f} ms, over {record["speedup"]};'
      f' calls {record["sparse_calls"]}, {record["communication"]}'
    )

  return measure.run_each(options.select, run, options.out, summary)


if __name__ == '__main__':
  raise SystemExit(main())
