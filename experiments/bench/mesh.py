"""`python -m experiments.bench.mesh --out FILE`: data-parallel steps on the GPUs of this machine, sparse against dense.

Plain `jax.jit` of arrays with a `NamedSharding` over a mesh of automatic axes. Tokens are divided. Weights, moments and
masks are on every device, or with `--sharding fsdp`, in steps, divided as well. Both twins run on all devices in turns.
`--one` times the share of one device on one device alone as well, which says what the communication costs. Flags of XLA
are given in `XLA_FLAGS`, to both twins, and recorded.

Before anything is timed the results are compared with those of one device, see `mesh_checks`.
"""

from collections.abc import Mapping, Sequence
import functools
import os
import statistics
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from experiments.bench import feed_forward, hlo, measure, twins
from experiments.bench.mesh_checks import CHECKS
from experiments.bench.meshes import (
  communication,
  keep_tokens_divided,
  make_mesh,
  place,
  SHARDINGS,
  state_shardings,
  TOKENS,
  WHOLE,
)
from pallas_kernels import _bench

MODULE = 'experiments.bench.mesh'
FFN_CASES = {
  case.name: case for case in (feed_forward.Case('fst', act, (32768, 4096, 16384)) for act in ('gelu', 'silu'))
}  # fmt: skip
# Twice the batch of the measurements on one device.
STEP_CASES = {
  'gpt2-774m': twins.Case('gpt2', '774m', 32, 1024, 50304),
  'gpt2-1558m': twins.Case('gpt2', '1558m', 48, 1024, 50304),
  'llama-3b': twins.Case('llama', '3b', 12, 2048, 32000, 'bfloat16'),
}


def _rows(calls: Mapping[str, Any], compiled: Mapping[str, Any], options: Any) -> dict[str, dict[str, Any]]:
  """Times of the twins in turns, with what their programs hold."""
  rows = _bench.in_turns(calls, options.rounds, lambda name: _bench.stream_ms(calls[name], options.steps))
  for name, row in rows.items():
    row |= dict(memory_gb=_bench.memory(compiled[name]), communication=communication(compiled[name].as_text()))
  return rows


def run_ffn(name: str, mesh: Mesh, options: Any, head: Mapping[str, Any], clock: _bench.Clock) -> dict[str, Any]:
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
    compiled = _bench.compile_all(jobs, needed=jobs)
    calls = {name: functools.partial(f, *jobs[name][1]) for name, f in compiled.items()}
    heat = {name: statistics.median(_bench.stream_ms(call, options.steps)) for name, call in calls.items()}
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
    mode='forward_and_vjp', mesh=dict(mesh.shape), sharding='whole', implementation=options.implementation,
    **sparse, baselines=rows, speedup=_bench.speedup(rows, sparse['median_ms']),
    sparse_calls=counts, headline=not options.tiny,
  )  # fmt: skip


def run_step(name: str, mesh: Mesh, options: Any, head: Mapping[str, Any], clock: _bench.Clock) -> dict[str, Any]:
  """A training step without mask search on all devices; state donated, one of both twins."""
  pair = twins.Twins(
    STEP_CASES[name], options, clock, mesh,
    shardings=functools.partial(state_shardings, mesh, options.sharding),
    wrap=functools.partial(keep_tokens_divided, mesh),
  )  # fmt: skip
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
    mode='step', mesh=dict(mesh.shape), sharding=options.sharding, implementation=options.implementation,
    **sparse, baselines=rows,
    speedup=_bench.speedup(rows, sparse['median_ms']),
    sparse_calls=hlo.sparse_calls(pair.compiled['sparse'].as_text(), tokens=pair.tokens_a_step // mesh.size),
    headline=not options.tiny,
  )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected checks and cases; returns the number that failed."""
  choices = [*CHECKS, *FFN_CASES, *STEP_CASES]
  parser = measure.parser(MODULE, __doc__, choices, [*CHECKS, 'fst-gelu-32768x4096x16384', 'gpt2-774m'])
  parser.add_argument('--implementation', default='sparse', help='of the policy (default: %(default)s)')
  parser.add_argument('--devices', type=int, help='devices of the mesh (default: all)')
  parser.add_argument('--one', action='store_true', help="time one device's share of the block on one device as well")
  parser.add_argument('--sharding', default=SHARDINGS[0], choices=SHARDINGS, help="of a step's state (%(default)s)")
  parser.add_argument('--batch', type=int, help="sequences a step (default: the case's)")
  options = parser.parse_args(argv)
  measure.check_gpu(parser, options)
  if (options.devices or 1) > jax.device_count():
    parser.error(f'--devices {options.devices}: there are {jax.device_count()} here')
  head = measure.environment(MODULE, argv) | {'xla_flags': os.environ.get('XLA_FLAGS', '')}
  mesh = make_mesh(options.devices or jax.device_count())

  def run(name: str) -> dict[str, Any]:
    if name not in CHECKS:
      return (run_ffn if name in FFN_CASES else run_step)(name, mesh, options, head, _bench.Clock())
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

  return _bench.run_each(options.select, run, options.out, summary)


if __name__ == '__main__':
  raise SystemExit(main())
