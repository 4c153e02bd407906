"""Image classification, as DeiT learns it but without its augmentations and teacher."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.runs.data import images
from experiments.runs.data.batches import Batch, Batches, DataConfig
from experiments.runs.tasks import task


def load(**fields) -> Batches:
  """Images of a corpus of `images`, moved about (and, if coloured, mirrored) in training, as batches."""
  config = DataConfig(**fields)
  found = images.load(config)

  def make(rows: dict[str, np.ndarray], rng: np.random.Generator | None) -> Batch:
    pictures = rows['image'] if rng is None else move(rows['image'], rng)
    return {'images': found.normalise(pictures), 'labels': rows['label'].astype(np.int32)}

  data = Batches(config, found.splits, make, found.fingerprint, 'images')
  data.sizes = {'classes': len(found.classes), 'image_size': found.size, 'channels': found.channels}
  return data


def move(pictures: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """Each picture [B, H, W, K] moved by up to an eighth of its side, its edge repeated; coloured ones may be mirrored.

  >>> move(np.arange(16).reshape(1, 4, 4, 1), np.random.default_rng(0)).shape
  (1, 4, 4, 1)
  """
  size = pictures.shape[1]
  by = max(1, size // 8)
  wide = np.pad(pictures, ((0, 0), (by, by), (by, by), (0, 0)), mode='edge')
  corners = rng.integers(0, 2 * by + 1, (len(pictures), 2))
  moved = [picture[y : y + size, x : x + size] for picture, (y, x) in zip(wide, corners, strict=True)]
  if pictures.shape[-1] == 3:
    mirrored = rng.random(len(moved)) < 0.5
    moved = [picture[:, ::-1] if flip else picture for picture, flip in zip(moved, mirrored, strict=True)]
  return np.stack(moved)


def loss(logits_BxC: jax.Array, batch: task.Batch) -> jax.Array:
  """Mean cross-entropy of the classes in nats."""
  return optax.softmax_cross_entropy_with_integer_labels(logits_BxC, batch['labels']).mean()


def accuracy(logits_BxC: jax.Array, batch: task.Batch) -> dict[str, jax.Array]:
  """Share of the examples whose class is the likeliest."""
  return {'accuracy': jnp.mean(jnp.argmax(logits_BxC, axis=-1) == batch['labels'], dtype=jnp.float32)}


CLASSIFICATION = task.Task(
  families=('vit',),
  inputs=('images',),
  load=load,
  loss=loss,
  sizes=lambda data: data.sizes,
  measures=accuracy,
)
