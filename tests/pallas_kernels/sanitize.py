"""Every kernel under NVIDIA's compute-sanitizer, with good and with hostile operands: on a GPU, by hand.

  python -m tests.pallas_kernels.sanitize --out sanitize.json                     # memcheck and racecheck
  python -m tests.pallas_kernels.sanitize --tools memcheck --cases vnm

Each case has a process of its own for each tool, and one without a tool before, which compiles its programs; what a
tool writes is kept beside `--out`. Arrays are allocations of their own there, so that a read beside one is seen. A case
must also give what the reference gives, a hostile one what the nearest lawful operand gives.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
import concurrent.futures
import dataclasses
import functools
import json
import os
from pathlib import Path
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.runs.environment import environment, without_folders
from pallas_kernels import formats
from pallas_kernels.gated_activation import api as gated_activation
from pallas_kernels.operand import to_operand
from pallas_kernels.pack import api as pack
from pallas_kernels.quantize import api as quantize
from pallas_kernels.sparse_attention.api import Pattern, sparse_attention
from pallas_kernels.sparse_matmul import verify
from pallas_kernels.sparse_matmul.call import Call, Vectors
from pallas_kernels.sparse_matmul.mosaic_gpu import sparse_matmul
from pallas_kernels.two_of_four import transposable
from pallas_kernels.vnm import api as vnm_api
from pallas_kernels.vnm import mosaic_gpu as vnm_kernel
from pallas_kernels.vnm.format import compress, to_vnm_operand
from pallas_kernels.vnm.reference import vnm_mask
from tests.pallas_kernels.on_a_gpu import assert_same_bits, check, draw

TOOLS = ('memcheck', 'racecheck')
KEY = jax.random.key(5)
# Tiles that are not full; with infinities and NaN.
RAGGED = (516, 260)
# Of `few_columns_by_steps`: sizes that no tile divides, on three CTAs.
BY_STEPS: tuple[dict[str, Any], ...] = tuple(
  dict(
    m=396, n=n, k=k, a_dtype='bfloat16', b_dtype='bfloat16', out_dtype='bfloat16', b_layout='nk', out_layout='nm',
    activation='gelu', bias=True, a_scale=None, b_scale=None, keep_preactivation=False, alpha=1.0,
    seed=k,
    config=dict(
      rows=64, bn=8, bk=128, stages=stages, cluster=1, epilogue_n=8, ctas=3, delay=delay, split=1, halves='k'
    ),
  )
  for n, k, stages, delay in ((3, 500, 2, 0), (11, 700, 4, 1), (3, 1000, 6, 1))
)


def packers() -> None:
  w = draw(RAGGED)
  check(pack.transposable_pack, w)
  check(pack.masked_pack, w, jax.jit(pack.transposable_pack)(draw(RAGGED, seed=1)).codes)
  no_codes = jax.random.bits(KEY, (RAGGED[0] // 4, RAGGED[1] // 4), jnp.uint16)
  jax.block_until_ready(jax.jit(functools.partial(pack.masked_pack, implementation='triton'))(w, no_codes))
  for axis in (-1, -2):
    check(pack.soft_threshold_pack, w, jnp.float32(1.48), axis=axis)
  check(pack.mvue_pack, w, KEY)
  mask = jax.jit(pack.transposable_mask)(w)
  np.testing.assert_array_equal(mask, jax.jit(transposable.transposable_mask)(w))


def float8() -> None:
  check(quantize.quantize, draw(RAGGED), jnp.float32(80), dtype=jnp.float8_e4m3fn, transpose='both')


def activations() -> None:
  dh, z = (jax.random.normal(KEY, (RAGGED[1], width), jnp.bfloat16) for width in (576, 1152))
  call = functools.partial(gated_activation.activation_backward_pack, activation='silu', gated=True)
  made = jax.jit(functools.partial(call, implementation='triton'))(dh, z, KEY)
  picked = jax.jit(functools.partial(pack.mvue_pack, implementation='reference'))(made.dense, KEY)
  assert_same_bits(made.operand, picked.operand)


def matmuls() -> None:
  rng = np.random.default_rng(0)
  for implementation in ('mosaic_gpu', 'mosaic_gpu', 'mosaic_gpu', 'mosaic_gpu_sm80'):
    problem = verify.random_problem(rng, implementation)
    problem |= {name: min(problem[name], 396) for name in 'mnk'} | dict(config=None)  # small: the tools are slow
    error, wrong = verify.check(problem, implementation)
    assert wrong is None, (problem, error, wrong)


def few_columns_by_steps() -> None:
  """Consumers that share out the K steps, an even and an odd number each; some CTAs have more than one tile."""
  for case in BY_STEPS:
    error, wrong = verify.check(case)
    assert wrong is None, (case, error, wrong)


def hostile_metadata() -> None:
  """Positions that no packer makes: the numbers are of no use, but nothing beside the arrays is read."""
  x, b = (jax.random.normal(key, (256, 256), jnp.bfloat16) for key in jax.random.split(KEY))
  a = to_operand(formats.compress(x, jnp.tile(jnp.array([True, False, True, False]), (256, 64)), axis=-1))
  f = jax.jit(functools.partial(
    sparse_matmul, vectors=Vectors(), call=Call(jnp.dtype('bfloat16'), 'nk', 'mn')
  ))  # fmt: skip
  for word in (0, 2**32 - 1, 0x1B1B1B1B):
    jax.block_until_ready(f(dataclasses.replace(a, metadata=jnp.full_like(a.metadata, word)), b))


def vnm_ops() -> None:
  """Rows of -5 and 10^9 are taken for the nearest that there are."""
  for v, m in ((64, 8), (128, 16)):
    x = jax.random.randint(KEY, (256, 512), -9, 10).astype(jnp.bfloat16)
    b = jax.random.normal(KEY, (512, 200), jnp.bfloat16)
    good = to_vnm_operand(compress(x, vnm_mask(x, v=v, m=m), v=v, m=m))
    bad = dataclasses.replace(good, rows=good.rows.at[0, 1].set(-5).at[-1, 6].set(10**9))
    last = dataclasses.replace(good, rows=good.rows.at[0, 1].set(511).at[-1, 6].set(511))
    matmul = jax.jit(functools.partial(vnm_kernel.vnm_matmul, out_dtype=jnp.bfloat16, out_layout='mn'))
    for op in (
      functools.partial(matmul, b=b),
      jax.jit(functools.partial(vnm_api.expand, implementation='triton')),
      jax.jit(functools.partial(vnm_api.take_columns, columns=jnp.asarray([0, -1, 511, 512, 2**30]),
                                implementation='triton')),
    ):  # fmt: skip
      jax.block_until_ready(op(good))
      found, nearest = (jax.tree.leaves(op(a)) for a in (bad, last))
      assert_same_bits(found, nearest)
    # Rows that fall together may be counted in any order.
    transposed = jax.jit(functools.partial(vnm_api.transpose_pack, implementation='triton'))
    jax.block_until_ready([transposed(a) for a in (good, bad)])
    jax.block_until_ready(jax.jit(functools.partial(vnm_api.vnm_pack, v=v, m=m, implementation='triton'))(x))


def attention() -> None:
  q = jax.random.normal(KEY, (1, 200, 2, 64), jnp.bfloat16)
  for kind in ('local', 'fixed'):

    @jax.jit
    def step(q, kind=kind):
      attend = functools.partial(sparse_attention, patterns=Pattern(kind, 33), implementation='triton')
      y, vjp = jax.vjp(attend, q, q, q)
      return y, vjp(y)

    jax.block_until_ready(step(q))


CASES: Mapping[str, Callable[[], None]] = {
  f.__name__: f
  for f in (packers, float8, activations, matmuls, few_columns_by_steps, hostile_metadata, vnm_ops, attention)
}


def call(names: list[str]) -> int:
  """Calls the cases in this process; the number of those that failed."""
  failed = 0
  for name in names:
    start = time.monotonic()
    try:
      CASES[name]()
      said = 'passed'
    except Exception as error:  # of any case, and the next is tried
      failed, said = failed + 1, f'FAILED {type(error).__name__}: {str(error)[:300]}'
    print(f'{name}: {said}, {time.monotonic() - start:.0f} s', flush=True)
  return failed


def under(tool: str, name: str, out: Path, seconds: float, cache: str) -> dict[str, Any]:
  """What a tool says of one case in a process of its own; `status` is None where the time was over.

  A tool that dies of a signal (it did while XLA compiled) is tried once more.
  """
  log, said = out.with_suffix(f'.{tool}.{name}.log'), out.with_suffix(f'.{tool}.{name}.out')
  command = ['compute-sanitizer', '--tool', tool, '--log-file', str(log), '--error-exitcode', '9']
  deadline, status = time.monotonic() + seconds, None
  for _ in range(2):
    with said.open('w') as file:
      status = run([*command, *alone(name)], deadline - time.monotonic(), cache, stdout=file, stderr=file)
    if status is None or status >= 0:
      break
  lines = log.read_text(errors='replace').splitlines() if log.exists() else []
  told = [line for line in said.read_text(errors='replace').splitlines() if re.match(r'\w+: (passed|FAILED)', line)]
  return {
    'status': status, 'said': told, 'summary': [line for line in lines if 'SUMMARY' in line],
    'found': [line for line in lines if re.search('Invalid|hazard|Error:', line)][:20],
  }  # fmt: skip


def run(command: Sequence[str], seconds: float, cache: str, **options: Any) -> int | None:
  """The status of a command; None where its time was over.

  By `timeout`, which ends what the command has started as well: the process under a tool would go on, on the GPU.
  """
  if seconds < 1:
    return None
  limited = ['timeout', '-s', 'KILL', f'{seconds:.0f}', *command]
  status = subprocess.run(limited, env=variables(cache), check=False, **options).returncode
  status = 128 - status if status > 128 else status  # of a signal, as a shell tells it
  return None if status == -signal.SIGKILL else status


def alone(name: str) -> list[str]:
  """The command that calls the cases of this name."""
  return [sys.executable, '-m', 'tests.pallas_kernels.sanitize', '--cases', f'^{name}$', '--tools']


def variables(cache: str) -> dict[str, str]:
  """The environment of those processes: arrays lie apart, and compiled programs are kept in a folder."""
  return os.environ | {
    'XLA_PYTHON_CLIENT_ALLOCATOR': 'platform', 'XLA_FLAGS': '--xla_gpu_autotune_level=0',
    'JAX_COMPILATION_CACHE_DIR': cache, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
  }  # fmt: skip


def version() -> str | None:
  """The version of the tool, as 2025.3.1.0; None if there is no tool."""
  try:
    said = subprocess.run(['compute-sanitizer', '--version'], capture_output=True, text=True, check=False).stdout
  except OSError:
    return None
  found = re.search(r'Version ([\d.]+)', said)
  return found and found[1]


def main(argv: Sequence[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog='python -m tests.pallas_kernels.sanitize', description=__doc__)
  parser.add_argument('--tools', nargs='*', choices=TOOLS, default=TOOLS, help='none: call the cases by themselves')
  parser.add_argument('--cases', default='', help='a regular expression')
  parser.add_argument('--seconds', type=float, default=600, help='that all may take (default: %(default)s)')
  parser.add_argument('--parallel', type=int, default=1, help='cases side by side (default: %(default)s)')
  parser.add_argument('--out', type=Path, default=Path('sanitize.json'), help='where the record goes')
  args = parser.parse_args(argv)
  names = [name for name in CASES if re.search(args.cases, name)]
  if not args.tools:
    return call(names)
  deadline, failed = time.monotonic() + args.seconds, 0
  told = ['python', '-m', 'tests.pallas_kernels.sanitize', *(sys.argv[1:] if argv is None else argv)]
  record = without_folders({**environment(), 'command': shlex.join(told)})
  record |= {'name': 'sanitize', 'version': version(), 'tools': {tool: {} for tool in args.tools}}

  def each(name: str) -> dict[str, dict[str, Any]]:
    # Compiled without a tool first: under one it takes minutes.
    run(alone(name), deadline - time.monotonic(), cache)
    return {tool: under(tool, name, args.out, deadline - time.monotonic(), cache) for tool in args.tools}

  with tempfile.TemporaryDirectory() as cache, concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
    made = {pool.submit(each, name): name for name in names}
    for done in concurrent.futures.as_completed(made):
      for tool, found in done.result().items():
        record['tools'][tool][made[done]] = found
        failed += found['status'] != 0
        print(f'{tool} {made[done]}: {json.dumps(found)}', flush=True)
      args.out.write_text(json.dumps(record, indent=2) + '\n')
  return failed


if __name__ == '__main__':
  sys.exit(main())
