"""Generations of NVIDIA GPUs as values: what a kernel may count on, and which kernel an op has there.

The one place that knows compute capabilities. A new generation is an `Arch` here and the back ends that it names;
`README.md` lists the files.
"""

from collections.abc import Collection
import dataclasses


@dataclasses.dataclass(frozen=True)
class Example:
  """A GPU of a generation, as XLA and ptxas want it described to compile for it where it is not.

  Attributes:
    name: as the driver spells it.
    sms: multiprocessors.
    shared_memory_per_sm: bytes.
    threads_per_sm: at most.
    l2_bytes: of the second-level cache.
  """

  name: str
  sms: int
  shared_memory_per_sm: int
  threads_per_sm: int
  l2_bytes: int


# The order in which these kernels take the positions of a 2:4 operand, see `operand.py`.
REGISTER_ORDER = 'sparse wgmma'


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A back end of this package.

  Attributes:
    op: what it computes.
    backend: its name among the op's back ends.
    itemsizes: bytes of the entries that it multiplies.
    by_default: whether training takes it without records of the GPU; elsewhere these, or a check, have to say that
      sparse wins.
    layout: the order in which it reads positions.
  """

  op: str
  backend: str
  itemsizes: tuple[int, ...] = (2,)
  by_default: bool = False
  layout: str = REGISTER_ORDER


MMA_SP = Kernel('sparse_matmul', 'mosaic_gpu_sm80')
WGMMA = Kernel('sparse_matmul', 'mosaic_gpu', (1, 2), by_default=True)
WGMMA_OF_BLOCKS = Kernel('vnm_matmul', 'mosaic_gpu')


@dataclasses.dataclass(frozen=True)
class Arch:
  """A generation.

  Attributes:
    name: as PTX targets it, 'sm_90a'.
    capability: compute capability.
    kernels: those of this package that run there; of two that serve a call the first is taken.
    shared_memory: bytes that a block may have.
    example: to compile for; None where no kernel is compiled.
  """

  name: str
  capability: tuple[int, int]
  kernels: tuple[Kernel, ...] = ()
  shared_memory: int = 49152
  example: Example | None = None

  @property
  def itemsizes(self) -> tuple[int, ...]:
    """Bytes of the entries that its tensor cores multiply and that Triton, cuDNN and cuSPARSELt take there."""
    return (1, 2) if self.capability >= (8, 9) else (2,) if self.capability >= (8, 0) else ()

  def kernel(self, op: str, itemsize: int = 2) -> Kernel | None:
    """What `implementation='sparse'` names: the kernel of an op for entries of so many bytes, or None.

    >>> from pallas_kernels.arch import of_capability
    >>> of_capability((9, 0)).kernel('sparse_matmul', 1).backend, of_capability((8, 0)).kernel('sparse_matmul', 1)
    ('mosaic_gpu', None)
    """
    return next((k for k in self.kernels if k.op == op and itemsize in k.itemsizes), None)


SM_80 = Arch('sm_80', (8, 0), (MMA_SP,), 166912, Example('NVIDIA A100-SXM4-40GB', 108, 167936, 2048, 41943040))
SM_86 = Arch('sm_86', (8, 6), (MMA_SP,), 101376, Example('NVIDIA GeForce RTX 3090', 82, 102400, 1536, 6291456))
SM_89 = Arch('sm_89', (8, 9), (MMA_SP,), 101376, Example('NVIDIA L40S', 142, 102400, 1536, 100663296))
# wgmma exists here alone; Blackwell replaced it.
SM_90A = Arch(
  'sm_90a', (9, 0), (WGMMA, WGMMA_OF_BLOCKS, MMA_SP), 232448,
  Example('NVIDIA H100 80GB HBM3', 132, 233472, 2048, 52428800),
)  # fmt: skip
ARCHS = (SM_80, SM_86, SM_89, SM_90A)


def of_capability(capability: tuple[int, int]) -> Arch:
  """The generation of a compute capability.

  One between two that are listed counts as the lower of its major version, as its instructions are. One that is newer
  than all, or older, has no kernels of this package.
  """
  for arch in reversed(ARCHS):
    if arch.capability[0] == capability[0] and arch.capability <= capability:
      return arch if arch.capability == capability else dataclasses.replace(arch, capability=capability)
  return Arch(f'sm_{capability[0]}{capability[1]}', capability)


def kernels_of(op: str) -> dict[str, Kernel]:
  """This package's kernels of an op by their names."""
  return {kernel.backend: kernel for arch in ARCHS for kernel in arch.kernels if kernel.op == op}


def of_measured(op: str, implementations: Collection[str]) -> Arch:
  """The generation of a GPU of which the records are known: that of the newest of their kernels, else the first.

  Without any records it is one whose kernel is taken by default.

  >>> of_measured('sparse_matmul', ('cusparselt', 'mosaic_gpu')).name, of_measured('sparse_matmul', ('dense',)).name
  ('sm_90a', 'sm_80')
  """
  kernels = [kernel for arch in ARCHS if (kernel := arch.kernel(op))]
  known = [k for k in kernels if (k.backend in implementations if implementations else k.by_default)]
  return next(a for a in ARCHS if not known or a.kernel(op) == known[-1])
