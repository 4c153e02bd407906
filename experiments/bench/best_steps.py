"""`python -m experiments.bench.best_steps --out FILE`: training steps of each method at its best, dense ones as well.

What a method gains is told against the best that the dense model can do, and that depends on how the model is laid out.
So each method, dense and dense FP8 among them, is offered the same layouts: layers unrolled or in a scan, nothing
recomputed, all but the matmuls, or whole blocks, and XLA's flags (`Case.layouts` says which). The fastest counts. All
of them have attention by cuDNN, logits in bfloat16 with sums in float32, float32 weights and moments, and the state
donated.

First all programs are compiled, in processes side by side, into one folder. Then each is timed in a process of its own,
one at a time: all layouts once, and the best of each method again, in the opposite order of methods every other time. A
record is one layout of one method in one process.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
from pathlib import Path
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import hlo, measure, twins
from experiments.models import gpt2, llama
from experiments.race.contenders import Contender, CONTENDERS

MODULE = 'experiments.bench.best_steps'
# Of Hopper GPUs, of dense bfloat16: what shares of the peak are told of, whatever the method computes in.
PEAK_FLOPS = 989.4e12
FLAGS = {'': '', 'cublas': '--xla_gpu_enable_triton_gemm=false'}
_MEMORY = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.93'}
_AHEAD = 4  # processes that are traced while another is timed
_UPDATES = 3  # of the optimizer alone, with a mask search and without

METHODS: Mapping[str, Contender] = {
  **{name: CONTENDERS[name] for name in ('dense', 'dense_fp8', 'fst', 's_ste_fp8', 'fst_all', 's_ste_fp8_all')},
  'mst': Contender(label='MST, all linear layers', recipe=lambda _: twins.recipe_of('mixed_sparsity_transposable')),
  **{
    f'neuron_level_{v}': Contender(
      label=f'neuron level, {v}:2:8, two of four tokens', model={'ffn_order': 'position'},
      recipe=lambda _, v=v: twins.recipe_of(f'neuron_level_{v}x2x8_two_of_four_tokens'),
    )
    for v in (64, 128)
  },
}  # fmt: skip
_LINEAR = ('dense', 'dense_fp8', 'fst', 's_ste_fp8', 'fst_all', 's_ste_fp8_all')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """How a model is laid out: the name is `unrolled` or `scan`, what is recomputed, and flags, as `scan-dots+cublas`.

  >>> Layout.named('scan-dots+cublas')
  Layout(scan=True, remat='dots', flags='cublas')
  >>> Layout.named('unrolled')
  Layout(scan=False, remat=False, flags='')
  """

  scan: bool
  remat: Any
  flags: str

  @classmethod
  def named(cls, name: str) -> 'Layout':
    """The layout of this name.

    Raises:
      ValueError: there is none.
    """
    rest, _, flags = name.partition('+')
    layers, _, remat = rest.partition('-')
    kinds = {'': False, 'dots': 'dots', 'block': True}
    if layers not in ('scan', 'unrolled') or remat not in kinds or flags not in FLAGS:
      raise ValueError(
        f'layout {name!r}: known are scan and unrolled, then -dots or -block or nothing, then'
        f' {" or ".join("+" + flag for flag in FLAGS if flag)} or nothing'
      )
    return cls(scan=layers == 'scan', remat=kinds[remat], flags=flags)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One model.

  Attributes:
    family: 'gpt2' or 'llama'.
    size: a key of the family's `SIZES`.
    batch: sequences a step.
    steps: of a timed burst; two to five seconds, so that a GPU is warm.
    layouts: what is searched.
    fields: of the model's configuration.
    methods: what is timed of it.
    moment: dtype of AdamW's first moment.
  """

  family: str
  size: str
  batch: int
  steps: int
  layouts: tuple[str, ...]
  fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  methods: tuple[str, ...] = _LINEAR
  moment: str = 'float32'


