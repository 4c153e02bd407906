"""Times that records of a GPU foretell, here of one in a temporary folder."""

import pathlib
import tempfile

from absl.testing import absltest, parameterized

from pallas_kernels import _records

KEY = dict(m=64, n=128, k=256, dtype='bfloat16', layout='nk')


def row(implementation, samples, *, final=None, rejected=None, setup=None, **config):
  out = dict(implementation=implementation, config=config, rejected=rejected, samples_ms=samples)
  return out | ({} if final is None else dict(final_samples_ms=final)) | ({} if setup is None else dict(setup_ms=setup))


class ExpectedMsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    temporary = tempfile.TemporaryDirectory()
    self.addCleanup(temporary.cleanup)
    self.folder = pathlib.Path(temporary.name)
    self.entry = dict(
      key=KEY,
      baseline=dict(implementation='dense', config=None, samples_ms=[3.0, 8.0, 4.0]),
      candidates=[
        row('one', [1.5], stages=1),
        row('one', [9.0], final=[2.0, 2.5, 9.0], stages=2),  # the longest heat counts
        row('one', [0.1], final=[0.1], rejected='relative error', stages=3),
        row('two', [1.0, 2.0, 6.0], setup=0.25),
        row('three', [0.1], rejected='relative error'),
      ],
      choice=dict(implementation='one', config={'stages': 2}),
    )
    other = self.entry | dict(key=KEY | dict(m=512), baseline=dict(samples_ms=[100.0]), candidates=[])
    other['choice'] = dict(implementation='dense', config=None)
    _records.save(self.folder / 'gpu' / 'op.json', {'op': 'op'}, [self.entry, other])

  def ask(self, device='gpu', op='op', **change):
    return _records.expected_ms(device, op, KEY | change, folder=self.folder)

  def test_medians_of_verified_candidates_and_setup(self):
    self.assertEqual(self.ask(), {'dense': 4.0, 'one': 2.5, 'two': 2.25})

  def test_scaled_from_the_nearest_problem(self):
    found = self.ask(m=96, n=64)  # 1.5 times and half as large
    self.assertEqual(found, {'dense': 3.0, 'one': 1.875, 'two': 1.6875})
    self.assertEqual(self.ask(m=400), {'dense': 100 * 400 / 512})

  def test_far_problems_and_other_kinds_are_not_known(self):
    for change in (dict(k=1024), dict(dtype='float32'), dict(layout='kn')):
      self.assertEqual(self.ask(**change), {}, str(change))
    self.assertEqual(self.ask(k=512)['dense'], 8.0)
    self.assertEqual(self.ask(k=512, dtype='float16'), self.ask(k=512))
    self.assertEqual(self.ask(device='other'), {})
    self.assertEqual(self.ask(op='other'), {})

  def test_the_entry_of_exactly_this_problem(self):
    path = self.folder / 'gpu' / 'op.json'
    self.assertEqual(_records.entry_of(path, KEY), self.entry)
    self.assertIsNone(_records.entry_of(path, KEY | dict(m=65)))
    self.assertIsNone(_records.entry_of(self.folder / 'no.json', KEY))


if __name__ == '__main__':
  absltest.main()
