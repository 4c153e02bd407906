"""Files of records: what a kill leaves of them, and what is no record."""

from pathlib import Path

from absl.testing import absltest, parameterized

from experiments.runs import json_lines
from tests.experiments.fakes import temp_folder


class JsonLinesTest(parameterized.TestCase):
  @parameterized.parameters(b'', b'{"seed": 0}\n', b'{"seed": 0}')
  def test_records_follow_those_of_before(self, before):
    path = Path(temp_folder(self)) / 'records.jsonl'
    path.write_bytes(before)
    json_lines.append(path, {'seed': 1}, {'seed': 2})
    self.assertEqual([record['seed'] for record in json_lines.read(path)], [0, 1, 2] if before else [1, 2])

  def test_a_line_that_a_kill_cut_gives_way(self):
    path = Path(temp_folder(self)) / 'records.jsonl'
    for cut in (b'{"se', b'{"seed": 1', b'1', b'"\xc3'):
      path.write_bytes(b'{"seed": 0}\n' + cut)
      self.assertEqual(json_lines.read(path), [{'seed': 0}])
      json_lines.append(path, {'seed': 3})
      self.assertEqual(json_lines.read(path), [{'seed': 0}, {'seed': 3}])

  @parameterized.parameters(b'{"se\n{"seed": 1}\n', b'{"seed": 0}\n\n', b'[]\n')
  def test_a_line_before_it_is_an_error(self, text):
    path = Path(temp_folder(self)) / 'records.jsonl'
    path.write_bytes(text)
    with self.assertRaisesRegex(ValueError, r'records.jsonl, line [12] is no record: put back'):
      json_lines.read(path)


if __name__ == '__main__':
  absltest.main()
