"""Measures `sparse_matmul` on the card at hand.

    python -m pallas_kernels tune --select headline          # writes pallas_kernels/tuned/<device>/<op>.json
    python -m pallas_kernels bench --select headline --out results.jsonl
    python -m pallas_kernels verify --count 200              # random problems against NumPy's product
    python -m pallas_kernels records                         # what was measured, as a table
"""

import argparse
import contextlib
import math
import pathlib
import sys

from pallas_kernels import _device, _processes, _records

_SELECTIONS = (
  'square, headline, small, gpt2_124m, gpt2_774m, gpt2_1558m, llama_3b, block, models (the last five), fp8 (most of'
  ' these in FP8), all'
)


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m pallas_kernels', description='Measures kernels on the card at hand.',
    epilog='Passes over memory have their own programs: pallas_kernels.pack.bench and pallas_kernels.quantize.bench.',
  )  # fmt: skip
  commands = parser.add_subparsers(dest='command', required=True, metavar='command')

  def command(name: str, text: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=text, description=text)

  tune = command('tune', 'time settings and keep what was measured')
  tune.add_argument('--backends', nargs='+', default=['mosaic_gpu', 'cusparselt'], help='whose settings are searched')
  tune.add_argument('--processes', type=int, default=4, help='that compile (default: %(default)s)')
  tune.add_argument('--seconds', type=float, default=3600.0, help='after which no problem is begun')
  tune.add_argument('--missing', action='store_true', help='only what this card has no record of')
  bench = command('bench', 'time what the library runs against dense and cuSPARSELt')
  bench.add_argument('--out', type=pathlib.Path, default=pathlib.Path('results.jsonl'), help='gets a record a problem')
  verify = command('verify', 'random problems against a product by NumPy')
  verify.add_argument('--count', type=int, default=200, help='of problems (default: %(default)s)')
  verify.add_argument('--seed', type=int, default=0)
  verify.add_argument('--seconds', type=float, default=math.inf, help='after which no problem is begun')
  verify.add_argument('--out', type=pathlib.Path, help='gets one record of the run')
  verify.add_argument('--implementation', choices=('mosaic_gpu', 'mosaic_gpu_sm80'), help="(default: the card's)")
  measured = command('records', 'print what was measured')
  for each in (tune, bench):
    each.add_argument('--select', nargs='+', default=['headline'], help=f'which problems: {_SELECTIONS}')
  for each in (tune, bench, measured):
    each.add_argument('--tuned', type=pathlib.Path, default=_records.TUNED, help='folder of tuned records')
  return parser


def main(argv: list[str] | None = None) -> int:
  from pallas_kernels.sparse_matmul import _own_kernel
  from pallas_kernels.sparse_matmul import bench as sparse_matmul

  parser = _parser()
  args = parser.parse_args(argv)
  if unknown := sorted(set(getattr(args, 'select', ())) - set(sparse_matmul.SELECTIONS)):
    parser.error(f'--select {" ".join(unknown)}: known are {", ".join(sparse_matmul.SELECTIONS)}')
  if args.command == 'records':
    print('\n'.join(sparse_matmul.table_of_records(args.tuned)))
    return 0
  # The processes that tune share the card with this one.
  with _processes.shared_card() if args.command == 'tune' else contextlib.nullcontext():
    device = _device.current()
  if device.platform != 'gpu':
    parser.error(f'{args.command} runs on a GPU, and JAX finds {device.name!r} here')
  if args.command == 'tune':
    given = args.select, args.tuned, args.backends, args.processes, args.seconds, args.missing
    return min(sparse_matmul.tune_in_processes(*given), 1)
  if args.command == 'verify':
    kernel = args.implementation or _own_kernel.name(device)
    return min(sparse_matmul.verify(args.count, args.seed, args.seconds, args.out, kernel), 1)
  for name in args.select:
    sparse_matmul.bench(name, args.out, args.tuned)
  return 0


if __name__ == '__main__':
  sys.exit(main())
