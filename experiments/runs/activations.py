"""How sparse the squared-ReLU activations of a model are, layer by layer, and what a pattern keeps of them."""

from collections.abc import Callable, Mapping
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments.runs import build
from experiments.runs.build import Parts
from experiments.runs.models.gpt2 import MLP
import sparse24_jax as s24
from sparse24_jax.activation_patterns import feature_mask
from sparse24_jax.attention import Attention
from sparse24_jax.clusters import split_clusters
from sparse24_jax.linear_layer import projection_state
from sparse24_jax.neurons import route_tokens
from sparse24_jax.rules import rule_for

# The measures, as the records of a run call them, by layer each.
ZEROS = 'activation_zeros'
KEPT = 'activation_kept'
KEPT_SUM = 'activation_kept_sum'

_COLLECTION = 'activations'
_UP = 'c_fc'  # the first map of a layer
# A share of thousands of tokens times hundreds of neurons is known well enough from few batches.
_BATCHES = 8


def make_probe(
  parts: Parts, phase: str, attention: Attention = None
) -> Callable[[Any], dict[str, dict[str, float]]]:
  """Compiles to one program: train state -> measures of its activations, on the first validation batches.

  Squared ReLU is `y = relu(x W_up)^2` with the weights and the inputs of the phase's own forward, so in a sparse phase
  with projected weights, and below the first layer with inputs that went through a pattern. For each layer there are

  - `activation_zeros`: share of zeros in `y`, before any pattern;
  - `activation_kept`: share of the non-zero entries of `y` that the recipe's pattern keeps, or in a dense phase would;
  - `activation_kept_sum`: the same share of the sum of `y`.

  The last two need a recipe with a pattern. A model for which `can_probe` is False has no measures.

  Args:
    parts: of the run.
    phase: of the forward.
    attention: of the forward.
  """
  model = s24.sparsify(build.model_for(parts, attention), parts.recipe, phase=phase)
  batches = build.validation_batches(parts, min(_BATCHES, parts.config.eval_batches))

  @jax.jit
  def probe(params: Any, opt_state: Any, batches: Any) -> Any:
    sparse = s24.sparse_variables(params, opt_state, parts.recipe, phase=phase)

    def measure(batch: Any) -> Any:
      # Once more under other names: what is measured reads the weights beside the layers, not in their place.
      variables = {'params': params, 'sparse24': sparse, 'probe_params': params, 'probe_states': sparse}
      rngs = {'mvue': jax.random.key(0)}
      with nn.intercept_methods(_interceptor(parts.recipe)):
        inputs = [batch[name] for name in parts.task.inputs]
        return model.apply(variables, *inputs, rngs=rngs, mutable=[_COLLECTION])[1].get(_COLLECTION, {})

    return jax.tree.map(lambda x: jnp.mean(x, axis=0), jax.lax.map(measure, batches))

  return lambda state: _by_measure(probe(state.params, state.opt_state, batches))


def can_probe(parts: Parts) -> bool:
  """Whether the model has layers that `make_probe` measures."""
  config = parts.model.config
  return getattr(config, 'mlp', '') == 'relu2'


def measures(y: jax.Array, policy: s24.ActivationPolicy | None) -> dict[str, jax.Array]:
  """The measures of activations `y` [tokens, neurons], float32 scalars; those of the pattern only with a policy.

  >>> y = jnp.array([[0.0, 1, 2, 5], [0, 0, 0, 4]])
  >>> {name: float(value) for name, value in measures(y, s24.ActivationPolicy(s24.TwoOfFour())).items()}
  {'activation_zeros': 0.5, 'activation_kept': 0.75, 'activation_kept_sum': 0.9166666865348816}
  """
  active = y != 0
  found = {ZEROS: 1 - jnp.mean(active, dtype=jnp.float32)}
  if policy is not None:
    kept = feature_mask(y, policy)
    # Without a single active entry nothing is lost.
    found[KEPT] = _share(jnp.sum(kept & active, dtype=jnp.float32), jnp.sum(active, dtype=jnp.float32))
    found[KEPT_SUM] = _share(jnp.sum(jnp.where(kept, y, 0), dtype=jnp.float32), jnp.sum(y, dtype=jnp.float32))
  return found


def _share(part: jax.Array, whole: jax.Array) -> jax.Array:
  return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1.0), 1.0)


def _interceptor(recipe: s24.Recipe) -> Callable:
  """Stores the measures of every squared-ReLU layer that runs in the layer's own scope."""

  def intercept(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext):
    out, layer = call(*args, **kwargs), context.module
    if not isinstance(layer, MLP) or layer.config.mlp != 'relu2' or context.method_name != '__call__':
      return out
    if not layer.is_mutable_collection(_COLLECTION):  # under a scan that does not let it through
      return out
    rule = rule_for('/'.join((*layer.path, _UP, 'kernel')), recipe)
    y, policy = _routed(layer, args[0], _squared_relu(layer, args[0], rule), rule and rule.activation)
    for name, value in measures(y, policy).items():
      layer.put_variable(_COLLECTION, name, value)
    return out

  return intercept


def _up(layer: MLP) -> tuple[Mapping[str, jax.Array], Any]:
  """Parameters of the layer's first map, and the sparse state of its kernel: None in a dense phase."""
  variables = layer.variables
  return variables['probe_params'][_UP], variables.get('probe_states', {}).get(_UP, {}).get('kernel')


def _squared_relu(layer: MLP, x: jax.Array, rule: s24.Rule | None) -> jax.Array:
  """What the layer made of its input inside: [tokens, neurons]."""
  up, state = _up(layer)
  x, w, bias = nn.dtypes.promote_dtype(x, up['kernel'], up.get('bias'), dtype=layer.config.dtype)
  if rule and rule.policy.projection and state is not None:
    w = rule.policy.projection.apply(w, projection_state(state))
  h = jnp.dot(x.reshape(-1, x.shape[-1]), w)
  return jnp.square(jax.nn.relu(h if bias is None else h + bias[None, :]))


def _routed(
  layer: MLP, x: jax.Array, y: jax.Array, policy: s24.ActivationPolicy | None
) -> tuple[jax.Array, s24.ActivationPolicy | None]:
  """`y` with tokens and neurons in the order of the pattern; no policy in a dense phase, which knows no clusters."""
  if policy is None or not policy.clusters:
    return y, policy
  up, state = _up(layer)
  if state is None:
    return y, None
  _, neurons = split_clusters(projection_state(state))
  x, w = nn.dtypes.promote_dtype(x, up['kernel'], dtype=layer.config.dtype)
  x = x.reshape(-1, x.shape[-1])
  order = route_tokens(x, w, neurons, clusters=policy.clusters.number, within=policy.clusters.within)
  return jnp.take(jnp.take(y, order, axis=0), jnp.argsort(neurons, stable=True), axis=1), policy


def _by_measure(tree: Mapping[str, Any]) -> dict[str, dict[str, float]]:
  """measure -> layer -> value, from nested dictionaries of layers; stacked ones get an index: 'h/mlp[3]'."""
  found: dict[str, dict[str, float]] = {}
  for key_path, value in jax.tree_util.tree_leaves_with_path(jax.device_get(tree)):
    *layer, name = (key.key for key in key_path)
    for i, each in enumerate(np.ravel(value)):
      found.setdefault(name, {})['/'.join(layer) + (f'[{i}]' if np.ndim(value) else '')] = float(each)
  return found
