"""Builds the parts of a run from its configuration: data, model, recipe, optimizer, mesh."""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import math
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

from experiments.runs.experiment import Config
from experiments.runs.meshes import BATCH, make_mesh, rows_of_this_process
from experiments.runs.models import classifiers, gpt2, llama, translator
from experiments.runs.recipes import attention_of, make_recipe
from experiments.runs.tasks import known
from experiments.runs.tasks.task import Task
import sparse24_jax as s24
from sparse24_jax.attention import Attention


class Parts(NamedTuple):
  """What a run is made of.

  Attributes:
    config: the configuration.
    model: the linen model.
    recipe: the library's description of what is sparse and when.
    data: training and validation batches; see `experiments.runs.data.pipeline`.
    mesh: device mesh, or None for one device.
    task: what is learnt.
  """

  config: Config
  model: nn.Module
  recipe: s24.Recipe
  data: Any
  mesh: Mesh | None
  task: Task


class Family(NamedTuple):
  """What `model.family` names: its sizes, how to make a model's configuration, the model, an example of its inputs."""

  sizes: Collection[str]
  make_config: Callable[..., Any]
  model: Callable[..., Any]
  example: Callable[[Any], tuple[jax.Array, ...]]


def _tokens(config: Any) -> jax.Array:
  return jnp.zeros((1, config.seq_len), jnp.int32)


def _length(config: Any) -> jax.Array:
  return jnp.full(1, config.seq_len, jnp.int32)


def _image(config: Any) -> jax.Array:
  return jnp.zeros((1, config.image_size, config.image_size, config.channels))


FAMILIES: Mapping[str, Family] = {
  'gpt2': Family(gpt2.SIZES, gpt2.make_config, gpt2.GPT2, lambda c: (_tokens(c),)),
  'llama': Family(llama.SIZES, llama.make_config, llama.Llama, lambda c: (_tokens(c),)),
  'vit': Family(classifiers.VIT_SIZES, classifiers.make_vit_config, classifiers.ViT, lambda c: (_image(c),)),
  'text_classifier': Family(
    gpt2.SIZES, classifiers.make_text_config, classifiers.TextClassifier, lambda c: (_tokens(c), _length(c))
  ),
  'translator': Family(
    translator.SIZES, translator.make_config, translator.Translator, lambda c: (_tokens(c), _length(c), _tokens(c))
  ),
}


def task_of(config: Config) -> Task:
  """What the configuration learns; ValueError for a task that is not known, or a model that cannot learn it."""
  task = known.get(config.task)
  family = config.model.get('family', task.families[0])
  if family not in task.families:
    raise ValueError(f'model.family is {family!r}; task {config.task!r} takes {", ".join(task.families)}')
  return task


def family_of(config: Config) -> Family:
  """The kind of model of a configuration: what it names, or the usual one of its task."""
  return FAMILIES[config.model.get('family', task_of(config).families[0])]


def model_config(config: Config, sizes: Mapping[str, Any]) -> Any:
  """The model's configuration, with what the data decides.

  Raises:
    TypeError: the model section has a field that the model does not.
    ValueError: sizes that do not fit together.
  """
  family = family_of(config)
  if 'size' not in config.model:
    raise ValueError(f"model section: it has no 'size'; known: {', '.join(family.sizes)}")
  fields = {key: value for key, value in config.model.to_dict().items() if key not in ('family', 'size')}
  if 'vocab_size' in sizes:
    vocab = math.ceil(sizes['vocab_size'] / config.vocab_multiple) * config.vocab_multiple
    sizes = {**sizes, 'vocab_size': vocab}
  if 'attention_pattern' in fields:
    fields['attention_pattern'] = attention_of(fields['attention_pattern'])
  return family.make_config(config.model.size, **{**fields, **sizes})


