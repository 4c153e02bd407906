"""What a trained language model goes on with, and what it finds likelier; fine-tuning from a run."""

import json
from pathlib import Path
from unittest import mock

from absl.testing import absltest
import jax
import numpy as np
import pytest

from experiments.runs import build, experiment, inspection, language, methods, records, train
from experiments.runs.data.tokenizer import Bytes
from experiments.runs.tasks.language import NEXT_TOKEN
import sparse24_jax as s24
from tests.experiments.cli_test import call
from tests.experiments.fakes import fake_data, temp_folder
from tests.experiments.reports.run_folders import write_run

_ALPHABET = b'abcdefgh'


class _Data:
  vocab_size, tokenizer = 256, Bytes()


class _Parts:  # with sequences of 16 tokens
  data, task = _Data(), NEXT_TOKEN
  config = experiment.load_config('nano', tiny=True)


def alphabet(tokens):
  """A model that goes on with the next letter, round and round, and ends a document after `x`."""
  following = np.arange(256)
  for a, b in zip(_ALPHABET, _ALPHABET[1:] + _ALPHABET[:1], strict=True):
    following[a] = b
  following[ord('x')] = Bytes.separator
  return 9.0 * jax.nn.one_hot(jax.numpy.asarray(following)[tokens], 256)


class LanguageTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.loaded = mock.Mock(parts=_Parts())
    self.enter_context(mock.patch.object(language, '_model_of', lambda loaded: alphabet))

  def test_a_text_longer_than_the_sequences_goes_on(self):
    found = language.generate(self.loaded, 'ab', tokens=40)
    self.assertEqual(found, ('abcdefgh' * 6)[:42])
    self.assertEqual(language.generate(self.loaded, 'b' * 30 + 'c', tokens=3), 'b' * 30 + 'cdef')

  def test_a_document_ends(self):
    self.assertEqual(language.generate(self.loaded, 'ax', tokens=40), 'ax')

  def test_draws_depend_on_the_seed_alone(self):
    first, again, other = (
      language.generate(self.loaded, 'a', tokens=20, temperature=9.0, seed=seed) for seed in (1, 1, 2)
    )
    self.assertEqual(first, again)
    self.assertNotEqual(first, other)

  def test_bad_arguments(self):
    with self.assertRaisesRegex(ValueError, 'tokens 0 must be 1 or more'):
      language.generate(self.loaded, '', tokens=0)

  def test_cloze_by_sum_and_by_mean(self):
    def item(context, *choices, answer):
      return language.Item(Bytes().encode(context), tuple(map(Bytes().encode, choices)), answer)

    right = item('ab', 'cd', 'dc', answer=0)
    # Two likely letters and an unlikely one cost as much as that one alone, but less a letter.
    by_mean = item('ab', 'z', 'cdz', answer=1)
    values = language.cloze(self.loaded, [right] * 40 + [item('ab', 'ba', 'cd', answer=0)])
    self.assertAlmostEqual(values['accuracy'], 40 / 41)
    self.assertEqual((values['chance'], values['questions']), (0.5, 41.0))
    values = language.cloze(self.loaded, [by_mean])
    self.assertEqual((values['accuracy'], values['accuracy_by_mean']), (0.0, 1.0))

  def test_bad_questions(self):
    with self.assertRaisesRegex(ValueError, 'there are no questions'):
      language.cloze(self.loaded, [])
    long = language.Item(np.zeros(12, int), (np.zeros(6, int),), 0)
    with self.assertRaisesRegex(ValueError, r'question 1 has 12 \+ 6 tokens .* at most 17'):
      language.cloze(self.loaded, [long])
    path = Path(temp_folder(self)) / 'questions.jsonl'
    path.write_text('{"context": "a", "choices": ["b", "c"], "answer": 1}\n')
    (item,) = language.read_items(path, Bytes())
    self.assertEqual((item.context.tolist(), len(item.choices), item.answer), ([97], 2, 1))
    path.write_text('{"context": "a", "choices": ["b"], "answer": 1}\n')
    with self.assertRaisesRegex(ValueError, 'questions.jsonl:1: expected an object with context, choices and answer'):
      language.read_items(path, Bytes())

  def test_questions_of_held_out_text_have_one_right_answer(self):
    windows = np.random.default_rng(0).integers(0, 50, (12, 16))
    data = mock.Mock()
    data.validation = lambda: [{'inputs': windows[:6]}, {'inputs': windows[6:]}]
    whole = {tuple(row) for row in windows}
    items = list(language.held_out_items(data, 9))
    self.assertEqual({item.answer for item in items}, {0, 1, 2, 3})
    for item in items:
      fits = [(*item.context, *choice) in whole for choice in item.choices]
      self.assertEqual([i for i, fit in enumerate(fits) if fit], [item.answer])


