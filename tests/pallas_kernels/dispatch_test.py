import sys

from absl.testing import absltest

from pallas_kernels import _dispatch

_HERE = __name__
_BACKENDS = {name: f'{_HERE}:{name}' for name in ('good', 'picky', 'broken')} | {'absent': 'no_such_package.module:f'}


def good(x):
  return x + 1


def picky(x):
  raise NotImplementedError(f'not for {x}')


def broken(x):
  raise RuntimeError('a bug')


class DispatchTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    sys.modules.setdefault(_HERE, sys.modules[type(self).__module__])

  def test_first_that_accepts_answers(self):
    self.assertEqual(_dispatch.dispatch('op', _BACKENDS, None, ['picky', 'absent', 'good'], 1), 2)

  def test_several_are_asked_in_their_order(self):
    self.assertEqual(_dispatch.dispatch('op', _BACKENDS, ('picky', 'good'), ['broken'], 1), 2)
    with self.assertRaisesRegex(ValueError, 'picky: not for 1; absent: '):
      _dispatch.dispatch('op', _BACKENDS, ('picky', 'absent'), ['good'], 1)
    with self.assertRaisesRegex(ValueError, "implementation='fast' is unknown"):
      _dispatch.dispatch('op', _BACKENDS, ('good', 'fast'), ['good'], 1)

  def test_several_are_all_names(self):
    for odd in ((), (None, 'good'), ('good', None)):
      with self.assertRaisesRegex(ValueError, r"op: implementation=\(.*\) must be None, or one or several of .*'good'"):
        _dispatch.dispatch('op', _BACKENDS, odd, ['good'], 1)

  def test_a_named_back_end_fails_loudly(self):
    with self.assertRaisesRegex(ValueError, 'picky: not for 1'):
      _dispatch.dispatch('op', _BACKENDS, 'picky', ['good'], 1)
    with self.assertRaisesRegex(ValueError, 'no_such_package'):
      _dispatch.dispatch('op', _BACKENDS, 'absent', ['good'], 1)

  def test_unknown_name_lists_the_known_ones(self):
    with self.assertRaisesRegex(ValueError, r"implementation='fast' is unknown; .*'good'"):
      _dispatch.dispatch('op', _BACKENDS, 'fast', ['good'], 1)

  def test_every_reason_is_given_when_nobody_accepts(self):
    with self.assertRaisesRegex(ValueError, 'picky: not for 1; absent: .*no_such_package'):
      _dispatch.dispatch('op', _BACKENDS, None, ['picky', 'absent'], 1)

  def test_a_bug_is_not_taken_for_a_refusal(self):
    with self.assertRaises(RuntimeError):
      _dispatch.dispatch('op', _BACKENDS, None, ['broken', 'good'], 1)


if __name__ == '__main__':
  absltest.main()
