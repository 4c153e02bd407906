"""docs/faults.md is made of its records, by the programs that are there; nothing is lost."""

from pathlib import Path
import tempfile

from absl.testing import absltest

from tests import fault_records, faults


class PageTest(absltest.TestCase):
  def test_the_page_is_of_the_records(self):
    records = fault_records.read()
    self.assertEqual([r['name'] for r in records], [*faults.CASES, 'soak'])
    self.assertEqual([r['name'] for r in records if r.get('lost') or r.get('bad')], [])
    with tempfile.TemporaryDirectory() as folder:
      page = Path(folder, 'faults.md')
      fault_records.write_page(records, page)
      self.assertEqual(page.read_text(), fault_records.PAGE.read_text())


if __name__ == '__main__':
  absltest.main()
