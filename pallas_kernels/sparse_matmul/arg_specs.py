"""The problems that are tuned, benchmarked and verified: layers of real models in the layouts that training uses."""

import argparse
import dataclasses
from typing import Any

import jax.numpy as jnp

_BF16 = jnp.dtype('bfloat16')
_FP8, _E5M2 = jnp.dtype('float8_e4m3fn'), jnp.dtype('float8_e5m2')
ROLES = ('forward', 'input_grad', 'weight_grad')


@dataclasses.dataclass(frozen=True)
class Spec:
  """One matmul of a layer y[tokens, d_out] = x[tokens, d_in] W[d_in, d_out], or a plain square matmul.

  Attributes:
    tokens: rows of x.
    d_in: columns of x.
    d_out: columns of y.
    role: an entry of `ROLES`, or 'plain' for D [d_out, tokens] with both operands K-major.
    dtype: of A, and of B, but where A is e5m2, a gradient, B holds activations in e4m3.
    headline: whether `docs/speed.md` quotes it.
  """

  tokens: int
  d_in: int
  d_out: int
  role: str = 'plain'
  dtype: Any = _BF16
  headline: bool = False

  @property
  def mnk(self) -> tuple[int, int, int]:
    """Sizes of the sparse matmul; the sparse operand's rows come first."""
    return {
      'plain': (self.d_out, self.tokens, self.d_in),
      'forward': (self.d_out, self.tokens, self.d_in),
      'input_grad': (self.d_in, self.tokens, self.d_out),
      'weight_grad': (self.d_out, self.d_in, self.tokens),
    }[self.role]

  @property
  def b_dtype(self) -> Any:
    return _FP8 if self.dtype == _E5M2 else self.dtype

  @property
  def b_layout(self) -> str:
    # 8-bit operands are K-major in every role.
    return 'kn' if self.role == 'weight_grad' and self.dtype.itemsize == 2 else 'nk'

  @property
  def out_layout(self) -> str:
    return 'mn' if self.role == 'plain' else 'nm'

  @property
  def flops(self) -> int:
    """Logical operations, as if A were dense."""
    m, n, k = self.mnk
    return 2 * m * n * k


def _layer(tokens: int, d_in: int, d_out: int, headline: bool = False) -> list[Spec]:
  return [Spec(tokens, d_in, d_out, role, headline=headline) for role in ROLES]


def _fp8_layer(tokens: int, d_in: int, d_out: int) -> list[Spec]:
  # The input gradient is dense: its weight is 2:4 along the other axis.
  return [Spec(tokens, d_in, d_out, 'forward', _FP8), Spec(tokens, d_in, d_out, 'weight_grad', _E5M2)]


def _fp8_layer_of_fst(tokens: int, d_in: int, d_out: int) -> list[Spec]:
  # One transposable mask serves both axes.
  return [*_fp8_layer(tokens, d_in, d_out), Spec(tokens, d_in, d_out, 'input_grad', _FP8)]


