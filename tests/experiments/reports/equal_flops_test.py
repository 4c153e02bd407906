"""Tables of runs with equal FLOPs."""

from absl.testing import absltest

from experiments.reports import equal_flops
from experiments.reports import race_table as table


def run(contender, seed, loss, *, rate=0.01, steps=2000, **fields):
  return {
    'contender': contender, 'title': contender, 'seed': seed, 'rate': rate, 'decay': 0.0, 'share': 1.0, 'steps': steps,
    'loss': loss, 'searched_with': [0], 'model': {'size': 'nano'}, 'recipe': {'kwargs': {}}, 'validation': [], **fields,
  }  # fmt: skip


def rows(markdown):
  return [[cell.strip() for cell in line.strip('|').split('|')] for line in markdown.splitlines()[2:]]


class ShapesTest(absltest.TestCase):
  def test_dense_models_of_one_method_are_rows_by_their_shape(self):
    """All of them are `dense`, and their searches are apart."""
    narrow = {'size': 'nano', 'embed_dim': 48, 'num_heads': 3, 'ffn_width': 0.25}
    records = [
      run('dense', seed, loss, steps=steps, model=model)
      for model, steps, losses in (({'size': 'nano'}, 480, (9.0, 2.0)), (narrow, 1509, (8.0, 1.5)))
      for seed, loss in enumerate(losses)
    ]
    found = table.by_seed(map(equal_flops.named_by_shape, records))
    self.assertEqual(
      {own.title: own.losses for own in found.values()},
      {
        'dense, as many FLOPs: 2 layers, width 48, FFN 48, 1,509 steps': {1: 1.5},
        'dense, as many FLOPs: 2 layers, width 64, FFN 256, 480 steps': {1: 2.0},
      },
    )


class RestorationTest(absltest.TestCase):
  def test_the_loss_before_is_that_of_the_last_evaluation_without_a_restored_step(self):
    """At the best rate of the search, in the seeds that are reported; the stage has its usual length, its own, or none.

    Losses at the end are compared seed by seed.
    """
    at = (1500, 1750, 1900, 2000)
    records = [
      run(equal_flops.MST, seed, curve[-1], rate=rate,
          validation=[[s, None, x] for s, x in zip(at, curve, strict=True)])
      for seed, rate, curve in (
        (0, 0.01, (2.0, 2.0, 2.0, 2.0)), (0, 0.02, (1.9, 1.9, 1.9, 1.9)),
        (1, 0.01, (5.0, 5.0, 5.0, 5.0)), (1, 0.02, (1.5, 1.4, 1.3, 1.6)),
      )
    ]  # fmt: skip
    longer = [{**r, 'recipe': {'kwargs': {'restoration': 0.1}}} for r in records]
    never = [{**r, 'loss': r['loss'] + 0.5, 'recipe': {'kwargs': {'restoration': 0, 'density': 0.2}}} for r in records]
    self.assertEqual(
      rows(equal_flops.restoration_markdown([('CPU', [*never, *records]), ('GPU', longer)])),
      [
        ['mixed_sparsity, CPU', '0.02', '1', '1,900', '1,900', '1.300, one seed', '1.600, one seed', '+0.300, one seed',
         ''],
        ['mixed_sparsity, never restored, density 0.2, CPU', '0.02', '1', 'never', '', '', '2.100, one seed', '',
         '+0.500, one seed'],
        ['mixed_sparsity, GPU', '0.02', '1', '1,800', '1,750', '1.400, one seed', '1.600, one seed', '+0.200, one seed',
         ''],
      ],
    )  # fmt: skip


if __name__ == '__main__':
  absltest.main()
