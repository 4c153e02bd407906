"""The table of steps at their best, from records of several commits."""

import json
from pathlib import Path
import re

from absl.testing import absltest

from experiments.reports import best_steps, provenance
from tests.experiments.fakes import temp_folder


def record(commit, when, ms, layout='scan', recipe='fst', **fields):
  return dict(
    device='a GPU', model='gpt2', recipe=recipe, layout=layout, commit=commit, when=when, amortised_ms=ms, headline=True
  ) | fields


class LoadTest(absltest.TestCase):
  def test_of_two_commits_the_newer_counts(self):
    """The median of six processes of two programs is the time of neither."""
    new = [record('b', '2026-02-01', ms) for ms in (4.0, 5.0, 6.0)]
    old = [record('a', '2026-01-01', ms, layout) for ms in (1.0, 2.0, 3.0) for layout in ('scan', 'unrolled')]
    path = Path(temp_folder(self), 'steps.jsonl')
    # The order of lines tells nothing, and a method that was not measured again keeps its records.
    lines = [*new, *old, record('a', '2026-01-01', 8.0, recipe='dense')]
    path.write_text('\n'.join(map(json.dumps, lines)))
    found = best_steps.load(path)['a GPU', 'gpt2']
    fst = found['fst']
    self.assertEqual((fst.ms, fst.layout, fst.others, fst.processes), (5.0, 'scan', {}, 3))
    self.assertEqual(fst.record['commit'], 'b')
    self.assertEqual((found['dense'].ms, found['dense'].processes), (8.0, 1))

  def test_two_gpus_of_one_commit_are_two_sessions(self):
    path = Path(temp_folder(self), 'steps.jsonl')
    lines = [record('a', '1', ms, gpu='GPU-1', recipe=name) for name, ms in (('dense', 8.0), ('fst', 4.0))]
    lines += [record('a', '2', ms, gpu='GPU-2', recipe=name) for name, ms in (('dense', 9.0), ('s_ste', 3.0))]
    path.write_text('\n'.join(map(json.dumps, lines)))
    found = best_steps.load(path)['a GPU', 'gpt2']
    self.assertEqual((found['dense'].ms, found['dense'].processes), (9.0, 1))
    self.assertEqual(best_steps.speedups(found), {'fst': 2.0, 's_ste': 3.0})

  def test_one_newer_process_does_not_take_the_place_of_three(self):
    path = Path(temp_folder(self), 'steps.jsonl')
    lines = [record('a', '1', ms) for ms in (4.0, 5.0, 6.0)] + [record('b', '2', 3.0)]
    path.write_text('\n'.join(map(json.dumps, lines)))
    fst = best_steps.load(path)['a GPU', 'gpt2']['fst']
    self.assertEqual((fst.ms, fst.processes), (5.0, 3))

  def test_a_gain_is_over_the_rival_of_its_own_session(self):
    """Where that was timed, else over the fastest of any: two sessions have two GPUs, or two programs."""
    path = Path(temp_folder(self), 'steps.jsonl')
    lines = [record('a', '2026-01-01', ms, recipe=name) for name, ms in (('dense', 8.0), ('fst', 4.0), ('ste', 5.0))]
    lines += [record('b', '2026-02-01', ms, recipe=name) for name, ms in (('dense', 9.0), ('s_ste', 3.0))]
    lines += [record('c', '2026-03-01', 4.0, recipe='alone')]
    lines += [record('a', '2026-01-01', 6.0, recipe='dense_fp8')]
    path.write_text('\n'.join(map(json.dumps, lines)))
    found = best_steps.load(path)['a GPU', 'gpt2']
    self.assertEqual(found['dense'].ms, 9.0)
    gains = {'fst': 2.0, 'ste': 1.6, 's_ste': 3.0, 'alone': 2.0, 'dense_fp8': 8 / 6}
    self.assertEqual(best_steps.speedups(found), gains)
    self.assertEqual(best_steps.speedups(found, 'dense_fp8'), {'fst': 1.5, 'ste': 1.2})

  def test_the_table_has_the_spread_and_marks_what_three_processes_timed(self):
    rest = dict(label='FST', mfu=0.4, memory_gb={'total': 9.0}, shape={'batch': 2, 'length': 8})
    path = Path(temp_folder(self), 'steps.jsonl')
    for processes, times in ((3, '6.0 (5.0 to 6.5) | **2.00** |'), (1, '5.0 | 2.40 |')):
      ms = (5.0, 6.5, 6.0)[:processes]
      lines = [record('a', '1', each, recipe='fst') | rest for each in ms]
      lines += [record('a', '1', 12.0, recipe='dense') | rest for _ in range(3)]
      path.write_text('\n'.join(map(json.dumps, lines)))
      self.assertIn(f' | FST | {times}', best_steps.markdown(best_steps.load(path)))

  def test_what_is_bold_was_timed_by_three_processes(self):
    found = best_steps.load()
    bold = re.findall(r'\*\*([\d.]+)\*\*', best_steps.markdown(found))
    settled = [best for methods in found.values() for name, best in methods.items() if name != 'dense' and timed(best)]
    self.assertEqual(bold, [f'{gain(best):.2f}' for best in settled])

  def test_the_readme_has_gains_of_three_processes_and_the_least_of_them(self):
    text = ' '.join((provenance.ROOT / 'README.md').read_text().split())
    pattern = r'is ([\d.]+) times \(GPT-2 124M, (.*?)\) to ([\d.]+) times faster \(width 4,096, (.*?)\)'
    (said,) = re.findall(pattern, text)
    found = {model: methods for (_, model), methods in best_steps.load().items()}
    low, high = found['gpt2-124m']['fst_all'], found['gpt2-8x4096']['s_ste_fp8_all']
    self.assertTrue(timed(low) and timed(high))
    self.assertEqual(said, (
      f'{gain(low):.2f}', 'FST on all linear layers', f'{gain(high):.2f}', 'S-STE in FP8 on all linear layers',
    ))  # fmt: skip
    sparse = [best for methods in found.values() for name, best in methods.items() if not name.startswith('dense')]
    self.assertEqual(min(filter(timed, sparse), key=gain), low)


def gain(best):
  return best.beside['dense'].ms / best.ms


def timed(best):
  """Whether three processes at one commit timed a method, in its layout, and the dense one beside it."""
  records = [json.loads(line) for line in (provenance.RESULTS / best_steps.FILE).read_text().splitlines()]

  def same(record, one):
    return all(record[key] == one.record[key] for key in ('device', 'model', 'recipe', 'layout', 'commit'))

  return all(
    len({(r['when'], r['process']) for r in records if same(r, one)}) >= 3 for one in (best, best.beside['dense'])
  )


if __name__ == '__main__':
  absltest.main()
