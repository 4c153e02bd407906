"""Sentences of the documents say no figure that neither a table beside them nor a record has."""

from absl.testing import absltest, parameterized

from tests.experiments.reports import prose

DOCUMENTS = ('README.md', *(f'docs/{name}.md' for name in ('guide', 'quality', 'quality_runs', 'speed', 'tasks')))


def uncarried(document):
  found = {part.title: prose.uncarried(part) for part in prose.sections((prose.ROOT / document).read_text())}
  return {title: figures for title, figures in found.items() if figures}


class ProseTest(parameterized.TestCase):
  @parameterized.parameters(*DOCUMENTS)
  def test_figures_are_those_of_tables_and_records(self, document):
    said = 'write what the records have, cite them (see prose.py), or take it out'
    self.assertEqual(uncarried(document), {}, said)

  def test_a_sentence_may_name_tuned_settings(self):
    said = '<!-- said: pallas_kernels/tuned/nvidia_h200/sparse_matmul.json?dtype=bfloat16&n={} -->'
    text = f'{said}\n\n4,096 to 4,096 1.56 times.'
    for tokens, expected in ((16, []), (64, ['1.56'])):
      (part,) = prose.sections(text.format(tokens))
      self.assertEqual(prose.uncarried(part), expected)

  def test_a_gain_is_over_the_baseline_that_is_named(self):
    for against, expected in (('pytorch', ['12.98']), ('xla', ['3.265'])):
      text = f'<!-- said: memory_bound.jsonl?op=transposable_pack&against={against} -->\n\n3.265 or 12.98 times.'
      (part,) = prose.sections(text)
      self.assertEqual(prose.uncarried(part), expected)

  def test_a_sentence_may_name_steps_and_their_gain(self):
    text = '<!-- said: best_steps_124m.jsonl -->\n\nFST gains {} times.'
    for gain, expected in (('1.03', []), ('1.04', ['1.04'])):
      (part,) = prose.sections(text.format(gain))
      self.assertEqual(prose.uncarried(part), expected)

  def test_a_part_of_the_third_order_has_tables_of_its_own(self):
    (_, above, part) = prose.sections('## Above\n\n| 1.25 |\n\nIt is 1.25.\n\n### A part\n\nIt is 1.25 too.\n')
    self.assertEqual((above.title, prose.uncarried(above)), ('Above', []))
    self.assertEqual((part.anchor, prose.uncarried(part)), ('a-part', ['1.25']))

  def test_a_point_of_a_curve_carries_no_sentence(self):
    facts = prose.Facts()
    facts.take_all([{'ms': 2.5, 'bursts': {'dense': [2.25, 2.75]}, 'validation': [[1, 1.5]], 'train': [[1, 1.75]]}])
    self.assertEqual(facts.numbers, {2.25, 2.5, 2.75})

  def test_a_run_has_a_clock_of_its_own(self):
    text = '<!-- records: race_h200_774m.jsonl -->\n\nSteps of {} ms, {} times as fast as those of dense FP8.'
    for ms, times, expected in (('131.7', '1.05', []), ('131.6', '1.97', ['131.6', '1.97'])):
      (part,) = prose.sections(text.format(ms, times))
      self.assertEqual(prose.uncarried(part), expected)

  @parameterized.parameters(
    ('FST ends 0.020 ± 0.008 above dense.', []),
    ('FST ends 0.016 ± 0.007 above dense, 0.017 ± 0.008 by another count.', ['0.016 ± 0.007', '0.017 ± 0.008']),
    ('FST ends 0.081 ± 0.016 below FST without it.', []),  # in no table: of the records
    ('A loss of 1.293 or 1.299.', ['1.299']),
    ('Its rate is `1.299`, of version PyTorch 2.11 and paper 2404.01847, at 1.5e-3 with 10.7 M.', []),
  )
  def test_a_sentence_that_no_record_carries(self, sentence, expected):
    (part,) = prose.sections(
      '<!-- records: compare_nano.jsonl -->\n\n| dense | FST |\n|---|---|\n| 1.277 | 1.293 |\n\n' + sentence
    )
    self.assertEqual(prose.uncarried(part), expected)

  def test_a_sentence_may_name_records_and_the_tables_of_another_document(self):
    text = '<!-- said: {} -->\n\nAfter 70 seconds it is at 1.738, in 117.4 ms a step.'
    for citation, expected in (
      ('docs/quality.md#sparse-weights', ['1.738', '117.4']),
      ('race_h200.jsonl?seconds=70.0', ['117.4']),
      ('race_h200.jsonl?seconds=70.0; docs/quality_runs.md#trials-of-the-races', []),
    ):
      (part,) = prose.sections(text.format(citation))
      self.assertEqual(prose.uncarried(part), expected, citation)
    with self.assertRaisesRegex(ValueError, 'docs/quality.md#gone: no such part'):
      prose.uncarried(prose.sections(text.format('docs/quality.md#gone'))[0])


if __name__ == '__main__':
  absltest.main()