CASES = {
  'gpt2-124m': Case(
    family='gpt2', size='124m', batch=32, steps=30, layouts=('unrolled', 'scan', 'unrolled+cublas'),
    methods=(*_LINEAR, 'mst'),
  ),
  'gpt2-774m': Case(
    family='gpt2', size='774m', batch=24, steps=14, layouts=('unrolled', 'unrolled+cublas')
  ),
  # 105 GB with nothing recomputed. A GPU with less memory takes `--layouts unrolled-dots unrolled-block scan-block`.
  'gpt2-1558m': Case(
    family='gpt2', size='1558m', batch=24, steps=8, layouts=('unrolled', 'unrolled+cublas'),
    methods=(*_LINEAR, 'mst'),
  ),
  # The width of 8B models; as many layers as fit with float32 weights and moments and nothing recomputed.
  'gpt2-8x4096': Case(
    family='gpt2', size='wide', batch=8, steps=12, layouts=('unrolled', 'unrolled+cublas'),
    fields=dict(num_layers=8, seq_len=2048),
  ),
  'llama-3b': Case(
    family='llama', size='3b', batch=6, steps=8, layouts=('unrolled', 'unrolled+cublas'),
    fields=dict(vocab_size=32000), moment='bfloat16',
  ),
  # Many short sequences: V tokens of one position are a block.
  'gpt2-1300m-relu2': Case(
    family='gpt2', size='1300m', batch=128, steps=8, layouts=('unrolled', 'unrolled+cublas'),
    fields=dict(mlp='relu2', seq_len=256), methods=('dense', 'neuron_level_64', 'neuron_level_128'),
  ),
}  # fmt: skip
_TINY = dict(num_layers=2, num_heads=2, embed_dim=32, seq_len=16, vocab_size=64, attention='xla')


