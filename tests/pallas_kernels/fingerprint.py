"""A hash of the PTX of every kernel that ships: to show that a change to the sources changes no machine code.

No GPU is needed, only the CUDA plug-ins and Triton. Before the change and after it:

    JAX_PLATFORMS=cpu python -m tests.pallas_kernels.fingerprint --out before.json
    JAX_PLATFORMS=cpu python -m tests.pallas_kernels.fingerprint --out after.json --compare before.json

Mosaic kernels are compiled for sm_90a with the settings that the records of all GPUs name, and the `mma.sp` one for all
of its targets; Triton kernels as the back ends launch them, for 8.0, 8.6 and 9.0. Names of kernels and of lines of the
source do not count, nor does the order of settings. `--only PATTERN` takes some cases, `--ptx FOLDER` keeps their text.
"""

import argparse
from collections.abc import Callable, Iterator
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp

from pallas_kernels import _records, _triton
from tests import targets
from tests.pallas_kernels import compiling

BF16, F32, E4M3, E5M2 = (jnp.dtype(name) for name in ('bfloat16', 'float32', 'float8_e4m3fn', 'float8_e5m2'))
S = targets.struct
N = 4096  # rows and columns of what Triton kernels take

# Case -> its PTX.
Cases = dict[str, Callable[[], str]]


def mosaic_cases() -> Cases:
  """The winners of all records, each setting on the problem that it won."""
  cases: Cases = {}
  for path in sorted(_records.TUNED.glob('*/*_matmul.json')):
    for entry in _records.entries_of(path):
      choice = _records.best_of(entry, 'mosaic_gpu')
      if choice is None or choice['config'] is None:
        continue
      make = _vnm_ptx if path.stem == 'vnm_matmul' else _sparse_ptx
      text = json.dumps([path.stem, *entry['key'].values()])
      name = f'{path.parent.name} {text}'
      if name in cases:
        raise ValueError(f'{name} is there twice')
      cases[name] = functools.partial(make, entry['key'], choice['config'])
  # What the epilogue can do: the step of a block asks for it.
  block = dict(m=16384, n=16384, k=4096, dtype='bfloat16', out_dtype='bfloat16', b_layout='nk', out_layout='nm')
  for activation in ('gelu', 'silu', 'squared_relu'):
    cases[f'epilogue {activation}'] = functools.partial(
      _sparse_ptx, block, None, activation=activation, keep_preactivation=True, bias=True
    )
  return cases


