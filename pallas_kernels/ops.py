"""The ops, and why one of them is not tuned."""

from collections.abc import Mapping
import dataclasses


@dataclasses.dataclass(frozen=True)
class Op:
  """One op.

  Attributes:
    folder: where it is; `tune.py` and `bench.py` there say what options they take (`arguments`), and do it (`run`).
    untuned: why it has no `tune.py`, or None.
    in_triton: whether what is measured needs Triton.
  """

  folder: str
  untuned: str | None = None
  in_triton: bool = False


OPS: Mapping[str, Op] = {
  'sparse_matmul': Op('sparse_matmul'),
  'vnm_matmul': Op('vnm'),
  'pack': Op('pack', in_triton=True),
  'gated_activation': Op('gated_activation', in_triton=True),
  'quantize': Op('quantize', in_triton=True),
  'sparse_attention': Op(
    'sparse_attention', untuned='its tiles follow from the size of a head and the window, see `triton.tiles`',
  ),
}  # fmt: skip
