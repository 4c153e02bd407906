"""`python -m experiments.bench.tracking --tokens FILE --out FILE`: do kernels train the model that the plain op does?

A byte-level GPT-2 is trained some hundred steps, by every recipe once with the kernels and once with the reference op,
from the same weights, on the same bytes, with the same MVUE keys; and dense. Seeds change weights and keys, not the
order of the bytes, so that what the seeds spread over is theirs alone. All runs end with the same evaluation, by the
plain op.

The verdict, ours: at every seed the two losses after training are no further apart than the largest and the smallest
loss of the reference op over the seeds.

The token file is made beforehand, `--prepare`, where the corpus is; to read it takes numpy alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import math
from pathlib import Path
import signal
import statistics
import time
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from experiments.bench import measure
from experiments.bench.byte_model import Method, offsets, prepare, RECIPES, Scale, STRIDE, TINY

MODULE = 'experiments.bench.tracking'


def run(options: Any, head: Mapping[str, Any], clock: measure.Clock) -> dict[str, Any]:
  """Trains all methods at all seeds for which there is time, and returns the record."""
  scale = TINY if options.tiny else Scale()
  data = np.load(options.tokens)
  if data.dtype != np.uint8 or data.ndim != 1:
    raise ValueError(f'{options.tokens.name} must hold bytes, uint8 [n], found {data.dtype} {data.shape}')
  starts, held_out = offsets(len(data), scale, options.steps)
  methods = [Method('dense', 'reference', scale, options.steps)] + [
    Method(recipe, name, scale, options.steps) for recipe in options.recipes for name in (options.kernels, 'reference')
  ]
  data, held_out = jnp.asarray(data), jnp.asarray(held_out)
  chunks = [jnp.asarray(starts[i : i + STRIDE]) for i in range(0, options.steps, STRIDE)]
  programs = _compiled(methods, data, chunks[0], held_out, clock)
  curves: dict[str, list[list[float]]] = {name: [] for name in programs}
  finals: dict[str, list[float]] = {name: [] for name in programs}
  seconds: dict[str, list[float]] = {name: [] for name in programs}
  longest = 0.0
  for i in range(options.seeds):
    begun = clock.passed
    if i > 0 and begun + longest > options.seconds:
      print(f'  no time for seed {i} and after: {begun:.0f} of {options.seconds:.0f} s are gone', flush=True)
      break
    try:
      with _stoppable():
        found = {name: _one_seed(name, programs, chunks, data, held_out, i) for name in programs}
    except StoppedError:
      print(f'  stopped in seed {i}, which is dropped', flush=True)
      break
    for name, (curve, final, took) in found.items():
      curves[name].append(curve)
      finals[name].append(final)
      seconds[name].append(took)
    longest = max(longest, clock.passed - begun)
    clock.lap(f'seed {i}, losses at the end {({name: values[-1] for name, values in finals.items()})}')
  comparisons = {
    recipe: compare(*((curves[n], finals[n]) for n in (f'{recipe} {options.kernels}', f'{recipe} reference')))
    for recipe in options.recipes
    if finals['dense'] and f'{recipe} {options.kernels}' in programs and f'{recipe} reference' in programs
  }
  return dict(
    bench='tracking', **head, op='training', model='gpt2', dtype='bfloat16', implementation=options.kernels,
    shape=dataclasses.asdict(scale) | {'hidden': 4 * scale.width, 'vocab': 256}, steps=options.steps, stride=STRIDE,
    seeds=len(finals['dense']), curves=curves, final=finals, seconds=seconds, comparisons=comparisons,
    tracks=bool(comparisons) and all(c['tracks'] for c in comparisons.values()),
    complete=set(comparisons) == set(options.recipes) and len(finals['dense']) == options.seeds,
  )  # fmt: skip


class StoppedError(Exception):
  """SIGTERM came: of `timeout`, where a GPU is lent for minutes."""


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
  """StoppedError in place of the end of the process."""

  def stop(*_: Any) -> None:
    raise StoppedError

  before = signal.signal(signal.SIGTERM, stop)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


def _one_seed(
  name: str, programs: Mapping[str, tuple[Callable[..., Any], ...]], chunks: Sequence[Array], data: Array,
  held_out: Array, i: int,
) -> tuple[list[float], float, float]:  # fmt: skip
  """Curve, loss at the end and seconds of one method."""
  init, train, evaluate = programs[name]
  start, seed = time.perf_counter(), jnp.int32(i)
  state, losses = init(seed), []
  for chunk in chunks:
    state, loss = train(state, data, chunk, seed)
    losses.append(loss)
  final = round(float(evaluate(state, data, held_out)), 5)
  return [round(float(loss), 5) for loss in losses], final, round(time.perf_counter() - start, 2)


def _compiled(
  methods: Sequence[Method], data: Array, chunk: Array, held_out: Array, clock: measure.Clock
) -> dict[str, tuple[Callable[..., Any], ...]]:
  """Of each method init, train and evaluate; a method that does not compile is left out."""

  def one(method: Method) -> Any:
    seed = jnp.int32(0)
    try:
      init = jax.jit(method.init).lower(seed).compile()
      state = jax.eval_shape(method.init, seed)
      train = jax.jit(method.train, donate_argnums=0).lower(state, data, chunk, seed).compile()
      return init, train, jax.jit(method.evaluate).lower(state, data, held_out).compile()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
      return error

  with concurrent.futures.ThreadPoolExecutor(len(methods)) as pool:
    found = dict(zip((m.name for m in methods), pool.map(one, methods), strict=True))
  clock.lap(f'compile {len(methods)} methods')
  for name in [name for name, programs in found.items() if isinstance(programs, Exception)]:
    print(f'  {name} does not compile: {str(found.pop(name))[:400]}', flush=True)
  if 'dense' not in found:
    raise ValueError('the dense model does not compile')
  return found


def compare(
  kernels: tuple[Sequence[Sequence[float]], Sequence[float]], plain: tuple[Sequence[Sequence[float]], Sequence[float]]
) -> dict[str, Any]:
  """How far kernels and reference op are apart, and how far the seeds.

  Args:
    kernels: curves [seeds][points] and losses at the end [seeds].
    plain: of the reference op.

  Returns:
    `difference` (kernels minus reference at the end, a seed), `spread` (largest minus smallest end of the reference),
    `curve_difference` (over the points, the median of the largest distance at any seed), `curve_spread` (likewise, of
    the reference over seeds), `tracks`: two seeds or more, and every difference within the spread.

  >>> compare(([[2.0], [2.2]], [1.0, 1.2]), ([[2.1], [2.2]], [1.05, 1.2]))
  {'difference': [-0.05, 0.0], 'spread': 0.15, 'curve_difference': 0.1, 'curve_spread': 0.1, 'tracks': True}
  """
  difference = [round(a - b, 5) for a, b in zip(kernels[1], plain[1], strict=True)]
  spread = round(max(plain[1]) - min(plain[1]), 5)
  pairs = zip(_points(kernels), _points(plain), strict=True)
  apart = [max(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in pairs]
  spreads = [max(point) - min(point) for point in _points(plain)]
  finite = all(map(math.isfinite, (*kernels[1], *plain[1])))
  return dict(
    difference=difference,
    spread=spread,
    curve_difference=round(statistics.median(apart), 5),
    curve_spread=round(statistics.median(spreads), 5),
    tracks=finite and len(difference) > 1 and max(map(abs, difference)) <= spread,
  )


def _points(run: tuple[Sequence[Sequence[float]], Sequence[float]]) -> list[tuple[float, ...]]:
  return list(zip(*run[0], strict=True))


def main(argv: Sequence[str] | None = None) -> int:
  """Makes the comparison; returns 0 if kernels and reference track each other, in every recipe, at every seed."""
  parser = measure.parser(MODULE, __doc__, ['all'], ['all'])
  parser.set_defaults(steps=300)
  parser.add_argument('--tokens', type=Path, required=True, help='.npy file of bytes, uint8 [n]')
  parser.add_argument('--prepare', action='store_true', help='write that file from the default corpus, and stop')
  parser.add_argument('--seeds', type=int, default=3, help='(default: %(default)s)')
  parser.add_argument('--recipes', nargs='+', default=[r for r in RECIPES if r != 'dense'], choices=list(RECIPES)[1:])
  parser.add_argument('--kernels', default='sparse', help='back end that is compared (default: %(default)s)')
  parser.add_argument('--seconds', type=float, default=600, help='no seed is begun that would end later')
  options = parser.parse_args(argv)
  if options.prepare:
    prepare(options.tokens)
    return 0
  measure.check_gpu(parser, options)
  if options.steps < STRIDE or options.steps % STRIDE:
    parser.error(f'--steps {options.steps} must be a positive multiple of {STRIDE}')
  head = measure.environment(MODULE, argv)
  record = run(options, head, measure.Clock())
  measure.append(options.out, record)
  for recipe, found in record['comparisons'].items():
    print(f'{recipe}: {found}', flush=True)
  print(_verdict(record), flush=True)
  return 0 if record['tracks'] and record['complete'] else 1


def _verdict(record: Mapping[str, Any]) -> str:
  found = 'tracks' if record['tracks'] else 'does not track'
  return f'verdict: {found}' + ('' if record['complete'] else ', but incomplete: recipes or seeds are missing')


if __name__ == '__main__':
  raise SystemExit(main())
