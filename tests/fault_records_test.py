"""docs/faults.md is made of its records, by the programs that are there; nothing is lost."""

from pathlib import Path
import tempfile

from absl.testing import absltest

from tests import fault_records, faults
from tests.pallas_kernels import sanitize


class PageTest(absltest.TestCase):
  def test_the_page_is_of_the_records(self):
    records = fault_records.read()
    self.assertEqual([r['name'] for r in records], [*faults.CASES, 'soak'])
    self.assertEqual([r['name'] for r in records if r.get('lost') or r.get('bad')], [])
    for record in fault_records.read(fault_records.SANITIZED):
      self.assertEqual([(t, c) for t, cases in record['tools'].items() for c in cases if cases[c]['status'] != 0], [])
      self.assertContainsSubset(record['tools']['memcheck'], sanitize.CASES)
    with tempfile.TemporaryDirectory() as folder:
      page = Path(folder, 'faults.md')
      fault_records.write_page(records, page)
      self.assertEqual(page.read_text(), fault_records.PAGE.read_text())


if __name__ == '__main__':
  absltest.main()
