"""`python -m experiments guide`: what it says follows from records."""

import contextlib
import io
import json
from pathlib import Path

from absl.testing import absltest, parameterized

from experiments import __main__ as cli
from experiments.reports import guide
from tests.experiments.fakes import temp_folder


def record(contender, seed, loss, **changes):
  fields = {'experiment': 'nano', 'contender': contender, 'title': contender, 'rate': 1e-3, 'decay': 0.0, 'seed': seed,
            'share': 1.0, 'loss': loss, 'equal_steps': 9, 'seconds': None, 'validation': [[9, None, loss]]}  # fmt: skip
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
    self.assertEqual(fst.said(), 'loss +10.0% ± 0.0% against dense at equal steps (fst: nano, 9 steps each)')
    self.assertEqual(found['S-STE'], [])  # diverged

  @parameterized.parameters(
    ((0.90, 0.92, 0.91), 'FST: below dense by more than its interval.'),
    ((0.90, 1.12, 0.91), 'dense: no recipe was shown to end below it.'),
    ((0.90,), 'dense: no recipe was shown to end below it.'),
  )
  def test_below_dense_is_claimed_with_an_interval_only(self, losses, said):
    found = self.evidence(
      *(record('dense', seed, 1.0) for seed in range(3)), *(record('fst', s, loss) for s, loss in enumerate(losses))
    )
    self.assertStartsWith(guide.advise('quality', {'FST': 1.2}, found), said)

  def test_what_loses_time_is_not_advised(self):
    race = guide.Evidence('a race', [-7.0, -8.0], [0.66, 0.68], 'seconds')
    self.assertStartsWith(guide.advise('sooner', {'FST': 0.99}, {'FST': [race]}), 'dense: ')
    self.assertStartsWith(guide.advise('sooner', {'FST': 1.01}, {'FST': [race]}), 'FST: ')
    self.assertEqual(guide.advise('sparse', {'S-STE': 1.1, 'S-STE, FP8': 1.2}, {}), 'S-STE, FP8.')


class CommandTest(absltest.TestCase):
  def test_on_a_gpu_with_records(self):
    arguments = ['guide', '--tokens', '32768', '--d', '2048', '--hidden', '8192', '--device', 'nvidia_h200']
    with contextlib.redirect_stdout(io.StringIO()) as out:
      self.assertEqual(cli.main(arguments), 0)
    self.assertRegex(out.getvalue(), r'S-STE, FP8: block \d\.\d\d times as fast\n')
    self.assertRegex(out.getvalue(), r"dense's final loss in 0\.\d\d ± 0\.\d\d of its time \(S-STE, FP8, all linear")
    with contextlib.redirect_stderr(io.StringIO()) as err:
      self.assertEqual(cli.main([*arguments[:-1], 'abacus']), 1)
    self.assertIn("nothing was measured on 'abacus'; pass --device, one of nvidia_h100", err.getvalue())


if __name__ == '__main__':
  absltest.main()
