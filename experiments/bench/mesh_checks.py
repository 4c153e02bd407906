"""What several devices compute, against one: samples, gradients and masks. A check beyond its limit raises."""

from collections.abc import Callable, Mapping
import statistics
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
import numpy as np
import optax

from experiments.bench import feed_forward, twins
from experiments.bench.meshes import communication, keep_tokens_divided, place, state_shardings, TOKENS, WHOLE
from experiments.runs.models import gpt2
from pallas_kernels import _bench, _tuning
import sparse24_jax as s24
from sparse24_jax import linear_layer
from sparse24_jax.plan import backend_of
from sparse24_jax.precision import Rounded

CHECKED = (4096, 1024, 4096)
# Relative errors, ours: sums over devices are rounded to bfloat16 one by one. The last is a median, see `check_gpt2`.
BLOCK_LIMIT, MODEL_LIMIT, SAMPLED_LIMIT = 5e-3, 2e-2, 5e-2


def _errors(found: Any, expected: Any) -> dict[str, float]:
  """Relative errors by path; leaves are fetched, since they lie on different devices."""
  host = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), (found, expected))
  paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(host[1])]
  pairs = zip(jax.tree.leaves(host[0]), jax.tree.leaves(host[1]), strict=True)
  return {path: float(f'{_tuning.relative_error(a, b):.3e}') for path, (a, b) in zip(paths, pairs, strict=True)}


def _differ(found: Any, expected: Any) -> float:
  """Share of entries of two trees that differ."""
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
  different = [np.asarray(a, np.float32) != np.asarray(b, np.float32) for a, b in pairs]
  return float(np.concatenate([d.ravel() for d in different]).mean())


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
  backend = backend_of(implementation)

  @jax.jit
  def f(dz: jax.Array, x: jax.Array) -> jax.Array:
    return linear_layer.kernel_weight_grad(dz, jax.random.key(3), Rounded(None, x), backend=backend)[1]

  expected, found = f(dz, identity), f(*place(mesh, (dz, identity), TOKENS))
  found = dict(differ=_differ(found, expected), kept=float((np.asarray(expected, np.float32) != 0).mean()))
  _check_limits({'differ': found['differ']}, 0.0)
  return found


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


def check_gpt2(mesh: Mesh, implementation: str, tiny: bool, sharding: str = 'whole') -> dict[str, Any]:
  """Largest and median error of the gradients of two blocks of GPT-2 against one device, with MVUE and without.

  MVUE chooses by the values that it is given, so there a rounding upstream picks other entries now and then; hence the
  limit on its median alone.

  Raises:
    ValueError: an error is beyond its limit.
  """
  model, params, tokens = _two_blocks(tiny)
  shardings = state_shardings(mesh, sharding, params)
  given = jax.device_put(params, shardings), place(mesh, tokens, TOKENS)
  jobs, found = {}, {}
  for name in ('sampled', 'unsampled'):
    f = _gradients(model, _recipe(implementation, sampled=name == 'sampled'))
    jobs[name, 'one'] = jax.jit(f), (params, tokens)
    divided = jax.jit(keep_tokens_divided(mesh, f), out_shardings=(NamedSharding(mesh, WHOLE), shardings))
    jobs[name, 'mesh'] = divided, given
  compiled = _bench.compile_all(jobs, needed=jobs)
  for name in ('sampled', 'unsampled'):
    errors = _errors(compiled[name, 'mesh'](*given), compiled[name, 'one'](params, tokens))
    worst = max(errors, key=errors.__getitem__)
    found[name] = dict(
      largest=errors[worst], of=worst, median=statistics.median(errors.values()), loss=errors['[0]'],
      communication=communication(compiled[name, 'mesh'].as_text()),
    )  # fmt: skip
    if 'all-to-all' in found[name]['communication']:
      raise ValueError(f'{name}: activations move between devices: {found[name]["communication"]}')
    if name == 'sampled':
      _check_limits({'sampled, median': found[name]['median']}, SAMPLED_LIMIT)
    else:
      _check_limits({f'unsampled {worst}': errors[worst]}, MODEL_LIMIT)
  return found


def check_fsdp(mesh: Mesh, implementation: str, tiny: bool) -> dict[str, Any]:
  """`check_gpt2` with weights and masks divided; then a step of AdamW with a mask search.

  The step is given weights and gradients of one device, so its masks have to be the same.

  Raises:
    ValueError: an error is beyond its limit.
  """
  found = check_gpt2(mesh, implementation, tiny, 'fsdp')
  model, params, tokens = _two_blocks(tiny)
  recipe = _recipe(implementation)
  gradients = jax.jit(_gradients(model, recipe))(params, tokens)[1]
  tx = s24.sparse_training(optax.adamw(1e-2), recipe, phase='sparse')  # a rate at which many masks change

  def step(params: Any, gradients: Any) -> twins.State:
    before = tx.init(params)
    before = before._replace(count=jnp.full_like(before.count, recipe.refresh_every - 1))
    updates, after = tx.update(gradients, before, params)
    return twins.State(optax.apply_updates(params, updates), after)

  expected = jax.jit(step)(params, gradients)
  shardings = state_shardings(mesh, 'fsdp', params)
  given = jax.device_put((params, gradients), (shardings, shardings))
  compiled = jax.jit(step, out_shardings=state_shardings(mesh, 'fsdp', expected)).lower(*given).compile()
  after = compiled(*given)
  masks = _differ(after.opt_state.projections, expected.opt_state.projections)
  errors = _errors(after, expected)
  worst = max(errors, key=errors.__getitem__)
  found['search'] = dict(
    masks_differ=masks, flipped=float(expected.opt_state.flip_rate.overall), largest=errors[worst], of=worst,
    communication=communication(compiled.as_text()),
  )  # fmt: skip
  _check_limits({'masks': masks}, 0.0)
  _check_limits({f'search {worst}': errors[worst]}, MODEL_LIMIT)
  return found


CHECKS = {'check-sample': check_sample, 'check-ffn': check_ffn, 'check-gpt2': check_gpt2, 'check-fsdp': check_fsdp}


def _two_blocks(tiny: bool) -> tuple[Any, Any, Array]:
  """A GPT-2 of two blocks, its parameters, and tokens [B, T + 1]."""
  fields = twins.TINY | dict(embed_dim=64, seq_len=64) if tiny else dict(num_layers=2, seq_len=512)
  config = gpt2.make_config(
    'nano' if tiny else '124m', vocab_size=512, dtype='bfloat16', scan_layers=True, remat=True,
    attention='xla' if tiny else 'cudnn', **fields,
  )  # fmt: skip
  model = gpt2.GPT2(config)
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 512, (8, config.seq_len + 1), dtype=np.int32))
  return model, jax.jit(lambda: model.init(jax.random.key(0), tokens[:1, :-1])['params'])(), tokens


def _recipe(implementation: str, *, sampled: bool = True) -> s24.Recipe:
  recipe = twins.fst(implementation)
  return recipe if sampled else recipe.with_exact_gradients()


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
