"""The alternatives of a regular expression, and which of them match nothing: those of a rule may be mistyped."""

from collections.abc import Collection, Iterator, Set
import itertools
import re
from typing import NamedTuple

# What decides where alternatives of a regular expression begin and end, and what hides such: escapes and sets.
_TOKENS = re.compile(r'\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:P<\w+>|:|<?[=!]|))?|[|)]|$', re.DOTALL)
# A group that may match several times.
_REPEATED = re.compile(r'\)[*+{]')


class Alternative(NamedTuple):
  """One of several, between bars in a regular expression: its place, and the expression with it alone or without it."""

  start: int
  text: str
  alone: str
  without: str

  def is_part_of(self, other: 'Alternative') -> bool:
    """Whether it lies in another alternative of the same expression."""
    return self is not other and other.start <= self.start < other.start + len(other.text)


def alternatives(pattern: str) -> Iterator[Alternative]:
  """All of a regular expression but for those of assertions and conditions, which match nothing themselves.

  >>> [(each.text, each.alone, each.without) for each in alternatives('.*/(mlp|atn)/(?!a|b).*')]
  [('mlp', '.*/(mlp)/(?!a|b).*', '.*/(atn)/(?!a|b).*'), ('atn', '.*/(atn)/(?!a|b).*', '.*/(mlp)/(?!a|b).*')]
  """
  flags = re.match(r'(\(\?[a-zA-Z]+\))*', pattern)
  if flags and 'x' in flags[0]:
    return  # its comments may hold anything
  first = flags.end() if flags else 0
  groups: list[list[int] | None] = [[first]]  # where alternatives of the open groups begin; None in assertions
  for token in _TOKENS.finditer(pattern, first):
    text, start, end = token[0], token.start(), token.end()
    if text.startswith('('):
      asserts = groups[-1] is None or text[-1] in '=!'
      groups.append(None if asserts else [] if text == '(?' else [end])
    elif text == '|' and groups[-1]:
      groups[-1].append(end)
    elif text in (')', ''):
      begins = groups.pop() or []
      before, after = pattern[: begins[0]] if begins else '', pattern[start:]
      for begin, behind in itertools.pairwise([*begins, start + 1]) if len(begins) > 1 else ():
        text = pattern[begin : behind - 1]
        without = pattern[:begin] + pattern[behind:] if behind <= start else pattern[: begin - 1] + after
        yield Alternative(begin, text, before + text + after, without)


def idle(pattern: str, names: Collection[str]) -> list[str]:
  """The alternatives of a regular expression that have no part in its matching any of the names.

  >>> idle('.*/(mlp|atn)/.*', ['h/mlp/up', 'h/attn/up'])
  ['atn']
  """
  matched = {name for name in names if re.fullmatch(pattern, name)}
  found = [each for each in alternatives(pattern) if each.text and _is_idle(each, pattern, matched)]
  return [each.text for each in found if not any(map(each.is_part_of, found))]


def _is_idle(each: Alternative, pattern: str, matched: Set[str]) -> bool:
  name = re.sub(r'\\(.)', r'\1', each.alone)
  if name in matched and re.escape(name) == each.alone:
    return False  # a path in full: nothing is compiled for each of many
  try:
    if any(map(re.compile(each.alone).fullmatch, matched)):
      return False
    # (a|b)+ may need what matches nothing alone.
    return not _REPEATED.search(pattern) or all(map(re.compile(each.without).fullmatch, matched))
  except re.error:  # a group that the rest refers to
    return False
