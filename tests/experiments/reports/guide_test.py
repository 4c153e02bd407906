"""`python -m experiments guide`: what it says follows from records."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import __main__ as cli
from experiments import arguments
from experiments.reports import best_steps, evidence, guide, guide_code, provenance
from experiments.reports import race_table as table
from experiments.runs.race import decays, programs, trials
from experiments.runs.race.contenders import CONTENDERS
import sparse24_jax as s24
from tests.draws import gaussian
from tests.experiments.fakes import temp_folder

CALLED = {
  'FST': 'fst', 'S-STE': 's_ste_fp8', 'FP8': 'dense_fp8', 'half': 'half_ffn', 'half in FP8': 'half_ffn_fp8',
  'a quarter': 'quarter_ffn_fp8', 'half S-STE': 'half_ffn_s_ste_fp8_all', 'small': 'dense_124m', 'SR-STE': 'sr_ste',
  'plain S-STE': 's_ste',
}  # fmt: skip


def record(contender, seed, loss, **changes):
  fields = {'experiment': 'nano', 'contender': contender, 'title': contender, 'rate': 1e-3, 'decay': 0.0, 'seed': seed,
            'device': '1 x NVIDIA H200', 'share': 1.0, 'loss': loss, 'equal_steps': 9, 'seconds': None,
            'model': {'size': 'nano'}, 'validation': [[9, None, loss]]}  # fmt: skip
  return json.dumps(fields | changes)


def sooner(faster, found, **asked):
  return guide.answer('sooner', faster, found, **asked)


def facts(answer, label):
  """The sentences under a label."""
  found, under = [], ''
  for each, text in answer.facts:
    under = each or under
    found += [text] if under == label else []
  return found


class EvidenceTest(parameterized.TestCase):
  def evidence(self, *lines, comparison='grid_nano.jsonl'):
    folder = Path(temp_folder(self))
    for name in evidence.COMPARISONS:
      (folder / name).write_text('')
    (folder / comparison).write_text('\n'.join(lines))
    return evidence.evidence(folder)

  def test_percent_is_seed_by_seed_against_dense(self):
    found = self.evidence(
      *(record('dense', seed, loss) for seed, loss in enumerate((1.0, 2.0, 4.0))),
      *(record('fst', seed, loss) for seed, loss in enumerate((1.1, 2.2))),
      record('s_ste', 2, None),
    )
    (fst,) = found['FST']
    for percent in fst.percent:
      self.assertAlmostEqual(percent, 10.0)
    self.assertEqual((len(fst.percent), fst.equal, list(fst.shares), fst.width), (2, 'steps', [], 64))
    self.assertEqual(found['S-STE'], [])  # diverged
    where = '2 layers of width 64, 9 steps, 2 seeds, NVIDIA H200'  # steps are as many on any device
    self.assertEqual(fst.place('a_gpu'), where)
    at_edge = dataclasses.replace(fst, own=dataclasses.replace(fst.own, edge=True, searched=4))
    for each, how in ((fst, 'at the one rate that was tried'), (at_edge, 'best at an edge of its search')):
      answer = guide.answer('quality', {'fst': 1.2}, {'FST': [each]})
      self.assertEqual(facts(answer, 'Loss'), [f"10.0% ± 0.0% above dense's after equal steps, {how} ({where})"])

  @parameterized.parameters(
    ((0.90, 0.92, 0.91), 'fst'),
    ((0.90, 1.12, 0.91), 'dense, as it is'),
    ((0.90,), 'dense, as it is'),
  )
  def test_below_dense_is_claimed_with_an_interval_only(self, losses, take):
    found = self.evidence(
      *(record('dense', seed, 1.0) for seed in range(3)), *(record('fst', s, loss) for s, loss in enumerate(losses))
    )
    self.assertEqual(guide.answer('quality', {'fst': 1.2}, found).take, take)

  def test_what_loses_time_is_not_advised(self):
    found = {'FST': [race('FST', (0.90, 0.91))]}
    self.assertStartsWith(sooner({'fst': 0.99}, found).take, 'dense, ')
    self.assertEqual(sooner({'fst': 1.01}, found).take, 'FST')

  def test_what_seeds_do_not_part_is_named_too(self):
    found = {'S-STE, FP8': [race('S-STE', (0.90, 0.92, 0.91))], 'dense, FP8': [race('FP8', (0.91, 0.93, 0.921))]}
    said = sooner({'s_ste_fp8': 1.5}, found, device='nvidia_h200')
    # The ranges overlap; seed by seed they differ by 0.0100, 0.0100 and 0.0110. Dense's loss of 1 is reached after
    # 10 + 90 / (2 - loss) seconds of 100.
    self.assertEqual(said.take, 'S-STE')
    needs = "dense's final loss after 0.93 ± 0.02 of dense's time (a race, 3 seeds, NVIDIA H200{})"
    self.assertEqual(facts(said, 'Gain')[0], needs.format(''))
    found['dense, FP8'] = [race('FP8', (0.91, 0.91, 0.921))]
    said = sooner({'s_ste_fp8': 1.5}, found, device='nvidia_h100')
    self.assertEqual((said.take, facts(said, 'Gain')[0]), ('S-STE or FP8', needs.format(', not nvidia_h100')))
    self.assertEqual(sooner({'s_ste_fp8': 0.9}, found).take, 'FP8')

  def test_dense_that_is_sooner_at_the_width_asked_about_comes_first(self):
    def why(fst, s_ste, d=768):
      found = {'FST': [fst], 'S-STE, FP8': [s_ste]}
      return facts(sooner({'fst': 1.1, 's_ste_fp8': 1.5}, found, d=d), 'Why')[0]

    # Dense falls from 2 to 1 between 10 and 100 seconds: it is at 1.4 after 64, these after 90.
    fst, s_ste = same_steps('FST', (1.5, 1.51)), same_steps('S-STE', (1.4, 1.41))
    first, none = 'dense reaches the final loss of {}, the soonest with several seeds of a race, ', 'no faster method'
    self.assertEqual(
      why(fst, s_ste, d=1024),
      first.format('S-STE') + 'in 0.71 ± 0.06 of the time that S-STE takes, and is then in mid-schedule (NVIDIA H200)',
    )
    # Not beyond seeds, surely sooner, another width that is nearer, and a race, which says itself who is sooner.
    self.assertStartsWith(why(fst, same_steps('S-STE', (1.0, 1.2), seconds=85.0)), first.format('S-STE'))
    self.assertStartsWith(why(fst, same_steps('S-STE', (1.01, 1.02), seconds=60.0)), none)
    self.assertStartsWith(why(fst, same_steps('S-STE', (1.01, 1.02), 2048, seconds=60.0)), first.format('FST'))
    # By the clock of the runs dense is later, and it may never be there.
    late = dataclasses.replace(s_ste, dense=dataclasses.replace(s_ste.dense, slower={0: 2.0, 1: 2.0}))
    never = same_steps('S-STE', (0.9, 0.95))
    for each in (late, never, same_steps('S-STE', (1.0, 1.1), seconds=95.0, equal='seconds')):
      self.assertStartsWith(why(fst, each), none)
    self.assertStartsWith(facts(sooner({'fst': 1.1}, {'FST': [fst]}), 'Why')[0], none)

  def test_a_winner_that_loses_to_a_rival_of_another_race_is_not_advised(self):
    found = {
      'S-STE, FP8': [race('S-STE', (0.90, 0.91)), race('S-STE', (0.95, 0.955, 0.96), 'b race')],
      'dense, a narrower FFN': [race('half in FP8', (0.94, 0.945, 0.95), 'b race')],
    }
    said = sooner({'s_ste_fp8': 1.5}, found, device='nvidia_h200')
    self.assertEqual(said.take, 'half in FP8')
    self.assertStartsWith(facts(said, 'Gain')[0], "dense's final loss after 0.95 ± 0.01 of dense's time (b race, 3 ")
    (other,) = facts(said, 'Else')
    self.assertStartsWith(other, "a race, 2 seeds, NVIDIA H200: S-STE had dense's final loss in 0.9")
    self.assertEndsWith(other, " of dense's time. half in FP8, which beat it elsewhere, did not run")
    found['dense, a narrower FFN'] = [race('half in FP8', (0.94, 0.957, 0.95), 'b race')]  # not parted
    said = sooner({'s_ste_fp8': 1.5}, found, device='nvidia_h200')
    self.assertEqual(said.take, 'S-STE')
    self.assertStartsWith(facts(said, 'Gain')[0], "dense's final loss after 0.92 ± 0.05 of dense's time (a race, ")
    self.assertNotIn('did not run', str(said))

  def test_the_race_of_the_nearest_width_leads_though_its_winner_loses_elsewhere(self):
    def of(width, each):
      return dataclasses.replace(each, width=width)

    found = {
      'S-STE, FP8': [
        of(2048, race('S-STE', (0.95, 0.955, 0.96), 'wide')), of(1280, race('S-STE', (0.90, 0.91), 'deep')),
      ],
      'dense, a narrower FFN': [
        of(2048, race('half in FP8', (0.94, 0.945, 0.95), 'wide')), of(1280, race('a quarter', (0.85,), 'deep')),
      ],
    }  # fmt: skip
    said = sooner({'s_ste_fp8': 1.5}, found, device='nvidia_h200', d=1024)
    self.assertEqual(said.take, 'S-STE')
    self.assertStartsWith(facts(said, 'Gain')[0].partition('(')[2], 'deep, ')
    self.assertStartsWith(facts(said, 'But')[0], 'deep: a quarter ended lowest')
    self.assertStartsWith(facts(said, 'Else')[0], 'wide, 3 seeds, NVIDIA H200: half in FP8 had ')
    self.assertNotIn('did not run', str(said))
    said = sooner({'s_ste_fp8': 1.5}, found, device='nvidia_h200', d=4096)
    self.assertEqual(said.take, 'half in FP8')
    self.assertEndsWith(facts(said, 'Else')[0], 'half in FP8, which beat it elsewhere, did not run')

  def test_a_dense_model_of_one_seed_that_ends_lower_is_named_before_other_races(self):
    small = race('small', (0.80,))
    found = {'S-STE, FP8': [race('S-STE', (0.90, 0.91))], 'a smaller dense model': [small]}
    for searched, how in ((1, ', at the one rate that was tried'), (3, '')):
      small = dataclasses.replace(small, own=dataclasses.replace(small.own, searched=searched))
      said = sooner({'s_ste_fp8': 1.5}, found | {'a smaller dense model': [small]}, device='nvidia_h200')
      share = "had dense's final loss in 0.85 of dense's time"
      self.assertEqual(facts(said, 'But'), [f'a race: small ended lowest, and {share}, by one seed{how}'])
    for other in (race('small', (0.95,)), race('small', (0.80,), 'b race')):  # behind, and elsewhere
      said = sooner({'s_ste_fp8': 1.5}, found | {'a smaller dense model': [other]})
      self.assertNotIn('small', str(said))

  def test_a_dense_rival_in_fp8_of_one_seed_is_named_where_dense_comes_first(self):
    found = {'S-STE, FP8': [same_steps('S-STE', (1.4, 1.41))], 'dense, FP8': [same_steps('FP8', (1.3,), seconds=88.0)]}
    asked = dict(d=768, device='nvidia_h200')
    said = guide.answer('sooner', {'s_ste_fp8': 1.5, 'dense_fp8': 1.1}, found, **asked)
    self.assertStartsWith(facts(said, 'Why')[0], 'dense reaches the final loss of S-STE, the soonest ')
    # Dense is at 1.3 after 73 seconds.
    self.assertEqual(
      facts(said, 'But'),
      ['a race: dense reaches the final loss of FP8 in 0.83 of the time that FP8 takes, by one seed'],
    )
    said = guide.answer('quality', {'s_ste_fp8': 1.5, 'dense_fp8': 1.1}, found, **asked)
    self.assertEqual((said.take, facts(said, 'But')), ('dense, as it is', [
      'FP8 is faster, and ended 30.0% above dense (a race, 1 seed, NVIDIA H200)',
      'S-STE is faster, for this price:',
    ]))  # fmt: skip
    self.assertEqual(said.code[0], '# If you pay this price: S-STE.')
    for goal in ('sooner', 'quality'):  # where FP8 is slower
      self.assertNotIn('FP8 ', str(guide.answer(goal, {'s_ste_fp8': 1.5, 'dense_fp8': 0.9}, found, **asked)))
    # With several seeds it is the price, and who was soonest.
    found['dense, FP8'] = [same_steps('FP8', (1.3, 1.31), seconds=88.0)]
    said = guide.answer('quality', {'dense_fp8': 1.1}, found, **asked)
    self.assertEqual(said.code[0], '# If you pay this price: FP8.')
    said = sooner({'s_ste_fp8': 1.5}, found, **asked)
    self.assertStartsWith(facts(said, 'Why')[0], 'dense reaches the final loss of FP8, the soonest ')

  def test_dense_as_it_is_has_no_code_of_its_own(self):
    self.assertEqual(guide.answer('quality', {'fst': 0.9}, {'FST': [same_steps('FST', (1.1, 1.2))]}).code, ())
    self.assertEqual(sooner({'fst': 0.9}, {'FST': [race('FST', (0.9, 0.91))]}).code, ())

  def test_a_race_of_far_wider_models_is_listed_and_not_advised(self):
    wide = dataclasses.replace(race('half', (0.90, 0.91)), width=1280)
    lower = dataclasses.replace(race('small', (0.8,)), width=1280)
    found = {'dense, a narrower FFN': [wide], 'a smaller dense model': [lower]}
    for d, take in ((640, 'half'), (2560, 'half'), (639, 'dense, as it is'), (2561, 'dense, as it is')):
      said = sooner({}, found, d=d)
      self.assertEqual(said.take, take)
      self.assertLen(facts(said, 'But'), take == 'half')
    self.assertEqual(facts(said, 'Why'), ['no race was run at a width within a factor of 2 of 2,561'])
    self.assertStartsWith(facts(said, 'Else')[0], "a race, 2 seeds, NVIDIA H200: half had dense's final loss in ")
    # Nor is what dense did beside models of far other widths.
    found = {'FST': [same_steps('FST', (1.5, 1.51))]}
    self.assertIn('mid-schedule', str(sooner({'fst': 1.1}, found, d=1536)))
    self.assertNotIn('mid-schedule', str(sooner({'fst': 1.1}, found, d=1537)))

  def test_a_narrower_block_has_the_gain_of_its_own_width(self):
    found = {'S-STE, FP8': [race('half S-STE', (0.90, 0.91))]}
    faster = {'s_ste_fp8': 1.5, 'half_ffn_s_ste_fp8_all': 2.9}
    said = sooner(faster, found, hidden=8192)
    self.assertEqual(
      facts(said, 'Gain')[1], 'a feed-forward block of hidden width 4,096 2.90 times as fast as dense of 8,192'
    )
    # Whether sparse pays is asked of blocks of one width.
    self.assertEqual(sooner(faster | {'s_ste_fp8': 0.9}, found).take, 'dense, as it is')
    sizes = dict(tokens=16384, gated=False, device='nvidia_h200')
    gains = guide.gains(d=2048, hidden=8192, **sizes)
    recipe = s24.recipes.KNOWN['s_ste_fp8'].example('.*')
    full, half = (s24.block_gain(2048, hidden, recipe, **sizes) for hidden in (8192, 4096))
    for name, ms in (
      ('s_ste_fp8_all', full.expected_ms), ('half_ffn_s_ste_fp8_all', half.expected_ms),
      ('dense_fp8', full.dense_fp8_ms), ('half_ffn', half.dense_ms), ('half_ffn_fp8', half.dense_fp8_ms),
    ):  # fmt: skip
      self.assertAlmostEqual(gains[name] or 0.0, full.dense_ms / ms)
    self.assertNotIn('dense_124m', gains)
    simulated = dataclasses.replace(full, simulated='no FP8 here')
    with mock.patch.object(guide, 'block_gain', lambda *args, **kwargs: simulated):
      self.assertIsNone(guide.gains(d=2048, hidden=8192, **sizes)['dense_fp8'])

  def test_code_says_whose_it_is_where_two_may_be_first(self):
    found = {'S-STE, FP8': [race('S-STE', (0.90, 0.92, 0.91))], 'dense, FP8': [race('FP8', (0.91, 0.91, 0.921))]}
    self.assertEqual(sooner({'s_ste_fp8': 1.5}, found).code[0], '# Of S-STE.')
    del found['dense, FP8']
    self.assertStartsWith(sooner({'s_ste_fp8': 1.5}, found).code[0], '# Once.')

  def test_what_has_another_dense_rival_is_in_its_own_answer_alone(self):
    relu2 = {'dense_relu2': 1.0, 'neuron_level': 1.02, 'half_ffn_relu2': 1.01}
    equal = {'dense_small': 1.0, 'static': 0.97, 'mixed_sparsity': 1.06}
    found = self.evidence(
      *(record(name, seed, loss) for name, loss in relu2.items() for seed in range(3)),
      *(record(name, seed, loss, experiment='tiny') for name, loss in equal.items() for seed in range(3)),
    )
    where = '2 layers of width 64, 9 steps, 3 seeds, NVIDIA H200'
    said = guide.answer('squared_relu', {'neuron_level': 1.5, 'neuron_level_128': None}, found)
    block = 'a feed-forward block of the size asked about'
    self.assertEqual(said.take, 'dense, squared ReLU, as it is')
    self.assertEqual(facts(said, 'Gain'), [
      f'64:2:8, two of four tokens: {block} 1.50 times as fast as dense',
      f'128:2:8, two of four tokens: {block} is not known to be faster',
    ])  # fmt: skip
    one = ', at the one rate that was tried'
    losses = f"neuron_level: 2.0% ± 0.0% above dense's{one}; half_ffn_relu2: 1.0% ± 0.0% above dense's{one} ({where})"
    self.assertEqual(facts(said, 'Loss'), [losses])
    for d, take in ((64, 'static'), (2048, 'static, by models of width 64 alone')):
      said = guide.answer('flops', {}, found, d=d)
      self.assertEqual(said.take, take)
      self.assertIn(f"mixed_sparsity 6.0% ± 0.0% above dense's{one} (dense is half as wide, ", facts(said, 'Loss')[0])
    for goal in ('sooner', 'quality', 'sparse'):
      self.assertNotRegex(str(guide.answer(goal, {}, found, d=64)), 'static|mixed|neuron|relu2')

  def test_sparse_activations_that_end_below_dense_are_what_to_take(self):
    ends = {'dense_relu2': 1.0, 'neuron_level': 0.98}
    found = self.evidence(*(record(name, seed, loss) for name, loss in ends.items() for seed in range(2)))
    self.assertEqual(guide.answer('squared_relu', {}, found).take, 'neuron_level')

  def test_what_dense_squared_relu_needs_of_the_time_is_said(self):
    own, dense = seeds_of('V:N:M', (1.4, 1.4)), seeds_of('dense', (1.0, 1.0))
    e = evidence.Evidence(
      evidence.NAMES['neuron_level'], 'neuron_level', own, dense, 'a race', 'NVIDIA H200', 'steps',
      against='dense_relu2',
    )  # fmt: skip
    (why,) = facts(guide.answer('squared_relu', {}, {'neuron level': [e]}), 'Why')
    self.assertStartsWith(why, 'dense reaches the final loss of V:N:M in 0.64 ± 0.00 of the time that this takes')

  def test_a_race_without_dense_in_16_bits_names_who_ended_lowest(self):
    def of(name, *losses):
      changes = dict(equal_steps=None, seconds=100.0)
      return [record(name, seed, loss, **changes, validation=[[1, 10, 2.0], [9, 100, loss]])
              for seed, loss in enumerate(losses)]  # fmt: skip

    faster = {'s_ste_fp8': 1.5, 'eighth_ffn_fp8': 2.0}
    lines = [*of('dense_fp8', 1.2), *of('eighth_ffn_s_ste_fp8_all', 1.0, 1.0, 1.0)]
    for rival, names in (((1.01, 1.01, 1.01), ''), ((1.01, 0.99, 1.01), ' or eighth_ffn_fp8')):
      found = self.evidence(*lines, *of('eighth_ffn_fp8', *rival))
      said = sooner(faster, found, d=64)
      where = '2 layers of width 64, 100 s, 3 seeds, NVIDIA H200, without dense in 16 bits: '
      self.assertEqual(facts(said, 'Else'), [f'{where}eighth_ffn_s_ste_fp8_all{names} ended lowest'])
      self.assertEqual((said.take, facts(sooner(faster, found, d=1024), 'Else')), ('dense, as it is', []))

  def test_runs_whose_dense_end_is_another_today_are_in_tables_alone(self):
    past = f'fst_fp8_all{table.IN_16_BITS}'
    found = self.evidence(*(record(name, s, loss) for name, loss in (('dense', 1.0), (past, 0.9)) for s in range(2)))
    self.assertLen(found['FST, FP8, dense end in 16 bits'], 1)
    self.assertEqual(guide.answer('quality', {'fst_fp8': 1.5}, found).take, 'dense, as it is')

  def test_sparse_weights_are_chosen_by_loss_where_none_is_known_to_be_faster(self):
    found = {
      'S-STE': [same_steps('plain S-STE', (1.03, 1.04))],
      'SR-STE': [same_steps('SR-STE', (1.01, 1.02)), same_steps('SR-STE', (1.09, 1.09), width=64)],
    }
    for faster in ({}, {'s_ste': 0.9}, {'s_ste': None, 'sr_ste': 0.8}):
      self.assertEqual(guide.answer('sparse', faster, found, d=768).take, 'SR-STE')
      self.assertEqual(guide.answer('sparse', faster | {'s_ste': 1.1}, found, d=768).take, 'plain S-STE')

  def test_sparse_weights_have_their_gain_and_loss_or_that_it_is_unknown(self):
    faster = {'s_ste': 1.1, 's_ste_fp8': 1.2}
    said = guide.answer('sparse', faster, {'S-STE, FP8': [race('S-STE', (0.9, 0.91))]})  # of equal seconds
    self.assertEqual((said.take, facts(said, 'Loss')), ('S-STE, FP8', ['no tuned comparison was recorded']))
    self.assertEqual(guide.answer('sparse', {'s_ste': 0.8}, {}).take, 'S-STE')
    ends = {'dense': 1.0, 's_ste': 1.03, 'sr_ste': 1.01, 'fst': 1.001}  # the last has no zeros at the end
    found = self.evidence(*(record(name, seed, loss) for name, loss in ends.items() for seed in range(3)))
    said = guide.answer('sparse', {'s_ste': 1.1, 'fst': 1.5}, found)
    where = '(2 layers of width 64, 9 steps, 3 seeds, NVIDIA H200)'
    self.assertEqual(
      (said.take, facts(said, 'Gain'), facts(said, 'Loss')),
      ('s_ste', ['a feed-forward block of the size asked about 1.10 times as fast as dense'],
       [f"3.0% ± 0.0% above dense's after equal steps, at the one rate that was tried {where}"]),
    )  # fmt: skip


class CodeTest(parameterized.TestCase):
  """What is pasted trains by the recipe of the contender whose figures stand beside it."""

  @parameterized.parameters(
    *(name for option in evidence.OPTIONS if option.recipe and not option.only for name in option.contenders),
    'dense_fp8', 'quarter_ffn_fp8', 'dense_124m_fp8',
  )  # fmt: skip
  def test_runs(self, contender):
    where = 'was the only one tried for 48 layers of width 1,600, 4,800 steps'
    lines = guide_code.code(contender, rate=2e-3, decay=2e-5, hidden=64, found=where, schedule=(0.2, 0.1))
    kernel = jnp.asarray(gaussian(0, (16, 64)))
    params = {'h_0': {part: {'up': {'kernel': kernel}} for part in ('mlp', 'attn')}}

    def loss_fn(params, tokens):
      return sum((tokens @ part['up']['kernel']).sum() for part in params['h_0'].values())

    names: dict[str, Any] = dict(
      jax=jax, optax=optax, s24=s24, loss_fn=loss_fn, params=params, tokens=jnp.ones((8, 16)),
      key=jax.random.key(0), steps=10,
    )  # fmt: skip
    once, _, each = '\n'.join(lines).partition('# In each step')
    exec(once, names)
    for step in (0, 9):  # in the first and the last phase
      names['step'] = step
      exec(f'#{each}', names)
    self.assertLessEqual(max(map(len, lines)), 96)
    self.assertIn(f'# The peak {where}: search your own.', lines)
    self.assertEqual(jax.tree.map(jnp.shape, names['grads']), jax.tree.map(jnp.shape, params))
    self.assertFalse(np.array_equal(names['params']['h_0']['mlp']['up']['kernel'], kernel))
    counts = [int(count) for _, count in optax.tree.get_all_with_path(names['opt_state'], 'count')]
    self.assertContainsSubset([2], counts)  # no step makes the state anew
    for step, rate in ((1, 1e-3), (2, 2e-3), (10, 2e-4)):
      self.assertAlmostEqual(float(names['rate'](step)), rate)
    if contender in CONTENDERS and evidence.NAMES[contender].recipe:
      made = CONTENDERS[contender].make(2e-5, 1000)
      (own,), (theirs,) = names['recipe'].describe()['rules'], made.describe()['rules']
      self.assertEqual(own | {'path': ''}, theirs | {'path': ''})
      self.assertEqual(names['recipe'].phases, made.phases)
      self.assertEqual(len(names['recipe'].weights), 2 if 'attn' in theirs['path'] else 1)

  def test_a_dense_model_in_its_own_dtype_needs_none(self):
    self.assertEmpty(guide_code.code('half_ffn', rate=1e-3, decay=0.0, found=''))

  @parameterized.parameters(
    ('half_ffn_fp8', '# The model: hidden layers of 4,096 in place of 8,196.'),
    ('quarter_ffn_s_ste_fp8_all', '# The model: hidden layers of 2,048 in place of 8,196.'),
    ('dense_124m', '# The model: 12 layers of width 768, hidden layers of 3,072.'),
    ('dense_124m_fp8', '# The model: 12 layers of width 768, hidden layers of 3,072.'),
    ('dense_fp8', '# Once.'),
  )
  def test_a_model_other_than_that_asked_about_is_named(self, contender, line):
    self.assertEqual(guide_code.code(contender, rate=1e-3, decay=0.0, found='is a guess', hidden=8196)[0], line)

  def test_the_optimizer_is_that_of_the_comparisons(self):
    for name in evidence.COMPARISONS:
      record = json.loads((provenance.RESULTS / name).read_text().partition('\n')[0])
      its = record.get('optimizer', {'b1': 0.9, 'b2': 0.95, 'eps': 1e-8, 'clip': 1.0, 'weight_decay': 0.1})
      self.assertEqual((its['b1'], its['b2'], its['eps']), (programs.B1, programs.B2, programs.EPS))
      self.assertEqual((its['clip'], its['weight_decay']), (programs.CLIP, programs.WEIGHT_DECAY))
    schedules = {e.where: e.schedule for each in evidence.evidence().values() for e in each}
    self.assertEqual(schedules['2 layers of width 64, 4,000 steps'], (0.025, 0.0))
    self.assertEqual(schedules['6 layers of width 384, 900 steps'], (100 / 900, 0.1))
    self.assertEqual(schedules['36 layers of width 1,280, 300 s'], (trials.WARM_UP, trials.LAST_RATE))


def seeds_of(who, losses):
  """Runs that fall on a line, from 2 after 10 seconds to their loss after 100."""
  curves = {seed: [(10.0, 2.0), (100.0, loss)] for seed, loss in enumerate(losses)}
  return table.Seeds(who, 1e-3, 0.0, 3, False, False, dict(enumerate(losses)), curves, ())


def race(who, losses, where='a race'):
  dense, name = seeds_of('dense', (1.0,) * len(losses)), CALLED[who]
  return evidence.Evidence(evidence.NAMES[name], name, seeds_of(who, losses), dense, where, 'NVIDIA H200', 'seconds')


def same_steps(who, losses, width=768, seconds=90.0, equal='steps'):
  """Runs of equal steps that fall to their loss from half of the seconds on."""
  curves = {seed: [(0.5 * seconds, 2.0), (seconds, loss)] for seed, loss in enumerate(losses)}
  own = dataclasses.replace(race(who, losses).own, curves=curves)
  return dataclasses.replace(race(who, losses), own=own, equal=equal, width=width)


class CommandTest(parameterized.TestCase):

  def said(self, *arguments):
    """What the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
      self.assertEqual(cli.main(list(arguments)), 0)
    self.assertLessEqual(max(map(len, out.getvalue().splitlines())), 100)
    return out.getvalue()

  def test_code_of_several_answers_stands_once(self):
    answer = guide.answer

    def of_one_code(*args, **kwargs):
      return dataclasses.replace(answer(*args, **kwargs), code=['# Once.', 'recipe'])

    with mock.patch.object(guide, 'answer', of_one_code):
      said = self.said('guide', '--tokens', '32768', '--d', '2048', '--hidden', '8192', '--device', 'nvidia_h200')
    first, *others = guide.QUESTIONS.values()
    self.assertEqual(said.count('\n    # Once.\n'), 1)
    self.assertEqual(said.count(f'\n    # As under "{first}"\n'), len(others))

  def test_on_a_gpu_with_records(self):
    arguments = ['guide', '--tokens', '32768', '--d', '2048', '--hidden', '8192', '--device', 'nvidia_h200']
    said = self.said(*arguments)
    for question in guide.QUESTIONS.values():
      self.assertIn(f'\n\n{question}\n\nTake  ', said)
    self.assertRegex(said, r'\n  S-STE, FP8 +\d\.\d\d\n')
    self.assertNotRegex(said, 'not nvidia|wide2048|rotary_qk|774m')
    self.assertRegex(said, r'\n  neuron level, 128:2:8, two of four tokens +1\.\d\d\n')
    self.assertRegex(said, r'\n  FST, FP8, all linear layers, dense end in 16 bits\*? +0\.76 ± 0\.01')
    self.assertIn('a sparse step 1.14 times (1.13 to 1.14; 24 layers of width 2,048', ' '.join(said.split()))
    said = self.said(*arguments[:-1], 'h100', '--goal', 'sooner')
    self.assertEqual(said.count('Take  '), 1)
    self.assertIn(
      '\nTake  S-STE, FP8, all linear layers, FFN half as wide or dense, FFN half as wide, in FP8\n', said
    )
    # Who ended lowest where it ran is what to take, with those that the seeds do not part from it.
    self.assertRegex(said, r'\n  dense, all linear layers in FP8 +0\.71 ± 0\.04  0\.74 ± 0\.10  -6\.0% ± 1\.1%\n')
    self.assertRegex(said, r'\n  dense, FFN half as wide, in FP8 +0\.65 ± 0\.25  0\.89 ± 0\.01  -7\.5% ± 8\.8%\n')
    self.assertRegex(said, r'\n  FST +1\.\d\d  1\.\d\d to 1\.\d\d  48 layers of width 1,600, H200\n')
    self.assertIn('not nvidia_h100', said)
    said = self.said(*arguments[:-1], 'h100', '--goal', 'quality')
    self.assertIn('48 layers of width 1,600, NVIDIA H200, not\n      nvidia_h100_80gb_hbm3)', said)
    arguments[2:7:2] = '16384', '1280', '5120'  # a narrower dense model won this race
    said = ' '.join(self.said(*arguments).split())
    self.assertIn(' Take dense, FFN a quarter as wide, in FP8 Gain ', said)
    self.assertIn(
      "dense, 124M (85M on bytes) ended lowest, and had dense's final loss in 0.53 of dense's time, by one seed, at the"
      ' one rate that was tried', said,
    )
    with contextlib.redirect_stderr(io.StringIO()) as err:
      self.assertEqual(cli.main([*arguments[:-1], 'abacus']), 1)
    self.assertIn("nothing was measured on 'abacus'; pass --device, one of nvidia_h100", err.getvalue())

  @pytest.mark.slow
  def test_of_one_goal_the_tables_have_what_its_answer_rests_on(self):
    size = ['guide', '--tokens', '32768', '--d', '2048', '--hidden', '8192', '--device', 'h200', '--goal']
    said = {goal: self.said(*size, goal).partition('What this rests on')[2] for goal in guide.QUESTIONS}
    self.assertIn('\n  MST  ', said['flops'])
    self.assertNotRegex(said['flops'], 'neuron level|S-STE')
    self.assertNotRegex(said['squared_relu'], 'MST|S-STE')
    self.assertNotRegex(said['quality'], 'MST|neuron level')

  def test_of_a_narrow_model_nothing_is_advised_from_wide_ones(self):
    said = self.said('guide', '--tokens', '16384', '--d', '64', '--hidden', '256', '--device', 'h200')
    self.assertIn('Take  dense, as it is\nWhy   no race was run at a width within a factor of 2 of 64\nElse  36 ', said)
    self.assertIn('Take  SR-STE, decay on weights\n', said)

  @parameterized.parameters(
    ('--d', '-768', '--d is -768, and must be a positive multiple of 4'),
    ('--d', '770', '--d is 770, and must be a positive multiple of 4'),
    ('--hidden', '3078', '--hidden is 3078, and must be a positive multiple of 4'),
    ('--tokens', '0', '--tokens is 0, and must be positive'),
  )
  def test_a_size_that_no_recipe_takes_is_told_by_its_option(self, option, value, message):
    arguments = {'--tokens': '16384', '--d': '768', '--hidden': '3072', '--device': 'h200'} | {option: value}
    with contextlib.redirect_stderr(io.StringIO()) as err:
      self.assertEqual(cli.main(['guide', *(word for pair in arguments.items() for word in pair)]), 1)
    self.assertStartsWith(err.getvalue(), f'error: {message}')

  def test_what_the_command_line_says_again_without_imports(self):
    parser = arguments.make_parser()
    for goal in guide.QUESTIONS:
      parser.parse_args(['guide', '--tokens=1', '--d=4', '--hidden=4', f'--goal={goal}'])
    with contextlib.redirect_stdout(io.StringIO()) as out, self.assertRaises(SystemExit):
      parser.parse_args(['tune-decay', '--help'])
    self.assertIn(f'steps of a run, as a share (default: {decays.SHARE:g})', ' '.join(out.getvalue().split()))


