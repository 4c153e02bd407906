"""Tables of single files of records, on records whose rows follow by hand."""

from unittest import mock

from absl.testing import absltest

from experiments.reports import measured, provenance


def made(maker, records, *args):
  """The rows of a table, each a list of cells."""
  with mock.patch.object(provenance, 'read', lambda citation: records):
    lines = maker(*args).splitlines()
  return [line.strip('| ').split(' | ') for line in lines]


class MeasuredTest(absltest.TestCase):
  def test_a_matmul_of_two_names_stands_once_beside_dense_without_zeros(self):
    record = {
      'device': 'NVIDIA H200', 'role': 'forward', 'dtype': 'bfloat16', 'samples_ms': [2.0], 'median_ms': 2.0,
      'shape': {'tokens': 1000, 'd_in': 2000, 'd_out': 4000}, 'tflops': 8.0, 'sustained_ms': 2.5,
      'baselines': {
        'dense': {'median_ms': 2.8, 'sustained_ms': 2.75}, 'cusparselt': {'median_ms': 2.1},
        'dense_without_zeros': {'median_ms': 3.0, 'sustained_ms': 4.0},
      },
    }  # fmt: skip
    named_twice, without = record | {'role': 'input_grad'}, record | {'dtype': 'float32', 'baselines': {}}
    head, _, *rows = made(measured.matmuls, [record, named_twice, without])
    self.assertEqual(head[0], 'GPU')
    # 8 TFLOP/s in 2 ms are 6.4 in 2.5. Dense with and without zeros stand apart.
    own = ['H200', '1000 x 2000 x 4000, forward', 'bfloat16', '8', '6', '1.50', '1.60', '1.40', '1.10', '1.05', '', '1']
    self.assertEqual(rows, [own])
    # Three processes: the median and the range of what each of them found.
    others = [record | {'process': i, 'samples_ms': [ms], 'median_ms': ms} for i, ms in ((1, 1.6), (2, 2.4))]
    (row,) = made(measured.matmuls, [record | {'process': 0}, *others])[2:]
    self.assertEqual((row[5], row[6], row[-1]), ('1.50 (1.25 to 1.88)', '1.60', '3'))

  def test_runs_that_took_other_seconds_are_compared_by_those(self):
    run = {'bench': 'race', 'seed': 0, 'steps': 100, 'share': 1.0, 'seconds': 9.0, 'rate': 1e-3, 'decay': 0.0}
    ours = run | {'contender': 'a', 'title': 'A', 'wall_s': 10.0, 'loss': 1.5, 'validation': [[100, 9.0, 1.5]]}
    # In 20 s its loss falls from 2 by a twentieth a second, though it was to take 9.
    rival = run | {'contender': 'b', 'title': 'B', 'wall_s': 20.0, 'loss': 1.0,
                   'validation': [[0, 0.0, 2.0], [50, 4.5, 1.5], [100, 9.0, 1.0]]}  # fmt: skip
    # Another seed, which one has alone, and a rate that is not its best.
    others = [ours | {'seed': 1, 'loss': 1.4}, rival | {'rate': 2e-3, 'loss': 1.1, 'wall_s': 1.0}]
    _, _, *rows = made(measured.race_by_the_clock, [ours, rival, *others], 'a.jsonl', 'a', 'b')
    self.assertEqual(rows, [['0', '100.0, 10.0', '1.500', '200.0, 20.0', '1.000', '1.500', '10.0, 1.000']])
    _, _, row = made(measured.race_by_the_clock, [ours | {'loss': 0.5}, rival], 'a.jsonl', 'a', 'b')
    self.assertEqual(row[-1], 'never')

  def test_by_the_minute_training_losses_are_of_what_was_logged_since_the_evaluation_before(self):
    run = {'bench': 'race', 'batch': 1000, 'length': 1000}
    ours = run | {'contender': 'a', 'title': 'A', 'validation': [[10, 30.0, 2.0], [20, 60.0, 1.0], [30, 90.0, 1.5]],
                  'train': [[5, 9.0, 0], [10, 7.0, 0], [20, 3.0, 0], [30, 1.0, 0]]}  # fmt: skip
    rival = run | {'contender': 'b', 'title': 'B', 'validation': [[11, 30.0, 1.5], [22, 60.0, 1.25], [33, 90.0, 1.75]],
                   'train': [[11, 3.0, 0], [22, 2.0, 0], [33, 1.0, 0]]}  # fmt: skip
    head, _, *rows = made(measured.race_by_the_minute, [{'bench': 'race_clock'}, rival, ours], 'x', 'a', 'b', 2)
    self.assertEqual(head[1], 'A: million bytes read')
    last = ['lowest of all', '20', '3.000', '1.0000 after 60 s', '22', '2.000', '1.2500 after 60 s', '-0.2500']
    self.assertEqual(rows, [['60', '20', '3.000', '1.0000', '22', '2.000', '1.2500', '-0.2500'], last])
    *_, first, _, _, _ = made(measured.race_by_the_minute, [rival, ours], 'x', 'a', 'b', 1)
    self.assertEqual(first[:4], ['30', '10', '8.000', '2.0000'])
    with self.assertRaisesRegex(ValueError, 'too many values'):  # of one run each
      made(measured.race_by_the_minute, [rival, ours, ours], 'x', 'a', 'b', 1)


if __name__ == '__main__':
  absltest.main()
