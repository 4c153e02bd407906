"""Suggestions for mistyped names, on command lines too, as argparse makes them from Python 3.14 on."""

import argparse
from collections.abc import Collection
import difflib
import re
from typing import NoReturn

# What papers call a recipe.
_PAPERS = {'fst': 'transposable_srste', 'mst': 'mixed_sparsity', 'sste': 's_ste', 'srste': 'sr_ste', 'set': 'set_'}


def meant(name: str, known: Collection[str]) -> str | None:
  """The known name that is close to another, whatever its case, or that a paper's name stands for; None: none is.

  >>> meant('FST', ['fst', 'ste']), meant('FST', ['transposable_srste']), meant('trian', ['train']), meant('x', ['ste'])
  ('fst', 'transposable_srste', 'train', None)
  """
  lower = name.lower().replace('-', '_')
  if (paper := _PAPERS.get(lower)) in known and lower not in known:
    return paper
  return next(iter(difflib.get_close_matches(name.lower(), known, 1)), None)


def with_meant(message: str, elsewhere: Collection[str] = ()) -> str:
  """A message of argparse, with the choice that was meant, or the one of another program.

  >>> with_meant("argument COMMAND: invalid choice: 'trian' (choose from 'train', 'eval')")
  "argument COMMAND: invalid choice: 'trian' (choose from 'train', 'eval'); did you mean 'train'?"
  """
  if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
    close = meant(found[1], [*re.findall(r"[^\s,']+", found[2]), *elsewhere])
    message += f'; did you mean {close!r}?' if close else ''
  return message


class Parser(argparse.ArgumentParser):
  """Says of a mistyped command or choice which was meant; so do the parsers of its commands."""

  def error(self, message: str) -> NoReturn:
    super().error(with_meant(message))
