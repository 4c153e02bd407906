"""The tables in which the page on quality begins: who is best, against whom, and that seeds are paired."""

from absl.testing import absltest

from experiments.reports import in_short


def _runs(contender: str, losses: list[float], *, steps: int | None = None) -> list[dict]:
  return [
    {'contender': contender, 'title': contender, 'rate': 1e-3, 'decay': 0.0, 'seed': seed, 'share': 1.0, 'loss': loss,
     'equal_steps': steps, 'validation': [[1, 20.0, loss + 1], [2, 40.0, loss]]}
    for seed, loss in enumerate(losses)
  ]  # fmt: skip


def _cells(text: str) -> list[list[str]]:
  return [[cell.strip() for cell in line.strip('|').split('|')] for line in text.splitlines()]


class InShortTest(absltest.TestCase):
  def test_the_best_of_each_side_of_those_with_seeds(self):
    race = [
      *_runs('dense_fp8', [2.0, 2.2]), *_runs('half_ffn_fp8', [1.8, 1.8]), *_runs('dense_124m', [1.0]),
      *_runs('s_ste_fp8_all', [1.9, 2.0]), *_runs('fst', [2.5, 2.5]), *_runs('gone', [0.5, 0.5]),
    ]  # fmt: skip
    head, _, row = _cells(in_short.equal_seconds({'a race': race}))
    self.assertEqual(row[:3], ['a race', 's_ste_fp8_all: 1.9500', 'half_ffn_fp8: 1.8000'])
    # 0.1 and 0.2 above the narrow one; 0.1 and 0.2 below that of its own shape. The mean of two and 12.706 / 2 times
    # their difference.
    self.assertEqual(row[head.index('sparse minus dense')], '+0.1500 ± 0.6353')
    self.assertEqual(row[head.index('minus dense FP8 of its shape')], '-0.1500 ± 0.6353')
    # The narrow one falls by 1 in its last 20 seconds: at 1.9 after 38 and at 2.0 after 36 of 40.
    self.assertEqual(row[4], '0.93 ± 0.32')

  def test_percent_above_dense_by_seed(self):
    found = _cells(in_short.equal_steps({
      '1 M': [*_runs('dense', [2.0, 2.0], steps=1600), *_runs('fst', [2.02, 2.06], steps=1600)],
      '2 M': [*_runs('dense', [1.0], steps=9), *_runs('s_ste_fp8', [1.5], steps=9), *_runs('s_ste', [1.2], steps=9)],
    }))  # fmt: skip
    head = found[0]
    self.assertEqual(head, ['parameters', 'steps', 'loss of dense', 'S-STE (85 M: in FP8)', 'FST'])
    self.assertEqual(found[2], ['1 M', '1,600', '2.000', '', '+2.0 ± 12.7'])
    self.assertEqual(found[3], ['2 M', '9', '1.000', '+20.0, one seed', ''])


if __name__ == '__main__':
  absltest.main()