class Step:
  """The training step of one method in one layout, compiled ahead of time."""

  def __init__(self, case: Case, method: str, layout: Layout, *, tiny: bool):
    family = gpt2 if case.family == 'gpt2' else llama
    fields: dict[str, Any] = dict(
      vocab_size=50304, dtype='bfloat16', logits_dtype='bfloat16', attention='cudnn', fused_mlp=True,
      scan_layers=layout.scan, remat=layout.remat,
    ) | dict(case.fields) | dict(METHODS[method].model)  # fmt: skip
    if tiny:
      fields |= _TINY | (dict(num_kv_heads=1, hidden_dim=64) if case.family == 'llama' else {})
    config = family.make_config('nano' if tiny else case.size, **fields)
    self.config = config
    self.model = gpt2.GPT2(config) if case.family == 'gpt2' else llama.Llama(config)
    recipe = METHODS[method].recipe
    self.recipe = recipe(6e-5) if recipe else None
    self.batch = (64 if tiny and 'neuron' in method else 4) if tiny else case.batch
    self.moment = case.moment
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (self.batch, config.seq_len + 1), dtype=np.int32)
    self.inputs = tokens, np.asarray(jax.random.key_data(jax.random.key(1)))
    self.optimizer = twins.make_optimizer(self.recipe, case.moment)

  @functools.cached_property
  def shapes(self) -> twins.State:
    """Of the state."""
    model = self.model.clone(config=dataclasses.replace(self.config, attention='xla'))  # for machines without cuDNN
    tokens = jax.ShapeDtypeStruct((1, self.config.seq_len), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
    return twins.State(params, jax.eval_shape(self.optimizer.init, params))

  @property
  def searches(self) -> bool:
    """Whether some steps search masks and others do not; the former are a program of their own then."""
    return self.recipe is not None and self.recipe.refresh_every > 1

  @property
  def tokens(self) -> int:
    """Tokens a step."""
    return self.batch * self.config.seq_len

  @property
  def flops(self) -> float:
    """Of a dense step with nothing recomputed: 6 a weight and token, and causal attention."""
    sizes = jax.tree_util.tree_leaves_with_path(self.shapes.params)
    weights = sum(math.prod(leaf.shape) for path, leaf in sizes if path[-1].key == 'kernel')
    if not any('head' in str(path) for path, _ in sizes):  # tied: the embedding is the output matrix, too
      weights += self.config.vocab_size * self.config.embed_dim
    attention = 6 * self.config.num_layers * self.config.seq_len * self.config.embed_dim
    return (6.0 * weights + attention) * self.tokens

  def compile(self) -> dict[str, Any]:
    """Compiles the step and what a mask search adds to it; returns seconds and what the program of the step is."""
    make = twins.make_step(self.model, self.recipe, self.moment, False if self.searches else None)
    step = jax.jit(lambda state, tokens, key: make(state, tokens, jax.random.wrap_key_data(key)), donate_argnums=0)
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor() as pool:
      made = {
        refresh: pool.submit(self._update(refresh).lower(self.shapes, self.shapes.params).compile)
        for refresh in ((False, True) if self.searches else ())
      }
      lowered = step.lower(self.shapes, *self.inputs)
      lowering = time.perf_counter() - start
      self.compiled = lowered.compile()
      self.updates = {refresh: update.result() for refresh, update in made.items()}
    text = self.compiled.as_text()
    return dict(
      compile=dict(lower_s=round(lowering, 1), total_s=round(time.perf_counter() - start, 1)),
      memory_gb=measure.memory(self.compiled), recomputed=hlo.recomputed(text), sparse_calls=hlo.sparse_calls(text),
      parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes.params)), flops=self.flops,
      refresh_every=self.recipe.refresh_every if self.recipe else None,
      shape=dict(batch=self.batch, length=self.config.seq_len, layers=self.config.num_layers, d=self.config.embed_dim,
                 hidden=self.config.hidden_dim, vocab=self.config.vocab_size),
    )  # fmt: skip

  def time(self, steps: int, bursts: int) -> dict[str, Any]:
    """Milliseconds of a step: of bursts without a mask search, and with a search's share, from the optimizer alone."""
    inputs = jax.device_put(self.inputs)
    self.state = self._state()

    def call() -> Any:
      self.state, loss = self.compiled(self.state, *inputs)
      return loss

    losses = [float(call()) for _ in range(3)]
    if not all(map(math.isfinite, losses)):
      raise RuntimeError(f'losses of the first steps: {losses}')
    found = []
    for _ in range(bursts):
      found.append(measure.stream_ms(call, steps, depth=2))
    row, search = measure.timing(found), 0.0
    if self.searches:
      samples = {refresh: self._updates_ms(update) for refresh, update in self.updates.items()}
      # A difference of two noisy times: no step is faster for the searches of others.
      search = max(0.0, statistics.median(samples[True]) - statistics.median(samples[False]))
      row |= dict(updates_ms=samples[False], updates_with_a_search_ms=samples[True], search_ms=round(search, 4))
    amortised = row['median_ms'] + search / (self.recipe.refresh_every if self.recipe else 1)
    return row | dict(
      amortised_ms=round(amortised, 4), tokens_per_s=round(self.tokens / amortised * 1e3, 1),
      mfu=round(self.flops / (amortised * 1e-3) / PEAK_FLOPS, 4), losses=losses,
    )  # fmt: skip

  def _update(self, refresh: bool) -> Any:
    """The optimizer alone, jitted: (state, gradients) -> both."""

    def update(state: twins.State, grads: Any) -> tuple[twins.State, Any]:
      updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params, refresh=refresh)
      return twins.State(optax.apply_updates(state.params, updates), opt_state), grads

    return jax.jit(update, donate_argnums=(0, 1))

  def _updates_ms(self, update: Any) -> list[float]:
    """Milliseconds of each of a few updates, after one that is not timed."""
    grads, found = jax.tree.map(jnp.zeros_like, self.state.params), []
    for _ in range(_UPDATES + 1):
      start = time.perf_counter()
      self.state, grads = jax.block_until_ready(update(self.state, grads))
      found.append(round(1e3 * (time.perf_counter() - start), 4))
    return found[1:]

  def _state(self) -> twins.State:
    """Random weights, ones where there is one axis; the optimizer's own state."""

    def leaf(path: Any, shape: Any) -> Any:
      if shape.ndim < 2 or path[-1].key == 'scale':
        return jnp.ones(shape.shape, shape.dtype)
      return 0.02 * jax.random.normal(jax.random.key(len(str(path))), shape.shape, shape.dtype)

    params = jax.tree_util.tree_map_with_path(leaf, self.shapes.params)
    return jax.block_until_ready(twins.State(params, jax.jit(self.optimizer.init)(params)))


def work(options: Any) -> int:
  """A process of its own: compiles, says so, and times when it is told to."""
  case, method, layout = options.one
  step = Step(CASES[case], method, Layout.named(layout), tiny=options.tiny)
  print(json.dumps(step.compile()), flush=True)
  if sys.stdin.readline().strip() == 'time':
    steps = 2 if options.tiny else CASES[case].steps
    print(json.dumps(step.time(steps, options.bursts)), flush=True)
  return 0


