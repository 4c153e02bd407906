"""What a recipe makes of a model, and where sparse feed-forward layers pay, by the records of a GPU.

    python -m sparse24_jax check my_package.my_model:example --recipe transposable_srste --path '.*/mlp/.*'
    python -m sparse24_jax where-it-pays --tokens 16384 --d 4096 --hidden 16384
    python -m sparse24_jax where-it-pays --tokens 8192 --d 1024 --hidden 4096 --gated --device nvidia_h100_80gb_hbm3
    python -m sparse24_jax where-it-pays --tokens 16384 --d 4096 --hidden 16384 --recipe s_ste_fp8 --parts
"""

import argparse
import functools
import importlib
import re
import shlex
import shutil
import sys
import textwrap
from typing import Any

import jax

from pallas_kernels import _checks, _device, _records
import sparse24_jax
from sparse24_jax import recipes
from sparse24_jax.block_gain import block_gain, BLOCK_LEGEND, block_table, explain, verdict
from sparse24_jax.pipes import quietly
from sparse24_jax.priced import BlockGain
from sparse24_jax.recipe import Recipe
from sparse24_jax.suggestions import Parser
from sparse24_jax.where_it_pays import LayerGain, LEGEND, table, where_it_pays

_COLUMNS = 100
_ONE_OF = 'one of %(choices)s (default: %(default)s)'


def main(argv: list[str] | None = None) -> int:
  parser = Parser(prog='python -m sparse24_jax', description=(__doc__ or '').partition('\n')[0])
  commands = parser.add_subparsers(dest='command', required=True)
  _add_where_it_pays(commands)
  _add_check(commands)
  args = parser.parse_args(argv)
  return args.run(parser, args)


def _add_where_it_pays(commands: Any) -> None:
  pays = commands.add_parser('where-it-pays', help='whether a feed-forward block runs faster sparse than dense')
  pays.add_argument('--tokens', type=int, required=True, help='tokens of a micro-batch on one device')
  pays.add_argument('--micro-batches', type=int, default=1,
                    help='of an optimizer step, which packs weights once for all; changes nothing for neuron_level'
                    ' (default: %(default)s)')  # fmt: skip
  pays.add_argument('--d', type=int, required=True, help='width of the model')
  pays.add_argument('--hidden', type=int, required=True, help='width of the hidden layer')
  pays.add_argument('--layers', type=int, default=1, help='layers of that kind (default: %(default)s)')
  pays.add_argument('--gated', action='store_true', help='a gate besides the up-projection')
  pays.add_argument('--recipe', metavar='RECIPE', default='transposable_srste', help=_ONE_OF,
                    choices=sorted(name for name, known in recipes.KNOWN.items() if known.is_sparse))  # fmt: skip
  pays.add_argument('--weights', choices=('bfloat16', 'float32'), default='bfloat16',
                    help='what is packed (default: %(default)s)')  # fmt: skip
  pays.add_argument('--parts', action='store_true', help='list what one block is made of')
  pays.add_argument('--device', help="folder of the GPU's records, or h100 (default: the GPU at hand)")
  pays.set_defaults(run=_where_it_pays)


def _add_check(commands: Any) -> None:
  checks = commands.add_parser(
    'check', help='what a model does with the weights that a recipe matches, a line a weight',
    description='Traces a model and says of each matched weight how it is read. Ends with 1 if one cannot be sparse.',
  )
  checks.add_argument('example', metavar='MODULE:FUNCTION',
                      help='returns (f, params, *args): a function of parameters, and arrays or shapes')  # fmt: skip
  checks.add_argument('--recipe', metavar='RECIPE', default='transposable_srste', help=_ONE_OF,
                      choices=sorted(recipes.KNOWN))  # fmt: skip
  checks.add_argument('--path', default='.*', help='pattern of the weights, of neuron_level the up-projections'
                      ' (default: %(default)s)')  # fmt: skip
  checks.add_argument('--down', help='of neuron_level, pattern of the down-projections')
  checks.add_argument('--dense', action='append', default=[], metavar='PATTERN', help='weights that stay dense')
  checks.set_defaults(run=_check)


