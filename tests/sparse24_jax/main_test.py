"""`python -m sparse24_jax`."""

import contextlib
import io
import itertools
import re
import runpy
import sys
from unittest import mock

from absl.testing import absltest, parameterized
import jax

from sparse24_jax import __main__ as command
from sparse24_jax import recipes
from sparse24_jax.block_gain import block_gain, block_table, BlockGain, Part
from sparse24_jax.where_it_pays import table, where_it_pays
from tests.sparse24_jax.gpus import gpu

ARGS = ('where-it-pays', '--tokens', '16384', '--d', '4096', '--hidden', '16384')
DEVICE = 'nvidia_h100_80gb_hbm3'


def run(*args: str) -> tuple[int, list[str]]:
  with contextlib.redirect_stdout(io.StringIO()) as out:
    code = command.main(list(args))
  return code, out.getvalue().rstrip('\n').split('\n')


def _verdict(lines: list[str]) -> str:
  return ' '.join(itertools.takewhile(bool, lines))


def _legend(lines: list[str]) -> str:
  return '\n'.join(lines).split('\n\n')[-1].replace('\n', ' ')


def _block(lines: list[str]) -> str:
  (block,) = (line for line in lines if line.startswith('one block: '))
  return block


class CommandTest(parameterized.TestCase):

  def test_without_a_gpu_says_what_to_do(self):
    code, lines = run(*ARGS)
    line = ' '.join(lines)
    self.assertEqual(code, 1)
    self.assertIn(f'nothing was measured on cpu; pass --device, one of {DEVICE}, nvidia_h200, or run: ', line)
    self.assertIn('python -m pallas_kernels tune', line)

  def test_a_part_of_a_name_is_enough(self):
    self.assertEqual(run(*ARGS, '--device', 'h100'), run(*ARGS, '--device', DEVICE))

  @parameterized.parameters(('--tokens', '0', 'tokens=0 must be positive'), ('--d', '6', 'length 6 along axis -1'))
  def test_sizes_that_cannot_be_are_one_line(self, option, value, message):
    with contextlib.redirect_stderr(io.StringIO()) as err, self.assertRaises(SystemExit) as end:
      command.main([*ARGS, '--device', DEVICE, option, value])
    self.assertEqual(end.exception.code, 2)
    self.assertIn(message, err.getvalue())

  def test_is_the_gpu_at_hand_unless_one_is_named(self):
    with gpu():
      here = run(*ARGS)
    self.assertEqual(here, run(*ARGS, '--device', DEVICE))
    self.assertEqual(here[0], 0)

  @parameterized.parameters(
    ((), ['down/kernel', 'up/kernel']), (('--gated', '--layers', '3'), ['down/kernel', 'gate/kernel', 'up/kernel']),
  )
  def test_four_lines_a_weight(self, options, names):
    _, lines = run(*ARGS, '--device', DEVICE, *options)
    titles = [i for i, line in enumerate(lines) if ' x ' in line]
    self.assertEqual([lines[i].partition(',')[0] for i in titles], names)
    self.assertEqual(lines[titles[0]], 'down/kernel, 16384 x 4096' + (', 3 of them, each' if options else ''))
    parts = ['forward', 'input gradient', 'weight gradient', 'packing', 'all of it']
    for i in titles:
      self.assertEqual([re.split(r' {2,}', line.strip())[0] for line in lines[i + 1 : i + 6]], parts)

  def test_begins_with_a_verdict_and_ends_with_a_legend(self):
    for recipe, verdict, steps in (
      ('transposable_srste', r'\d\.\d\d times faster than dense bfloat16\.',
       ', in sparse steps (83%)'),
      ('s_ste_fp8', r'\d\.\d\d times faster than dense bfloat16 and 1\.\d\d times faster than dense FP8\.', ''),
    ):
      _, lines = run(*ARGS, '--device', 'h200', '--gated', '--recipe', recipe)
      self.assertRegex(_verdict(lines), f'^Sparse, these layers are expected to run {verdict}$')
      self.assertEqual(lines[lines.index('') + 1], f'Recipe {recipe} on nvidia_h200, 16384 tokens{steps}:')
      legend = _legend(lines)
      for column in ('runs on', 'sparse ms', 'dense ms', 'FP8 dense ms', 'times faster', 'packing', 'dense FP8'):
        self.assertIn(f'{column}: ', legend)

  @parameterized.parameters(
    ('--recipe', 's_ste_fp8', '--parts'), ('--recipe', 'mixed_sparsity_transposable'),
    ('--device', 'h200', '--d', '2048'), ('--recipe', 'transposable_srste_fp8', '--tokens', '1048576'),
    ('--recipe', 'rigl', '--gated', '--layers', '32'), ('--device', 'no_such_gpu'),
  )  # fmt: skip
  def test_fits_a_hundred_columns(self, *options):
    lines = run(*ARGS, '--device', DEVICE, *options)[1]
    self.assertLessEqual(max(map(len, lines)), 100)

  @parameterized.parameters('transposable_srste', 's_ste_fp8')
  def test_says_only_that_nothing_was_measured(self, recipe):
    far = ('--tokens', '128', '--d', '64', '--hidden', '128')
    code, lines = run('where-it-pays', *far, '--device', DEVICE, '--recipe', recipe, '--parts')
    self.assertEqual(code, 0)
    self.assertEqual(lines, ['How fast these layers run sparse is not known: nothing near them was measured.'])

  @parameterized.parameters(*(n for n, known in recipes.KNOWN.items() if known.is_sparse and len(known.paths) == 1))
  def test_recipes(self, recipe):
    code, lines = run(*ARGS, '--device', DEVICE, '--recipe', recipe)
    self.assertEqual(code, 0)
    both_ways = ('transposable_srste', 'transposable_srste_fp8', 'mixed_sparsity_transposable')
    expected = 'mosaic_gpu' if recipe in both_ways else 'dense_fp8' if recipe == 's_ste_fp8' else 'dense'
    self.assertEqual([line.split()[2] for line in lines if 'input gradient' in line], [expected] * 2)
    block = _block(lines)
    # Of what packs in FP8 under transposable masks there may be no record yet.
    known = r'(\d+\.\d\d ms|-)' if recipe == 'transposable_srste_fp8' else r'\d+\.\d\d ms'
    self.assertRegex(block, rf'^one block: {known} sparse, \d+\.\d\d ms dense')
    self.assertEqual(' dense FP8' in block, recipe.endswith('_fp8'))

  @parameterized.parameters(('bfloat16', 1), ('float32', 4))
  def test_layers_and_block_are_of_the_same_weights(self, weights, micro_batches):
    options = ('--micro-batches', str(micro_batches)) if micro_batches > 1 else ()
    _, lines = run(*ARGS, '--device', DEVICE, '--weights', weights, *options)
    step = dict(tokens=16384, micro_batches=micro_batches)
    recipe = recipes.KNOWN['transposable_srste'].example('.*')
    sides = {'down': (16384, 4096), 'up': (4096, 16384)}
    params = {name: {'kernel': jax.ShapeDtypeStruct(side, weights)} for name, side in sides.items()}
    expected = table(where_it_pays(params, recipe, **step, device=DEVICE)).split('\n')
    block = block_gain(4096, 16384, recipe, **step, weight_dtype=weights, device=DEVICE)
    self.assertEqual(lines[3 : 4 + len(expected)], [*expected, block_table(block)])

  def test_one_block_is_one_of_all_layers(self):
    one, of_many = (run(*ARGS, '--device', DEVICE, '--layers', layers)[1] for layers in '13')
    self.assertEqual(_block(of_many), _block(one))

  def test_a_block_with_sparse_activations(self):
    status, lines = run(*ARGS, '--recipe', 'neuron_level', '--device', DEVICE, '--parts')
    self.assertEqual(status, 0)
    self.assertIn('sparse: as the recipe runs it', _legend(lines))
    self.assertRegex(lines[0], r'1\.\d\d times faster than dense bfloat16\.$')
    self.assertRegex(lines[3], r'^one block: .* sparse, .* dense; 144 MB of packed weights$')
    self.assertTrue(any(re.match(r'  dW of up +mosaic_gpu', line) for line in lines))

  def test_says_why_sparse_activations_stay_dense(self):
    args = ('where-it-pays', '--tokens', '16385', '--d', '4096', '--hidden', '16384', '--recipe', 'neuron_level')
    _, (line, *_) = run(*args, '--device', DEVICE)
    self.assertEqual(line, 'These layers stay dense: 16385 tokens are no multiple of V = 64 and 16 M = 128.')

  @parameterized.parameters('rigl', 'mixed_sparsity', 'sr_ste')
  def test_says_once_why_layers_stay_dense(self, recipe):
    _, lines = run(*ARGS, '--recipe', recipe, '--device', DEVICE)
    why = 'no kernel packs these masks; recipes with kernels are transposable_srste and s_ste'
    self.assertEqual(_verdict(lines), f'These layers stay dense: {why}.')
    self.assertEqual(' '.join(lines).count('no kernel packs'), 1)

  def test_says_whose_times_serve_another_gpu(self):
    line = run(*ARGS, '--device', 'h200')[1][3]
    self.assertEqual(line, f'for sizes far from those measured on nvidia_h200: times of {DEVICE}, the same chip')

  def test_parts_add_up(self):
    _, lines = run(*ARGS, '--device', DEVICE, '--recipe', 's_ste_fp8', '--gated', '--parts')
    totals = [float(ms) for ms in re.findall(r'([\d.]+) ms', _block(lines))]
    titles = [i for i, line in enumerate(lines) if line.endswith(', ms:')]
    self.assertEqual([lines[i].strip() for i in titles], ['sparse, ms:', 'dense, ms:', 'dense in FP8, ms:'])
    ends = [*titles[1:], max(i for i, line in enumerate(lines) if not line)]
    for total, start, end in zip(totals, titles, ends, strict=True):
      parts = [line.partition(' keeps ')[0] for line in lines[start + 1 : end]]
      self.assertAlmostEqual(sum(float(part.split()[-1]) for part in parts), total, delta=0.02)

  @parameterized.parameters(
    # By itself the up-projection would gain more with its exact gradient, the block gains less.
    ((1.14, 1.00), '1.14 times faster than dense bfloat16.'),
    ((0.945, 0.927), 'slower than dense bfloat16 (0.94 times as fast): train them in dense bfloat16.'),
    ((0.9, 0.99), 'slower than dense bfloat16 (0.90 times as fast): train them in dense bfloat16.'),
    ((0.94, 1.05), 'slower than dense bfloat16 (0.94 times as fast). With exact weight gradients, weight_grad='
                   "'dense', 1.05 times faster than dense bfloat16."),
    ((1.10, 1.10), '1.10 times faster than dense bfloat16.'), ((0.999, 0.999), 'run as fast as dense bfloat16.'),
    ((1.3, None), '1.30 times faster than dense bfloat16.'),
    ((None, None), 'is not known: nothing near them was measured.'),
  )  # fmt: skip
  def test_advice_is_that_of_the_block(self, gains, expected):
    def block(d, hidden, recipe, **kwargs):
      (rule,) = recipe.rules
      gain = gains[rule.policy.weight_grad == 'dense']
      chosen, dense = ((Part('all', ms),) for ms in (None if gain is None else 1 / gain, 1.0))
      return BlockGain(chosen, dense, (), 0, 0)

    with mock.patch.object(command, 'block_gain', block):
      lines = run('where-it-pays', '--tokens', '2048', '--d', '1024', '--hidden', '4096', '--device', DEVICE)[1]
    self.assertEndsWith(_verdict(lines), expected)

  @parameterized.parameters((768, 3072, True), (1024, 4096, False))
  def test_advice_on_the_gpu_that_was_measured(self, d, hidden, loses):
    _, lines = run('where-it-pays', '--tokens', '2048', '--d', str(d), '--hidden', str(hidden), '--device', DEVICE)
    self.assertEqual('slower than dense bfloat16' in _verdict(lines), loses)

  def test_as_a_program(self):
    out, err = io.StringIO(), io.StringIO()
    with (
      mock.patch.object(sys, 'argv', ['sparse24_jax', *ARGS, '--device', DEVICE]), mock.patch.dict(sys.modules),
      contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as end,
    ):  # fmt: skip
      del sys.modules['sparse24_jax.__main__']  # as in a process of its own
      runpy.run_module('sparse24_jax', run_name='__main__')
    self.assertEqual((end.exception.code or 0, err.getvalue()), (0, ''))
    self.assertEqual(out.getvalue().rstrip('\n').split('\n'), run(*ARGS, '--device', DEVICE)[1])


if __name__ == '__main__':
  absltest.main()