def _sparse_ptx(key, config, *, activation=None, keep_preactivation=False, bias=False) -> str:
  from pallas_kernels import operand
  from pallas_kernels.sparse_matmul import mosaic_gpu
  from pallas_kernels.sparse_matmul.call import Call, Vectors

  m, n, k, dtype = key['m'], key['n'], key['k'], jnp.dtype(key['dtype'])

  def f(values, metadata, b, *bias):
    return mosaic_gpu.sparse_matmul(
      operand.SparseOperand(values, metadata), b, Vectors(*bias),
      Call(jnp.dtype(key['out_dtype']), key['b_layout'], key['out_layout'], activation, keep_preactivation),
      config=None if config is None else mosaic_gpu.Config(**config), device=targets.target_device('sm_90a'),
    )

  b = S((n, k) if key['b_layout'] == 'nk' else (k, n), dtype)
  args = S((m, k // 2), dtype), S((-(-m // 64), -(-k // 64), 128), jnp.uint32), b, *([S((m,), F32)] if bias else [])
  return compiling.compile_report(f, *args).ptx


def _vnm_ptx(key, config) -> str:
  from pallas_kernels.operand import SparseOperand
  from pallas_kernels.vnm import format as fmt
  from pallas_kernels.vnm import mosaic_gpu

  r, n, k, dtype = key['m'], key['n'], key['k'], jnp.dtype(key['dtype'])
  v, _, m = (int(x) for x in key['pattern'].split(':'))
  compact = 4 * k // m

  def f(values, metadata, rows, b):
    a = fmt.VNMOperand(SparseOperand(values, metadata), rows, m)
    return mosaic_gpu.vnm_matmul(
      a, b, out_dtype=key['out_dtype'], out_layout=key['out_layout'], config=mosaic_gpu.Config(**config),
      device=targets.target_device('sm_90a'),
    )

  metadata = S((-(-r // 64), -(-compact // 64), 128), jnp.uint32)
  args = S((r, compact // 2), dtype), metadata, S((r // v, compact), jnp.int32), S((k, n), dtype)
  return compiling.compile_report(f, *args).ptx


def warp_cases(target: str) -> Cases:
  """The `mma.sp` kernel: it has one setting."""

  def ptx(dtype: jnp.dtype, plain: bool) -> str:
    from pallas_kernels import operand
    from pallas_kernels.sparse_matmul import mosaic_gpu_sm80
    from pallas_kernels.sparse_matmul.call import Call, Vectors

    m, n, k = 500, 300, 260

    def f(values, metadata, b):
      return mosaic_gpu_sm80.sparse_matmul(
        operand.SparseOperand(values, metadata), b, Vectors(),
        Call(dtype, 'nk', 'mn') if plain else Call(dtype, 'kn', 'nm', 'gelu'), device=targets.target_device(target),
      )

    b = S((n, k) if plain else (k, n), dtype)
    return compiling.compile_report(f, S((m, k // 2), dtype), S((8, 5, 128), jnp.uint32), b, target=target).ptx

  return {
    f'mma.sp {dtype} {plain}': functools.partial(ptx, jnp.dtype(dtype), plain)
    for dtype in ('bfloat16', 'float16') for plain in (False, True)
  }  # fmt: skip


def triton_calls() -> Iterator[tuple[str, Callable[[], object]]]:
  """Calls of the back ends that launch Triton kernels; `_triton.call` is watched while they are traced."""
  from pallas_kernels.gated_activation import triton as activations
  from pallas_kernels.pack import triton as pack
  from pallas_kernels.quantize import triton as quantize

  w, w32, scale, key = S((N, N), BF16), S((N, N), F32), S((), F32), jax.random.key(0)
  first = dict(origin=(0, 0, 0))
  for name, x in (('bfloat16', w), ('float32', w32)):
    codes = S((N // 4, N // 4), jnp.uint16)
    yield f'transposable {name}', lambda x=x: jax.eval_shape(lambda a: pack.transposable_pack(a, dtype=BF16), x)
    yield f'masked {name}', lambda x=x, c=codes: jax.eval_shape(lambda a, c: pack.masked_pack(a, c, dtype=BF16), x, c)
    yield f'masked8 {name} True', lambda x=x, c=codes: jax.eval_shape(
      lambda a, c, s: pack.masked_pack(a, c, s, dtype=E4M3), x, c, scale
    )
    for axis in (-1, -2):
      soft = functools.partial(pack.soft_threshold_pack, axis=axis, dtype=BF16)
      yield f'soft threshold {name} {axis}', lambda x=x, f=soft: jax.eval_shape(f, x, scale)
      soft8 = functools.partial(pack.soft_threshold_pack, axis=axis, dtype=E4M3)
      yield f'soft threshold8 {name} {axis} True', lambda x=x, f=soft8: jax.eval_shape(f, x, scale)
    yield f'mvue {name} -2', lambda x=x: jax.eval_shape(lambda a: pack.mvue_pack(a, key, dtype=BF16, **first), x)
    yield f'mvue8 {name} -2 True', lambda x=x: jax.eval_shape(
      lambda a, s: pack.mvue_pack(a, key, s, dtype=E5M2, **first), x, scale
    )
  for transpose in ('both', 'only'):
    for dtype in (E4M3, E5M2):
      f = functools.partial(quantize.quantize, dtype=dtype, transpose=transpose)
      yield f'quantize8 {transpose} {dtype}', lambda f=f: jax.eval_shape(f, w, scale)
  for activation in ('silu', 'gelu', 'relu', 'squared_relu'):
    for gated in (True, False):
      z = S((N, 2 * N if gated else N), BF16)
      f = functools.partial(activations.activation_backward_pack, activation=activation, gated=gated, **first)
      yield f'backward {activation} {gated}', lambda f=f, z=z: jax.eval_shape(
        lambda d, a: f(d, a, key, dtype=BF16), w, z
      )
      yield f'backward8 {activation} {gated}', lambda f=f, z=z: jax.eval_shape(
        lambda d, a, s: f(d, a, key, s, dtype=E5M2), w, z, scale
      )
  yield from _vnm_calls()
  yield from _attention_calls()


def _vnm_calls() -> Iterator[tuple[str, Callable[[], object]]]:
  from pallas_kernels.vnm import reference
  from pallas_kernels.vnm import triton as vnm

  x = S((N, N), BF16)
  for v, m in ((64, 8), (128, 8), (128, 16), (256, 8)):
    packed = jax.eval_shape(functools.partial(reference.vnm_pack, v=v, m=m), x)[0]
    transposed = jax.eval_shape(functools.partial(reference.transpose_pack, used=None, pattern=None), packed)
    used, squared, name = S((N,), jnp.bool_), dict(v=v, m=m, activation='squared_relu'), f'vnm {v}:{m}'

    def of(f, *args, **options):
      return lambda: jax.eval_shape(functools.partial(f, **options), *args)

    def under(x, gradient, pattern, **options):
      return vnm.vnm_pack(x, gradient=gradient, pattern=pattern, **options)

    kept = S((N, 2 * N // m), BF16)
    yield f'{name} rows', of(vnm.vnm_pack, x, **squared, residuals=True)
    yield f'{name} rows under, kept', of(under, kept, x, packed, **squared)
    yield f'{name} rows under, kept, masked', of(under, kept, x, packed, **squared, masked=True)
    transpose_pack, transpose_pack_24 = vnm.transpose_pack, vnm.transpose_pack_24
    pattern_24 = jax.eval_shape(functools.partial(reference.transpose_pack_24, used=None, pattern=None), packed)
    yield f'{name} transposed', of(lambda a, f=transpose_pack: f(a, used=None, pattern=None), packed)
    yield f'{name} transposed used', of(lambda a, u, f=transpose_pack: f(a, used=u, pattern=None), packed, used)
    yield f'{name} transposed under', of(lambda a, p, f=transpose_pack: f(a, used=None, pattern=p), packed, transposed)
    yield f'{name} transposed 2:4', of(lambda a, f=transpose_pack_24: f(a, used=None, pattern=None), packed)
    under_24 = lambda a, p, f=transpose_pack_24: f(a, used=None, pattern=p)  # noqa: E731
    yield f'{name} transposed 2:4 under', of(under_24, packed, pattern_24)
    yield f'{name} expanded', of(vnm.expand, packed)
    yield f'{name} columns taken', of(vnm.take_columns, packed, S((256,), jnp.int32))
  yield '2:4 expanded', lambda: jax.eval_shape(vnm.expand, pattern_24)


def _attention_calls() -> Iterator[tuple[str, Callable[[], object]]]:
  from pallas_kernels.sparse_attention import triton
  from pallas_kernels.sparse_attention.patterns import Pattern

  for kind in ('full', 'local', 'strided', 'combined', 'fixed'):
    for size in (64, 128):
      x = S((4, 4096, 12, size), BF16)

      def step(q, k, v, dy, kind=kind):
        y, vjp = jax.vjp(functools.partial(triton.attend, Pattern(kind, 128), scale=0.125), q, k, v)
        return y, vjp(dy)

      yield f'attention {kind} {size}', lambda f=step, x=x: jax.eval_shape(f, x, x, x, x)


def triton_cases() -> Cases:
  """One case a kernel, its constants and a compute capability; those in float8 begin at 8.9."""
  found: Cases = {}
  for name, call in triton_calls():
    launches = []

    def note(kernel, *args, out_shape, launches=launches, **options):
      launches.append((kernel, [x.dtype for x in (*args, *out_shape)], options))
      return tuple(jnp.zeros(s.shape, s.dtype) for s in out_shape)

    with mock.patch.object(_triton, 'call', note):
      call()
    if not launches:
      raise ValueError(f'{name} launched nothing')
    for i, (kernel, dtypes, options) in enumerate(launches):
      for capability in (90,) if '8 ' in name and not name.startswith('vnm') else (80, 86, 90):
        ptx = functools.partial(_triton_ptx, kernel, dtypes, options, capability)
        found[f'triton {name} {i} sm_{capability}'] = ptx
  return found


_NOT_CONSTANTS = ('grid', 'num_warps', 'zeroed_outputs', 'input_output_aliases', 'compute_capability')


def _triton_ptx(kernel, dtypes, options, capability) -> str:
  from triton.backends.compiler import GPUTarget
  from triton.compiler import ASTSource
  from triton.compiler import compile as triton_compile

  constants = {name: value for name, value in options.items() if name not in _NOT_CONSTANTS}
  pointers = {n: compiling.POINTERS[jnp.dtype(d).name] for n, d in zip(kernel.arg_names, dtypes, strict=False)}
  aligned = {(i,): [['tt.divisibility', 16]] for i in range(len(dtypes))}
  source = ASTSource(
    kernel, signature=pointers | dict.fromkeys(constants, 'constexpr'), constexprs=constants, attrs=aligned
  )
  made = triton_compile(source, target=GPUTarget('cuda', capability, 32), options={'num_warps': options['num_warps']})
  return made.asm['ptx'].replace(kernel.__name__, 'kernel')


def plain(ptx: str) -> str:
  """PTX without what only says where it comes from: lines of sources, comments and tables for debuggers."""
  ptx = re.sub(r'^\s*\.section\s+\.debug.*?^\s*\}\n', '', ptx, flags=re.MULTILINE | re.DOTALL)
  # Labels of functions and of lines; those that code branches to are called $L__BB.
  dropped = re.compile(r'^\s*(//|\.loc\b|\.file\b|\$L__(tmp|func_begin|func_end|info|debug))')
  lines = (re.sub(r'\s*//.*', '', line).rstrip() for line in ptx.splitlines() if not dropped.match(line))
  return '\n'.join(line for line in lines if line)


def measure(cases: Cases, folder: pathlib.Path | None) -> dict[str, str]:
  """Case -> hash."""
  found = {}
  for name, ptx in cases.items():
    text = plain(ptx())
    if '.entry' not in text:
      raise ValueError(f'{name}: no kernel was made')
    found[name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    if folder is not None:
      (folder / (re.sub(r'\W+', '_', name) + '.ptx')).write_text(text)
    print(name, found[name], file=sys.stderr, flush=True)
  return found


def _cases_of(part: str) -> Cases:
  if part == 'triton':
    return triton_cases()
  return ({} if part != 'sm_90a' else mosaic_cases()) | {f'{n} {part}': f for n, f in warp_cases(part).items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--compare', type=pathlib.Path, help='the file of an earlier run; differences are an error')
  parser.add_argument('--only', default='', help='a regular expression that names of cases hold')
  parser.add_argument('--ptx', type=pathlib.Path, help='a folder for the text')
  parser.add_argument('--part', choices=('triton', *targets.TARGETS), help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.ptx:
    args.ptx.mkdir(parents=True, exist_ok=True)
  if args.part:
    cases = {name: ptx for name, ptx in _cases_of(args.part).items() if re.search(args.only, name)}
    args.out.write_text(json.dumps(measure(cases, args.ptx)))
    return
  found: dict[str, str] = {}
  with tempfile.TemporaryDirectory() as folder:
    for part in ('triton', *targets.TARGETS):  # a process a target: Mosaic keeps the settings of the first
      out = pathlib.Path(folder, part)
      more = ['--ptx', str(args.ptx)] if args.ptx else []
      command = [sys.executable, '-m', 'tests.pallas_kernels.fingerprint', '--part', part, '--out', str(out)]
      environment = os.environ | {'TRITON_CACHE_DIR': folder}  # of another source Triton may keep the lines
      subprocess.run([*command, '--only', args.only, *more], check=True, env=environment)
      found |= json.loads(out.read_text())
  args.out.write_text(json.dumps(found, indent=0, sort_keys=True) + '\n')
  if args.compare:
    before = {name: x for name, x in json.loads(args.compare.read_text()).items() if re.search(args.only, name)}
    differing = sorted(name for name in before.keys() & found.keys() if before[name] != found[name])
    print(f'{len(before.keys() & found.keys()) - len(differing)} the same, {len(differing)} differ: {differing}')
    print(f'only before: {sorted(before.keys() - found.keys())}\nonly now: {sorted(found.keys() - before.keys())}')
    sys.exit(bool(differing))


if __name__ == '__main__':
  main()
