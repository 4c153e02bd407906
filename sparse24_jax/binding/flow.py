"""Which matmuls of a whole step read a weight as it is, which read what a mask was laid over, and what is made of both.

`bind` follows a model's weights to its matmuls before anything is sparse. Here a step is looked at as it is run, with
its backward pass and its optimizer: from the arrays that go in, weights and their states, along every equation.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import operator
from typing import Any, NamedTuple

from sparse24_jax.binding import _jax
from sparse24_jax.binding.gates import ARRANGING, gates
from sparse24_jax.numerics import ROUNDED_TO_FP8
from sparse24_jax.policy import PrecisionName

UNSURE = -1


class Weight(NamedTuple):
  """One of the weights that are followed.

  Attributes:
    folder: of the tree that it lies in, as there may be averages and copies.
    path: in that tree.
    update: by which of the program it was made; 0 as it goes in, `UNSURE` of one that may have changed nothing, and of
      states that the optimizer does not keep.
  """

  folder: str
  path: str
  update: int = 0

  @property
  def name(self) -> tuple[str, str]:
    """Names the weight, whatever update made it."""
    return self.folder, self.path


class Marks(NamedTuple):
  """Which sparse weights, states and updates are in a value.

  Attributes:
    dense: weights, as they are stored or with their entries arranged, cast or scaled.
    states: masks, scales or packed operands.
    sparse: weights over which a state of theirs was laid.
    reads: the matmuls of weights that it was made by, a bit each. Sets would be too slow in a long program.
    touched: the weights that it was computed from, by matmuls or otherwise, a bit each.
    updates: of weights, which with these are the weights of the next step.
    handed: the weights whose updates it is, arranged or cast at most.
    scaled: the weights in whose updates, as they were handed on, it has a factor that is no gate.
    fp8: whether what it holds was rounded to 8 bits.
    plain: those of `dense` whose entries are arranged or cast at most.
    near: weights to which something was added, other than an update, as in a step of SAM: no mask is laid over them.
  """

  dense: frozenset[Weight] = frozenset()
  states: frozenset[Weight] = frozenset()
  sparse: frozenset[Weight] = frozenset()
  reads: int = 0
  touched: int = 0
  updates: frozenset[Weight] = frozenset()
  handed: frozenset[Weight] = frozenset()
  scaled: frozenset[Weight] = frozenset()
  fp8: bool = False
  plain: frozenset[Weight] = frozenset()
  near: frozenset[Weight] = frozenset()

  def of_update(self, number: int) -> 'Marks':
    """The same of states and updates that this one of a program's updates made."""
    states, updates = ({w._replace(update=number) for w in each} for each in (self.states, self.updates))
    return self._replace(states=frozenset(states), updates=frozenset(updates))


class Read(NamedTuple):
  """A line of the program with a matmul that reads a weight, projected or as it is, and in which precision."""

  weight: Weight
  sparse: bool
  line: str
  precision: PrecisionName = 'default'


class Named(NamedTuple):
  """What is in one value that has a name (`checkpoint_name`).

  Attributes:
    weights: those that it is, as stored.
    reads: the matmuls that it was made by.
    touched: the weights that it was made of.
    states: whose states it is.
  """

  weights: frozenset[Weight] = frozenset()
  reads: Sequence[Read] = ()
  touched: frozenset[Weight] = frozenset()
  states: frozenset[Weight] = frozenset()


class Found(NamedTuple):
  """What a program does with the weights.

  Attributes:
    reads: all matmuls that read them.
    named: by name what is in its values, in the order of the program. What a loop does stands once.
    altered: the weights that get an update which something multiplied, and nowhere an update as it was returned.
    returned: the weights of which the program returns a state that one of its updates made.
  """

  reads: list[Read]
  named: dict[str, list[Named]]
  altered: frozenset[tuple[str, str]] = frozenset()
  returned: frozenset[tuple[str, str]] = frozenset()


_NONE = Marks()
# A sum with something else is another weight, or a gradient with decay.
_SUMS = frozenset(('add', 'add_any', 'sub'))
_TESTS = frozenset(('eq', 'ne', 'lt', 'le', 'gt', 'ge', 'is_finite'))
# A mask or a scale acts by these.
_LAID_OVER = frozenset(('mul', 'div', 'select_n', 'and', 'or', 'xor'))
# Of all the arguments are those of a jaxpr inside.
_CALLS = frozenset((
  'jit', 'checkpoint', 'custom_jvp_call', 'custom_vjp_call', 'custom_vmap_call', 'custom_partitioning', 'shard_map',
  'eval_jaxpr', 'remat_opt',
))  # fmt: skip


