"""Where the device time of a step goes: a profiler trace, read back and summed by kind of kernel.

A kernel is judged by its name and, where that says nothing (XLA names its fusions after their last operation), by the
named scopes of the instruction that launched it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import glob
from pathlib import Path
import re
import tempfile
from typing import Any
import warnings

import jax

from experiments.bench.hlo import op_names

KINDS = (
  'GEMM sparse', 'GEMM dense', 'attention', 'pack', 'activation', 'normalisation', 'loss', 'optimizer', 'copy', 'other'
)  # fmt: skip

# First match decides. Names of GEMMs: Pallas (mosaic_gpu, on every GPU), cuBLAS (nvjet, xmma, cutlass), XLA's own
# (gemm_fusion), splits and their sums.
_BY_KERNEL = (
  ('attention', r'sdpa|fmha|flash'),
  ('GEMM sparse', r'mosaic_gpu|cusparselt|spmma|sparse_matmul'),
  ('pack', r'(transposable|repair|masked|soft_threshold|mvue|quanti[sz]e|amax|pack)\w*_kernel|\w*pack_kernel'),
  ('pack', r'^(pack_rows|transpose_pack|take_columns|expand_rows|scatter_rows)'),  # V:N:M
  ('activation', r'^(forward|backward\w*|gated\w*|activation\w*)_kernel'),
  ('GEMM dense', r'nvjet|gemm|xmma|cutlass|cublas|splitk'),
  ('copy', r'memcpy|memset|^(wrapped_)?(copy|transpose)|_(copy|transpose)_fusion'),
)
_BY_SCOPE = (
  ('optimizer', r'\boptimizer\b'),
  ('pack', r'\bpack|mvue|sparse_variables|projection'),
  ('loss', r'\bloss\b|softmax_cross_entropy'),
  ('attention', r'/attn\b'),
  ('normalisation', r'/ln_\w'),
  ('activation', r'/mlp\b'),
)


@dataclasses.dataclass(frozen=True)
class Kernel:
  """One kernel launch.

  Attributes:
    name: as the profiler spells it.
    op_name: scopes of its instruction, '' if unknown.
    start_ns: when it started.
    duration_ns: how long it ran.
  """

  name: str
  op_name: str
  start_ns: float
  duration_ns: float


def classify(name: str, op_name: str = '') -> str:
  """The kind of a kernel, one of `KINDS`.

  >>> classify('nvjet_hsh_256x128_64x4_TNT'), classify('loop_add_fusion_3', 'jit(step)/optimizer/add')
  ('GEMM dense', 'optimizer')
  """
  for kind, pattern in _BY_KERNEL:
    # A transposition inside the optimizer is the optimizer's.
    if re.search(pattern, name, re.IGNORECASE) and not (kind == 'copy' and 'optimizer' in op_name):
      return kind
  for kind, pattern in _BY_SCOPE:
    if re.search(pattern, op_name):
      return kind
  return 'other'


def capture(call: Callable[[], Any], steps: int, names: Mapping[str, str]) -> list[Kernel]:
  """Runs `steps` steps under the profiler.

  Args:
    call: starts a step and returns what to wait for.
    steps: how many.
    names: from `hlo.op_names`.

  Returns:
    The kernels; none where the profiler saw no GPU.
  """
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0
  options.host_tracer_level = 1
  jax.block_until_ready(call())
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, profiler_options=options):
      results = [call() for _ in range(steps)]
      jax.block_until_ready(results)
    files = sorted(glob.glob(f'{folder}/**/*.xplane.pb', recursive=True))
    return read(files[-1], names) if files else []


def read(file: str | Path, names: Mapping[str, str]) -> list[Kernel]:
  """The kernels in a trace file."""
  # XLA names a fusion's kernel after the instruction, with characters that C does not take replaced.
  by_kernel = {re.sub(r'\W', '_', instruction): name for instruction, name in names.items()}
  kernels = []
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', DeprecationWarning)  # of the reader's own types
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
      if not plane.name.startswith('/device:GPU'):
        continue
      for line in plane.lines:
        if not line.name.startswith('Stream'):
          continue
        for event in line.events:
          op = next((str(value) for key, value in event.stats if key == 'hlo_op'), '')
          scopes = names.get(op) or by_kernel.get(event.name, '')
          kernels.append(Kernel(event.name, scopes, event.start_ns, event.duration_ns))
  return kernels


def busy_ns(kernels: Iterable[Kernel]) -> float:
  """Nanoseconds in which at least one kernel ran."""
  total, end = 0.0, float('-inf')
  for kernel in sorted(kernels, key=lambda k: k.start_ns):
    stop = kernel.start_ns + kernel.duration_ns
    total += max(0.0, stop - max(end, kernel.start_ns))
    end = max(end, stop)
  return total


def summarize(kernels: Sequence[Kernel], steps: int, *, top: int = 12) -> dict[str, Any] | None:
  """Device time of a step by kind, and its longest kernels.

  Returns:
    `by_kind_ms` (kind -> ms a step), `busy_ms` (a step, overlaps counted once), `idle_ms` (a step, between the first
    kernel's start and the last one's end), `top` (kernels by total time); None if there are no kernels.
  """
  if not kernels:
    return None
  by_kind = dict.fromkeys(KINDS, 0.0)
  by_name: dict[tuple[str, str], list[float]] = {}
  for kernel in kernels:
    kind = classify(kernel.name, kernel.op_name)
    by_kind[kind] += kernel.duration_ns
    by_name.setdefault((kernel.name, kind), []).append(kernel.duration_ns)
  span = max(k.start_ns + k.duration_ns for k in kernels) - min(k.start_ns for k in kernels)
  busy = busy_ns(kernels)
  longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
  per_step = 1e6 * steps
  return dict(
    by_kind_ms={kind: round(ns / per_step, 4) for kind, ns in by_kind.items()},
    busy_ms=round(busy / per_step, 4),
    idle_ms=round((span - busy) / per_step, 4),
    top=[
      dict(kernel=name[:120], kind=kind, calls=round(len(times) / steps, 2), ms=round(sum(times) / per_step, 4))
      for (name, kind), times in longest
    ],
  )


def explain(
  calls: Mapping[str, Callable[[], Any]], programs: Mapping[str, Any], steps: int
) -> dict[str, Any] | None:
  """Captures, summarizes and prints every twin; None if the profiler fails, which must not lose the timings.

  Args:
    calls: twin -> what starts a step.
    programs: twin -> its compiled step.
    steps: to capture.
  """
  try:
    found = {
      name: summarize(capture(call, steps, op_names(programs[name].as_text())), steps) for name, call in calls.items()
    }
  except (RuntimeError, OSError, ValueError, IndexError) as error:
    print(f'  no profile: {type(error).__name__}: {str(error)[:300]}', flush=True)
    return None
  print(table(found), flush=True)
  return found


def table(summaries: Mapping[str, Mapping[str, Any] | None]) -> str:
  """Both twins side by side, and the longest kernels of each."""
  found = {name: summary for name, summary in summaries.items() if summary}
  if not found:
    return 'no kernels in the trace: is this a GPU?'
  lines = [f'{"ms a step":16}' + ''.join(f'{name:>14}' for name in found)]
  for kind in KINDS:
    times = [summary['by_kind_ms'][kind] for summary in found.values()]
    if any(times):
      lines.append(f'{kind:16}' + ''.join(f'{ms:14.3f}' for ms in times))
  for key in ('busy_ms', 'idle_ms'):
    lines.append(f'{key.removesuffix("_ms"):16}' + ''.join(f'{summary[key]:14.3f}' for summary in found.values()))
  for name, summary in found.items():
    lines.append(f'longest kernels of {name}:')
    lines += [f'{row["ms"]:10.3f} ms {row["calls"]:7.1f}x {row["kind"]:13} {row["kernel"]}' for row in summary['top']]
  return '\n'.join(lines)
