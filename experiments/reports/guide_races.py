"""Who wins the recorded races, and when dense is sooner: what the guide's answers to "What is soonest?" rest on."""

from collections.abc import Mapping, Sequence
import itertools
import math
import statistics
from typing import NamedTuple

from experiments.reports.evidence import below, edge, Evidence, far, interval, NEAR, near, parted, told, under


class Winner(NamedTuple):
  """The contender that wins a race, the first of those with several seeds.

  Attributes:
    first: of the lowest loss.
    near: those that its seeds do not part from it.
    lower: those of one seed that ended lower.
    beaten_by: what beat the first in a race whose width is as near or nearer, and did not run in this one.
  """

  first: Evidence
  near: Sequence[Evidence]
  lower: Sequence[Evidence]
  beaten_by: Evidence | None

  @property
  def names(self) -> str:
    """All that may be the first."""
    return ' or '.join(e.who for e in (self.first, *self.near))

  def said(self, device: str) -> str:
    """The race in a sentence."""
    share = f"{interval(self.first.shares)} of dense's time"
    text = f"{self.first.place(device)}: {self.names} had dense's final loss in {share}"
    return f'{text}. {self.beaten_by.who}, which beat it elsewhere, did not run' if self.beaten_by else text

  def warned(self) -> list[str]:
    """What one seed cannot claim, and a reader should know before he takes what is claimed."""
    return [
      f"{e.where}: {e.who} ended lowest, and had dense's final loss in {e.shares[0]:.2f} of dense's time, by one seed"
      + edge(e)
      for e in self.lower
    ]


def winners(
  faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], d: int | None
) -> list[Winner]:
  """The first of each race in which one was surely below dense, the nearest width first."""
  candidates = [e for title in sorted(found) for e in found[title] if may_gain(e, faster)]
  races: dict[tuple[str, str], list[Evidence]] = {}
  for e in candidates:
    if e.shares and len(e.percent) > 1 and e.mean < 0:
      races.setdefault((e.where, e.device), []).append(e)
  for each in races.values():
    each.sort(key=lambda e: e.mean)
  # A race of the width asked about says more than others.
  ordered = [each for each in sorted(races.values(), key=lambda each: far(each[0].width, d)) if below(each[0].percent)]
  # Who is ahead of whom, by more than the interval, in any race.
  ahead = [(first, e) for each in ordered for first, e in itertools.combinations(each, 2) if parted(e, first)]
  made = []
  for first, *others in ordered:
    ran = {e.who for e in (first, *others)}
    elsewhere = (
      winner for winner, e in ahead
      if e.who == first.who and winner.who not in ran and far(winner.width, d) <= far(first.width, d)
    )  # fmt: skip
    lower = [
      e for e in candidates
      if (e.where, e.device) == (first.where, first.device) and len(e.shares) == 1
      and max(e.behind(first), default=0.0) < 0
    ]  # fmt: skip
    better = next((winner for winner in elsewhere if winner.device == first.device), None)
    made.append(Winner(first, [e for e in others if not parted(e, first)], lower, better))
  return made


def behind_at_this_width(
  faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], d: int | None
) -> list[tuple[str, str]]:
  """That, in the longest runs of the nearest width, no method was surely sooner at its final loss than dense.

  Nothing if one was, or if these runs were a race, which tells itself who was sooner.
  """
  known = [
    e for each in found.values() for e in each
    if e.width and e.dense_shares and may_gain(e, faster) and near(e.width, d)
  ]  # fmt: skip
  if d is None or not known:
    return []
  width = min((e.width for e in known if e.width), key=lambda width: far(width, d))
  longest = max((e for e in known if e.width == width), key=lambda e: next(iter(e.own.curves.values()))[-1][0])
  alike = [e for e in known if (e.width, e.where, e.device) == (width, longest.where, longest.device)]
  alike.sort(key=lambda e: -statistics.fmean(e.dense_shares))
  several = [e for e in alike if len(e.percent) > 1]
  if longest.equal == 'seconds' or not several or any(map(_sooner, several)):
    return []
  best = several[0]
  why = (
    f'dense reaches the final loss of {best.who}, the soonest with several seeds of {best.where}, in'
    f' {interval(best.dense_shares)} of the time that {best.who} takes, and is then in mid-schedule ({best.device})'
  )
  ahead = [
    f'{e.where}: dense reaches the final loss of {e.who} in {e.dense_shares[0]:.2f} of the time that {e.who} takes, by'
    f' one seed{edge(e)}' for e in alike[: alike.index(best)]
  ]  # fmt: skip
  return [('Why', why), *under('But', ahead)]


def without_dense(
  faster: Mapping[str, float | None], found: Mapping[str, Sequence[Evidence]], device: str, d: int | None
) -> list[str]:
  """Who ended lowest in races of about this width in which no dense model in 16 bits ran."""
  races: dict[tuple[str, str], list[Evidence]] = {}
  for e in (e for each in found.values() for e in each if e.against != 'dense' and near(e.width, d)):
    if e.equal == 'seconds' and may_gain(e, faster):
      races.setdefault((e.where, e.device), []).append(e)
  said = []
  for (where, gpu), each in races.items():
    first, *others = sorted(each, key=lambda e: e.own.mean)
    names = [first.who, *(e.who for e in others if len(e.behind(first)) > 1 and not parted(e, first))]
    names += [first.dense.title] if len(first.percent) > 1 and not below(first.percent) else []
    seeds = f'{len(first.own.losses)} seeds, {told(gpu, device)}'
    said.append(f'{where}, {seeds}, without dense in 16 bits: {" or ".join(names)} ended lowest')
  return said


def no_race(found: Mapping[str, Sequence[Evidence]], d: int | None) -> str:
  """That all races were of other widths; '' if one was not, or there was none."""
  widths = [e.width for each in found.values() for e in each if e.shares]
  if not widths or any(near(width, d) for width in widths):
    return ''
  return f'no race was run at a width within a factor of {NEAR} of {d:,}'


def _gain(e: Evidence, faster: Mapping[str, float | None]) -> float | None:
  """The gain that decides: of a recipe that over a dense block as wide as its own."""
  return faster.get(e.option.contenders[0] if e.option.recipe else e.contender)


def is_gain(gain: float | None) -> bool:
  """Whether a gain is known to be one."""
  return gain is not None and round(gain, 2) > 1


def how(e: Evidence, faster: Mapping[str, float | None]) -> str:
  return 'is faster' if is_gain(_gain(e, faster)) else 'computes less'


def may_gain(e: Evidence, faster: Mapping[str, float | None]) -> bool:
  """Whether it may be sooner than dense; of a dense rival whose block is not priced its race says so."""
  gain = _gain(e, faster)
  return e.option.recipe is None if gain is None else is_gain(gain)


def _sooner(e: Evidence) -> bool:
  """Whether it is at its final loss before dense by more than the interval."""
  return not all(map(math.isfinite, e.dense_shares)) or below([1 - share for share in e.dense_shares])
