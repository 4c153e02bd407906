"""Memory, communication and time of a step on many GPUs, on paper.

Compute is measured: the training step of Llama 3B on one H200 (`best_steps.jsonl`), dense and with transposable masks,
divided by parameters and tokens. That step recomputes nothing. Here blocks are recomputed, which is taken to make a
step a third longer, dense or sparse. Links have the rates that their makers state, which no program reaches. The
formulas:

- Dense compute takes c P t for t tokens on a GPU and P parameters. Sparse compute saves s F t of it, for F parameters
  of feed-forward layers. Tensor parallelism over M GPUs splits feed-forward layers alone, so all other layers are
  computed M times.
- To gather or to reduce and scatter S bytes over K machines of G = 8 GPUs takes
  S (1 - 1/K) / (G network) + S (1 - 1/G) / nvlink, with 50 GB/s of network (one port of NDR InfiniBand) and 450 GB/s of
  NVLink 4 a GPU, each way; an all-reduce is both, one after the other.
- Data parallelism needs one all-reduce of the gradients, 4 P bytes. FSDP gathers weights for each micro-batch: a dense
  one twice, forward and backward, 2 bytes each time. A sparse one is packed, 9/8 bytes a time: the matrix forward, its
  transpose backward, and the matrix again where gate and up are recomputed: 2 2/3 times on average, 3 bytes.
  It reduces and scatters gradients, 4 bytes. Tensor parallelism needs, for each micro-batch and layer, two all-reduces
  of the tokens' activations, 2 t d bytes, within a machine.
- For each parameter a GPU holds 4 bytes of the parameter, 8 of its moments, 4 of its gradient, and 1 of its mask if it
  is sparse, divided by the GPUs over which they are split. It also holds what it gathers of one layer. With
  recomputation it holds the inputs of all layers of a micro-batch, 2 t d bytes each, about 2 t (4 d + 3 h / M) of the
  layer that is computed again, and logits, 4 t V.
"""

from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

TOKENS, MICRO = 4 * 2**20, 8192  # a step of all GPUs; a micro-batch of one
_RECOMPUTING = 4 / 3  # a pass forward, again, and two backward, for one and two
# Bytes of a feed-forward weight that are gathered in a step. A packed 2:4 matrix has half of the values and two bits
# for each of them, 9/8 bytes a weight.
_GATHERED = {'dense': 2 * 2, 'sparse': (2 + 2 / 3) * 9 / 8}


@dataclasses.dataclass(frozen=True)
class Model:
  """Sizes of a Llama: layers, width, hidden width, share of key-value heads among heads, vocabulary."""

  name: str
  layers: int
  d: int
  hidden: int
  kv_share: float
  vocab: int

  @property
  def ffn(self) -> int:
    """Parameters of feed-forward layers."""
    return 3 * self.layers * self.d * self.hidden

  @property
  def rest(self) -> int:
    """All others: attention, embedding and output matrix."""
    return round(self.layers * self.d * self.d * (2 + 2 * self.kv_share)) + 2 * self.d * self.vocab


MODELS = (Model('8B', 32, 4096, 14336, 1 / 4, 128256), Model('70B', 80, 8192, 28672, 1 / 8, 128256))


@dataclasses.dataclass(frozen=True)
class Links:
  """Bytes a second of one GPU, each way: an H100 with NVLink 4 and one port of NDR InfiniBand, 8 to a machine."""

  gpus: int = 8
  nvlink: float = 450e9
  network: float = 50e9

  def gather(self, size: float, over: int) -> float:
    """Seconds to gather, or to reduce and scatter, so many bytes over so many GPUs."""
    inside = min(over, self.gpus)
    return size * (1 - inside / over) / (inside * self.network) + size * (1 - 1 / inside) / self.nvlink


class Compute(NamedTuple):
  """Measured seconds a token: `dense` of each parameter, `saved` of each in a sparse feed-forward layer."""

  dense: float
  saved: float


class Row(NamedTuple):
  """One layout: GB on a GPU, GB that it receives in a step, and seconds of a step."""

  model: str
  gpus: int
  layout: str
  memory: float
  dense_traffic: float
  sparse_traffic: float
  communication: tuple[float, float]
  compute: tuple[float, float]


def measured(dense_ms: float, sparse_ms: float, tokens: int, parameters: int, ffn: int) -> Compute:
  """Of whole training steps of one Llama, which recompute nothing; of `ffn` parameters in feed-forward layers.

  >>> measured(3000.0, 1500.0, tokens=10, parameters=1000, ffn=300)
  Compute(dense=0.0004, saved=0.00066...)
  """
  dense, sparse = (_RECOMPUTING * ms / 1e3 for ms in (dense_ms, sparse_ms))
  return Compute(dense / tokens / parameters, (dense - sparse) / tokens / ffn)


def rows(compute: Compute, links: Links = Links(), gpus: Sequence[int] = (64, 1024)) -> list[Row]:
  """Every model on every number of GPUs, in every layout."""
  return [_row(model, n, layout, compute, links) for model in MODELS for n in gpus for layout in _LAYOUTS]


_LAYOUTS = {'data': (False, 1), 'fsdp': (True, 1), 'fsdp and model 8': (True, 8)}


def _row(model: Model, gpus: int, layout: str, compute: Compute, links: Links) -> Row:
  fsdp, tensor = _LAYOUTS[layout]
  all_parameters, over = model.ffn + model.rest, gpus // tensor
  tokens = TOKENS / gpus
  micro = max(1, round(tokens / MICRO))
  state = 16 * all_parameters + model.ffn
  one_layer = 2 * all_parameters / model.layers if fsdp else 0
  # A group of `tensor` GPUs has the tokens of all of its own, each layer's inputs on every one of them.
  here = min(tokens, MICRO) * tensor
  activations = 2 * here * (model.d * (model.layers + 4) + 3 * model.hidden / tensor) + 4 * here * model.vocab
  memory = state / (gpus if fsdp else 1) + one_layer + activations
  traffic, seconds = [], []
  for gathered_bytes in _GATHERED.values():
    if fsdp:
      sizes = (gathered_bytes + 4) * model.ffn / tensor + (2 * 2 + 4) * model.rest
      times, one = micro, links.gather(sizes, over)
      if tensor > 1:
        # Neighbours on NVLink split a layer, so that those of an `fsdp` group lie on different machines.
        one = sizes * (1 - 1 / over) / links.network
    else:
      sizes, times = 2.0 * 4 * all_parameters, 1.0
      one = links.gather(sizes, over)
    # Two all-reduces a layer, each of which receives everything twice.
    summed = micro * 4 * model.layers * 2 * here * model.d * (1 - 1 / tensor)
    traffic.append((times * sizes * (1 - 1 / over) + summed) / 1e9)
    seconds.append(times * one + summed / links.nvlink)
  dense = compute.dense * (model.ffn + tensor * model.rest) * tokens
  sparse = dense - compute.saved * model.ffn * tokens
  return Row(model.name, gpus, layout, memory / 1e9, traffic[0], traffic[1], (seconds[0], seconds[1]), (dense, sparse))
