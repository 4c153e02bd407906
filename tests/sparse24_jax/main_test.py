"""`python -m sparse24_jax`."""

import contextlib
import io
import re
import runpy
import sys
from unittest import mock

from absl.testing import absltest, parameterized
import jax

from sparse24_jax import __main__ as command
from sparse24_jax.block_gain import block_gain, block_table, BlockGain, Part
from sparse24_jax.where_it_pays import table, where_it_pays
from tests.sparse24_jax.gpus import gpu

ARGS = ('where-it-pays', '--tokens', '16384', '--d', '4096', '--hidden', '16384')
DEVICE = 'nvidia_h100_80gb_hbm3'


def run(*args: str) -> tuple[int, list[str]]:
  with contextlib.redirect_stdout(io.StringIO()) as out:
    code = command.main(list(args))
  return code, out.getvalue().rstrip('\n').split('\n')


class CommandTest(parameterized.TestCase):

  def test_without_a_gpu_says_what_to_do(self):
    code, (line,) = run(*ARGS)
    self.assertEqual(code, 1)
    self.assertIn("nothing was measured on 'cpu'", line)
    self.assertIn(f"pass --device, one of ['{DEVICE}'", line)
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
  def test_one_line_a_weight(self, options, names):
    _, (head, *lines) = run(*ARGS, '--device', DEVICE, *options)
    lines = [line.split() for line in lines if ' x ' in line]
    self.assertStartsWith(head, 'weight')
    self.assertEqual([line[0] for line in lines], names)
    self.assertEqual({line[4] for line in lines}, {'3' if options else '1'})
    self.assertEqual(lines[0][1:4], ['16384', 'x', '4096'])

  @parameterized.parameters(*(recipe for recipe in command.PRICED if recipe != 'neuron_level'))  # has no layers
  def test_recipes(self, recipe):
    code, lines = run(*ARGS, '--device', DEVICE, '--recipe', recipe)
    self.assertEqual(code, 0)
    expected = {'transposable_srste': 'mosaic_gpu', 's_ste_fp8': 'dense_fp8'}.get(recipe, 'dense')
    *layers, block = [line for line in lines if ': no kernel: ' not in line]
    self.assertIn(f'input_grad {expected} ', layers[-1])
    self.assertEqual('stays dense: ' in block, layers != lines[:-1])
    self.assertRegex(block, r'^one block: \d+\.\d\d ms as chosen, \d+\.\d\d ms dense, \d\.\d\dx; .*')
    self.assertEqual('dense in FP8' in block, recipe == 's_ste_fp8')

  @parameterized.parameters(('bfloat16', 1), ('float32', 4))
  def test_layers_and_block_are_of_the_same_weights(self, weights, micro_batches):
    options = ('--micro-batches', str(micro_batches)) if micro_batches > 1 else ()
    _, lines = run(*ARGS, '--device', DEVICE, '--weights', weights, *options)
    step = dict(tokens=16384, micro_batches=micro_batches)
    recipe = command.RECIPES['transposable_srste']('.*')
    sides = {'down': (16384, 4096), 'up': (4096, 16384)}
    params = {name: {'kernel': jax.ShapeDtypeStruct(side, weights)} for name, side in sides.items()}
    self.assertEqual(lines[:3], table(where_it_pays(params, recipe, **step, device=DEVICE)).split('\n'))
    block = block_gain(4096, 16384, recipe, **step, weight_dtype=weights, device=DEVICE)
    self.assertEqual(lines[3:], [block_table(block)])

  def test_one_block_is_one_of_all_layers(self):
    *_, block = run(*ARGS, '--device', DEVICE)[1]
    *_, of_many = run(*ARGS, '--device', DEVICE, '--layers', '3')[1]
    self.assertStartsWith(block, 'one block: ')
    self.assertEqual(of_many, block)

  def test_a_block_with_sparse_activations(self):
    status, lines = run(*ARGS, '--recipe', 'neuron_level', '--device', DEVICE, '--parts')
    self.assertEqual(status, 0)
    self.assertRegex(lines[0], r'^one block: .* as chosen, .* dense, 1\.\d\dx; 144 MB packed$')
    self.assertTrue(any(re.match(r'  dW of up +mosaic_gpu', line) for line in lines))

  def test_says_why_sparse_activations_stay_dense(self):
    args = ('where-it-pays', '--tokens', '16385', '--d', '4096', '--hidden', '16384', '--recipe', 'neuron_level')
    _, (line,) = run(*args, '--device', DEVICE)
    self.assertRegex(line, r', 1\.00x; .*; stays dense: 16385 tokens are no multiple of V = 64 and 16 M = 128$')

  def test_says_whose_times_serve_another_gpu(self):
    _, (line, *_) = run(*ARGS, '--device', 'h200')
    far = "for sizes far from all that was measured on 'nvidia_h200'"
    self.assertEqual(line, f"{far}, times are those of '{DEVICE}', which has the same chip")

  def test_parts_add_up(self):
    _, lines = run(*ARGS, '--device', DEVICE, '--recipe', 's_ste_fp8', '--gated', '--parts')
    (block,) = (line for line in lines if line.startswith('one block: '))
    totals = [float(ms) for ms in re.findall(r'([\d.]+) ms', block)]
    titles = [i for i, line in enumerate(lines) if line.endswith(', ms:')]
    self.assertEqual([lines[i].strip() for i in titles], ['as chosen, ms:', 'dense, ms:', 'dense in FP8, ms:'])
    for total, start, end in zip(totals, titles, [*titles[1:], len(lines)], strict=True):
      self.assertAlmostEqual(sum(float(line.split()[-1]) for line in lines[start + 1 : end]), total, delta=0.02)

  @parameterized.parameters(
    # By itself the up-projection would gain more with its exact gradient, the block gains less.
    ((1.14, 1.00), None), ((0.945, 0.927), 'slower than dense: leave these layers out of the recipe'),
    ((0.9, 0.99), 'slower than dense: leave these layers out of the recipe'),
    ((0.94, 1.05), "weight_grad='dense' is faster, 1.05x, and exact"),
    ((1.10, 1.10), None), ((0.999, 0.999), None), ((1.3, None), None), ((None, None), None),
  )  # fmt: skip
  def test_advice_is_that_of_the_block(self, gains, expected):
    def block(d, hidden, recipe, **kwargs):
      (rule,) = recipe.rules
      gain = gains[rule.policy.weight_grad == 'dense']
      chosen, dense = ((Part('all', ms),) for ms in (None if gain is None else 1 / gain, 1.0))
      return BlockGain(chosen, dense, (), 0, 0)

    with mock.patch.object(command, 'block_gain', block):
      lines = run('where-it-pays', '--tokens', '2048', '--d', '1024', '--hidden', '4096', '--device', DEVICE)[1]
    self.assertStartsWith(lines[3], 'one block: ')
    self.assertEqual(lines[4:], [] if expected is None else [expected])

  @parameterized.parameters((768, 3072, True), (1024, 4096, False))
  def test_advice_on_the_gpu_that_was_measured(self, d, hidden, loses):
    _, lines = run('where-it-pays', '--tokens', '2048', '--d', str(d), '--hidden', str(hidden), '--device', DEVICE)
    self.assertEqual(lines[4:], ['slower than dense: leave these layers out of the recipe'] if loses else [])

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
