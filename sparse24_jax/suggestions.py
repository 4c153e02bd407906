"""Suggestions for mistyped names and patterns, on command lines too, as argparse makes them from Python 3.14 on."""

import argparse
from collections.abc import Collection, Iterator
import difflib
import itertools
import re
from typing import NamedTuple, NoReturn

# What decides where alternatives of a regular expression begin and end, and what hides such: escapes and sets.
_TOKENS = re.compile(r'\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:P<\w+>|:|))?|[|)]|$', re.DOTALL)
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


class Alternative(NamedTuple):
  """One of several, between bars in a regular expression; and the expression with it alone, and without it."""

  text: str
  alone: str
  without: str


def alternatives(pattern: str) -> Iterator[Alternative]:
  """All of a regular expression but for those of assertions and conditions, which match nothing themselves.

  >>> [(each.text, each.alone, each.without) for each in alternatives('.*/(mlp|atn)/(?!a|b).*')]
  [('mlp', '.*/(mlp)/(?!a|b).*', '.*/(atn)/(?!a|b).*'), ('atn', '.*/(atn)/(?!a|b).*', '.*/(mlp)/(?!a|b).*')]
  """
  flags = re.match(r'(\(\?[a-zA-Z]+\))*', pattern)
  if flags and 'x' in flags[0]:
    return  # its comments may hold anything
  groups: list[list[int]] = [[flags.end() if flags else 0]]  # where the alternatives of the open groups begin
  for token in _TOKENS.finditer(pattern, groups[0][0]):
    text, start, end = token[0], token.start(), token.end()
    if text.startswith('('):
      groups.append([] if text == '(?' else [end])
    elif text == '|' and groups[-1]:
      groups[-1].append(end)
    elif text in (')', ''):
      begins = groups.pop()
      texts = [pattern[a : b - 1] for a, b in itertools.pairwise([*begins, start + 1])]
      for i, text in enumerate(texts if len(texts) > 1 else []):
        before, after = pattern[: begins[0]], pattern[start:]
        yield Alternative(text, before + text + after, before + '|'.join(texts[:i] + texts[i + 1 :]) + after)


def idle(pattern: str, names: Collection[str]) -> list[str]:
  """The alternatives of a regular expression that have no part in its matching any of the names.

  >>> idle('.*/(mlp|atn)/.*', ['h/mlp/up', 'h/attn/up'])
  ['atn']
  """
  found = [each.text for each in alternatives(pattern) if each.text and _is_idle(each, pattern, names)]
  return [text for text in found if not any(text in other for other in found if other != text)]


def _is_idle(each: Alternative, pattern: str, names: Collection[str]) -> bool:
  try:
    alone, without, whole = ({name for name in names if re.fullmatch(p, name)} for p in (*each[1:], pattern))
  except re.error:  # a group that the rest refers to
    return False
  return not alone and without == whole  # (a|b)+ may need what matches nothing alone


def with_meant(message: str) -> str:
  """A message of argparse, with the choice that was meant.

  >>> with_meant("argument COMMAND: invalid choice: 'trian' (choose from 'train', 'eval')")
  "argument COMMAND: invalid choice: 'trian' (choose from 'train', 'eval'); did you mean 'train'?"
  """
  if found := re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message):
    close = meant(found[1], re.findall(r"[^\s,']+", found[2]))
    message += f'; did you mean {close!r}?' if close else ''
  return message


class Parser(argparse.ArgumentParser):
  """Says of a mistyped command or choice which was meant; so do the parsers of its commands."""

  def error(self, message: str) -> NoReturn:
    super().error(with_meant(message))
