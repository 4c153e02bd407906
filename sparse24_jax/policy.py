"""How layers and blocks are computed, as frozen, hashable data; this file knows no op and no kernel."""

import dataclasses
from typing import Any, Literal

from pallas_kernels._choices import check_choices, check_whole
from sparse24_jax.projection import Projection

# Those of `plan.PRECISIONS`.
PrecisionName = Literal['default', 'fp8', 'fp8_e4m3']


def fp8_precision(fp8: bool | Literal['e4m3']) -> PrecisionName:
  """The precision that recipes have by their argument `fp8`.

  >>> fp8_precision(False), fp8_precision(True), fp8_precision('e4m3')
  ('default', 'fp8', 'fp8_e4m3')
  """
  names: dict[Any, PrecisionName] = {False: 'default', True: 'fp8', 'e4m3': 'fp8_e4m3'}
  if fp8 not in names:
    raise ValueError(f"fp8={fp8!r} must be False, True or 'e4m3', the format of output gradients")
  return names[fp8]


def repr_of(value: Any, **shown: str) -> str:
  """The repr of a dataclass without the fields at their defaults; `shown` replaces some."""
  def is_default(field: dataclasses.Field, found: Any) -> bool:
    return type(found) is type(field.default) and found == field.default  # not of arrays, which may be traced

  changed = [f for f in dataclasses.fields(value) if not is_default(f, getattr(value, f.name))]
  texts = (f'{f.name}={shown.get(f.name) or repr(getattr(value, f.name))}' for f in changed)
  return f'{type(value).__name__}({", ".join(texts)})'


@dataclasses.dataclass(frozen=True)
class DotPolicy:
  """How the three matmuls of a linear layer are done.

  Attributes:
    projection: what makes the weight sparse; None leaves the layer dense, in FP8 if `precision` says so.
    input_grad: `'sparse'` runs the input gradient with the compressed transposed weight, which takes a transposable
      projection; `'dense'` runs a dense matmul. The numbers are the same.
    weight_grad: `'mvue'` samples the output gradient 2:4 along tokens (needs a key and tokens in multiples of four),
      `'dense'` leaves it as it is.
    precision: `'default'` multiplies in the dtype of the operands; `'fp8'` rounds weights and activations to e4m3 and
      output gradients to e5m2 first, in hardware on a Hopper GPU and in simulation elsewhere. In a dense phase too.
      `'fp8_e4m3'` rounds these to e4m3 as well, which has half of the rounding errors, and 18 binades in place of 32.
    implementation: what runs the sparse matmuls. None chooses by the records of the GPU: a kernel where it measured
      faster. Without records, and in FP8 elsewhere than on Hopper, it is plain `jax.numpy`, as `'reference'` is
      everywhere. `'sparse'`, our kernels, and `'cusparselt'` run all of them or raise; `'dense'` packs, decompresses
      and multiplies, which takes the kernels' path on any device.

  >>> import sparse24_jax as s24
  >>> s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue').precision
  'default'
  """

  projection: Projection | None = None
  input_grad: Literal['sparse', 'dense'] = 'dense'
  weight_grad: Literal['mvue', 'dense'] = 'dense'
  precision: PrecisionName = 'default'
  implementation: Literal['sparse', 'cusparselt', 'dense', 'reference'] | None = None

  def __repr__(self) -> str:
    return repr_of(self)

  def __post_init__(self):
    if not isinstance(self.projection, Projection | None):
      raise ValueError(f'projection={self.projection!r} is not a Projection; call its maker, magnitude() say')
    check_choices(self)
    if self.input_grad == 'sparse' and not (self.projection and self.projection.transposable):
      found = self.projection.name if self.projection else None
      raise ValueError(f"input_grad='sparse' needs a transposable projection, found {found!r}")

  @property
  def is_plain(self) -> bool:
    """Whether its matmuls are those of a dense layer in the dtype of the activations."""
    return self.projection is None and self.precision == 'default' and self.weight_grad == 'dense'

  @property
  def of_matrix(self) -> 'DotPolicy':
    """The policy of the matrix `[..., in, out]`, of a weight that is stored in another way."""
    matrix = self.projection and self.projection.matrix
    return self if matrix is None else dataclasses.replace(self, projection=matrix)


@dataclasses.dataclass(frozen=True)
class TwoOfFour:
  """2:4: of each four neighbours the two largest stay.

  >>> import sparse24_jax as s24
  >>> str(s24.TwoOfFour()), s24.TwoOfFour().group, s24.TwoOfFour().block
  ('2:4', 4, 1)
  """

  @property
  def group(self) -> int:
    """Neighbours of which two stay."""
    return 4

  @property
  def block(self) -> int:
    """Rows that share a choice."""
    return 1

  def __str__(self) -> str:
    return '2:4'


@dataclasses.dataclass(frozen=True)
class VNM:
  """V:2:M: a block of V rows keeps the same four of each M columns, and each row the two largest of these.

  Attributes:
    v: rows of a block; 64 and 128 are those of the format's authors.
    m: columns of a group.

  >>> import sparse24_jax as s24
  >>> str(s24.VNM(128, 8)), s24.VNM(128, 8).group, s24.VNM(128, 8).block
  ('128:2:8', 8, 128)
  """

  v: int
  m: int

  def __post_init__(self):
    check_whole('v', self.v, 1)
    check_whole('m', self.m, 4)

  @property
  def group(self) -> int:
    """Neighbours of which two stay."""
    return self.m

  @property
  def block(self) -> int:
    """Rows that share a choice."""
    return self.v

  def __str__(self) -> str:
    return f'{self.v}:2:{self.m}'


