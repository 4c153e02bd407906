"""The commands that records and documents name are of programs that are here, with options that they have."""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
import contextlib
import importlib
import io
import json
from pathlib import Path
import re
import shlex
from unittest import mock

from absl.testing import absltest, parameterized

from experiments.arguments import make_parser, PROGRAMS
from experiments.reports import provenance
from tests.experiments.fakes import temp_folder

DOCUMENTS = (
  *(provenance.ROOT / name for name in ('README.md', 'CONTRIBUTING.md', 'pallas_kernels/README.md')),
  *sorted(provenance.ROOT.glob('docs/*.md')), *sorted(provenance.ROOT.glob('examples/**/*.md')),
)  # fmt: skip
# Records of whole commits whose programs have other options or contenders today -> their number. The documents name
# those of today.
OF_THEN = {'race_h200.jsonl': 31, 'race_h200_seeds.jsonl': 34, 'race_clocks.jsonl': 4, 'race_h200_124m.jsonl': 2}

_OURS = re.compile(r'python3? -m ((?:experiments|pallas_kernels|sparse24_jax|tests)\b[\w.]*)(.*)')

# Reads options, or looks at them, and ends by an exception: `_ReadError`, or SystemExit with a message.
type Reader = Callable[[argparse.ArgumentParser, Sequence[str]], None]


class _ReadError(Exception):
  """A program has read its options, and would begin."""


def whole(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
  """Reads a command line as the program does."""
  _, rest = parser.parse_known_args(words)
  if rest:
    parser.error(f'unrecognized arguments: {" ".join(rest)}')
  raise _ReadError


def in_part(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
  """Looks for the command and the options: a document leaves some out, and has names in capitals for values."""
  known, parsers = set(), [parser]
  for word in [word for word in words if not word.startswith('-')]:
    inner = [a.choices for p in parsers for a in p._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
      break
    if not word.isupper() and not any(word in choices for choices in inner):
      parser.error(f'no command {word}')
    known |= {option for p in parsers for option in p._option_string_actions}
    parsers = [p for choices in inner for name, p in choices.items() if word.isupper() or name == word]
  known |= {option for p in parsers for option in p._option_string_actions}
  if unknown := [word for word in words if word.startswith('--') and word.partition('=')[0] not in known]:
    parser.error(f'unrecognized arguments: {" ".join(unknown)}')
  raise _ReadError


def refused(command: str, reader: Reader) -> str | None:
  """What is wrong with a command; None if its program would begin."""
  found = _OURS.search(command)
  if not found:
    return 'no program of this project'
  name, words = found[1], shlex.split(found[2])
  if name == 'experiments' and words and words[0] in PROGRAMS:
    main, words = f'experiments.{PROGRAMS[words[0]][0]}', words[1:]
  elif name == 'experiments':
    return _end(lambda: reader(make_parser(), words))
  elif not provenance.is_program(name):
    return f'no program {name}'
  else:
    main = f'{name}.__main__' if (provenance.ROOT / name.replace('.', '/')).is_dir() else name

  def run() -> None:
    with mock.patch.object(argparse.ArgumentParser, 'parse_args', lambda parser, argv=None: reader(parser, words)):
      importlib.import_module(main).main()

  return _end(run)


def _end(run: Callable[[], None]) -> str | None:
  with contextlib.redirect_stderr(io.StringIO()) as errors:
    try:
      run()
    except _ReadError:
      return None
    except SystemExit:
      return errors.getvalue().strip().splitlines()[-1]
  return 'it does not read options'


def commands(document: Path) -> Iterator[str]:
  """The commands of a document that run programs of this project, in blocks of code and in sentences."""
  blocks, text = re.compile(r'(?s)```.*?```'), document.read_text()
  lines = [line for block in blocks.findall(text) for line in block.replace('\\\n', ' ').splitlines()]
  lines += [' '.join(code.split()) for code in re.findall(r'`([^`]+)`', blocks.sub('', text))]
  for line in lines:
    for part in re.split(r'\s(?:\||;|#|&&)', line):
      if found := _OURS.search(part):
        yield found[0]


class CommandsTest(parameterized.TestCase):
  def test_records_name_commands_that_are_here(self):
    """Or are counted in `OF_THEN`."""
    kept, found = {}, Counter()
    for path in sorted(provenance.RESULTS.glob('*.jsonl')):
      for record in map(json.loads, path.read_text().splitlines()):
        command = record['command']
        if command not in kept:
          kept[command] = refused(provenance.today(command), whole)
        found[path.name] += kept[command] is not None
    self.assertEqual(+found, OF_THEN, [f'{command}: {why}' for command, why in kept.items() if why])

  @parameterized.parameters(*DOCUMENTS)
  def test_documents_name_commands_that_are_here(self, document):
    found = {command: wrong for command in commands(document) if (wrong := refused(command, in_part))}
    self.assertEqual(found, {})

  @parameterized.parameters(
    ('python -m experiments compare --seeds 0 1', None, None),
    ('python -m experiments together --seeds 0', 'invalid choice', 'no command together'),
    ('python -m experiments compare --sedes 0', '--sedes', '--sedes'),
    ('python -m experiments race --seconds 9', 'required: --out', None),
    ('python -m experiments race --contenders dance', 'invalid choice', None),
    ('python -m pallas_kernels bench OP --out FILE', 'invalid choice', None),
    ('python -m pallas_kernels bench pack --ponly x', '--ponly', '--ponly'),
    ('python -m pallas_kernels.pack.bench --out FILE', 'no program', 'no program'),
    ('python -m tests.soak --steps 3', None, None),
  )
  def test_what_is_refused(self, command, by_whole, by_part):
    for reader, expected in ((whole, by_whole), (in_part, by_part)):
      self.assertRegex(refused(command, reader) or 'nothing', expected or '^nothing$')

  def test_commands_of_a_document(self):
    page = Path(temp_folder(self)) / 'page.md'
    page.write_text('\n'.join((
      'Run `python -m', 'experiments pages` first.', '', '```', 'X=1 python -m tests.soak \\', '  --kills 3  # why',
      'ls; python -m pip', '```',
    )))  # fmt: skip
    self.assertEqual([*commands(page)], ['python -m tests.soak    --kills 3 ', 'python -m experiments pages'])


if __name__ == '__main__':
  absltest.main()
