"""Generations of NVIDIA GPUs as values: what a kernel may count on, and which kernel an op has there.

The one place that knows compute capabilities. A new generation is an `Arch` here and the back ends that it names;
`README.md` lists the files.
"""

from collections.abc import Collection, Mapping
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


@dataclasses.dataclass(frozen=True)
class Arch:
  """A generation.

  Attributes:
    name: as PTX targets it, 'sm_90a'.
    capability: compute capability.
    sparse_instruction: of its sparse tensor cores that the kernels here use, 'wgmma' or 'mma.sp'; None where none does.
    kernels: op -> this package's back end of it, which `implementation='sparse'` names.
    by_default: whether training takes these kernels, those of FP8 among them, without records of the GPU; elsewhere its
      own records have to say that sparse wins.
    float8: whether it converts and multiplies float8.
    shared_memory: bytes that a block may have.
    example: to compile for; None where no kernel is compiled.
  """

  name: str
  capability: tuple[int, int]
  sparse_instruction: str | None = None
  kernels: Mapping[str, str] = dataclasses.field(default_factory=dict)
  by_default: bool = False
  float8: bool = False
  shared_memory: int = 49152
  example: Example | None = None

  @property
  def since_ampere(self) -> bool:
    """Whether it has what came with compute capability 8.0, on which Triton, cuDNN and cuSPARSELt build."""
    return self.capability >= (8, 0)

  def kernel(self, op: str) -> str | None:
    """The back end that this package has for an op here, or None.

    >>> from pallas_kernels.arch import of_capability
    >>> of_capability((9, 0)).kernel('vnm_matmul'), of_capability((8, 0)).kernel('vnm_matmul')
    ('mosaic_gpu', None)
    """
    return self.kernels.get(op)


def _with_warp_matmuls(
  name: str, capability: tuple[int, int], shared_memory: int, example: Example, *, float8: bool = False
) -> Arch:
  """A generation whose sparse tensor cores a warp feeds from its registers."""
  return Arch(
    name, capability, sparse_instruction='mma.sp', kernels={'sparse_matmul': 'mosaic_gpu_sm80'}, float8=float8,
    shared_memory=shared_memory, example=example,
  )  # fmt: skip


SM_80 = _with_warp_matmuls('sm_80', (8, 0), 166912, Example('NVIDIA A100-SXM4-40GB', 108, 167936, 2048, 41943040))
SM_86 = _with_warp_matmuls('sm_86', (8, 6), 101376, Example('NVIDIA GeForce RTX 3090', 82, 102400, 1536, 6291456))
SM_89 = _with_warp_matmuls(
  'sm_89', (8, 9), 101376, Example('NVIDIA L40S', 142, 102400, 1536, 100663296), float8=True
)
# wgmma exists here alone; Blackwell replaced it.
SM_90A = Arch(
  'sm_90a', (9, 0), sparse_instruction='wgmma', kernels={'sparse_matmul': 'mosaic_gpu', 'vnm_matmul': 'mosaic_gpu'},
  by_default=True, float8=True, shared_memory=232448,
  example=Example('NVIDIA H100 80GB HBM3', 132, 233472, 2048, 52428800),
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
  return Arch(f'sm_{capability[0]}{capability[1]}', capability, float8=capability >= (8, 9))


def of_measured(op: str, implementations: Collection[str]) -> Arch:
  """The generation of a GPU of which the records are known: that of the newest of their kernels, else the first.

  Without any records it is one whose kernels are taken by default.

  >>> of_measured('sparse_matmul', ('cusparselt', 'mosaic_gpu')).name, of_measured('sparse_matmul', ('dense',)).name
  ('sm_90a', 'sm_80')
  """
  known = [a.kernel(op) for a in ARCHS if (a.kernel(op) in implementations if implementations else a.by_default)]
  return next(a for a in ARCHS if not known or a.kernel(op) == known[-1])
