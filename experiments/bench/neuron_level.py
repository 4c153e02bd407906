"""`python -m experiments.bench.neuron_level --out FILE`: V:N:M matmul, packers and feed-forward block against dense.

Three groups of cases. `matmul`: the matmul against the faster of XLA's two ways to write the dense one, with the
settings of `tuned/<device>/vnm_matmul.json`, which `python -m pallas_kernels tune vnm_matmul` writes. `packs`: each
packer's bytes over its time, as a share of the copy bandwidth of the same run. `block`: the block, forward and backward
with all its packs, against dense squared ReLU. All are timed in turns by the sum of their kernels (by the wall clock on
a CPU); records hold every sample.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
from pathlib import Path
import statistics
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from experiments.bench import measure, trace
from experiments.bench.vnm_packs import Case, compile_all, pack, PACKS, Plan
from pallas_kernels import _device, _tuning
from pallas_kernels.vnm import _own_kernel, api
from pallas_kernels.vnm.arg_specs import dense_ways, operand, PATTERNS, SHAPES
from pallas_kernels.vnm.format import decompress_operand, VNMOperand
import sparse24_jax as s24
from sparse24_jax.activation_sparsity import neuron_level_ffn

MODULE = 'experiments.bench.neuron_level'
BLOCK = (16384, 4096, 16384)
TINY = (128, 256, 128)

CASES = {
  case.name: case
  for v, m in PATTERNS
  for case in (
    *(Case('matmul', v, m, shape) for shape in SHAPES),
    *(Case('pack', v, m, (BLOCK[0], BLOCK[2]), role) for role in PACKS),
    *(Case('ffn', v, m, BLOCK, setting=setting) for setting in measure.ACTIVATIONS),
  )
}
GROUPS = {
  group: [name for name, case in CASES.items() if case.kind == kind and not case.setting]
  for group, kind in (('matmul', 'matmul'), ('packs', 'pack'), ('block', 'ffn'))
}


def matmul(case: Case, options: Any) -> Plan:
  """Measures a matmul with the settings that the records have of it."""
  r, k, n = TINY if options.tiny else case.shape

  def make(key: Array) -> tuple[VNMOperand, Array, Array, Array]:
    a = operand(r, k, case.v, case.m, key)
    b, full = (
      jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32).astype(a.dtype)
      for i, shape in ((1, (k, n)), (2, (r, k)))
    )
    return a, b, decompress_operand(a), full

  key = jax.random.key(r + case.m)
  a, b, dense, _ = jax.eval_shape(make, key)
  # XLA's CPU multiplies bfloat16 slowly and not in all layouts.
  ways = dense_ways(jnp.float32 if options.tiny else a.dtype)
  if options.tiny:
    name, config, multiply = 'reference', None, functools.partial(api.vnm_matmul, implementation='reference')
  else:
    kernel = _own_kernel.here()
    known = kernel.known(a, n, _device.current())
    name, config, multiply = kernel.name, dataclasses.asdict(known), functools.partial(kernel.multiply, config=known)
  jobs: dict[str, Any] = {'make': (make, (key,))}
  jobs |= {name: (f, (dense, b)) for name, f in ways.items()}
  jobs['expected'] = (functools.partial(jnp.dot, preferred_element_type=jnp.float32), (dense, b))
  if options.tiny:
    jobs['expected'] = (lambda x, y: jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32)), (dense, b))
  jobs['sparse'] = multiply, (a, b)

  def run(compiled: Mapping[str, Any]) -> dict[str, Any]:
    a, b, dense, full = compiled['make'](key)
    expected = compiled['expected'](dense, b)
    heat = {name: statistics.median(measure.timer(compiled[name], (dense, b), options.steps)) for name in ways}
    best = min(heat, key=heat.__getitem__)
    if 'sparse' not in compiled:
      raise ValueError(f'{case.name}: no compiled kernel')
    candidate = _tuning.Candidate(name, config, compiled['sparse'], (a, b))
    error, reason = _tuning.verify(candidate, expected)
    if reason:
      raise ValueError(f'{case.name}: {reason}')
    # Zeros take less power, so that the same kernel multiplies `dense`, whose zeros are the pattern's, faster.
    calls = {
      'sparse': (candidate.f, (a, b)), best: (compiled[best], (dense, b)), 'full': (compiled[best], (full, b)),
    }  # fmt: skip
    rows = measure.timed(calls, options)
    if not options.tiny:
      hot = dict(zip(calls, _tuning.sustained([*calls.values()]), strict=True))
      rows = {name: row | hot[name] for name, row in rows.items()}
    ms = rows['sparse']['median_ms']
    return dict(
      bench='vnm_matmul', op='vnm_matmul', role='forward', pattern=f'{case.v}:2:{case.m}',
      shape=dict(tokens=r, d_in=k, d_out=n, m=r, n=n, k=k), layouts=dict(b='kn', out='mn'), mode='forward',
      implementation=name, config=config, **rows['sparse'],
      baselines={
        name: rows[call] | {'config': {'way': best}}
        for name, call in (('dense', best), ('dense_without_zeros', 'full'))
      },
      speedup=round(rows[best]['median_ms'] / ms, 4),
      tflops=2 * r * n * k / ms / 1e9, error=error,
    )  # fmt: skip

  return Plan(jobs, run)


def block(case: Case, options: Any) -> Plan:
  """Measures the block, forward and backward."""
  tokens, d, hidden = (case.v, 64, 2 * case.v) if options.tiny else case.shape
  dtype = jnp.float32 if options.tiny else jnp.bfloat16
  implementation = None if options.tiny else 'sparse'
  policy = measure.activation_policy(case.v, case.m, case.setting, implementation=implementation)

  def make(key: Array) -> tuple[Any, ...]:
    sizes = ((tokens, d), (d, hidden), (hidden, d), (tokens, d))
    x, up, down, dz = (
      (jax.random.normal(key, size, jnp.float32) * scale).astype(dtype)
      for key, size, scale in zip(jax.random.split(key, 4), sizes, (1, d**-0.5, hidden**-0.5, 1), strict=True)
    )
    states = {'up': s24.soft_threshold_projection().init(up), 'down': s24.soft_threshold_projection(axis=-1).init(down)}
    return x, up, down, dz, states

  def step(block: Callable[..., Array]) -> Callable[..., Any]:
    def both(x: Array, up: Array, down: Array, dz: Array, state: Any) -> Any:
      z, vjp = jax.vjp(lambda *a: block(*a, state), x, up, down)
      return z, *vjp(dz)

    return both

  def dense(x: Array, up: Array, down: Array, state: Any) -> Array:
    del state
    return jnp.dot(jnp.square(jax.nn.relu(jnp.dot(x, up))), down)

  steps = {
    'sparse': step(lambda x, up, down, state: neuron_level_ffn(x, up, down, state, policy=policy)),
    'dense': step(dense), 'dense recompute': step(jax.checkpoint(dense)),
  }  # fmt: skip
  key = jax.random.key(5)
  shapes = jax.eval_shape(make, key)

  def run(compiled: Mapping[str, Any]) -> dict[str, Any]:
    programs = {name: compiled[name] for name in steps if name in compiled}
    if 'sparse' not in programs:
      raise ValueError(f'{case.name}: the step does not compile')
    args = compiled['make'](key)
    rows = measure.timed({name: (f, args) for name, f in programs.items()}, options)
    best = min((name for name in rows if name != 'sparse'), key=lambda name: rows[name]['median_ms'])
    return dict(
      bench='ffn', op='neuron_level_ffn', role='forward_and_vjp', activation='squared_relu',
      pattern=f'{case.v}:2:{case.m}', shape=dict(tokens=tokens, d=d, hidden=hidden), mode='forward_and_vjp',
      implementation=policy.implementation or 'reference', dense_features=policy.dense_features,
      token_pattern=None if policy.tokens == policy.features else str(policy.tokens), **rows['sparse'],
      baselines=dict(dense=rows[best] | {'form': best, 'memory_gb': measure.memory(programs[best])}),
      speedup=measure.speedup({'dense': rows[best]}, rows['sparse']['median_ms']),
      memory_gb=measure.memory(programs['sparse']),
    )  # fmt: skip

  def explain(compiled: Mapping[str, Any], record: Mapping[str, Any]) -> Any:
    args = compiled['make'](key)
    calls = {
      name: functools.partial(compiled[name], *args) for name in ('sparse', record['baselines']['dense']['form'])
    }
    return trace.explain(calls, compiled, 3)

  return Plan({'make': (make, (key,))} | {name: (f, shapes) for name, f in steps.items()}, run, explain)


def _amend(out: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
  """Puts a record in the place of another."""
  lines = out.read_text().splitlines()
  lines[len(lines) - 1 - lines[::-1].index(json.dumps(old))] = json.dumps(new)
  out.write_text('\n'.join(lines) + '\n')


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected cases; returns the number that failed."""
  parser = measure.parser(MODULE, __doc__, [*GROUPS, *CASES], list(GROUPS))
  options = parser.parse_args(argv)
  measure.check_gpu(parser, options)
  head = measure.environment(MODULE, argv)
  plans: dict[str, Callable[[Case, Any], Plan]] = {'matmul': matmul, 'pack': pack, 'ffn': block}
  chosen = {name: plans[CASES[name].kind](CASES[name], options) for name in measure.selected(options, GROUPS)}
  clock = measure.Clock()
  compiled = compile_all(chosen)
  clock.lap('compiling')
  records: dict[str, dict[str, Any]] = {}

  def run(name: str) -> dict[str, Any]:
    try:
      found = chosen[name].run(compiled[name])
    except KeyError as missing:
      raise ValueError(f'{missing} was not compiled') from missing
    records[name] = dict(**head, recipe='neuron_level', dtype='bfloat16', headline=not options.tiny) | found
    return records[name]

  def summary(record: Mapping[str, Any]) -> str:
    share = f'{record["copy_share"]:.2f} of copy' if 'copy_share' in record else f'speedup {record["speedup"]}'
    if 'sustained_ms' in record:
      share += f', sustained {record["baselines"]["dense"]["sustained_ms"] / record["sustained_ms"]:.4f}'
    return f'{record["median_ms"]:.4f} ms, {share}'

  failed = measure.run_each(chosen, run, options.out, summary)
  clock.lap('timing')
  # Last, with every record written: after JAX's profiler has run, CUPTI's timer may lose kernels and end the process.
  if options.explain:
    for name, record in records.items():
      if profile := chosen[name].explain(compiled[name], record):
        _amend(options.out, record, record | {'profile': profile})
    clock.lap('profile')
  return failed


if __name__ == '__main__':
  raise SystemExit(main())