def follow_weights(jaxpr: Any, marks: Sequence[Marks], made: Mapping[str, Marks]) -> Found:
  """What becomes of the weights of a jaxpr, whose arguments are marked; `made` says what has a name, by that name."""
  keys = list(dict.fromkeys(key for mark in marks for key in mark.dense))
  flow = _Flow({}, {}, made, set(), set())
  out = flow.through(jaxpr, [
    mark._replace(touched=sum(1 << keys.index(key) for key in mark.dense), plain=mark.dense) for mark in marks
  ])
  reads = list(flow.reads)
  return Found(
    reads,
    {
      name: [
        Named(mark.dense, _of_bits(mark.reads, reads), frozenset(_of_bits(mark.touched, keys)), mark.states)
        for mark in marks
      ]
      for name, marks in flow.named.items()
    },
    frozenset(weight.name for weight in flow.altered - flow.kept),
    frozenset(weight.name for mark in out for weight in mark.states if weight.update),
  )


def _of_bits[T](bits: int, each: Sequence[T]) -> list[T]:
  return [one for i, one in enumerate(each) if bits >> i & 1]


class _Flow(NamedTuple):
  reads: dict[Read, int]  # to its bit
  named: dict[str, list[Marks]]
  made: Mapping[str, Marks]
  altered: set[Weight]  # to which a scaled update was added
  kept: set[Weight]  # or one as it was handed on

  def through(self, jaxpr: Any, marks: Sequence[Marks]) -> list[Marks]:
    opened, _ = _jax.open_jaxpr(jaxpr)
    known: dict[Any, Marks] = dict(zip(opened.invars, marks, strict=True))
    may_be_gate = gates(opened)

    def read(atom: Any) -> Marks:
      return _NONE if _jax.is_literal(atom) else known.get(atom, _NONE)

    for equation in opened.eqns:
      given = [read(atom) for atom in equation.invars]
      if any(mark != _NONE for mark in given) or _jax.checkpoint_name_of(equation) is not None:
        with _jax.inside(equation):
          out = self.equation(equation, given, may_be_gate)
        known.update(zip(equation.outvars, out, strict=True))
    return [read(atom) for atom in opened.outvars]

  def equation(self, equation: Any, given: Sequence[Marks], may_be_gate: Callable[[Any], bool]) -> list[Marks]:
    name, params, outs = _jax.name_of(equation), equation.params, len(equation.outvars)
    inner = next((params[key] for key in ('jaxpr', 'call_jaxpr', 'call', 'fwd_jaxpr') if key in params), None)
    if name == 'scan':
      constants, carried, _ = _jax.scan_parts(params, given)
      return self._loop(inner, given, given[len(constants) : len(constants) + len(carried)], outs)
    if name == 'while':
      n, m = params['cond_nconsts'], params['body_nconsts']
      self.through(params['cond_jaxpr'], [*given[:n], *given[n + m :]])
      return self._loop(params['body_jaxpr'], given[n:], given[n + m :], outs)
    if name == 'cond':
      branches = [self.through(branch, given[1:]) for branch in params['branches']]
      return [_chosen(marks, _union(marks)) for marks in zip(*branches, strict=True)]
    if name in _CALLS and inner is not None:
      return self.through(inner, given)
    if name == 'optimization_barrier':
      return list(given)
    if (called := _jax.checkpoint_name_of(equation)) is not None:
      before = self.named.setdefault(called, [])
      before.extend(given)
      if called == ROUNDED_TO_FP8:
        return [mark._replace(fp8=True) for mark in given]
      return [self.made[called].of_update(len(before))] if called in self.made else list(given)
    if name in _jax.MATMULS:
      return [self._matmul(equation, given, given[:2])] * outs
    if _is_kernel(name) and any(mark.sparse for mark in given):
      return [self._matmul(equation, given, [mark._replace(dense=frozenset()) for mark in given])] * outs
    made = _made(name, given)
    if any(_jax.is_fp8(out) for out in equation.outvars):
      made = made._replace(fp8=True)
    if any(mark.handed or mark.scaled for mark in given):
      handed, scaled = self._handed(name, equation, given, may_be_gate)
      made = made._replace(handed=handed, scaled=scaled)
    return [made] * outs

  def _handed(
    self, name: str, equation: Any, given: Sequence[Marks], may_be_gate: Callable[[Any], bool]
  ) -> tuple[frozenset[Weight], frozenset[Weight]]:
    """The weights whose updates the result is, and those whose updates have a factor in it. In doubt, none."""
    none, found = frozenset[Weight](), _union(given)
    power_of_one = name == 'integer_pow' and equation.params['y'] == 1  # optax.ema begins with it
    if name in ARRANGING or name == 'select_n' or power_of_one:
      return found.handed, found.scaled
    if name in ('add', 'add_any'):
      for mark in given:
        names = {weight.name for weight in mark.dense}
        self.kept.update(weight for weight in found.handed if weight.name in names)
        self.altered.update(weight for weight in found.scaled if weight.name in names)
    if name in _SUMS:
      weights = {weight.name for mark in given for weight in mark.dense}
      return none, frozenset(weight for weight in found.scaled if weight.name not in weights)
    if name == 'neg':
      return none, found.handed | found.scaled
    if name == 'mul' or (name == 'div' and not (given[1].handed or given[1].scaled)):
      whose = next(i for i, mark in enumerate(given) if mark.handed or mark.scaled)
      return none, found.scaled | (none if may_be_gate(equation.invars[1 - whose]) else given[whose].handed)
    return none, none

  def _loop(self, body: Any, given: Sequence[Marks], carried: Sequence[Marks], outs: int) -> list[Marks]:
    """A carry is in each pass what it was in the first: weights stay weights when a step is done."""
    out = self.through(body, given)
    return [_union(pair) for pair in zip(out, [*carried, *[_NONE] * (outs - len(carried))], strict=True)]

  def _matmul(self, equation: Any, given: Sequence[Marks], operands: Sequence[Marks]) -> Marks:
    """What is in the result of a matmul, whose reads are noted."""
    source, made = _jax.source_of(equation), _union(given)
    reads = made.reads
    for operand in operands:
      for sparse, keys in ((False, operand.dense | operand.near), (True, operand.sparse - operand.dense)):
        for key in keys:
          read = Read(key, sparse, source, 'fp8' if operand.fp8 else 'default')
          reads |= 1 << self.reads.setdefault(read, len(self.reads))
    return Marks(reads=reads, touched=made.touched)


