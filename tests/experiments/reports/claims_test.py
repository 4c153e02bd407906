"""Verdicts on what the papers claim follow the figures."""

import json
from pathlib import Path

from absl.testing import absltest, parameterized
import numpy as np

from experiments.reports import claims, papers
from experiments.runs import method_table, recipes, records
from tests.experiments.fakes import temp_folder
from tests.experiments.reports.run_folders import write_run


class VerdictTest(parameterized.TestCase):
  def _verdicts(self, **finals):
    folder = temp_folder(self)
    tails = {'dense': 5e-3}
    for method, losses in finals.items():
      for seed, loss in enumerate(losses):
        write_run(folder, method, seed, loss, tail=tails.get(method, 1e-3))
    return {finding.claim: finding for finding in claims.findings(records.find_runs([folder]))}

  @parameterized.parameters(
    ((1.26, 1.27, 1.28), 'disagrees', r'\+0\.060'),
    ((1.19, 1.20, 1.21), 'agrees', 'below dense'),
    ((1.201, 1.209, 1.221), 'agrees', 'less than 1% of the loss'),
    # Surely higher, and surely by less than one percent.
    ((1.203, 1.213, 1.2231), 'agrees', 'less than 1% of the loss'),
    # Surely higher, by one percent or not: 0.0111 ± 0.0043 against 0.0121.
    ((1.2091, 1.2221, 1.2321), 'open', 'does not tell whether by 1% of the loss'),
    ((1.21, 1.19, 1.24), 'open', 'too wide to tell'),
    ((1.26,), 'open', 'one seed'),
  )
  def test_fst_against_dense(self, fst, verdict, evidence):
    finding = self._verdicts(dense=(1.20, 1.21, 1.22), fst=fst)['FST reaches the quality of dense training.']
    self.assertEqual(finding.verdict, verdict)
    self.assertRegex(finding.evidence, evidence)

  def test_a_strict_claim_stays_open_within_the_spread(self):
    found = self._verdicts(fst=(1.21, 1.19, 1.24), ste=(1.20, 1.21, 1.22))
    self.assertEqual(found['FST beats plain straight-through training.'].verdict, 'open')

  def test_no_setting_of_a_method_is_picked(self):
    folder = Path(temp_folder(self))
    for method, decays in (('fst', (6e-3, 6e-5)), ('sr_ste', (3.0,)), ('sr_ste_published', (2e-4,))):
      for decay in decays:
        for seed in range(3):
          final = {6e-3: 1.20, 6e-5: 1.25, 3.0: 1.19, 2e-4: 1.30}[decay] + 0.01 * seed
          path = write_run(folder / str(decay), method, seed, final)
          config = json.loads((path / 'config.json').read_text())
          config['label'] += f'; masked_decay={decay}'
          (path / 'config.json').write_text(json.dumps(config))
    found = [f for f in claims.findings(records.find_runs([folder])) if f.claim.startswith('With Adam')]
    self.assertEqual([f.verdict for f in found], ['disagrees', 'disagrees', 'agrees', 'agrees'])
    for finding, (ours, theirs) in zip(
      found, (('0.006', '3.0'), ('6e-05', '3.0'), ('0.006', '0.0002'), ('6e-05', '0.0002')), strict=True
    ):
      self.assertRegex(finding.evidence, f'FST; masked_decay={ours} ends .* SR-STE, .*masked_decay={theirs}')

  def test_a_changed_pattern_is_no_verdict_on_the_paper(self):
    folder = Path(temp_folder(self))
    write_run(folder, 'dense_relu2', 0, 1.2)
    path = write_run(folder, 'neuron_level', 0, 1.2)
    config = json.loads((path / 'config.json').read_text())
    for change, count in (({}, 1), ({'dense_features': 0.5}, 0), ({'tokens': '2:4'}, 0)):
      changed = config | {'recipe': config['recipe'] | {'kwargs': {'policy': {
        **config['recipe']['kwargs']['policy'], **change,
      }}}}  # fmt: skip
      (path / 'config.json').write_text(json.dumps(changed))
      self.assertLen(claims.findings(records.find_runs([folder])), count)

  def test_our_own_pattern_is_no_verdict_on_the_paper(self):
    found = self._verdicts(
      dense_relu2=(1.20, 1.21, 1.22), neuron_level=(1.30, 1.31, 1.32),
      neuron_level_two_of_four_tokens=(1.201, 1.211, 1.22),
    )  # fmt: skip
    verdicts = {(f.source == claims.NEURON_LEVEL, f.verdict) for f in found.values()}
    self.assertEqual(verdicts, {(True, 'disagrees'), (False, 'agrees')})

  def test_attention_is_full_in_both_or_sparse_in_both(self):
    found = self._verdicts(
      mixed_sparsity=(1.98, 1.99, 2.0), static=(1.88, 1.89, 1.9), static_attention=(1.76, 1.77, 1.78),
    )  # fmt: skip
    (finding,) = found.values()
    self.assertIn('MST ends 0.100 nats above static mask (', finding.evidence)

  @parameterized.parameters((4, 3.182), (12, 2.201), (41, 2.021))
  def test_intervals_are_students(self, n, quantile):
    """Quantiles of a printed table, 0.975 at n - 1 degrees of freedom."""
    values = np.linspace(0, 1, n)
    expected = quantile * values.std(ddof=1) / n**0.5
    np.testing.assert_allclose(claims.half_width(values.tolist()), expected, rtol=1e-3)

  def test_flip_rates(self):
    found = self._verdicts(dense=(1.2,), fst=(1.2,), fst_no_decay=(1.2,))
    settle = next(f for claim, f in found.items() if claim.startswith('With masked decay'))
    stay = next(f for claim, f in found.items() if claim.startswith('Without decay'))
    self.assertEqual((settle.verdict, stay.verdict), ('agrees', 'disagrees'))
    self.assertIn('peak 6.', settle.evidence)

  @parameterized.parameters(
    # Peak and tail of FST, sparse steps of it and of a dense twin whose tail is 1e-3.
    ((1e-2, 5e-4), 3000, 3000, 'agrees', 'disagrees'),
    ((1e-2, 2e-3), 3000, 3000, 'disagrees', 'agrees'),
    ((1e-2, 9e-3), 3000, 3000, 'disagrees', 'agrees'),  # does not fall
    ((1e-2, 9e-3), 3333, 0, 'disagrees', 'open'),  # whatever the dense rate was
    ((1e-2, 2e-3), 3333, 0, 'open', 'open'),  # a sparse phase that ends before a dense run does
    ((1e-2, 5e-4), 3333, 0, 'open', 'open'),
  )
  def test_flip_rates_of_records(self, flips, steps, dense_steps, settle, stay):
    common = {
      'experiment': 'nano', 'seed': 0, 'steps': 4000, 'model': {}, 'corpus': '', 'optimizer': {}, 'seconds': 1.0,
      'spent': {}, 'validation_loss': 1.0,
    }  # fmt: skip

    def runs(method, peak, tail, end):
      recipe, kwargs = method_table.METHODS[method].recipe, dict(method_table.METHODS[method].kwargs)
      record = {**common, 'method': method, 'label': method, 'recipe': recipe, 'recipe_kwargs': kwargs}
      record['flip_rate'] = {'peak': peak, 'peak_step': 100, 'tail': tail, 'end': end or record['steps']}
      return [papers.run_of({**record, 'sparse_steps': end})]

    dense = runs('dense', 2e-2, 1e-3, dense_steps)
    for method, judge, expected in zip(('fst', 'fst_no_decay'), claims.OF_FLIPS, (settle, stay), strict=True):
      found = judge(runs(method, *flips, steps), dense)
      self.assertEqual(found and found[0], expected, method)
    said = claims.flips_in_short(runs('fst', *flips, steps), dense)
    self.assertEqual(said, f'flip rate 1.0e-02 at its peak, {flips[1]:.1e} before step {steps:,}; dense 1.0e-03'
                     f' before step {dense_steps or 4000:,}')

  @parameterized.parameters(
    ({'masked_decay': 6e-3}, {'refresh_every': 40}, 1),
    ({'masked_decay': 6e-3}, {}, 0),
    ({'masked_decay': 6e-3, 'refresh_every': 1}, {}, 1),
  )
  def test_flip_rates_compare_at_equal_intervals(self, fst, dense, pairs):
    folder = temp_folder(self)
    for method, kwargs in (('fst', fst), ('dense', {'path': recipes.FFN, 'watch': 'transposable', **dense})):
      name = method_table.METHODS[method].recipe
      path = write_run(folder, method, 0, 1.2)
      config = json.loads((path / 'config.json').read_text())
      config['recipe'] |= {'name': name, 'kwargs': kwargs, 'flip_rate': 'refresh'}
      (path / 'config.json').write_text(json.dumps(config))
    groups = {run.method: [run] for run in records.find_runs([folder])}
    self.assertLen(claims.comparable_flips(groups['fst'], groups['dense']), pairs)


if __name__ == '__main__':
  absltest.main()
