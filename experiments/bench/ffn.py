"""`python -m experiments.bench.ffn --out FILE`: a feed-forward block, forward and backward, against its dense twins.

Timed is one jitted call that takes weights, tokens, the output's cotangent and the projection's state (mask or scale)
and gives the output and the gradients of weights and tokens. Packing, MVUE and quantisation are inside; the search for
masks is not, since training does it every 40 steps. The dense twin is the fastest of the forms
in `DENSE_FORMS`; for FP8 there is a dense FP8 twin as well.
"""

from collections.abc import Mapping, Sequence
import functools
import statistics
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import hlo, measure, trace
from experiments.bench.feed_forward import (
  Case,
  dense_block,
  DENSE_FORMS,
  dense_step,
  inputs,
  RECIPES,
  sparse_step,
  TINY,
)
from experiments.bench.ffn_errors import check, CHECKED, gradient_errors
from pallas_kernels import _bench, _compat
import sparse24_jax as s24

MODULE = 'experiments.bench.ffn'
SHAPES = ((16384, 4096, 16384), (32768, 4096, 14336))
# Roles and counts of sparse calls in a step: one a matrix, but S-STE's input gradient is dense.
_ROLES = {'fst': hlo.ROLES, 's_ste_fp8': ('forward', 'weight_grad'), 'fst_fp8': hlo.ROLES}

CASES = {
  case.name: case
  for method in RECIPES for shape in SHAPES for activation in ('gelu', 'silu')
  for case in (Case(method, activation, shape),)
}  # fmt: skip
GROUPS = {group: [name for name, case in CASES.items() if case.fp8 == (group == 'fp8')] for group in ('bf16', 'fp8')}


def run(case: Case, options: Any, head: Mapping[str, Any], clock: _bench.Clock) -> dict[str, Any]:
  """Measures one case and returns its record."""
  shape = TINY if options.tiny else case.shape
  implementation = None if options.tiny or options.implementation == 'auto' else options.implementation
  dtype = jnp.float32 if options.tiny else jnp.bfloat16  # XLA's CPU lacks some matmuls of bfloat16
  jobs = _jobs(case, shape, implementation, dtype)
  compiled = _bench.compile_all(jobs, needed=('sparse',))
  clock.lap(f'compile {len(jobs)} steps')
  calls = {name: functools.partial(f, *jobs[name][1]) for name, f in compiled.items()}
  counts = hlo.sparse_calls(compiled['sparse'].as_text(), tokens=shape[0])
  # Gate and up-projection are one matmul.
  if not options.tiny and implementation and sum(counts.values()) < 2 * len(_ROLES[case.method]):
    raise ValueError(f'the compiled step lacks sparse matmuls in {_ROLES[case.method]}; it has {counts}')

  heat = {name: statistics.median(_bench.stream_ms(call, options.steps)) for name, call in calls.items()}
  clock.lap('first heat: ' + ', '.join(f'{name} {ms:.3f} ms' for name, ms in heat.items()))
  form = {}  # the fastest of each twin's forms
  for name in sorted(heat, key=heat.__getitem__):
    form.setdefault(name.split()[0], name)
  twins = {twin: calls[form[twin]] for twin in ('sparse', 'dense', 'dense_fp8') if twin in form}
  rows = _bench.in_turns(twins, options.rounds, lambda name: _bench.stream_ms(twins[name], options.steps))
  clock.lap('second heat')
  for twin, row in rows.items():
    program, args = compiled[form[twin]], jobs[form[twin]][1]
    # Not beside a trace: both want the one profiling interface of the driver.
    if jax.default_backend() == 'gpu' and not options.explain:
      row['device_ms'] = _compat.median_ms(program, args, 5)
    row |= dict(memory_gb=_bench.memory(program), form=form[twin])
  profile = None
  if options.explain:
    programs = {twin: compiled[form[twin]] for twin in twins}
    profile = trace.explain(twins, programs, 3)
    clock.lap('profile')
  error = None
  if not options.skip_check and case.shape == SHAPES[0]:  # The shape that is checked is one and the same.
    error = gradient_errors(case, TINY if options.tiny else CHECKED, implementation, dtype)
    clock.lap(f'errors {error}')
  sparse = rows.pop('sparse')
  flops = 6 * shape[0] * shape[1] * shape[2] * (3 if case.gated else 2)
  return dict(
    bench='ffn', **head, **case.fields, weights='bfloat16',
    shape=dict(tokens=shape[0], d=shape[1], hidden=shape[2]), mode='forward_and_vjp',
    implementation=implementation or 'auto', **sparse, baselines=rows,
    speedup=_bench.speedup(rows, sparse['median_ms']),
    heat_ms={name: round(ms, 4) for name, ms in heat.items()}, tflops=flops / sparse['median_ms'] / 1e9,
    sparse_calls=counts, error=error, profile=profile, headline=not options.tiny,
  )  # fmt: skip


def _jobs(
  case: Case, shape: tuple[int, int, int], implementation: str | None, dtype: Any
) -> dict[str, tuple[Any, Sequence[Any]]]:
  """The sparse step, and all forms of its dense twins."""
  wide = jax.jit(lambda: inputs(case, shape, jnp.float32))()
  dense_args = tuple(jax.tree.map(lambda a: a.astype(dtype), wide))
  sparse_args = *dense_args, jax.jit(case.states)(dense_args[0]), jax.random.key(7)
  steps = {'sparse': (sparse_step(case, case.policy(implementation)), sparse_args)}
  for form in DENSE_FORMS:
    steps[f'dense {form}'] = dense_step(dense_block(case, form)), dense_args
  if case.fp8:
    fp8_dot = functools.partial(s24.dot, policy=s24.DotPolicy(precision='fp8'))
    for form in ('plain', 'recompute'):
      steps[f'dense_fp8 {form}'] = dense_step(dense_block(case, form, fp8_dot)), dense_args
  return {name: (jax.jit(step), args) for name, (step, args) in steps.items()}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the selected cases; returns the number that failed."""
  parser = measure.parser(MODULE, __doc__, [*GROUPS, *CASES], ['bf16'])
  parser.add_argument(
    '--implementation', default='sparse', help="of the policy; 'auto' follows the records (default: %(default)s)"
  )
  checks = parser.add_mutually_exclusive_group()
  checks.add_argument('--skip-check', action='store_true', help='no comparison of gradients with the reference')
  checks.add_argument('--check-only', action='store_true', help='only that comparison; nothing is timed')
  options = parser.parse_args(argv)
  measure.check_gpu(parser, options)
  head = measure.environment(MODULE, argv)
  names = _bench.selected(options, GROUPS)
  if options.check_only:  # of one shape, whatever the shape that is timed
    names = list({(CASES[name].method, CASES[name].activation): name for name in reversed(names)}.values())[::-1]
    return _bench.run_each(
      names, lambda name: check(CASES[name], options, head), options.out, lambda record: str(record['error'])
    )

  def summary(record: Mapping[str, Any]) -> str:
    ratios = ', '.join(f'x{ratio:.3f} over {twin}' for twin, ratio in record['speedup'].items())
    return f'{record["median_ms"]:.3f} ms, {ratios}; calls {record["sparse_calls"]}'

  return _bench.run_each(
    names, lambda name: run(CASES[name], options, head, _bench.Clock()), options.out, summary
  )


if __name__ == '__main__':
  raise SystemExit(main())
