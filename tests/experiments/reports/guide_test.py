"""`python -m experiments guide`: what it says follows from records."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import optax

from experiments import __main__ as cli
from experiments.race.contenders import CONTENDERS
from experiments.reports import evidence, guide, guide_code
from experiments.reports import race_table as table
import sparse24_jax as s24
from tests.draws import gaussian
from tests.experiments.fakes import temp_folder

OPTIONS = {option.title: option for option in evidence.OPTIONS}


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
  def evidence(self, *lines):
    folder = Path(temp_folder(self))
    for name in evidence.COMPARISONS:
      (folder / name).write_text('')
    (folder / evidence.COMPARISONS[0]).write_text('\n'.join(lines))
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
    for each, how in ((fst, 'its rate not searched'), (at_edge, 'best at an edge of its search')):
      answer = guide.answer('quality', {'FST': 1.2}, {'FST': [each]})
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
    self.assertEqual(guide.answer('quality', {'FST': 1.2}, found).take, take)

  def test_what_loses_time_is_not_advised(self):
    found = {'FST': [race('FST', (0.90, 0.91))]}
    self.assertStartsWith(sooner({'FST': 0.99}, found).take, 'dense, ')
    self.assertEqual(sooner({'FST': 1.01}, found).take, 'FST')

  def test_what_seeds_do_not_part_is_named_too(self):
    found = {'S-STE, FP8': [race('S-STE', (0.90, 0.92, 0.91))], 'dense, FP8': [race('FP8', (0.91, 0.93, 0.921))]}
    said = sooner({'S-STE, FP8': 1.5}, found, device='nvidia_h200')
    # The ranges overlap; seed by seed they differ by 0.0100, 0.0100 and 0.0110. Dense's loss of 1 is reached after
    # 10 + 90 / (2 - loss) seconds of 100.
    self.assertEqual(said.take, 'S-STE')
    needs = "dense's final loss after 0.93 ± 0.02 of dense's time (a race, 3 seeds, NVIDIA H200{})"
    self.assertEqual(facts(said, 'Gain')[0], needs.format(''))
    found['dense, FP8'] = [race('FP8', (0.91, 0.91, 0.921))]
    said = sooner({'S-STE, FP8': 1.5}, found, device='nvidia_h100')
    self.assertEqual((said.take, facts(said, 'Gain')[0]), ('S-STE or FP8', needs.format(', not nvidia_h100')))
    self.assertEqual(sooner({'S-STE, FP8': 0.9}, found).take, 'FP8')

  def test_dense_that_is_sooner_at_the_width_asked_about_comes_first(self):
    def same_steps(name, losses, width=768, seconds=90.0, equal='steps'):
      curves = {seed: [(0.5 * seconds, 2.0), (seconds, loss)] for seed, loss in enumerate(losses)}
      return dataclasses.replace(
        race(name, losses), own=dataclasses.replace(race(name, losses).own, curves=curves), equal=equal, width=width
      )  # fmt: skip

    def why(fst, s_ste, d=768):
      found = {'FST': [fst], 'S-STE, FP8': [s_ste]}
      return facts(sooner({'FST': 1.1, 'S-STE, FP8': 1.5}, found, d=d), 'Why')[0]

    # Dense falls from 2 to 1 between 10 and 100 seconds: it is at 1.4 after 64, these after 90.
    fst, s_ste = same_steps('FST', (1.5, 1.51)), same_steps('S-STE', (1.4, 1.41))
    first, none = 'it has the final loss of {}, the soonest sparse model at a race, ', 'no faster method was shown'
    self.assertEqual(
      why(fst, s_ste, d=1024),
      first.format('S-STE') + 'after 0.71 ± 0.06 of its time, and is then in mid-schedule (NVIDIA H200)',
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
    self.assertStartsWith(facts(sooner({'FST': 1.1}, {'FST': [fst]}), 'Why')[0], none)

  def test_a_winner_that_loses_to_a_rival_of_another_race_is_not_advised(self):
    found = {
      'S-STE, FP8': [race('S-STE', (0.90, 0.91)), race('S-STE', (0.95, 0.955, 0.96), 'b race')],
      'dense, a narrower FFN': [race('half in FP8', (0.94, 0.945, 0.95), 'b race')],
    }
    said = sooner({'S-STE, FP8': 1.5}, found, device='nvidia_h200')
    self.assertEqual(said.take, 'half in FP8')
    self.assertStartsWith(facts(said, 'Gain')[0], "dense's final loss after 0.95 ± 0.01 of dense's time (b race, 3 ")
    (other,) = facts(said, 'Else')
    self.assertStartsWith(other, 'a race, 2 seeds, NVIDIA H200: S-STE, 0.9')
    self.assertEndsWith(other, " of dense's time. half in FP8, which beat it elsewhere, did not run")
    found['dense, a narrower FFN'] = [race('half in FP8', (0.94, 0.957, 0.95), 'b race')]  # not parted
    said = sooner({'S-STE, FP8': 1.5}, found, device='nvidia_h200')
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
    said = sooner({'S-STE, FP8': 1.5}, found, device='nvidia_h200', d=1024)
    self.assertEqual(said.take, 'S-STE')
    self.assertStartsWith(facts(said, 'Gain')[0].partition('(')[2], 'deep, ')
    self.assertStartsWith(facts(said, 'But')[0], 'deep: a quarter ended lowest')
    self.assertStartsWith(facts(said, 'Else')[0], 'wide, 3 seeds, NVIDIA H200: half in FP8, ')
    self.assertNotIn('did not run', str(said))
    said = sooner({'S-STE, FP8': 1.5}, found, device='nvidia_h200', d=4096)
    self.assertEqual(said.take, 'half in FP8')
    self.assertEndsWith(facts(said, 'Else')[0], 'half in FP8, which beat it elsewhere, did not run')

  def test_a_dense_model_of_one_seed_that_ends_lower_is_named_before_other_races(self):
    small = race('small', (0.80,))
    found = {'S-STE, FP8': [race('S-STE', (0.90, 0.91))], 'a smaller dense model': [small]}
    for searched, how in ((1, ', its rate not searched'), (3, '')):
      small = dataclasses.replace(small, own=dataclasses.replace(small.own, searched=searched))
      said = sooner({'S-STE, FP8': 1.5}, found | {'a smaller dense model': [small]}, device='nvidia_h200')
      self.assertEqual(facts(said, 'But'), [f"a race: small ended lowest, 0.85 of dense's time, with one seed{how}"])
    for other in (race('small', (0.95,)), race('small', (0.80,), 'b race')):  # behind, and elsewhere
      said = sooner({'S-STE, FP8': 1.5}, found | {'a smaller dense model': [other]})
      self.assertNotIn('small', str(said))

  def test_sparse_weights_have_their_gain_and_loss_or_that_it_is_unknown(self):
    faster = {'S-STE': 1.1, 'S-STE, FP8': 1.2}
    said = guide.answer('sparse', faster, {'S-STE, FP8': [race('S-STE', (0.9, 0.91))]})  # of equal seconds
    self.assertEqual((said.take, facts(said, 'Loss')), ('S-STE, FP8', ['no tuned comparison was recorded']))
    self.assertEqual(guide.answer('sparse', {'S-STE': 0.8}, {}).take, 'S-STE')
    ends = {'dense': 1.0, 's_ste': 1.03, 'sr_ste': 1.01, 'fst': 1.001}  # the last has no zeros at the end
    found = self.evidence(*(record(name, seed, loss) for name, loss in ends.items() for seed in range(3)))
    said = guide.answer('sparse', {'S-STE': 1.1, 'FST': 1.5}, found)
    where = '(2 layers of width 64, 9 steps, 3 seeds, NVIDIA H200)'
    self.assertEqual(
      (said.take, facts(said, 'Gain'), facts(said, 'Loss')),
      ('s_ste', ['a feed-forward block 1.10 times as fast as dense, at the size asked about'],
       [f"3.0% ± 0.0% above dense's after equal steps, its rate not searched {where}"]),
    )  # fmt: skip


class CodeTest(parameterized.TestCase):
  """What is pasted trains by the recipe of the contender whose figures stand beside it."""

  @parameterized.parameters(
    *((option.title, name) for option in evidence.OPTIONS if option.recipe for name in option.contenders),
    ('dense, FP8', 'dense_fp8'), ('dense, a narrower FFN', 'quarter_ffn_fp8'),
  )  # fmt: skip
  def test_runs(self, title, contender):
    lines = guide_code.code(OPTIONS[title], contender, rate=1e-3, decay=2e-5, hidden=64)
    kernel = jnp.asarray(gaussian(0, (16, 64)))
    params = {'h_0': {part: {'up': {'kernel': kernel}} for part in ('mlp', 'attn')}}

    def loss_fn(params, tokens):
      return sum((tokens @ part['up']['kernel']).sum() for part in params['h_0'].values())

    names = dict(jax=jax, optax=optax, s24=s24, loss_fn=loss_fn, params=params, tokens=jnp.ones((8, 16)),
                 key=jax.random.key(0), step=0, steps=10)  # fmt: skip
    exec('\n'.join(lines), names)
    self.assertLessEqual(max(map(len, lines)), 96)
    self.assertEqual(lines[0].startswith('#'), '_ffn' in contender)
    self.assertEqual(jax.tree.map(jnp.shape, names['grads']), jax.tree.map(jnp.shape, params))
    if contender in CONTENDERS and OPTIONS[title].recipe:
      made = CONTENDERS[contender].make(2e-5, 1000)
      (own,), (theirs,) = names['recipe'].describe()['rules'], made.describe()['rules']
      self.assertEqual(own | {'path': ''}, theirs | {'path': ''})
      self.assertEqual(names['recipe'].phases, made.phases)
      self.assertEqual(len(names['recipe'].weights), 2 if 'attn' in theirs['path'] else 1)

  def test_a_dense_model_in_its_own_dtype_needs_none(self):
    self.assertEmpty(guide_code.code(OPTIONS['a smaller dense model'], 'dense_124m', rate=1e-3, decay=0.0))


def seeds_of(who, losses):
  """Runs that fall on a line, from 2 after 10 seconds to their loss after 100."""
  curves = {seed: [(10.0, 2.0), (100.0, loss)] for seed, loss in enumerate(losses)}
  return table.Seeds(who, 1e-3, 0.0, 3, False, False, dict(enumerate(losses)), curves, ())


def race(who, losses, where='a race'):
  dense = seeds_of('dense', (1.0,) * len(losses))
  option = OPTIONS['S-STE, FP8']
  return evidence.Evidence(option, who, seeds_of(who, losses), dense, where, 'NVIDIA H200', 'seconds')


class CommandTest(absltest.TestCase):

  def said(self, *arguments):
    """What the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
      self.assertEqual(cli.main(list(arguments)), 0)
    self.assertLessEqual(max(map(len, out.getvalue().splitlines())), 100)
    return out.getvalue()

  def test_on_a_gpu_with_records(self):
    arguments = ['guide', '--tokens', '32768', '--d', '2048', '--hidden', '8192', '--device', 'nvidia_h200']
    said = self.said(*arguments)
    for question in guide.QUESTIONS.values():
      self.assertIn(f'\n\n{question}\n\nTake  ', said)
    self.assertRegex(said, r'\n  S-STE, FP8  \d\.\d\d\n')
    self.assertNotRegex(said, 'another GPU|wide2048|rotary_qk|774m')
    said = self.said(*arguments[:-1], 'h100', '--goal', 'sooner')
    self.assertEqual(said.count('Take  '), 1)
    self.assertIn('\nTake  S-STE, FP8, all linear layers, FFN half as wide\n', said)
    # The shares are those of docs/quality.md, and who ended lowest where it ran is what to take.
    self.assertRegex(said, r'\n  dense, all linear layers in FP8  0\.71 ± 0\.04  0\.88 ± 0\.01  -6\.0% ± 1\.1%\n')
    self.assertRegex(said, r'\n  dense, FFN half as wide, in FP8 +0\.65 ± 0\.25  0\.89 ± 0\.01  -7\.5% ± 8\.8%\n')
    self.assertRegex(said, r'\n  FST +1\.\d\d  1\.\d\d to 1\.\d\d  48 layers of width 1,600, NVIDIA H200\n')
    self.assertIn('not nvidia_h100', said)
    arguments[2:7:2] = '16384', '1280', '5120'  # a narrower dense model won this race
    said = ' '.join(self.said(*arguments).split())
    self.assertIn(' Take dense, FFN a quarter as wide, in FP8 Gain ', said)
    self.assertIn(
      "dense, 124M (85M on bytes) ended lowest, 0.53 of dense's time, with one seed, its rate not searched", said
    )
    with contextlib.redirect_stderr(io.StringIO()) as err:
      self.assertEqual(cli.main([*arguments[:-1], 'abacus']), 1)
    self.assertIn("nothing was measured on 'abacus'; pass --device, one of nvidia_h100", err.getvalue())


if __name__ == '__main__':
  absltest.main()
