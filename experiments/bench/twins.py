"""Language models whose training steps are timed, sparse and dense.

Both twins train the same parameters in turns: the dense step takes weights and moments out of the sparse run's state
and puts them back, so one set of them is in memory. Tokens are uniformly random; time hardly depends on them, since
gradients of embeddings are summed in float32.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

from experiments.bench import hlo, measure
from experiments.runs import recipes
from experiments.runs.build import is_matrix, wrapped
from experiments.runs.models import gpt2, layers, llama
from pallas_kernels import _bench
import sparse24_jax as s24

FFN = r'.*/mlp/.*'
LINEAR = r'.*/(attn|mlp)/.*/kernel'
# Samples where the fused block takes them: elsewhere in a block the exact gradient is as fast.
MIXED: Mapping[str, Mapping[str, Any]] = {'mixed_sparsity_transposable': dict(mvue_path=FFN)}
NEURON_LEVEL: Mapping[str, s24.ActivationPolicy] = {
  '_'.join(['neuron_level', f'{v}x2x{m}', *filter(None, [setting])]): measure.activation_policy(v, m, setting)
  for v, m in ((128, 8), (128, 16), (64, 8)) for setting in measure.ACTIVATIONS
}  # fmt: skip
# Of one pattern of weights; `neuron_level` takes two, and says its pattern in its name here.
OF_ONE_PATH = {name: known for name, known in s24.recipes.KNOWN.items() if len(known.paths) == 1 and known.is_sparse}
RECIPES = (*OF_ONE_PATH, *NEURON_LEVEL)


@dataclasses.dataclass(frozen=True)
class Case:
  """One model and how it is trained.

  Attributes:
    model: 'gpt2' or 'llama'.
    size: a key of the model's `SIZES`.
    batch: sequences a step.
    length: positions of a sequence.
    vocab: rows of the embedding.
    remat: recompute blocks in the backward.
    moment: dtype of AdamW's first moment, in both twins.
    mlp: of GPT-2; neuron-level sparsity takes 'relu2', squared ReLU.
  """

  model: str
  size: str
  batch: int
  length: int
  vocab: int
  remat: bool
  moment: str = 'float32'
  mlp: str = 'gelu'

  @property
  def name(self) -> str:
    """What `--select` calls it."""
    return f'{self.model}-{self.size}' + ('' if self.mlp == 'gelu' else f'-{self.mlp}')


CASES = {
  case.name: case
  for case in (
    Case('gpt2', '124m', 32, 1024, 50304, False),
    Case('gpt2', '1558m', 24, 1024, 50304, True),
    Case('llama', '3b', 6, 2048, 32000, True, 'bfloat16'),
    # Many short sequences: V tokens of one position are a block.
    Case('gpt2', '124m', 128, 256, 50304, False, mlp='relu2'),
    Case('gpt2', '1300m', 128, 256, 50304, True, mlp='relu2'),
    Case('gpt2', 'wide', 128, 256, 50304, True, mlp='relu2'),
  )
}
TINY = dict(num_layers=2, num_heads=2, embed_dim=32, seq_len=16)


class State(NamedTuple):
  """What a step carries."""

  params: Any
  opt_state: Any


def make_model(case: Case, options: Any) -> Any:
  """The linen model of a case, in bfloat16 with float32 parameters."""
  family, make = (gpt2, gpt2.GPT2) if case.model == 'gpt2' else (llama, llama.Llama)
  fields: dict[str, Any] = dict(dtype='bfloat16', scan_layers=True, remat=case.remat, attention='cudnn')
  if case.model == 'gpt2':
    fields['mlp'] = case.mlp
  if options.tiny:
    fields |= TINY | {'attention': 'xla'}
    fields |= dict(num_kv_heads=1, hidden_dim=64) if case.model == 'llama' else {}
    return make(family.make_config('nano', vocab_size=64, **fields))
  return make(family.make_config(case.size, vocab_size=case.vocab, seq_len=case.length, **fields))


def recipe_of(name: str) -> s24.Recipe:
  """The recipe by the name that records have."""
  if name in NEURON_LEVEL:
    policy = NEURON_LEVEL[name]
    return s24.recipes.neuron_level('.*/mlp/c_fc/kernel', '.*/mlp/c_proj/kernel', policy=policy)
  known = OF_ONE_PATH[name]
  # Mixed sparsity takes every linear layer of a block; early in the run, where all places of the masks are taken.
  mixed = known.make is s24.recipes.mixed_sparsity
  return known.make(LINEAR if mixed else FFN, **known.settings, **MIXED.get(name, {}))


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


def at_step(state: State, count: int) -> State:
  """The sparse run's state with another number of steps done, which decides when masks are searched next."""
  sparse, outer = _wrapper(state)
  return _wrapped(state.params, sparse._replace(count=jnp.full_like(sparse.count, count)), outer)