def make_parts(config: Config, *, data: Any = None) -> Parts:
  """Builds the parts of a run.

  Args:
    config: from `experiment.load_config`.
    data: batches to use in place of the configured corpus.

  Raises:
    ValueError: settings that do not fit together, or data that is not there; says which.
  """
  counted = ('steps', 'accumulate', 'log_every', 'eval_every', 'eval_batches', 'vocab_multiple')
  counts = {key: config[key] for key in counted} | {f'mesh.{axis}': size for axis, size in config.mesh.items()}
  for key, count in counts.items():
    if count < 1:
      raise ValueError(f'{key} is {count}; it must be 1 or more')
  if config.checkpoint_every < 0:
    raise ValueError(f'checkpoint_every is {config.checkpoint_every}; it must be 1 or more, or 0 for no checkpoints')
  for key in ('eval_every', 'checkpoint_every'):
    if config[key] % config.log_every:
      raise ValueError(
        f'{key} {config[key]} is not a multiple of log_every {config.log_every}; resuming would lose a line'
      )
  if config.data.batch_size % (config.accumulate * config.mesh.data * config.mesh.fsdp):
    raise ValueError(
      f'data.batch_size {config.data.batch_size} is not divisible by accumulate {config.accumulate} x mesh '
      f'{config.mesh.data} x {config.mesh.fsdp}'
    )
  learning_rate(config)  # refuses a warm-up that takes all steps, before a folder is made
  recipe = make_recipe(config)
  if (start := config.recipe.dense_from) not in ('weights', 'projected'):
    raise ValueError(f"recipe.dense_from is {start!r}; known: 'weights', 'projected'")
  mesh = make_mesh(config)
  task = task_of(config)
  if data is None:  # Not before: a bad recipe should not wait for data preparation.
    optional = {key: config.data[key] or None for key in ('data_dir', 'manual_dir', 'max_tokens')}
    index, count = rows_of_this_process(mesh)
    share = {'process_index': index, 'process_count': count, 'micro_batches': config.accumulate}
    data = task.load(**{**config.data.to_dict(), **optional, **share})
  make_model = family_of(config).model
  try:
    model = model_config(config, task.sizes(data))
    for dtype in (model.dtype, model.param_dtype):
      jnp.dtype(dtype)
    too_long = config.data.seq_len > model.seq_len
  except (TypeError, ArithmeticError) as error:
    raise ValueError(f'model section: {error}') from error
  if model.attention == 'cudnn' and jax.default_backend() != 'gpu':
    raise ValueError("model.attention is 'cudnn', which needs an NVIDIA GPU; set model.attention=xla, or use --tiny")
  if too_long:
    raise ValueError(f'data.seq_len {config.data.seq_len} is longer than the model takes, {model.seq_len}')
  parts = Parts(config, make_model(model), recipe, data, mesh, task)
  for phase in recipe.phases:
    model_for(parts, phase.attention)  # refuses what does not fit its layers and heads
  return parts


def phase_of(parts: Parts, step: int) -> tuple[str, Attention]:
  """Name and attention of the phase of an optimizer step: what a compiled program depends on."""
  steps = parts.config.steps
  return s24.phase_at(parts.recipe, step, steps), s24.attention_at(parts.recipe, step, steps)


def refresh_of(parts: Parts, step: int) -> bool | None:
  """Whether an optimizer step chooses masks, where a program of its own for those that do not is faster; else None.

  On a GPU the host would wait in every step to hear it. A step that is skipped is not counted, so that the host does
  not know there.
  """
  if jax.default_backend() != 'gpu' or parts.recipe.refresh_every == 1 or parts.config.bad_numbers.policy == 'skip':
    return None
  return s24.refresh_at(parts.recipe, step)


def enter_phase(parts: Parts, step: int, params: Any, opt_state: Any) -> Any:
  """The parameters that an optimizer step starts from: projected ones, if that is how its dense phase begins."""
  return jax.jit(projection(parts, params))(params, opt_state) if projects_at(parts, step) else params


def projects_at(parts: Parts, step: int) -> bool:
  """Whether an optimizer step begins a dense phase, and with projected parameters."""
  if parts.config.recipe.dense_from == 'weights' or step == 0:
    return False
  return [phase_of(parts, at)[0] for at in (step - 1, step)] == ['sparse', 'dense']


def projection(parts: Parts, params: Any) -> Callable[[Any, Any], Any]:
  """(parameters, optimizer state) -> what a sparse phase computes with; of parameters with these shapes."""
  recipe = bound_recipe(parts, params)
  return lambda p, s: s24.project(p, s, recipe, phase='sparse')


def bound_recipe(parts: Parts, params: Any) -> s24.Recipe:
  """The recipe as the model is found to read its weights, for `project`, which does not see the model."""
  example = family_of(parts.config).example(parts.model.config)
  return s24.bind(parts.recipe, parts.model, params, *example)


def regroup(parts: Parts, step: int, params: Any, opt_state: Any) -> Any:
  """The optimizer state that an optimizer step starts from: neurons are clustered anew where a sparse phase begins."""
  if step == 0 or [phase_of(parts, at)[0] for at in (step - 1, step)] != ['dense', 'sparse']:
    return opt_state
  return s24.regroup_neurons(params, opt_state, parts.recipe)


def model_for(parts: Parts, attention: Attention, *, blocks: bool = True, **changes: Any) -> nn.Module:
  """The model with the attention of a phase, its own where the phase names none; other attributes by name.

  Without `blocks` of sparse activations feed-forward layers take tokens as they come: to reorder them takes time.
  """
  config = parts.model.config
  if attention is not None:
    config = dataclasses.replace(config, attention_pattern=attention)
  if not blocks and getattr(config, 'ffn_order', 'sequence') != 'sequence':
    config = dataclasses.replace(config, ffn_order='sequence')
  return parts.model.clone(config=config, **changes)


