"""The training step of one method in one layout: compiled ahead of time, and timed with its share of mask searches."""

import concurrent.futures
import dataclasses
import functools
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import hlo, trace, twins
from experiments.bench.step_cases import Case, Layout, METHODS
from experiments.runs.models import gpt2, llama
from experiments.runs.race.contenders import MANY_STEPS
from pallas_kernels import _bench

# Peak of Hopper GPUs in dense bfloat16. Shares of the peak refer to it, whatever the method computes in.
PEAK_FLOPS = 989.4e12
_PROFILED = 3  # steps
_UPDATES = 3  # of the optimizer alone, with a mask search and without
_TINY = dict(num_layers=2, num_heads=2, embed_dim=32, seq_len=16, vocab_size=64, attention='xla')


class Step:
  """The training step of one method in one layout, compiled ahead of time."""

  def __init__(self, case: Case, method: str, layout: Layout, *, tiny: bool):
    family = gpt2 if case.family == 'gpt2' else llama
    fields: dict[str, Any] = dict(
      vocab_size=50304, dtype='bfloat16', logits_dtype='bfloat16', attention='cudnn',
      scan_layers=layout.scan, remat=layout.remat,
    ) | dict(case.fields) | dict(METHODS[method].model)  # fmt: skip
    if tiny:
      fields |= _TINY | (dict(num_kv_heads=1, hidden_dim=64) if case.family == 'llama' else {})
    config = family.make_config('nano' if tiny else case.size, **fields)
    self.config = config
    self.model = gpt2.GPT2(config) if case.family == 'gpt2' else llama.Llama(config)
    recipe = METHODS[method].make(6e-5, MANY_STEPS)
    self.recipe = recipe if recipe.rules else None
    policy = twins.activations(self.recipe) if self.recipe else None
    self.batch = (policy.features.block if policy else 4) if tiny else case.batch
    self.moment = case.moment
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (self.batch, config.seq_len + 1), dtype=np.int32)
    self.inputs = tokens, np.asarray(jax.random.key_data(jax.random.key(1)))
    self.optimizer = twins.make_optimizer(self.recipe, case.moment)

  @functools.cached_property
  def shapes(self) -> twins.State:
    """The shapes of the state."""
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
    """FLOPs of a dense step with nothing recomputed: 6 per weight and token, and causal attention."""
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
      memory_gb=_bench.memory(self.compiled), recomputed=hlo.recomputed(text), sparse_calls=hlo.sparse_calls(text),
      parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.shapes.params)), flops=self.flops,
      refresh_every=self.recipe.refresh_every if self.recipe else None,
      shape=dict(batch=self.batch, length=self.config.seq_len, layers=self.config.num_layers, d=self.config.embed_dim,
                 hidden=self.config.hidden_dim, vocab=self.config.vocab_size),
    )  # fmt: skip

  def time(self, steps: int, bursts: int, *, profile: bool = False) -> dict[str, Any]:
    """Milliseconds of a step: of bursts without a mask search, and with a search's share, from the optimizer alone.

    Args:
      steps: of a burst.
      bursts: how many.
      profile: also where the time goes, of a few steps under the profiler (`trace.summarize`).
    """
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
      found.append(_bench.stream_ms(call, steps, depth=2))
    row, search = _bench.timing(found), 0.0
    if profile:
      kernels = trace.capture(call, _PROFILED, hlo.op_names(self.compiled.as_text()))
      row |= dict(profile=trace.summarize(kernels, _PROFILED, top=30))
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