class StepsTest(absltest.TestCase):

  def test_sessions_make_one_range_and_the_gpu_asked_about_comes_first(self):
    def session(device, ms, processes=3):
      def best(ms, **beside):
        record = {'label': 'FST', 'shape': {'d': 768, 'layers': 12}}
        return best_steps.Best(ms, 0.9 * ms, 1.1 * ms, 'unrolled', {}, record, processes, beside)
      # A newer dense is of another session.
      return {(device, '124m'): {'dense': best(300.0), 'fst': best(ms, dense=best(100.0))}}

    sessions = [session('NVIDIA H200', 80.0), session('NVIDIA H100 80GB HBM3', 50.0), session('NVIDIA H200', 100.0)]
    sessions.append(session('NVIDIA H200', 10.0, processes=2))  # which settle nothing
    step = evidence.steps(768, sessions, 'nvidia_h200')['fst']
    self.assertAlmostEqual(step.times, 1.125)
    self.assertAlmostEqual(step.least, 90 / 110)
    self.assertAlmostEqual(step.most, 110 / 72)
    self.assertEqual((step.where, step.device), ('12 layers of width 768', 'NVIDIA H200'))
    self.assertAlmostEqual(evidence.steps(768, sessions, 'nvidia_h100_80gb_hbm3')['fst'].times, 2.0)


if __name__ == '__main__':
  absltest.main()
