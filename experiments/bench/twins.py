"""Training steps of language models, sparse and dense, and both in turns on a mesh.

Both twins train the same parameters in turns: the dense step takes weights and moments out of the sparse run's state
and puts them back, so one set of them is in memory. Tokens are uniformly random; time hardly depends on them, since
gradients of embeddings are summed in float32.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

from experiments.bench import hlo
from experiments.runs import recipes
from experiments.runs.build import is_matrix, wrapped
from experiments.runs.models import gpt2, layers, llama
from pallas_kernels import _bench
import sparse24_jax as s24


@dataclasses.dataclass(frozen=True)
class Case:
  """One model and how it is trained.

  Attributes:
    model: 'gpt2' or 'llama'.
    size: a key of the model's `SIZES`.
    batch: sequences a step.
    length: positions of a sequence.
    vocab: rows of the embedding.
    moment: dtype of AdamW's first moment, in both twins.
  """

  model: str
  size: str
  batch: int
  length: int
  vocab: int
  moment: str = 'float32'


TINY = dict(num_layers=2, num_heads=2, embed_dim=32, seq_len=16)


class State(NamedTuple):
  """What a step carries."""

  params: Any
  opt_state: Any


def make_model(case: Case, *, tiny: bool) -> Any:
  """The linen model of a case, in bfloat16 with float32 parameters: layers in a scan, whose blocks are recomputed."""
  family, make = (gpt2, gpt2.GPT2) if case.model == 'gpt2' else (llama, llama.Llama)
  fields: dict[str, Any] = dict(dtype='bfloat16', scan_layers=True, remat=True, attention='cudnn')
  if tiny:
    fields |= TINY | {'attention': 'xla'}
    fields |= dict(num_kv_heads=1, hidden_dim=64) if case.model == 'llama' else {}
    return make(family.make_config('nano', vocab_size=64, **fields))
  return make(family.make_config(case.size, vocab_size=case.vocab, seq_len=case.length, **fields))


def fst(implementation: str) -> s24.Recipe:
  """FST on feed-forward layers, by one implementation."""
  return recipes.with_implementation(s24.recipes.transposable_srste(recipes.FFN, masked_decay=6e-5), implementation)


def activations(recipe: s24.Recipe) -> s24.ActivationPolicy | None:
  """How the recipe makes activations sparse, or None."""
  return next((rule.activation for rule in recipe.rules if rule.activation), None)


def adamw(moment: str) -> optax.GradientTransformation:
  """The optimizer of both twins: decay on matrices only; a rate small enough to train on noise for ever."""
  return optax.adamw(1e-6, b1=0.9, b2=0.95, weight_decay=0.1, mask=is_matrix, mu_dtype=moment)


def make_optimizer(recipe: s24.Recipe | None, moment: str) -> optax.GradientTransformationExtraArgs:
  """Clipping and AdamW, in the recipe's wrapper if there is one."""
  clip = optax.clip_by_global_norm(1.0)
  return optax.chain(clip, adamw(moment)) if recipe is None else wrapped(clip, adamw(moment), recipe, 'sparse')


def make_step(
  model: Any, recipe: s24.Recipe | None, moment: str = 'float32', refresh: bool | None = None
) -> Callable[..., Any]:
  """(state, tokens [B, T + 1], key) -> (state, loss); dense without a recipe, else of the recipe's sparse phases.

  With `refresh` False, of steps that choose no masks.
  """
  tx = make_optimizer(recipe, moment)
  net = model if recipe is None else s24.sparsify(model, recipe, phase='sparse')

  def loss_fn(params: Any, states: Any, tokens: Array, key: Array) -> Array:
    variables = {'params': params} if recipe is None else {'params': params, 'sparse24': states}
    logits = net.apply(variables, tokens[:, :-1], rngs={'mvue': key})
    with jax.named_scope('loss'):
      return layers.cross_entropy(logits, tokens[:, 1:]).mean()

  def step(state: State, tokens: Array, key: Array) -> tuple[State, Array]:
    states = None
    if recipe is not None:
      with jax.named_scope('pack'):
        states = s24.sparse_variables(state.params, state.opt_state, recipe, phase='sparse')
    loss, grads = jax.value_and_grad(loss_fn)(state.params, states, tokens, key)
    with jax.named_scope('optimizer'):
      updates, opt_state = tx.update(grads, state.opt_state, state.params, refresh=refresh)
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


def _wrapper(state: State) -> tuple[s24.SparseTrainingState, tuple[Any, ...]]:
  """The state of the recipe's wrapper, and what stands before it in a chain."""
  if isinstance(state.opt_state, s24.SparseTrainingState):
    return state.opt_state, ()
  *outer, sparse = state.opt_state
  return sparse, tuple(outer)


def _wrapped(params: Any, sparse: s24.SparseTrainingState, outer: tuple[Any, ...]) -> State:
  return State(params, (*outer, sparse) if outer else sparse)


class Twins:
  """Both compiled steps over one state, neither of which searches masks.

  Args:
    case: the model.
    options: of the command line.
    clock: told of compiling.
    mesh: its devices divide the tokens along 'data'.
    shardings: how it holds a state, from one of shapes.
    wrap: of a step, before it is traced.
  """

  def __init__(
    self, case: Case, options: Any, clock: _bench.Clock, mesh: Mesh, *, shardings: Callable[[Any], Any],
    wrap: Callable[[Any], Any] = lambda step: step,
  ):  # fmt: skip
    self.recipe = fst(options.implementation)
    self.model = make_model(case, tiny=options.tiny)
    batch, length = (2 * mesh.size, TINY['seq_len']) if options.tiny else (options.batch or case.batch, case.length)
    self.tokens_a_step = batch * length
    rng = np.random.default_rng(0)
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ('data',)))
    tokens = rng.integers(0, self.model.config.vocab_size, (batch, length + 1), dtype=np.int32)
    self.tokens, self.key = jax.device_put(tokens, split), jax.device_put(jax.random.key(1), whole)

    def init() -> State:
      params = self.model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))['params']
      return State(params, make_optimizer(self.recipe, case.moment).init(params))

    shapes = jax.eval_shape(init)
    held = shardings(shapes)
    abstract = jax.tree.map(lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes, held)
    jobs = {
      twin: (
        jax.jit(
          wrap(make_step(self.model, recipe, case.moment, False if recipe else None)), donate_argnums=0,
          out_shardings=(jax.tree.map(lambda a: a.sharding, state), whole),
        ),
        (state, self.tokens, self.key),
      )
      for twin, recipe, state in (('sparse', self.recipe, abstract), ('dense', None, dense_part(abstract)))
    }
    # Before there is a state: autotuning needs memory too.
    self.compiled = _bench.compile_all(jobs, needed=jobs)
    clock.lap('compile ' + ' and '.join(jobs))
    for name, compiled in self.compiled.items():
      again = hlo.recomputed(compiled.as_text())
      warning = f'; SHORT OF MEMORY: XLA computes {again} instructions again' if again else ''
      print(f'  memory of {name}: {_bench.memory(compiled)} GB{warning}', flush=True)
    self.calls = {twin: getattr(self, twin) for twin in self.compiled}
    self.state = jax.block_until_ready(jax.jit(init, out_shardings=held)())
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