def _made(name: str, given: Sequence[Marks]) -> Marks:
  """What is in the result of an equation."""
  found = _union(given)
  if name not in ARRANGING:
    found = found._replace(plain=frozenset())
  if name.startswith(('reduce_', 'arg')) and name != 'reduce_precision':
    return found._replace(dense=frozenset(), near=frozenset(), updates=frozenset())
  if name in _TESTS:
    return Marks(states=found.states | found.sparse, reads=found.reads)  # not made of entries
  if name in _SUMS:
    for mark in given:
      if updated := _updated(mark.dense, found.updates):  # the weights of the next step
        return Marks(updated, touched=mark.touched)
    found = found._replace(updates=frozenset())
    names = frozenset.intersection(*(frozenset(w.name for w in mark.dense | mark.sparse) for mark in given))
    return found._replace(
      dense=frozenset.intersection(*(mark.dense for mark in given)),
      sparse=frozenset(w for w in found.sparse if w.name in names),
      near=found.near.union(w for mark in given for w in mark.plain if w.name not in names),
    )
  if name in _LAID_OVER or _is_kernel(name):  # one that is given a weight and its state packs it
    found = _chosen(given[1:] if name == 'select_n' else given, found)
    covered, laid = set(), set()
    for i, mark in enumerate(given):
      for key in mark.dense | mark.near:
        # What is selected from is laid over nothing: it may be the weight itself.
        over = given[:1] if name == 'select_n' else [other for j, other in enumerate(given) if j != i]
        others = (other.states | other.sparse for other in over)
        if states := {state for each in others for state in each if state.name == key.name}:
          covered.add(key.name)
          laid |= states & {key} or states  # of a state of another step, by which step that is
    dense, near, states = (
      frozenset(w for w in each if w.name not in covered) for each in (found.dense, found.near, found.states)
    )
    return found._replace(dense=dense, near=near, states=states, sparse=found.sparse.union(laid))
  return found


def _updated(dense: frozenset[Weight], updates: frozenset[Weight]) -> frozenset[Weight]:
  """The weights after their updates; one whose update may have changed nothing stays listed as it was, too."""
  names = {w.name for w in dense} & {w.name for w in updates}
  after = {w for w in updates if w.name in names and w.update != UNSURE}
  unsure = {w.name for w in updates if w.update == UNSURE}
  return frozenset(after | {w for w in dense if w.name in names & unsure})


def _chosen(marks: Sequence[Marks], found: Marks) -> Marks:
  """The marks of all values from which a run selects one; an update that only some of them carry counts as unsure."""
  unsure = (w for w in found.updates if not all(w in mark.updates for mark in marks))
  return found._replace(updates=found.updates.union(w._replace(update=UNSURE) for w in unsure))


def _is_kernel(name: str) -> bool:
  return name.endswith(('_kernel', '_call'))


def _union(marks: Sequence[Marks]) -> Marks:
  found = Marks(*(functools.reduce(operator.or_, each) for each in zip(_NONE, *marks, strict=True)))
  return found._replace(scaled=found.scaled - found.handed) if found.scaled else found