Pattern = TwoOfFour | VNM


@dataclasses.dataclass(frozen=True)
class Clusters:
  """Clusters of neurons to which tokens are sent, so that the tokens of a block use the same neurons.

  Attributes:
    number: of clusters, a divisor of the neurons.
    within: how many neighbouring tokens are routed among each other, a multiple of V; 0 is all of them. In a causal
      model: the sequences of a step, with their tokens of one position as neighbours. Ours.

  >>> import sparse24_jax as s24
  >>> s24.ActivationPolicy(s24.VNM(16, 8), s24.VNM(16, 8), clusters=s24.Clusters(4, within=64)).clusters
  Clusters(number=4, within=64)
  """

  number: int
  within: int = 0

  def __post_init__(self):
    check_whole('number', self.number, 1)
    check_whole('within', self.within, 0)


@dataclasses.dataclass(frozen=True)
class ActivationPolicy:
  """How a squared-ReLU feed-forward block is made sparse.

  The default is ours in what the weight gradients keep. `ActivationPolicy(VNM(64, 8), VNM(64, 8), 0.05)` is the
  published form (arXiv 2602.06183), `ActivationPolicy(TwoOfFour(), dense_features=0.05)` the predecessor (arXiv
  2503.16672); `docs/quality_runs.md` compares them.

  Attributes:
    features: of the activations, along neurons: `VNM`, in blocks of tokens, or `TwoOfFour`, each token by itself. No
      paper gives V and M; 64 and 8 are ours, and no search chose them.
    tokens: what the weight gradients keep of them, along tokens. `TwoOfFour()`: a neuron keeps two of four tokens.
      Beside `VNM` features these are neighbours (ours), of which the forward has left few. The same `VNM` as
      `features`: a block of neurons drops half of the tokens, as published.
    dense_features: share of the neurons, those most often active, whose weight gradients run dense, 0 to 1. 0.05 is
      that of arXiv 2503.16672.
    clusters: of neurons, to which tokens are sent; needs the state `'neurons'`, and `tokens` in blocks. None leaves
      tokens and neurons in their order.
    sparse_weights: whether the weights are 2:4 too, by the soft threshold of S-STE: up along its input, down along its
      output.
    implementation: `'sparse'` runs the matmuls on sparse tensor cores, which takes `VNM` features without clusters;
      `'reference'` is plain `jax.numpy`; None is the former where they are known to pay, and logs once why not
      elsewhere. That takes sparse weights; one Hopper GPU, no mesh, with jax-triton; tokens and neurons in multiples
      of V and 16 M and a width in multiples of 64; and records of that GPU, of matmuls with sizes within a factor of
      two, by which the block gains 10% or more. Each expert is a block of its own; the kernels serve them one after
      another.

  >>> import sparse24_jax as s24
  >>> policy = s24.ActivationPolicy(features=s24.VNM(128, 16))  # each token keeps 2 of 16 neurons, by 128 tokens
  >>> recipe = s24.recipes.neuron_level('.*/up/kernel', '.*/down/kernel', policy=policy)
  >>> {rule.activation == policy for rule in recipe.rules}
  {True}
  """

  features: Pattern = VNM(64, 8)
  tokens: Pattern = TwoOfFour()
  dense_features: float = 0.0
  clusters: Clusters | None = None
  sparse_weights: bool = True
  implementation: Literal['sparse', 'reference'] | None = None

  def __post_init__(self):
    for name in ('features', 'tokens'):
      if not isinstance(getattr(self, name), Pattern):
        raise ValueError(f'{name}={getattr(self, name)!r} must be TwoOfFour() or VNM(v, m)')
    if not isinstance(self.clusters, Clusters | None):
      raise ValueError(f'clusters={self.clusters!r} must be Clusters(number) or None')
    if self.sparse_weights not in (True, False):
      raise ValueError(f'sparse_weights={self.sparse_weights!r}: known are [True, False]')
    check_choices(self)
    if not 0 <= self.dense_features <= 1:
      raise ValueError(f'dense_features={self.dense_features} must be from 0 to 1')
    if self.tokens not in (TwoOfFour(), self.features):
      raise ValueError(f'tokens={self.tokens} must be TwoOfFour() or features, which are {self.features}')
    if self.clusters and (isinstance(self.tokens, TwoOfFour) or self.clusters.within % self.features.block):
      raise ValueError(
        f'clusters of {self.features} features with tokens={self.tokens}: they put tokens side by side that use the'
        f' same neurons, which takes VNM(v, m) for both, and within={self.clusters.within} in multiples of v'
      )

    if self.implementation == 'sparse' and (self.clusters or not isinstance(self.features, VNM)):
      found = self.clusters or f'{self.features} features'
      raise ValueError(
        f"implementation='sparse' has no kernels for {found}; it takes VNM(v, m) features without clusters, and"
        ' implementation=None runs these in plain jax.numpy'
      )

  def describe(self) -> dict[str, Any]:
    """Plain values for logs and checkpoints, without the choice of kernels.

    >>> import sparse24_jax as s24
    >>> s24.ActivationPolicy().describe()['tokens']
    '2:4'
    """
    return dict(
      features=str(self.features), tokens=str(self.tokens), dense_features=self.dense_features,
      clusters=self.clusters and dataclasses.asdict(self.clusters), sparse_weights=self.sparse_weights,
    )
