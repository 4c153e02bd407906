"""Encoders with a class for an output: a vision transformer, and a text classifier that a language model becomes.

Both have the blocks of `gpt2`, under the names that they have there, so that recipes and checkpoints fit. B batch,
T positions, D embedding, P patches, C classes.

Dosovitskiy et al., arXiv 2010.11929; Touvron et al. (DeiT), arXiv 2012.12877: pre-norm, biases, GELU, a class token.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, Literal

from flax import linen as nn
import jax
import jax.numpy as jnp

from experiments.runs.models.gpt2 import Block, embed_tokens, enter_stream, GPT2Config, layer_norm
from experiments.runs.models.gpt2 import SIZES as GPT2_SIZES
from experiments.runs.models.layers import INIT_STD, run_blocks, sized


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(GPT2Config):
  """A vision transformer: the fields of `GPT2Config`, which has no vocabulary here, and these.

  Attributes:
    classes: how many there are to choose from.
    image_size: pixels of a side.
    channels: of an image.
    patch: pixels of a patch's side; must divide `image_size`.
    pool: 'token' reads the class from a token of its own, 'mean' from the mean of all positions.
  """

  vocab_size: int = 0
  bias: bool = True
  causal: bool = False
  classes: int
  image_size: int
  channels: int = 1
  patch: int
  pool: Literal['token', 'mean'] = 'token'

  def __post_init__(self):
    super().__post_init__()
    if self.image_size % self.patch:
      raise ValueError(f'patch {self.patch} does not divide image_size {self.image_size}')
    if self.pool not in ('token', 'mean'):
      raise ValueError(f"pool is {self.pool!r}; known: 'token', 'mean'")
    positions = (self.image_size // self.patch) ** 2 + (self.pool == 'token')
    if positions != self.seq_len:
      raise ValueError(
        f'seq_len is {self.seq_len}; images of {self.image_size} in patches of {self.patch} with pool={self.pool!r} '
        f'take {positions} positions: set model.seq_len and data.seq_len to that'
      )


# 'tiny', 'small' and 'base' are those of DeiT.
VIT_SIZES: Mapping[str, Mapping[str, int]] = {
  'nano': dict(num_layers=2, num_heads=4, embed_dim=64, seq_len=50, patch=4),
  'tiny': dict(num_layers=12, num_heads=3, embed_dim=192, seq_len=197, patch=16),
  'small': dict(num_layers=12, num_heads=6, embed_dim=384, seq_len=197, patch=16),
  'base': dict(num_layers=12, num_heads=12, embed_dim=768, seq_len=197, patch=16),
}


def make_vit_config(size: str, **overrides: Any) -> ViTConfig:
  """Returns the configuration of a named size; ValueError for one that is not known, or sizes that do not fit.

  >>> make_vit_config('small', classes=1000, image_size=224, channels=3).hidden_dim
  1536
  """
  return sized(ViTConfig, VIT_SIZES, size, **overrides)


class ViT(nn.Module):
  """A vision transformer."""

  config: ViTConfig
  deterministic: bool = True

  @nn.compact
  def __call__(self, images_BxHxWxK: jax.Array) -> jax.Array:
    """Returns float32 logits [B, C] for float images [B, H, W, K]."""
    cfg = self.config
    x_BxTxP = cut_patches(images_BxHxWxK, cfg.patch)
    x_BxTxD = _plain(cfg, cfg.embed_dim, 'patch')(x_BxTxP.astype(cfg.dtype))
    if cfg.pool == 'token':
      shape, dtype = (1, 1, cfg.embed_dim), jnp.dtype(cfg.param_dtype)
      token = self.param('class_token', nn.initializers.normal(INIT_STD), shape, dtype)
      token = jnp.broadcast_to(token, (x_BxTxD.shape[0], 1, cfg.embed_dim)).astype(x_BxTxD.dtype)
      x_BxTxD = jnp.concatenate([token, x_BxTxD], axis=1)
    x_BxTxD = run_blocks(Block, cfg, self.deterministic, enter_stream(cfg, self.deterministic, x_BxTxD))
    x_BxTxD = layer_norm(cfg, 'ln_f')(x_BxTxD)
    x_BxD = x_BxTxD[:, 0] if cfg.pool == 'token' else x_BxTxD.mean(axis=1)
    return _plain(cfg, cfg.classes, 'classifier')(x_BxD).astype(jnp.float32)


def cut_patches(images_BxHxWxK: jax.Array, patch: int) -> jax.Array:
  """Patches [B, T, patch * patch * K] of images, row by row.

  >>> cut_patches(jnp.arange(16.0).reshape(1, 4, 4, 1), 2)[0, 1].tolist()
  [2.0, 3.0, 6.0, 7.0]
  """
  batch, height, width, channels = images_BxHxWxK.shape
  x = images_BxHxWxK.reshape(batch, height // patch, patch, width // patch, patch, channels)
  return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, patch * patch * channels)


def _plain(config: GPT2Config, features: int, name: str) -> nn.Dense:
  """A linear layer outside the blocks: dense in every recipe."""
  return nn.Dense(
    features,
    dtype=config.dtype,
    param_dtype=jnp.dtype(config.param_dtype),
    kernel_init=nn.initializers.normal(INIT_STD),
    name=name,
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextClassifierConfig(GPT2Config):
  """A text classifier: the fields of `GPT2Config`, and the number of `classes`."""

  classes: int
  causal: bool = False


def make_text_config(size: str, **overrides: Any) -> TextClassifierConfig:
  """Returns the configuration of a named size of `gpt2`; ValueError for one that is not known."""
  return sized(TextClassifierConfig, GPT2_SIZES, size, **overrides)


class TextClassifier(nn.Module):
  """The trunk of a GPT-2 or BERT with a linear map of the mean of its outputs; its own parameters start there."""

  config: TextClassifierConfig
  deterministic: bool = True

  @nn.compact
  def __call__(self, tokens_BxT: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Returns float32 logits [B, C] for int32 tokens [B, T], of which each row has so many."""
    cfg = self.config
    x_BxTxD, _ = embed_tokens(cfg, self.deterministic, tokens_BxT)
    x_BxTxD = run_blocks(Block, cfg, self.deterministic, x_BxTxD, lengths_B)
    x_BxTxD = layer_norm(cfg, 'ln_f')(x_BxTxD)
    here_BxTx1 = (jnp.arange(tokens_BxT.shape[1])[None] < lengths_B[:, None])[..., None]
    total_BxD = jnp.where(here_BxTx1, x_BxTxD, 0).sum(axis=1, dtype=jnp.float32)
    mean_BxD = total_BxD / jnp.maximum(lengths_B, 1)[:, None].astype(jnp.float32)
    return _plain(cfg, cfg.classes, 'classifier')(mean_BxD.astype(cfg.dtype)).astype(jnp.float32)