def identity(parts: Parts) -> dict[str, Any]:
  """What two runs must share for one to go on from the other's checkpoint, as JSON-able data."""
  config = parts.config.to_dict()
  return {
    **{key: config[key] for key in ('seed', 'steps', 'accumulate', 'optimizer', 'task', 'init_from')},
    'model': dataclasses.asdict(parts.model.config),
    'recipe': parts.recipe.describe() | {'dense_from': config['recipe']['dense_from']},
    'data': {key: value for key, value in config['data'].items() if not key.endswith('_dir')}
    | {'fingerprint': parts.data.fingerprint},
  }


def learning_rate(config: Config, times: Any = 1) -> optax.Schedule:
  """Linear warm-up, then half a cosine down to `end_lr`, all of it `times` as high; an array may say how much.

  Raises:
    ValueError: the warm-up takes all steps.
  """
  opt = config.optimizer
  if opt.warmup_steps >= config.steps:
    raise ValueError(
      f'optimizer.warmup_steps is {opt.warmup_steps}; it must be less than steps, {config.steps}:'
      f' --set optimizer.warmup_steps={config.steps // 5}'
    )
  usual = optax.warmup_cosine_decay_schedule(0.0, opt.peak_lr, opt.warmup_steps, config.steps, opt.end_lr)
  return usual if isinstance(times, int) and times == 1 else lambda count: times * usual(count)


def make_optimizer(
  config: Config, recipe: s24.Recipe, phase: str, times: Any = 1
) -> optax.GradientTransformationExtraArgs:
  """AdamW inside the recipe's wrapper; weight decay on matrices only.

  Learning rates are `times` those of the configuration.
  """
  opt = config.optimizer
  rate = learning_rate(config, times)
  # AdamW, spelt out because a recipe may hold the second moment in its sparse phase: STEP does.
  if recipe.freezes_second_moment:
    moments = s24.scale_by_step_adam(opt.b1, opt.b2, opt.eps, phase=phase)
  else:
    moments = optax.scale_by_adam(opt.b1, opt.b2, opt.eps)
  decay = optax.add_decayed_weights(opt.weight_decay, is_matrix)
  inner = optax.chain(moments, decay, optax.scale_by_learning_rate(rate))
  clip = optax.clip_by_global_norm(opt.clip) if opt.clip else optax.identity()
  return wrapped(clip, inner, recipe, phase, rate)


def is_matrix(params: Any) -> Any:
  """Which parameters decay: tree like `params` of bools."""
  return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ('kernel', 'embedding'), params)


def wrapped(
  clip: optax.GradientTransformation, inner: optax.GradientTransformation, recipe: s24.Recipe, phase: str,
  learning_rate: optax.ScalarOrSchedule | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
  """Clip and optimizer in the recipe's wrapper.

  Gradients are clipped before the wrapper, so that masked decay is not, or inside it where links come and go, so that
  the norm is that of the links' gradients (as in the released code of mixed sparsity training).
  """
  # Where links come and go the dense gradient is larger than that of the links, which alone is applied.
  if any(rule.policy.projection is not None and rule.policy.projection.update is not None for rule in recipe.rules):
    return s24.sparse_training(optax.chain(clip, inner), recipe, phase=phase, learning_rate=learning_rate)
  return optax.chain(clip, s24.sparse_training(inner, recipe, phase=phase, learning_rate=learning_rate))


def validation_batches(parts: Parts, count: int) -> dict[str, Any]:
  """The first validation batches, stacked to [count, B, ...] and split over the mesh."""
  batches = list(parts.data.validation(count))
  stacked = {key: np.stack([batch[key] for batch in batches]) for key in batches[0]}
  if parts.mesh is None:
    return stacked
  sharding = NamedSharding(parts.mesh, PartitionSpec(None, BATCH))
  return {key: jax.make_array_from_process_local_data(sharding, x) for key, x in stacked.items()}


def shard_batch(parts: Parts, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
  """Splits a batch [B, ...] into micro-batches [accumulate, B / accumulate, ...] and over the mesh."""
  batch = {key: x.reshape(parts.config.accumulate, -1, *x.shape[1:]) for key, x in batch.items()}
  if parts.mesh is None:
    return batch
  sharding = NamedSharding(parts.mesh, PartitionSpec(None, BATCH))
  return {key: jax.make_array_from_process_local_data(sharding, x) for key, x in batch.items()}