def _where_it_pays(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
  here = _device.current()
  device = _records.device_meant(args.device) if args.device else here.slug
  priced = device if args.device else None  # of the GPU at hand, what is installed counts
  known = _records.measured_devices()
  measured = [p.parent.name for p in _records.paths_of(_records.TUNED, device, 'sparse_matmul') if p.exists()]
  if not measured and not (device == here.slug and _checks.possible(here, 'sparse_matmul')):
    run = 'python -m pallas_kernels tune sparse_matmul'
    _say(f'nothing was measured on {device}; pass --device, one of {", ".join(known)}, or run: {run}')
    return 1
  which = recipes.KNOWN[args.recipe]
  recipe = which.example(*(('.*',) if len(which.paths) == 1 else ('up/.*', 'down/.*')))
  try:
    block, exact, found = _gains(args, recipe, priced)
  except ValueError as error:
    parser.error(str(error))
  _say(verdict(block, exact.gain))
  if block.gain is None and not any(part.by and part.ms is not None for part in (*block.chosen, *block.dense)):
    return 0
  print()
  steps = f', in sparse steps ({recipe.fraction_of("sparse"):.0%})' if recipe.fraction_of('dense') else ''
  _say(f'Recipe {args.recipe} on {device}, {args.tokens} tokens{steps}:')
  if measured and measured != [device]:
    what = 'for sizes far from those measured on' if device in measured else 'nothing was measured on'
    _say(f'{what} {device}: times of {measured[-1]}, the same chip')
  if found:
    _say(table([layer.stacked(args.layers) for layer in found], said=block.why_dense or block.simulated))
  _say(block_table(block))
  if args.parts:
    _say(explain(block))
  _say(f'\n{LEGEND} {BLOCK_LEGEND}' if found else f'\n{BLOCK_LEGEND}')
  return 0


def _gains(
  args: argparse.Namespace, recipe: Recipe, device: str | None
) -> tuple[BlockGain, BlockGain, list[LayerGain]]:
  """The gain of the block, that with exact gradients, and those of its layers by themselves."""
  counted = dict(tokens=args.tokens, micro_batches=args.micro_batches, device=device)
  block_of = functools.partial(
    block_gain, args.d, args.hidden, gated=args.gated, weight_dtype=args.weights, **counted
  )
  block = block_of(recipe)
  if any(rule.activation for rule in recipe.rules):
    # Its two layers do not run by themselves, nor has it another way to a gradient.
    return block, block, []
  sides = {'up': (args.d, args.hidden), 'down': (args.hidden, args.d)}
  if args.gated:
    sides['gate'] = sides['up']
  params = {name: {'kernel': jax.ShapeDtypeStruct(side, args.weights)} for name, side in sides.items()}
  return block, block_of(recipe.with_exact_gradients()), where_it_pays(params, recipe, **counted)


def _say(text: str) -> None:
  for line in text.split('\n'):
    print(textwrap.fill(line, _COLUMNS, break_long_words=False, break_on_hyphens=False))


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
  module, _, name = args.example.partition(':')
  if not name:
    parser.error(f'{args.example!r} names no function: write {module or "MODULE"}:FUNCTION')
  sys.path.insert(0, '')
  try:
    example = getattr(importlib.import_module(module), name)
  except Exception as error:  # of the user's module, whatever it does when it is imported
    meant = module.removesuffix('.py').replace('/', '.')
    hint = f'. Did you mean {meant}:{name}?' if module.endswith('.py') else ''
    parser.error(f'{args.example!r} is no MODULE:FUNCTION: {type(error).__name__}: {error}{hint}')
  try:
    found = example()
  except Exception as error:
    parser.error(f'{args.example}() raised {type(error).__name__}: {error}')
  if not isinstance(found, tuple | list) or len(found) < 2:
    parser.error(f'{args.example}() must return (f, params, *args), found {type(found).__name__}')
  which = recipes.KNOWN[args.recipe]
  if len(which.paths) > 1 and args.down is None:
    parser.error(f'{args.recipe} needs --down, a pattern of the down-projections, and --path of the up-projections')
  if len(which.paths) == 1 and args.down is not None:
    of_two = ', '.join(name for name, known in recipes.KNOWN.items() if len(known.paths) > 1)
    parser.error(f'--down is for {of_two}, which takes --path of the up-projections and --down')
  try:
    recipe = which.example(args.path, *([] if args.down is None else [args.down])).with_dense(*args.dense)
  except ValueError as error:
    parser.error(str(error))
  try:
    checked = sparse24_jax.check(recipe, *found)
  except TypeError as error:  # where the arguments are not those of the function
    parser.error(f'{error}: {args.example}() must return (f, params, *args), with all that f takes')
  except ValueError as error:
    parser.error(str(error))
  print(checked.text(max(40, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None))
  if dense := [w.path for w in checked.weights if w.leave_dense]:
    print(f'to leave these dense here: {" ".join(f"--dense {shlex.quote(re.escape(path))}" for path in dense)}')
  return int(any(w.problem for w in checked.weights))  # whatever is unbound, as no name of a recipe is bound


if __name__ == '__main__':
  sys.exit(quietly(main))
