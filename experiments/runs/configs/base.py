"""The fields that every experiment has, at their plainest values. Not an experiment itself."""

from typing import Any

from ml_collections import ConfigDict

from experiments.runs.experiment import Config

TINY_MODEL = {'num_layers': 2, 'num_heads': 2, 'embed_dim': 32, 'seq_len': 16}


# The data of each task that a package holds.
_EMBEDDED = {
  'language_model': 'aws_docs',
  'masked_lm': 'aws_docs',
  'image_classification': 'digits',
  'text_classification': 'aws_services',
  'translation': 'jupyterlab_de',
}
# The digits have 8 x 8 pixels; few messages have less than 32 bytes.
_TINY_TASK = {
  'image_classification': {'seq_len': 17, 'patch': 2, 'pool': 'token'},
  'translation': {'seq_len': 64},
}


def make(name: str, *, size: str, tiny: bool, **fields: Any) -> Config:
  """Returns a full configuration.

  Args:
    name: experiment name; run folders are called after it.
    size: a key of the `SIZES` of the model, `experiments.runs.models.gpt2` unless `model` has another `family`.
    tiny: shrink model, batch, length and intervals so that a test can train it.
    **fields: values for the fields below, dictionaries for sections.

  Returns:
    A locked `ConfigDict`. A field that does not exist cannot be set, except in `model`, which takes every field of
    `GPT2Config` (or, with `family='llama'`, `LlamaConfig`), and in `recipe.kwargs`, which takes the arguments of the
    recipe.
  """
  config = ConfigDict(
    {
      'name': name,
      # The key of METHODS in experiments/runs/method_table.py that was put in; empty for a configuration of its own.
      'method': '',
      # What reports call the run; empty means the name of its recipe.
      'label': '',
      # What is learnt: a name of experiments/runs/tasks/task.py.
      'task': 'language_model',
      # The folder of a run whose newest checkpoint gives the parameters that this model has too; the others are new.
      'init_from': '',
      # Decides initial parameters, dropout, MVUE sampling and random masks; the order of the data has data.seed.
      'seed': 0,
      # Optimizer steps.
      'steps': 1000,
      # Micro-batches a step; masks, decay and counters move once a step, whatever this is.
      'accumulate': 1,
      'model': {'size': size},
      # A vocabulary that is a multiple of 64 fills the tiles of a tensor core.
      'vocab_multiple': 1,
      # See experiments.runs.data.pipeline.DataConfig. batch_size: sequences an optimizer step, over all devices and
      # micro-batches; an empty folder name means the default folder; max_tokens 0 means all.
      'data': {
        'corpus': 'aws_docs',
        'tokenizer': 'bytes',
        'seq_len': 64,
        'batch_size': 16,
        'seed': 0,
        'data_dir': '',
        'manual_dir': '',
        'max_tokens': 0,
      },
      'optimizer': {
        'peak_lr': 3e-3,
        'end_lr': 0.0,
        'warmup_steps': 100,
        'b1': 0.9,
        'b2': 0.95,
        'eps': 1e-8,
        'weight_decay': 0.1,
        'clip': 1.0,
      },
      # The name of a function in sparse24_jax.recipes and its arguments. flip_rate: 'refresh' compares the masks of two
      # refreshes; 'step' searches anew at every step, which makes recipes with different intervals comparable.
      # What a dense phase after a sparse one starts from: the 'weights', or the 'projected' ones that the sparse phase
      # computed with. Masked decay leaves little between the two; without it the former are far from what was trained.
      # implementation: of the sparse matmuls, see `s24.DotPolicy`; 'auto' leaves the choice to the library.
      'recipe': {
        'name': 'dense', 'kwargs': {}, 'flip_rate': 'refresh', 'dense_from': 'weights', 'implementation': 'auto',
      },
      # Arguments of `runs.methods` that fit this experiment, {'rigl': {'refresh_every': 50}} say. The name of a
      # method in place of a `density`, or of `steps`, the share of the steps, makes FLOPs equal to that method's. A
      # field that a `policy` does not name stays the method's.
      'methods': {},
      # Devices on each axis of the mesh: batches are split over data and fsdp, parameters over fsdp, the neurons of
      # feed-forward layers over model (tensor parallelism).
      'mesh': {'data': 1, 'fsdp': 1, 'model': 1},
      # About numbers that are not finite, and losses that jump: see experiments.runs.bad_numbers.
      'bad_numbers': {'policy': 'stop', 'cap': 10, 'spike': 20.0},
      'log_every': 50,
      'eval_every': 500,
      'eval_batches': 50,
      # 0: none, so a run that is cut starts again.
      'checkpoint_every': 500,
      'keep_checkpoints': 2,
    }
  )
  _set(config, fields)
  if tiny:
    shrink(config)
  return config


def shrink(config: Config) -> None:
  """Turns an experiment into its tiny twin, in place: same task, recipe, optimizer and dtype, a learnable size."""
  config.name += '-tiny'
  config.steps = 60
  config.accumulate = min(config.accumulate, 2)
  with config.model.unlocked():
    config.model.update(TINY_MODEL)
    # Software bfloat16 is several times slower than float32 on a CPU.
    config.model.update({'dtype': 'float32', 'remat': False, 'attention': 'xla'})
    if config.model.get('family') == 'llama':
      config.model.update({'num_kv_heads': 1, 'hidden_dim': 96})
    config.model.update(_TINY_TASK.get(config.task, {}))
  config.data.update(
    {
      'corpus': _EMBEDDED[config.task],
      'tokenizer': 'bytes',
      'seq_len': config.model.seq_len,
      'batch_size': 16,
    }
  )
  config.optimizer.update({'peak_lr': 1e-2, 'warmup_steps': 6})
  config.mesh.update({'data': 1, 'fsdp': 1, 'model': 1})
  config.update({'log_every': 10, 'eval_every': 30, 'eval_batches': 2 if config.task == 'translation' else 4})
  config.checkpoint_every = min(config.checkpoint_every, 30)
  if 'refresh_every' in config.recipe.kwargs:
    config.recipe.kwargs.refresh_every = 5


def _set(config: Config, fields: dict[str, Any]) -> None:
  """Sets fields section by section; `model` and `recipe` replace what is there."""
  for key, value in fields.items():
    if key in ('model', 'recipe', 'methods'):
      with config.unlocked():
        config[key].update(ConfigDict(value))
    elif isinstance(value, dict):
      config[key].update(value)
    else:
      config[key] = value