@dataclasses.dataclass(frozen=True)
class Job:
  """One program."""

  case: str
  method: str
  layout: str

  @property
  def weight(self) -> int:
    """About how long it takes to compile: those that take longest begin first."""
    case, layout = CASES[self.case], Layout.named(self.layout)
    layers = case.fields.get('num_layers') or (gpt2 if case.family == 'gpt2' else llama).SIZES[case.size]['num_layers']
    return (1 if layout.scan else layers) * (1 if self.method.startswith('dense') else 2)

  def __str__(self) -> str:
    return f'{self.case} {self.method} {self.layout}'


class Worker:
  """The process of a job: it compiles, and times when it is told."""

  def __init__(self, job: Job, options: Any):
    command = [sys.executable, '-m', MODULE, '--one', job.case, job.method, job.layout, '--out', str(options.out)]
    command += ['--bursts', str(options.bursts), *(['--tiny'] if options.tiny else [])]
    flags = f'{os.environ.get("XLA_FLAGS", "")} {FLAGS[Layout.named(job.layout).flags]}'.strip()
    env = os.environ | _MEMORY | dict(
      XLA_FLAGS=flags, JAX_COMPILATION_CACHE_DIR=str(options.cache), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0',
    )  # fmt: skip
    self._log = tempfile.TemporaryFile('w+')  # noqa: SIM115, closed by `end`
    self._process = subprocess.Popen(
      command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
    )

  def tell(self, word: str) -> None:
    """Writes a line to it."""
    assert self._process.stdin
    self._process.stdin.write(word + '\n')
    self._process.stdin.flush()

  def answer(self) -> dict[str, Any]:
    """The line of JSON that it prints next.

    Raises:
      RuntimeError: it ended instead; with what it said last.
    """
    assert self._process.stdout
    for line in self._process.stdout:
      if line.startswith('{'):
        return json.loads(line)
    status = self._process.wait()
    self._log.seek(0)
    said = [line for line in self._log.read().splitlines() if 'Error' in line or 'EXHAUSTED' in line]
    raise RuntimeError(f'exit status {status}: {" ".join(said)[-600:]}')

  def end(self) -> None:
    """Ends it, whatever it does."""
    self._process.kill()
    self._process.wait()
    self._log.close()


def compile_all(jobs: Iterable[Job], options: Any) -> dict[Job, dict[str, Any]]:
  """Compiles in processes side by side; returns what each program is, without those that failed."""

  def one(job: Job) -> dict[str, Any] | None:
    start, worker = time.monotonic(), Worker(job, options)
    try:
      found = worker.answer()
      print(f'{job}: compiled, {time.monotonic() - start:.0f} s, {found["memory_gb"]}', flush=True)
      return found
    except RuntimeError as error:
      print(f'{job}: failed: {error}', flush=True)
      return None
    finally:
      worker.end()

  order = sorted(jobs, key=lambda job: -job.weight)
  with concurrent.futures.ThreadPoolExecutor(options.parallel) as pool:
    return {job: found for job, found in zip(order, pool.map(one, order), strict=True) if found}


def timed(jobs: Sequence[Job], options: Any) -> Iterator[tuple[Job, dict[str, Any]]]:
  """Times jobs one after another; the next ones are traced meanwhile. A job that fails costs the others nothing."""
  waiting: list[tuple[Job, Worker]] = []
  todo = list(jobs)
  try:
    while todo or waiting:
      while todo and len(waiting) < _AHEAD:
        job = todo.pop(0)
        waiting.append((job, Worker(job, options)))
      job, worker = waiting.pop(0)
      try:
        made = worker.answer()
        worker.tell('time')
        yield job, made | worker.answer()
      except RuntimeError as error:
        print(f'{job}: failed: {error}', flush=True)
      finally:
        worker.end()
  finally:
    for _, worker in waiting:
      worker.end()


