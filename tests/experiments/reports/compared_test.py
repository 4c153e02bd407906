"""Which rows a table of a comparison has; its figures are judged in `pages_test`."""

from absl.testing import absltest

from experiments.reports import compared

FILES = ['compare_dense_neurons_nano.jsonl']


class ComparedTest(absltest.TestCase):
  def test_a_method_has_its_title_or_its_label_or_no_row(self):
    shown, left_out = compared.DENSE_NEURONS
    _, _, *rows = compared.markdown((FILES, {shown: 'ours', left_out: ''})).splitlines()
    self.assertEqual([row.split(' | ')[0] for row in rows], ['| dense, squared ReLU', '| ours'])

  def test_a_label_that_no_record_has_is_refused(self):
    with self.assertRaisesRegex(ValueError, r'compare_dense_neurons_nano.jsonl: no method is called FTS$'):
      compared.markdown((FILES, {**compared.DENSE_NEURONS, 'FTS': 'FST'}))


if __name__ == '__main__':
  absltest.main()