SQUARE = [Spec(8192, 8192, 8192, headline=True), Spec(8192, 8192, 8192, dtype=_FP8, headline=True)]
HEADLINE = [
  spec for sizes in ((16384, 4096, 16384), (16384, 16384, 4096), (32768, 4096, 14336)) for spec in _layer(*sizes, True)
]
# Where dispatch has to choose: feed-forward layers of small models.
SMALL = [
  spec
  for tokens in (2048, 8192)
  for d in (768, 1024, 2048)
  for spec in (*_layer(tokens, d, 4 * d), *_layer(tokens, 4 * d, d))
]
# The feed-forward layers of whole models, at the tokens of a step of `experiments.bench.best_steps`.
GPT2_124M = [*_layer(32768, 768, 3072), *_layer(32768, 3072, 768)]
GPT2_774M = [*_layer(16384, 1280, 5120), *_layer(16384, 5120, 1280)]
GPT2_1558M = [*_layer(24576, 1600, 6400), *_layer(24576, 6400, 1600)]
# Gate and up-projection are one matmul.
LLAMA_3B = [*_layer(12288, 3072, 2 * 8192), *_layer(12288, 8192, 3072)]
# Transformer blocks of width 4096, with GELU and with a gate.
BLOCK = [
  spec
  for sizes in ((16384, 4096, 2 * 14336), (16384, 14336, 4096), (16384, 4096, 16384), (16384, 16384, 4096))
  for spec in _layer(*sizes)
]
MODELS = [*GPT2_1558M, *LLAMA_3B, *GPT2_124M, *BLOCK, *GPT2_774M]
# In FP8: the feed-forward blocks that are quoted, whole models, the same blocks with a gate.
FP8 = [
  spec
  for sizes in (
    (16384, 4096, 16384), (16384, 16384, 4096), (32768, 4096, 14336), (32768, 14336, 4096),
    (24576, 1600, 6400), (24576, 6400, 1600), (32768, 768, 3072), (32768, 3072, 768),
    (12288, 3072, 2 * 8192), (12288, 8192, 3072), (16384, 4096, 2 * 16384), (32768, 4096, 2 * 14336),
  )
  for spec in _fp8_layer(*sizes)
]
# Attention's projections of whole models, q, k and v as one in GPT-2; and the same in FP8.
_PROJECTIONS = {
  'gpt2_1558m': [(24576, 1600, 3 * 1600), (24576, 1600, 1600)],
  'block': [(16384, 4096, 3 * 4096), (16384, 4096, 4096)],
  'llama_3b': [(12288, 3072, 3072), (12288, 3072, 1024)],
}
ATTENTION = {
  f'{model}_attention{name}': [spec for sizes in all_sizes for spec in layer(*sizes)]
  for model, all_sizes in _PROJECTIONS.items()
  for name, layer in (('', _layer), ('_fp8', _fp8_layer_of_fst))
}
# Generation: few tokens, a sequence each, by layers of width 4096, and the same in FP8.
_DECODED = [(tokens, *layer) for layer in ((4096, 4096), (4096, 14336), (14336, 4096)) for tokens in (1, 4, 16, 64)]
DECODE = [Spec(*sizes, 'forward') for sizes in _DECODED]
DECODE_FP8 = [Spec(*sizes, 'forward', _FP8) for sizes in _DECODED if sizes[0] in (1, 16)]
_IN_ATTENTION = [spec for specs in ATTENTION.values() for spec in specs]
ALL = [*SQUARE, *HEADLINE, *SMALL, *MODELS, *FP8, *DECODE, *DECODE_FP8, *_IN_ATTENTION]
SELECTIONS = {
  'square': SQUARE, 'headline': HEADLINE, 'small': SMALL,
  'gpt2_124m': GPT2_124M, 'gpt2_774m': GPT2_774M, 'gpt2_1558m': GPT2_1558M,
  'llama_3b': LLAMA_3B, 'block': BLOCK, 'models': MODELS, 'fp8': FP8,
  'gpt2_124m_fp8': [spec for spec in FP8 if 768 in (spec.d_in, spec.d_out)],
  'gpt2_1558m_fp8': [spec for spec in FP8 if spec.tokens == 24576],
  'decode': DECODE, 'decode_fp8': DECODE_FP8, **ATTENTION, 'all': ALL,
}
# Sizes no tile divides, down to one group; (m, n, k).
RAGGED = [(1, 1, 4), (64, 8, 4), (3, 5, 68), (100, 130, 140), (257, 193, 260), (520, 392, 196), (63, 65, 1000)]


def arguments(parser: argparse.ArgumentParser) -> None:
  """Which problems a command takes."""
  parser.add_argument(
    '--select', nargs='+', default=['headline'], choices=SELECTIONS, metavar='NAME',
    help=f'which problems (default: headline): {", ".join(SELECTIONS)}; models are the five before it, fp8 most in FP8',
  )
