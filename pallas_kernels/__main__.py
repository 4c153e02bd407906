"""Measures kernels on the card at hand.

    python -m pallas_kernels tune --select headline          # writes pallas_kernels/tuned/<device>/<op>.json
    python -m pallas_kernels bench --select headline --out results.jsonl
    python -m pallas_kernels verify --count 200              # random problems against the reference
    python -m pallas_kernels where-it-pays                   # what was measured, as a table
"""

import argparse
import contextlib
import importlib
import pathlib
import sys

from pallas_kernels import _device, _processes, _tuning

# Modules with tune_in_processes(selections, folder, backends, processes, seconds, missing),
# bench(selection, out, folder), verify(count, seed) and where_it_pays(folder).
OPS = {'sparse_matmul': 'pallas_kernels.sparse_matmul.bench'}


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog='python -m pallas_kernels', description='Measures kernels on the card at hand.')
  parser.add_argument('command', choices=('tune', 'bench', 'verify', 'where-it-pays'))
  parser.add_argument('--op', choices=sorted(OPS), default='sparse_matmul')
  names = (
    'square, headline, small, gpt2_124m, gpt2_774m, gpt2_1558m, llama_3b, block, models (the last five), fp8 (most of'
    ' these in FP8), all'
  )
  parser.add_argument('--select', nargs='+', default=['headline'], help=f'which problems: {names}')
  parser.add_argument('--backends', nargs='+', default=['mosaic_gpu', 'cusparselt'], help='that tune searches')
  parser.add_argument('--processes', type=int, default=4, help='that tune compiles in (default: %(default)s)')
  parser.add_argument('--seconds', type=float, default=3600.0, help='after which tune begins no problem')
  parser.add_argument('--missing', action='store_true', help='tune only what this card has no record of')
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('results.jsonl'), help='records of bench')
  parser.add_argument('--tuned', type=pathlib.Path, default=_tuning.TUNED, help='folder of tuned records')
  parser.add_argument('--count', type=int, default=200, help='problems that verify draws')
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args(argv)
  op = importlib.import_module(OPS[args.op])
  if unknown := sorted(set(args.select) - set(op.SELECTIONS)):
    parser.error(f'--select {" ".join(unknown)}: known are {", ".join(op.SELECTIONS)}')
  if args.command != 'where-it-pays':
    # The processes that tune share the card with this one.
    with _processes.shared_card() if args.command == 'tune' else contextlib.nullcontext():
      device = _device.current()
    if device.platform != 'gpu':
      parser.error(f'{args.command} runs on a GPU, and JAX finds {device.name!r} here')
  if args.command == 'tune':
    given = args.select, args.tuned, args.backends, args.processes, args.seconds, args.missing
    return min(op.tune_in_processes(*given), 1)
  if args.command == 'bench':
    for name in args.select:
      op.bench(name, args.out, args.tuned)
  elif args.command == 'verify':
    return min(op.verify(args.count, args.seed), 1)
  else:
    print('\n'.join(op.where_it_pays(args.tuned)))
  return 0


if __name__ == '__main__':
  sys.exit(main())
