"""`python -m experiments guide`: what it says follows from records."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path

from absl.testing import absltest, parameterized

from experiments import __main__ as cli
from experiments.reports import guide
from experiments.reports import race_table as table
from tests.experiments.fakes import temp_folder


def record(contender, seed, loss, **changes):
  fields = {'experiment': 'nano', 'contender': contender, 'title': contender, 'rate': 1e-3, 'decay': 0.0, 'seed': seed,
            'device': '1 x NVIDIA H200', 'share': 1.0, 'loss': loss, 'equal_steps': 9, 'seconds': None,
            'validation': [[9, None, loss]]}  # fmt: skip
  return json.dumps(fields | changes)


class EvidenceTest(parameterized.TestCase):
  def evidence(self, *lines):
    folder = Path(temp_folder(self))
    for name in guide.COMPARISONS:
      (folder / name).write_text('')
    (folder / guide.COMPARISONS[0]).write_text('\n'.join(lines))
    return guide.evidence(folder)

  def test_percent_is_seed_by_seed_against_dense(self):
    found = self.evidence(
      *(record('dense', seed, loss) for seed, loss in enumerate((1.0, 2.0, 4.0))),
      *(record('fst', seed, loss) for seed, loss in enumerate((1.1, 2.2))),
      record('s_ste', 2, None),
    )
    (fst,) = found['FST']
    for percent in fst.percent:
      self.assertAlmostEqual(percent, 10.0)
    self.assertEqual((len(fst.percent), fst.equal, list(fst.shares)), (2, 'steps', []))
    where = 'fst, its rate not searched: nano, 9 steps each, on NVIDIA H200'  # steps are as many on any device
    self.assertEqual(fst.said('a_gpu'), f"After equal steps its loss is 10.0% ± 0.0% above dense's. ({where})")
    self.assertEqual(found['S-STE'], [])  # diverged
    at_edge = dataclasses.replace(fst, own=dataclasses.replace(fst.own, edge=True, searched=4))
    self.assertEndsWith(at_edge.said(), '(fst, best at an edge of its search: nano, 9 steps each, on NVIDIA H200)')

  @parameterized.parameters(
    ((0.90, 0.92, 0.91), 'fst: below dense by more than its interval.'),
    ((0.90, 1.12, 0.91), 'dense: no recipe was shown to end below it.'),
    ((0.90,), 'dense: no recipe was shown to end below it.'),
  )
  def test_below_dense_is_claimed_with_an_interval_only(self, losses, said):
    found = self.evidence(
      *(record('dense', seed, 1.0) for seed in range(3)), *(record('fst', s, loss) for s, loss in enumerate(losses))
    )
    self.assertStartsWith(guide.advise('quality', {'FST': 1.2}, found), said)

  def test_what_loses_time_is_not_advised(self):
    found = {'FST': [race('FST', (0.90, 0.91))]}
    self.assertStartsWith(guide.advise('sooner', {'FST': 0.99}, found), 'dense: ')
    self.assertStartsWith(guide.advise('sooner', {'FST': 1.01}, found), 'FST: ')

  def test_what_seeds_do_not_part_is_named_too(self):
    found = {'S-STE, FP8': [race('S-STE', (0.90, 0.92, 0.91))], 'dense, FP8': [race('FP8', (0.91, 0.93, 0.921))]}
    said = guide.advise('sooner', {'S-STE, FP8': 1.5}, found, 'nvidia_h200')
    # The ranges overlap; seed by seed they differ by 0.0100, 0.0100 and 0.0110. Dense's loss of 1 is reached after
    # 10 + 90 / (2 - loss) seconds of 100.
    needs = "S-STE: it needs 0.93 ± 0.02 of dense's time to dense's final loss (a race, on NVIDIA H200).\n- "
    self.assertStartsWith(said, needs)
    self.assertIn('seconds:\n- S-STE beats FP8: its loss is 0.0103 ± 0.0014 lower. It needs 0.99 ', said)
    found['dense, FP8'] = [race('FP8', (0.91, 0.91, 0.921))]
    said = guide.advise('sooner', {'S-STE, FP8': 1.5}, found, 'nvidia_h100')
    needs = "S-STE or FP8: it needs 0.93 ± 0.02 of dense's time to dense's final loss, FP8 0.93 ± 0.01 (a race"
    self.assertStartsWith(said, needs)
    self.assertIn('on NVIDIA H200, another GPU than nvidia_h100).\n- Race it', said)
    self.assertIn('seconds:\n- Seeds do not part S-STE and FP8 (a race).', said)
    self.assertStartsWith(guide.advise('sooner', {'S-STE, FP8': 0.9}, found), 'FP8: ')

  def test_dense_that_is_sooner_at_the_width_asked_about_comes_first(self):
    def same_steps(name, losses, width=768, seconds=90.0, equal='steps'):
      curves = {seed: [(0.5 * seconds, 2.0), (seconds, loss)] for seed, loss in enumerate(losses)}
      return dataclasses.replace(
        race(name, losses), own=dataclasses.replace(race(name, losses).own, curves=curves), equal=equal, width=width
      )  # fmt: skip

    def said(fst, s_ste, d=768):
      return guide.advise('sooner', {'FST': 1.1, 'S-STE, FP8': 1.5}, {'FST': [fst], 'S-STE, FP8': [s_ste]}, d=d)

    # Dense falls from 2 to 1 between 10 and 100 seconds: it is at 1.4 after 64, these after 90.
    fst, s_ste = same_steps('FST', (1.5, 1.51)), same_steps('S-STE', (1.4, 1.41))
    first = 'dense at width 768{}. The soonest sparse model there is {}.'
    self.assertStartsWith(
      said(fst, s_ste, d=1024),
      first.format(', the nearest to 1,024 that was tried', 'S-STE') + ' Dense reaches its final loss in'
      " 0.71 ± 0.06 of the time that S-STE takes, and is then in mid-schedule (a race, on NVIDIA H200).\n"
      '- For wider models: dense: ',
    )
    # Not beyond seeds, surely sooner, another width that is nearer, and a race, which says itself who is sooner.
    self.assertStartsWith(said(fst, same_steps('S-STE', (1.0, 1.2), seconds=85.0)), first.format('', 'S-STE'))
    self.assertStartsWith(said(fst, same_steps('S-STE', (1.01, 1.02), seconds=60.0)), 'dense: no faster')
    self.assertStartsWith(said(fst, same_steps('S-STE', (1.01, 1.02), 2048, seconds=60.0)), first.format('', 'FST'))
    # By the clock of the runs dense is later, and it may never be there.
    late = dataclasses.replace(s_ste, dense=dataclasses.replace(s_ste.dense, slower={0: 2.0, 1: 2.0}))
    never = same_steps('S-STE', (0.9, 0.95))
    for sooner in (late, never):
      self.assertStartsWith(said(fst, sooner), 'dense: no faster')
    self.assertNotIn('dense at width', said(fst, same_steps('S-STE', (1.0, 1.1), seconds=95.0, equal='seconds')))
    self.assertStartsWith(guide.advise('sooner', {'FST': 1.1}, {'FST': [fst]}), 'dense: no faster')

  def test_a_winner_that_loses_to_a_rival_of_another_race_is_not_advised(self):
    found = {
      'S-STE, FP8': [race('S-STE', (0.90, 0.91)), race('S-STE', (0.95, 0.955, 0.96), 'b race')],
      'dense, a narrower FFN': [race('half in FP8', (0.94, 0.945, 0.95), 'b race')],
    }
    said = guide.advise('sooner', {'S-STE, FP8': 1.5}, found, 'nvidia_h200')
    self.assertStartsWith(said, "half in FP8: it needs 0.95 ± 0.01 of dense's time to dense's final loss (b race, on")
    self.assertIn('\n- S-STE won a race in which half in FP8 did not run (a race, on NVIDIA H200).\n- Race it', said)
    found['dense, a narrower FFN'] = [race('half in FP8', (0.94, 0.957, 0.95), 'b race')]  # not parted
    said = guide.advise('sooner', {'S-STE, FP8': 1.5}, found, 'nvidia_h200')
    needs = "S-STE: it needs 0.92 ± 0.05 of dense's time to dense's final loss (a race, on NVIDIA H200).\n- Or "
    self.assertStartsWith(said, needs)
    self.assertNotIn('did not run', said)

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
    said = guide.advise('sooner', {'S-STE, FP8': 1.5}, found, 'nvidia_h200', d=1024)
    self.assertRegex(
      said, r"^S-STE, first of those with several seeds: it needs .* \(width 1,280: deep, on NVIDIA H200\)\.\n"
      r'- But a quarter ended lowest in .*\n- Or half in FP8: .* \(width 2,048: wide, on NVIDIA H200\)\.\n- Race ',
    )  # fmt: skip
    self.assertIn('- half in FP8 beats S-STE: its loss is 0.0100 ± 0.0000 lower. It needs 0.99 ', said)
    self.assertEndsWith(said, ' final loss (wide).')
    self.assertNotIn('did not run', said)
    said = guide.advise('sooner', {'S-STE, FP8': 1.5}, found, 'nvidia_h200', d=4096)
    self.assertStartsWith(said, 'half in FP8: ')
    self.assertIn('\n- S-STE won a race in which half in FP8 did not run (deep, on NVIDIA H200).\n', said)

  def test_a_dense_model_of_one_seed_that_ends_lower_is_named_before_the_race_is_described(self):
    small = race('small', (0.80,))
    found = {'S-STE, FP8': [race('S-STE', (0.90, 0.91))], 'a smaller dense model': [small]}
    for searched, how in ((1, ', and its rate was not searched'), (3, '')):
      small = dataclasses.replace(small, own=dataclasses.replace(small.own, searched=searched))
      said = guide.advise('sooner', {'S-STE, FP8': 1.5}, found | {'a smaller dense model': [small]}, 'nvidia_h200')
      self.assertIn(
        f"\n- But small ended lowest in its race. It has one seed{how}. It needs 0.85 of dense's time to dense's final"
        ' loss (a race, on NVIDIA H200).\n- Race it', said.partition('\n\n')[0],
      )  # fmt: skip
    for other in (race('small', (0.95,)), race('small', (0.80,), 'b race')):  # behind, and elsewhere
      said = guide.advise('sooner', {'S-STE, FP8': 1.5}, found | {'a smaller dense model': [other]})
      self.assertNotIn('small ', said.replace('a smaller', ''))

  def test_sparse_weights_have_their_gain_and_loss_or_that_it_is_unknown(self):
    faster = {'S-STE': 1.1, 'S-STE, FP8': 1.2}
    said = guide.advise('sparse', faster, {'S-STE, FP8': [race('S-STE', (0.9, 0.91))]})
    self.assertStartsWith(said, 'S-STE, FP8: a feed-forward block is 1.20 times as fast as dense here.\n- After equal ')
    self.assertIn('as dense here.\n- No tuned comparison was recorded', guide.advise('sparse', faster, {}))
    self.assertStartsWith(guide.advise('sparse', {'S-STE': 0.8}, {}), 'S-STE: a feed-forward block is 0.80 times')
    ends = {'dense': 1.0, 's_ste': 1.03, 'sr_ste': 1.01, 'fst': 1.001}  # the last has no zeros at the end
    found = self.evidence(*(record(name, seed, loss) for name, loss in ends.items() for seed in range(3)))
    where = '(nano, 9 steps each, its rate not searched)'
    said = guide.advise('sparse', {'S-STE': 1.1}, found)
    cost = '\nLosses of models with 2:4 weights, after equal steps:\n'
    lines = (f"{loss} ± 0.0% above dense's: {who} {where}" for loss, who in (('1.0%', 'sr_ste'), ('3.0%', 's_ste')))
    self.assertEndsWith(said, cost + '\n'.join(f'- {line}' for line in lines))


def seeds_of(who, losses):
  """Runs that fall on a line, from 2 after 10 seconds to their loss after 100."""
  curves = {seed: [(10.0, 2.0), (100.0, loss)] for seed, loss in enumerate(losses)}
  return table.Seeds(who, 1e-3, 0.0, 3, False, False, dict(enumerate(losses)), curves, ())


def race(who, losses, where='a race'):
  dense = seeds_of('dense', (1.0,) * len(losses))
  return guide.Evidence(seeds_of(who, losses), dense, where, 'NVIDIA H200', 'seconds')


class CommandTest(absltest.TestCase):

  def said(self, *arguments):
    """What the command prints, with a space where there is any white space."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
      self.assertEqual(cli.main(list(arguments)), 0)
    self.assertLessEqual(max(map(len, out.getvalue().splitlines())), 120)
    return ' '.join(out.getvalue().split())

  def test_on_a_gpu_with_records(self):
    arguments = ['guide', '--tokens', '32768', '--d', '2048', '--hidden', '8192', '--device', 'nvidia_h200']
    said = self.said(*arguments)
    self.assertRegex(said, r'S-STE, FP8\. A feed-forward block is \d\.\d\d times as fast as dense\. ')
    self.assertRegex(said, r"0\.\d\d ± 0\.\d\d of dense's time to dense's final loss\. \(S-STE, FP8, all linear")
    self.assertNotIn('another GPU', said)
    self.assertRegex(said, 'the goal: a loss after the fewest seconds Take ')
    said = self.said(*arguments[:-1], 'h100')
    # The difference and the share are those of docs/quality.md, and who ended lowest where it ran is what to take.
    self.assertIn(
      ' beats dense, all linear layers in FP8: its loss is 0.0150 ± 0.0042 lower. It needs 0.88 ± 0.01 of the', said,
    )  # fmt: skip
    self.assertIn(' Take S-STE, FP8, all linear layers, FFN half as wide: ', said)
    self.assertIn(
      ' FFN half as wide beats dense, FFN half as wide, in FP8: its loss is 0.0127 ± 0.0014 lower. It needs 0.89 ± 0.01'
      ' of the', said,
    )  # fmt: skip
    self.assertRegex(said, r' A step of gpt2-1558m is 1\.\d\d times as fast as dense\. \(.*: width 1,600, on NVIDIA')
    self.assertIn('another GPU', said)
    arguments[2:7:2] = '16384', '1280', '5120'  # a narrower dense model won this race
    self.assertRegex(
      self.said(*arguments), r' Take dense, FFN a quarter as wide, in FP8: .* 300 s each, .*'
      r' - But dense, 124M \(85M on bytes\) ended lowest in its race\. It has one seed, and its rate was not searched',
    )  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()) as err:
      self.assertEqual(cli.main([*arguments[:-1], 'abacus']), 1)
    self.assertIn("nothing was measured on 'abacus'; pass --device, one of nvidia_h100", err.getvalue())


if __name__ == '__main__':
  absltest.main()