def best(found: Iterable[tuple[Job, Mapping[str, Any]]]) -> dict[str, Job]:
  """Method -> its fastest layout.

  >>> a, b = Job('gpt2-124m', 'dense', 'scan'), Job('gpt2-124m', 'dense', 'unrolled')
  >>> best([(a, {'amortised_ms': 2.0}), (b, {'amortised_ms': 1.0})])['dense'].layout
  'unrolled'
  """
  fastest: dict[str, tuple[float, Job]] = {}
  for job, row in found:
    fastest[job.method] = min(fastest.get(job.method, (math.inf, job)), (row['amortised_ms'], job), key=lambda x: x[0])
  return {method: job for method, (_, job) in fastest.items()}


def run(case: str, jobs: Sequence[Job], options: Any, head: Mapping[str, Any], until: float) -> None:
  """Times the compiled layouts of a case, and the best of each method again; appends the records."""
  rows: list[tuple[Job, dict[str, Any]]] = []
  chosen = list(jobs)
  for process in range(options.processes):
    for job, row in timed(chosen if process % 2 == 0 else chosen[::-1], options):
      record = dict(
        bench='best_steps', **head, op='train_step', model=case, recipe=job.method,
        label=METHODS[job.method].label, layout=job.layout, moment=CASES[case].moment, process=process,
        **row, headline=not options.tiny,
      )  # fmt: skip
      measure.append(options.out, record)
      rows.append((job, row))
      print(f'{job}: {row["amortised_ms"]:.2f} ms, MFU {row["mfu"]:.3f}', flush=True)
      if time.monotonic() > until:
        print(f'{case}: stopped, the time is over', flush=True)
        return
    chosen = [job for job in jobs if job in best(rows).values()]
  say(case, rows)


def say(case: str, rows: Sequence[tuple[Job, Mapping[str, Any]]]) -> None:
  """Prints each method at its best beside dense at its best."""
  ms = {
    method: statistics.median(row['amortised_ms'] for other, row in rows if other == job)
    for method, job in best(rows).items()
  }
  for method, job in best(rows).items():
    times = f', {ms["dense"] / ms[method]:.3f} of dense' if 'dense' in ms else ''
    print(f'{case}: {method} at its best, {job.layout}: {ms[method]:.2f} ms{times}', flush=True)


def main(argv: Sequence[str] | None = None) -> int:
  """Measures the selected models; returns the number of programs that failed to compile."""
  parser = argparse.ArgumentParser(prog=f'python -m {MODULE}', description=(__doc__ or '').partition('\n')[0])
  parser.add_argument('--out', type=Path, required=True, help='JSON-lines file to append records to')
  parser.add_argument('--select', nargs='+', default=['gpt2-124m'], choices=tuple(CASES), metavar='CASE')
  parser.add_argument('--methods', nargs='+', choices=tuple(METHODS), metavar='METHOD', help="(default: the case's)")
  parser.add_argument('--layouts', nargs='+', metavar='LAYOUT', help="(default: the case's)")
  parser.add_argument('--processes', type=int, default=3, help='that time the best layout (default: %(default)s)')
  parser.add_argument('--bursts', type=int, default=1, help='in each process (default: %(default)s)')
  parser.add_argument('--parallel', type=int, default=12, help='programs compiled at once (default: %(default)s)')
  parser.add_argument('--seconds', type=float, default=math.inf, help='nothing is timed after so many')
  parser.add_argument('--cache', type=Path, help='folder of compiled programs (default: one that is removed)')
  parser.add_argument('--tiny', action='store_true', help='small shapes, to see that it runs')
  parser.add_argument('--one', nargs=3, help=argparse.SUPPRESS)
  options = parser.parse_args(argv)
  if options.one:
    return work(options)
  for layout in options.layouts or ():
    Layout.named(layout)
  os.environ.update(_MEMORY)  # this process only asks for the GPU's name
  measure.check_gpu(parser, options)
  head, until = measure.environment(MODULE, argv), time.monotonic() + options.seconds
  jobs = [
    Job(case, method, layout)
    for case in options.select
    for method in options.methods or CASES[case].methods
    for layout in options.layouts or CASES[case].layouts
  ]
  with tempfile.TemporaryDirectory() as folder:
    options.cache = options.cache or Path(folder)
    made = compile_all(jobs, options)
    for case in options.select:
      if time.monotonic() < until:
        run(case, [job for job in jobs if job in made and job.case == case], options, head, until)
  return len(jobs) - len(made)


if __name__ == '__main__':
  raise SystemExit(main())