@pytest.mark.slow
class FineTuningTest(absltest.TestCase):
  def test_a_run_that_begins_with_another(self):
    folder = temp_folder(self)
    before = f'{folder}/before'
    config = experiment.load_config('bert_nano', ['model.num_layers=1'], tiny=True)
    config = methods.configure(config, 's_ste', 0)
    train.train(config, before, data=fake_data(config), quiet=True)

    config = experiment.load_config('finetune_nano', ['model.num_layers=1', f'init_from={before}', 'steps=1',
                                                      'log_every=1', 'eval_every=1', 'optimizer.peak_lr=0.0',
                                                      'optimizer.warmup_steps=0'], tiny=True)  # fmt: skip
    with mock.patch.object(inspection.build, 'make_parts', make_parts):
      train.train(config, f'{folder}/after', data=fake_data(config), quiet=True)
      first, then = (inspection.load(f'{folder}/{name}') for name in ('before', 'after'))
    self.assertEqual(first.phase, 'sparse')
    state = first.state
    projected = s24.project(state.params, state.opt_state, first.parts.recipe, phase='sparse')
    np.testing.assert_array_equal(
      then.state.params['h_0']['mlp']['c_fc']['kernel'], projected['h_0']['mlp']['c_fc']['kernel']
    )
    events = records.read_run(f'{folder}/after').events
    self.assertIn('new are classifier/bias, classifier/kernel; left out are none', events[0]['what'])


def make_parts(config, *, data=None):
  return _MAKE_PARTS(config, data=data or fake_data(config))


_MAKE_PARTS = build.make_parts


class CommandTest(absltest.TestCase):
  def test_cloze_of_several_runs_with_a_record_each(self):
    folder = Path(temp_folder(self))
    runs = [str(write_run(str(folder), 'fst', seed, 1.0 + seed)) for seed in (0, 1)]
    (folder / 'q').write_text('{"context": "ab", "choices": ["cd", "ba"], "answer": 0}\n')
    # The newest checkpoint need not be of the last evaluation, nor of any.
    runs.append(runs[0])
    loaded = [mock.Mock(parts=_Parts(), phase='dense', state=mock.Mock(step=step)) for step in (4000, 500, 20)]
    with (
      mock.patch.object(language, '_model_of', lambda loaded: alphabet),
      mock.patch.object(inspection, 'load', side_effect=loaded),
    ):
      status, out, _ = call('cloze', *runs, '--file', str(folder / 'q'), '--results', str(folder / 'r'))
    self.assertEqual((status, out.count('1.000 of 1 questions right')), (0, 3))
    found = [json.loads(line) for line in (folder / 'r').read_text().splitlines()]
    losses = [(r['seed'], r['steps'], r.get('validation_loss')) for r in found]
    self.assertEqual(losses, [(0, 4000, 1.0), (1, 500, 2.0 + 2 * np.exp(-1)), (0, 20, None)])
    self.assertEqual({(r['measures']['accuracy'], r['label']) for r in found}, {(1.0, 'FST')})

  def test_generate_and_cloze_of_a_folder_that_is_none(self):
    for command in ('generate', 'cloze'):
      status, _, err = call(command, '/nonexistent')
      self.assertEqual(status, 1)
      self.assertRegex(err, 'is not the folder of a run')


if __name__ == '__main__':
  absltest.main()