def _wrapper(state: State) -> tuple[s24.SparseTrainingState, tuple[Any, ...]]:
  """The state of the recipe's wrapper, and what stands before it in a chain."""
  if isinstance(state.opt_state, s24.SparseTrainingState):
    return state.opt_state, ()
  *outer, sparse = state.opt_state
  return sparse, tuple(outer)


def _wrapped(params: Any, sparse: s24.SparseTrainingState, outer: tuple[Any, ...]) -> State:
  return State(params, (*outer, sparse) if outer else sparse)


class Twins:
  """Both compiled steps over one state.

  Args:
    case: see `CASES`.
    options: of the command line.
    clock: told of compiling.
    mesh: its devices divide the tokens along 'data'; None for one device.
    shardings: how it holds a state, from one of shapes; None has it whole on every device.
    wrap: of a step, before it is traced.
  """

  def __init__(
    self, case: Case, options: Any, clock: _bench.Clock, mesh: Mesh | None = None, *,
    shardings: Callable[[Any], Any] | None = None, wrap: Callable[[Any], Any] = lambda step: step,
  ):  # fmt: skip
    self.case = case
    self.recipe = recipes.with_implementation(recipe_of(options.recipe), options.implementation)
    self.model = make_model(case, options)
    sparse_model, policy = self.model, activations(self.recipe)
    batch, length = options.batch or case.batch, case.length
    if options.tiny:
      batch, length = 2 * mesh.size if mesh else policy.features.block if policy else 4, TINY['seq_len']
    if policy:
      # A block may not see what follows its tokens. Dense, the order is all the same, so the twin keeps its own.
      if batch % policy.features.block:
        raise ValueError(f'{batch} sequences a step: {self.recipe.name} takes multiples of V = {policy.features.block}')
      sparse_model = self.model.clone(config=dataclasses.replace(self.model.config, ffn_order='position'))
    self.tokens_a_step = batch * length
    rng = np.random.default_rng(0)
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) if mesh else None for axes in ((), ('data',)))
    tokens = rng.integers(0, self.model.config.vocab_size, (batch, length + 1), dtype=np.int32)
    self.tokens, self.key = jax.device_put(tokens, split), jax.device_put(jax.random.key(1), whole)

    def init() -> State:
      params = self.model.init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))['params']
      return State(params, make_optimizer(self.recipe, case.moment).init(params))

    shapes = jax.eval_shape(init)
    held = shardings(shapes) if shardings else jax.tree.map(lambda _: whole, shapes)
    abstract = jax.tree.map(lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), shapes, held)
    # Masks are chosen by a program of its own, as `experiments.runs` has it on a GPU.
    every = self.recipe.refresh_every
    twins = {
      'sparse': (sparse_model, self.recipe, abstract, False if every > 1 else None),
      'dense': (self.model, None, dense_part(abstract), None),
    }
    if every > 1 and getattr(options, 'refreshes', 0):
      twins['search'] = (sparse_model, self.recipe, abstract, True)
    jobs = {
      twin: (
        jax.jit(
          wrap(make_step(model, recipe, case.moment, refresh)), donate_argnums=0,
          out_shardings=(jax.tree.map(lambda a: a.sharding, state), whole),
        ),
        (state, self.tokens, self.key),
      )
      for twin, (model, recipe, state, refresh) in twins.items()
    }
    # Before there is a state: autotuning needs memory too.
    self.compiled = _bench.compile_all(jobs, needed=jobs)
    clock.lap('compile ' + ' and '.join(jobs))
    self._search, self._searches = self.compiled.pop('search', None), False
    for name, compiled in self.compiled.items():
      again = hlo.recomputed(compiled.as_text())
      warning = f'; SHORT OF MEMORY: XLA computes {again} instructions again' if again else ''
      print(f'  memory of {name}: {_bench.memory(compiled)} GB{warning}', flush=True)
    self.calls = {twin: getattr(self, twin) for twin in self.compiled}
    self.state = jax.block_until_ready(jax.jit(init, out_shardings=held)())
    clock.lap('initialise')

  @property
  def dtype(self) -> str:
    """In which the sparse twin multiplies by its sparse weights."""
    return 'float8' if any(rule.policy.precision != 'default' for rule in self.recipe.rules) else 'bfloat16'

  def sparse(self) -> Array:
    """One sparse step; returns its loss."""
    program = self._search if self._searches and self._search else self.compiled['sparse']
    self.state, loss = program(self.state, self.tokens, self.key)
    return loss

  def dense(self) -> Array:
    """One dense step; returns its loss."""
    dense, loss = self.compiled['dense'](dense_part(self.state), self.tokens, self.key)
    self.state = with_dense_part(self.state, dense)
    return loss

  def at(self, count: int) -> None:
    """Sets the number of steps done, which decides when masks are searched next."""
    self.state = at_step(self.state, count)
    self._searches = s24.refresh_at(self.recipe, count)
