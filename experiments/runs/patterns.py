"""Refuses regular expressions that could search for longer than anyone waits: configurations come from elsewhere too.

Python's `re` tries one way after another. Paths of weights have some 60 characters, so a handful of repetitions side by
side is searched in no time, but repetitions of repetitions, or many optional parts, take longer than the age of the
universe. What is refused here is more than what is dangerous; patterns of weights need none of it.
"""

import re

_LONGEST, _REPETITIONS, _OPTIONAL, _CHOICES = 300, 5, 12, 10
_INNERMOST = re.compile(r'\((?:\?(?:[:=!>]|<[=!]|P<\w+>))?([^()]*)\)([*+?{])?')


def require_fast(name: str, pattern: str) -> None:
  """Raises ValueError for a pattern that may take forever to match; `name` says where it stands.

  >>> require_fast('path', r'.*/(attn|mlp)/.*')
  >>> require_fast('path', r'(.*a)*b')
  Traceback (most recent call last):
  ...
  ValueError: path '(.*a)*b' repeats a group that holds a repetition or a choice; ...
  """
  plain = re.sub(r'\[\^?\]?[^\]]*\]', 'x', re.sub(r'\\.', 'x', pattern))
  choices, why = 0, ''
  while found := _INNERMOST.search(plain):
    inner, repeated = found[1], found[2] or ''
    if repeated and repeated != '?' and re.search(r'[*+?{|]', inner):
      why = 'repeats a group that holds a repetition or a choice'
      break
    choices += '|' in inner
    plain = plain[: found.start()] + inner.replace('|', 'x') + repeated + plain[found.end() :]
  repetitions, optional = len(re.findall(r'[*+{]', plain)), plain.count('?')
  if not why and (repetitions > _REPETITIONS or optional > _OPTIONAL or choices > _CHOICES):
    why = f'has {repetitions} repetitions, {optional} optional parts and {choices} choices'
  if not why and len(pattern) > _LONGEST:
    why = f'has {len(pattern)} characters'
  if why:
    raise ValueError(
      f'{name} {pattern!r} {why}; accepted are {_REPETITIONS} repetitions, {_OPTIONAL} optional parts, '
      f'{_CHOICES} choices and {_LONGEST} characters, because others can take forever to match'
    )
