"""`python -m experiments.bench.neuron_level --out FILE`: a feed-forward block with V:N:M activations against dense.

Timed is the block, forward and backward with all its packs, against dense squared ReLU, in turns by the sum of their
kernels (by the wall clock on a CPU); records hold every sample. `python -m pallas_kernels bench vnm_matmul` has the
matmul and the packers by themselves.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from experiments.bench import measure, trace
from experiments.runs import recipes
from pallas_kernels import _bench
from pallas_kernels.vnm.arg_specs import PATTERNS
import sparse24_jax as s24
from sparse24_jax.activation_sparsity import neuron_level_ffn

MODULE = 'experiments.bench.neuron_level'
BLOCK = (16384, 4096, 16384)
_SEED = 5
# What a case changes in the published activations.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
  '': {}, 'dense_neurons': recipes.MORE_DENSE, 'two_of_four_tokens': recipes.TWO_OF_FOUR
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
  """A block of `BLOCK` tokens, width and neurons with V:2:M features; `setting` is a key of `_SETTINGS`."""

  v: int
  m: int
  setting: str

  @property
  def name(self) -> str:
    """What `--select` calls it."""
    parts = ('ffn', f'{self.v}x2x{self.m}', self.setting, 'x'.join(map(str, BLOCK)))
    return '-'.join(filter(None, parts))

  @property
  def pattern(self) -> str:
    return f'{self.v}:2:{self.m}'

  def policy(self, implementation: Any) -> s24.ActivationPolicy:
    """Its activations, with a back end."""
    changes = {**_SETTINGS[self.setting], 'implementation': implementation}
    return recipes.policy_of(recipes.as_published(self.pattern, **changes))


CASES = {
  case.name: case for v, m in PATTERNS for setting in _SETTINGS for case in (Case(v, m, setting),)
}  # fmt: skip
GROUPS = {'block': [name for name, case in CASES.items() if not case.setting]}


def block(
  case: Case, options: Any, head: Mapping[str, Any], done: list[tuple[Mapping[str, Any], dict[str, Any]]]
) -> _bench.Plan:
  """Measures the block, forward and backward; `done` gets its compiled functions and its record."""
  tokens, d, hidden = (case.v, 64, 2 * case.v) if options.tiny else BLOCK
  dtype = jnp.float32 if options.tiny else jnp.bfloat16
  policy = case.policy(None if options.tiny else 'sparse')

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
  key = jax.random.key(_SEED)
  shapes = jax.eval_shape(make, key)

  def run(compiled: Mapping[str, Any]) -> dict[str, Any]:
    args = compiled['make'](key)
    programs = {'sparse': compiled['sparse']} | {name: compiled[name] for name in steps if name in compiled}
    rows = _bench.timed({name: (f, args) for name, f in programs.items()}, options)
    best = min((name for name in rows if name != 'sparse'), key=lambda name: rows[name]['median_ms'])
    record = dict(
      **head, bench='ffn', op='neuron_level_ffn', recipe='neuron_level', dtype='bfloat16', headline=not options.tiny,
      role='forward_and_vjp', activation='squared_relu',
      pattern=case.pattern, shape=dict(tokens=tokens, d=d, hidden=hidden), mode='forward_and_vjp',
      implementation=policy.implementation or 'reference', dense_features=policy.dense_features,
      token_pattern=None if policy.tokens == policy.features else str(policy.tokens), **rows['sparse'],
      baselines=dict(dense=rows[best] | {'form': best, 'memory_gb': _bench.memory(programs[best])}),
      speedup=_bench.speedup({'dense': rows[best]}, rows['sparse']['median_ms']),
      memory_gb=_bench.memory(programs['sparse']),
    )  # fmt: skip
    done.append((compiled, record))
    return record

  return _bench.Plan({'make': (make, (key,))} | {name: (f, shapes) for name, f in steps.items()}, run)


def _explain(compiled: Mapping[str, Any], record: Mapping[str, Any]) -> Any:
  """Device time by kind of kernel of a block and its baseline, or None."""
  args = compiled['make'](jax.random.key(_SEED))
  form = record['baselines']['dense']['form']
  return trace.explain({name: functools.partial(compiled[name], *args) for name in ('sparse', form)}, compiled, 3)


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
  head, done = measure.environment(MODULE, argv), []
  plans = {name: block(CASES[name], options, head, done) for name in _bench.selected(options, GROUPS)}
  failed = _bench.run_plans(
    plans, options.out, lambda record: f'{record["median_ms"]:.4f} ms, speedup {record["speedup"]}'
  )
  # Last, with every record written: after JAX's profiler has run, CUPTI's timer may lose kernels and end the process.
  for compiled, record in done if options.explain else ():
    if profile := _explain(compiled, record):
      _amend(options.out, record, record | {'profile': profile})
  return failed


if __name__ == '__main__':
  raise SystemExit(main())
