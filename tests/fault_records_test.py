"""The records of faults are of the programs that are there; nothing is lost."""

from absl.testing import absltest

from experiments.reports import faults as page
from experiments.reports import provenance
from tests import fault_records, faults
from tests.pallas_kernels import sanitize


class RecordsTest(absltest.TestCase):
  def test_every_case_has_a_record_and_nothing_is_lost(self):
    records = fault_records.read()
    self.assertEqual([r['name'] for r in records], [*faults.CASES, 'soak'])
    self.assertEqual([r['name'] for r in records if r.get('lost') or r.get('bad')], [])

  def test_no_kernel_has_an_error_and_the_page_names_those_that_did_not_run(self):
    self.assertCountEqual(page.SANITIZED, sanitize.CASES)
    for record in provenance.read('sanitize.jsonl'):
      self.assertEqual([(t, c) for t, cases in record['tools'].items() for c in cases if cases[c]['status'] != 0], [])
      self.assertContainsSubset(record['tools']['memcheck'], sanitize.CASES)


if __name__ == '__main__':
  absltest.main()
