"""Measures kernels on the GPU at hand; every op has the same two commands.

    python -m pallas_kernels tune sparse_matmul --select headline      # writes pallas_kernels/tuned/<device>/<op>.json
    python -m pallas_kernels bench sparse_matmul --select headline --out results.jsonl
    python -m pallas_kernels verify --count 200              # random problems of sparse_matmul against NumPy's
    python -m pallas_kernels bounds --out bounds.jsonl       # clock, power and NVIDIA's counters of four matmuls
    python -m pallas_kernels records                         # what was measured of sparse_matmul, as a table

`ops.py` says what measures each op.
"""

import argparse
from collections.abc import Sequence
import contextlib
import importlib
import math
import pathlib
import sys
from typing import Any

from pallas_kernels import _device, _processes, _records, _triton
from pallas_kernels.arch import kernels_of
from pallas_kernels.ops import Op, OPS


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m pallas_kernels', description='Measures kernels on the GPU at hand.'
  )
  commands = parser.add_subparsers(dest='command', required=True, metavar='command')

  def command(name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text)

  for name, text, option, path, what in (
    ('tune', 'time settings and keep what was measured', '--tuned', _records.TUNED, 'folder of tuned records'),
    ('bench', 'time what the library runs against the best of the others', '--out', 'results.jsonl', 'gets records'),
  ):
    ops = command(name, text).add_subparsers(dest='op', required=True, metavar='op')
    for op, how in OPS.items():
      reason = f'nothing to tune: {how.untuned}' if name == 'tune' and how.untuned else None
      parser_of_op = ops.add_parser(op, help=reason, description=reason)
      if reason is None:
        parser_of_op.add_argument(option, type=pathlib.Path, default=pathlib.Path(path), help=what)
        _module(name, how).arguments(parser_of_op)
  verify = command('verify', 'random problems of sparse_matmul against a matmul by NumPy')
  verify.add_argument('--count', type=int, default=200, help='of problems (default: %(default)s)')
  verify.add_argument('--seed', type=int, default=0)
  verify.add_argument('--seconds', type=float, default=math.inf, help='after which no problem is begun')
  verify.add_argument('--out', type=pathlib.Path, help='gets one record of the run')
  verify.add_argument('--implementation', choices=sorted(kernels_of('sparse_matmul')), help="(default: the GPU's)")
  bounds = command('bounds', 'what bounds sparse_matmul: loops with clock and power, and counters of single launches')
  bounds.add_argument('--out', type=pathlib.Path, default=pathlib.Path('bounds.jsonl'), help='gets records')
  bounds.add_argument('--select', nargs='+', choices=('square', 'forward'), default=['square', 'forward'])
  bounds.add_argument('--ncu', help="NVIDIA's profiler (default: the one on the path, or CUDA's)")
  measured = command('records', 'print what was measured of sparse_matmul')
  measured.add_argument('--tuned', type=pathlib.Path, default=_records.TUNED, help='folder of tuned records')
  return parser


def _module(command: str, op: Op) -> Any:
  return importlib.import_module(f'pallas_kernels.{op.folder}.{command}')


def main(argv: Sequence[str] | None = None) -> int:
  """The command line; exit status 1 if a result is wrong or something failed."""
  from pallas_kernels.sparse_matmul import bounds
  from pallas_kernels.sparse_matmul.bench import table_of_records
  from pallas_kernels.sparse_matmul.verify import verify

  parser = _parser()
  args = parser.parse_args(argv)
  if args.command == 'records':
    print('\n'.join(table_of_records(args.tuned)))
    return 0
  op = getattr(args, 'op', 'sparse_matmul')
  if args.command == 'tune' and (reason := OPS[op].untuned):
    parser.error(f'tune {op}: nothing to tune: {reason}')
  if OPS[op].in_triton:
    _triton.check_program(parser)
  # The processes that tune `sparse_matmul`, and those that are profiled, share the GPU with this one.
  shared = args.command == 'bounds' or (args.command == 'tune' and op == 'sparse_matmul')
  with _processes.shared_gpu() if shared else contextlib.nullcontext():
    device = _device.current()
  if device.platform != 'gpu' and not getattr(args, 'tiny', False):
    parser.error(f'{args.command} runs on a GPU, and JAX finds {device.name!r} here')
  if args.command == 'verify':
    own = device.arch.kernel('sparse_matmul')
    kernel = args.implementation or (own and own.backend)
    if kernel is None:
      parser.error(f'verify: sparse_matmul has no kernel for {device.name}')
    return min(verify(args.count, args.seed, args.seconds, args.out, kernel), 1)
  if args.command == 'bounds':
    return bounds.run(args)
  return _module(args.command, OPS[op]).run(args)


if __name__ == '__main__':
  sys.exit(main())
