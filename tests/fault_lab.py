"""Where faults are tried: a folder, chance, runs that are cut, commands, and ways to harm what they left."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import io
import os
from pathlib import Path
import random
import re
import signal
from unittest import mock

from experiments import __main__ as cli
from experiments.runs import stopping, train
from experiments.runs.data import pipeline
from tests.experiments import fakes
from tests.experiments.runs import train_test

STEPS = 30
# What a case finds, one for each thing that it tries: 'survived', 'refused', or 'lost: ' and what was seen.
type Outcomes = Iterator[str]


@dataclasses.dataclass
class Lab:
  """Tries faults: it has a folder, chance, and programs that are compiled once."""

  folder: Path
  chance: random.Random
  programs: dict[str, list] = dataclasses.field(default_factory=dict)
  count: int = 0

  def new(self) -> Path:
    self.count += 1
    return self.folder / f'run{self.count}'

  def config(self, **changes):
    kwargs = train_test.RECIPES['transposable_srste']
    return train_test.tiny('transposable_srste', kwargs, steps=STEPS, **changes)

  def train(self, folder: Path, data=None, key: str = '', **changes):
    config = self.config(**changes)
    shared = self.programs.setdefault(key or str(sorted(changes.items())), [])
    quiet = contextlib.redirect_stderr(io.StringIO())
    with quiet:
      return train.train(config, folder, data=data or fakes.FakeData(), quiet=True, programs=shared)

  def cut(self, step: int, folder: Path | None = None) -> Path:
    """A run that was ended by a signal while it fetched the batch of a step."""
    folder, fetch = folder or self.new(), fakes._Iterator.__next__

    def fetch_and_signal(it):
      if it._position == step:
        os.kill(os.getpid(), signal.SIGTERM)
      return fetch(it)

    with mock.patch.object(fakes._Iterator, '__next__', fetch_and_signal), contextlib.suppress(stopping.StoppedError):
      self.train(folder)
    return folder

  def whole(self) -> Path:
    """The run that nothing happened to."""
    folder = self.folder / 'whole'
    if not folder.exists():
      self.train(folder)
    return folder

  def survives(self, folder: Path) -> str:
    """Whether a run, started again, ends as the one that nothing happened to."""
    self.train(folder)
    same = (folder / 'metrics.jsonl').read_bytes() == (self.whole() / 'metrics.jsonl').read_bytes()
    found, expected = (train_test.final_arrays(self.config(), f)[0] for f in (folder, self.whole()))
    same = same and all(found[path].tobytes() == array.tobytes() for path, array in expected.items())
    return 'survived' if same else 'lost'


def command(*arguments: str) -> tuple[int, str]:
  """Status and output of a command line, on made-up text."""
  out = io.StringIO()
  with (
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(out),
    mock.patch.object(pipeline, 'load', lambda **_: fakes.FakeData()),
  ):
    status = cli.main(arguments)
  return status, out.getvalue()


def refused(arguments: tuple[str, ...], message: str) -> str:
  """'refused' if a command ends with a status of 1 and a message."""
  status, output = command(*arguments)
  told = status == 1 and re.search(message, output) and 'Traceback' not in output
  return 'refused' if told else f'lost: {status} {output[-300:]}'


def raises(kind: type[Exception], message: str, action: Callable[[], object]) -> str:
  try:
    action()
  except kind as error:
    return 'refused' if re.search(message, str(error)) else f'lost: {error}'
  return 'lost: nothing was raised'


def flip(file: Path, chance: random.Random) -> None:
  """Changes one random bit."""
  content = bytearray(file.read_bytes())
  content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
  file.write_bytes(content)


def files_of(folder: Path, item: str) -> list[Path]:
  found = sorted(p for p in (folder / item).rglob('*') if p.is_file() and p.stat().st_size)
  return [p for p in found if p.name not in ('_CHECKPOINT_METADATA', '_sharding')]


def newest(folder: Path) -> Path:
  return max((p for p in (folder / 'checkpoints').iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
