"""The description of a run: frozen data that says which weights are sparse, how, and when."""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import math
import re
from typing import Any, get_args, Literal

from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
import numpy as np

from pallas_kernels._choices import check_choices, check_whole
from sparse24_jax.asked import Asked, PLAIN
from sparse24_jax.attention import Attention, check_attention, describe_attention
from sparse24_jax.layout import Layout, Layouts, MadeBy
from sparse24_jax.policy import ActivationPolicy, DotPolicy, repr_of
from sparse24_jax.projection import Projection

PhaseName = Literal['dense', 'sparse']
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)


@dataclasses.dataclass(frozen=True)
class Rule:
  """The policy of the weights whose path matches.

  Attributes:
    path: a regular expression that the whole path of a weight must match, `h_0/mlp/c_fc/kernel` say. Weights are
      arrays of two or more axes whose name is not `bias`, `scale` or `embedding`. Axis -2 has to be the one that the
      matmul contracts, which a shape does not tell: kernels `[embed, heads, head_dim]` of Flax's attention and of
      `DenseGeneral` with several features are not to be matched.
    policy: how their matmuls are done.
    activation: how the activations of the squared-ReLU block are made sparse to which they belong, or None. Only a
      layer that runs the whole block can follow it.
    exact: regular expressions, likewise of whole paths, of those of its weights whose gradient is taken of all of the
      output gradient where `policy` samples that; see `Recipe.with_exact_gradients`.

  >>> import sparse24_jax as s24
  >>> up, rest = s24.Rule('.*/c_fc/.*', s24.DotPolicy(s24.transposable())), s24.Rule('.*', s24.DotPolicy())
  >>> s24.Recipe('up only', (up, rest)).describe()['rules'][0]['projection']
  'transposable exact'
  """

  path: str
  policy: DotPolicy
  activation: ActivationPolicy | None = None
  exact: tuple[str, ...] = ()

  def __repr__(self) -> str:
    return repr_of(self)

  def __post_init__(self):
    if not isinstance(self.exact, tuple):
      raise ValueError(f'exact of rule {self.path!r} must be a tuple of regular expressions, found {self.exact!r}')
    _check_pattern('rule path', self.path)
    for path in self.exact:
      _check_pattern('path of exact gradients', path)
    if not isinstance(self.policy, DotPolicy):
      raise ValueError(f'policy of rule {self.path!r} must be a DotPolicy, found {self.policy!r}')
    if not isinstance(self.activation, ActivationPolicy | None):
      raise ValueError(f'activation of rule {self.path!r} must be an ActivationPolicy, found {self.activation!r}')

  @property
  def is_plain(self) -> bool:
    """Whether it leaves its weights as a dense model has them."""
    policy = dataclasses.replace(self.policy, implementation=None)
    return self.activation is None and policy == DotPolicy()

  def of(self, path: str) -> 'Rule':
    """The rule of one of its weights, by which its matmuls run."""
    if not self.exact:
      return self
    whole = any(re.fullmatch(pattern, path) for pattern in self.exact)
    policy = dataclasses.replace(self.policy, weight_grad='dense') if whole else self.policy
    return dataclasses.replace(self, policy=policy, exact=())

  def in_dense_phase(self) -> 'Rule':
    """The rule of the same weights in a dense phase, which lifts the sparsity and not the precision."""
    policy = self.policy
    # These name what runs sparse matmuls.
    named = None if policy.implementation in ('sparse', 'cusparselt') else policy.implementation
    dense = DotPolicy(precision=policy.precision, implementation=named)
    return dataclasses.replace(self, policy=dense, activation=None, exact=())


def _check_pattern(what: str, path: Any) -> None:
  if not isinstance(path, str):
    raise ValueError(f'{what} {path!r} must be a string, a regular expression')
  try:
    re.compile(path)
  except re.error as error:
    raise ValueError(f'{what} {path!r} is not a regular expression: {error}') from error


@dataclasses.dataclass(frozen=True)
class Phase:
  """A stretch of training.

  Attributes:
    name: `'sparse'`, where the rules hold, or `'dense'`, where nothing is sparse and nothing decays: a layer whose rule
      has the precision `'fp8'` is a dense one in FP8, every other one the plain one.
    fraction: share of the optimizer steps, in (0, 1].
    attention: which earlier positions a token attends to, for models that can: an `AttentionPattern` for all heads of
      all layers, or a tuple with one entry a layer, each None, a pattern, or a tuple of one a head. None leaves what
      the model does by itself: attending to all of them. A Python value as the name is: a step is compiled for each
      pair of the two.

  >>> import sparse24_jax as s24
  >>> near, far = s24.AttentionPattern('local', 64), s24.AttentionPattern('strided', 64)
  >>> phases = (s24.Phase('sparse', 0.9, (near, (near, far))), s24.Phase('dense', 0.1))  # two layers, two heads
  >>> [s24.phase_at(s24.Recipe('two', phases=phases), step, 100) for step in (0, 95)]
  ['sparse', 'dense']
  """

  name: PhaseName
  fraction: float
  attention: Attention = None

  def __repr__(self) -> str:
    return repr_of(self)

  def __post_init__(self):
    check_phase(self.name)
    check_attention(f'attention of phase {self.name!r}', self.attention)
    if not 0 < self.fraction <= 1:
      raise ValueError(f'phase {self.name!r} has fraction {self.fraction}; it must be in (0, 1]')


def check_phase(name: str) -> None:
  if isinstance(name, Phase):
    raise ValueError(f'phase is a Phase object; give its name, {name.name!r}')
  if name not in PHASES:
    raise ValueError(f'phase={name!r}: known are {list(PHASES)}')


def require_recipe(recipe: Any, order: str = '') -> None:
  """ValueError unless it is one; `order` is how the arguments stand in the call."""
  if not isinstance(recipe, Recipe):
    found = f'{recipe!r}.' if isinstance(recipe, str) else f'{type(recipe).__name__}: arguments in another order?'
    order = f' It is {order}' if order else ''
    raise ValueError(f'recipe must be a Recipe, as the functions of sparse24_jax.recipes make, found {found}{order}')


def resolve_phase(recipe: 'Recipe', phase: PhaseName | None) -> PhaseName:
  """`phase`, or if None the recipe's first one.

  ValueError for `'sparse'` in a recipe that is never sparse, and for None in one that begins dense and is sparse later:
  a run that takes it for the phase of all steps would be dense to the end, without a word.
  """
  require_recipe(recipe)
  names: list[PhaseName] = [p.name for p in recipe.phases]
  if phase is None:
    if names[0] == 'dense' and 'sparse' in names:
      raise ValueError(f"recipe {recipe.name!r} begins dense: say phase='dense' or phase='sparse' (see phase_at)")
    return names[0]
  check_phase(phase)
  if phase == 'sparse' and 'sparse' not in names:
    raise ValueError(f"phase='sparse', but recipe {recipe.name!r} has the phases {names}")
  return phase


def unnamed_phase(recipe: 'Recipe') -> str | None:
  """The error for an optimizer whose caller names no phase; None if the recipe has only one."""
  names = list(dict.fromkeys(p.name for p in recipe.phases))
  if len(names) < 2:
    return None
  return (
    f'recipe {recipe.name!r} has phases {", ".join(map(repr, names))}; none is given, so this optimizer is of'
    f' {names[0]!r} throughout; see phase_at'
  )


def _kind(projection: Projection | None) -> str | None:
  """The name of a projection; if its links move, without its schedules, which a run may change."""
  if projection is None or projection.update is None:
    return projection and projection.name
  return f'dynamic_sparse {getattr(projection.update, "structure", None) or "without structure"}'


def is_decay(value: Any) -> bool:
  """Whether masked decay may be this number, which may be traced: finite, and zero or more."""
  if isinstance(value, Tracer):  # under optax.inject_hyperparams: its value is not known here
    return value.shape == ()
  found = np.asarray(value)
  number = any(jnp.issubdtype(found.dtype, kind) for kind in (jnp.floating, jnp.integer))
  return number and found.shape == () and 0 <= float(found) < math.inf


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How a run is made sparse. Build one with a function of `sparse24_jax.recipes`.

  Attributes:
    name: of the constructor.
    rules: tried in order; the first whose path matches decides.
    masked_decay: lambda of lambda (1 - M) W, added once an optimizer step in sparse phases; a number, a scalar array,
      or a function of the step count. Not multiplied by the learning rate when it acts on gradients.
    decay_on: `'gradients'` adds it to the gradient, before the moments; `'weights'` adds it to the update, after
      them, times the learning rate.
    refresh_every: optimizer steps between mask refreshes, at which flip rates are measured.
    phases: in order; the fractions add up to one.
    flip_rate: `'refresh'` compares the mask in use before and after a refresh. A projection that holds no mask, the
      soft threshold, has always the one of its weight: there the rate is that of the one step with the refresh.
      `'step'` searches masks anew at every step, before and after it, and reports the rate per step, whatever is in
      use.
    freezes_second_moment: whether sparse phases hold Adam's second moment where the dense start left it, which
      `step_adam` inside does.
    total_steps: of the only runs that its schedules are made for, others than which `phase_at` refuses. None: of any.

  >>> import sparse24_jax as s24
  >>> rule = s24.Rule('.*/mlp/.*', s24.DotPolicy(s24.magnitude()))
  >>> s24.Recipe('own', (rule,), phases=(s24.Phase('dense', 0.2), s24.Phase('sparse', 0.8))).masked_decay
  0.0
  """

  name: str
  rules: tuple[Rule, ...] = ()
  masked_decay: float | Array | Callable[[Any], Any] = 0.0
  decay_on: Literal['gradients', 'weights'] = 'gradients'
  refresh_every: int = 1
  phases: tuple[Phase, ...] = (Phase('sparse', 1.0),)
  flip_rate: Literal['refresh', 'step'] = 'refresh'
  freezes_second_moment: bool = False
  total_steps: int | None = None

  def __repr__(self) -> str:
    return repr_of(self)

  def __post_init__(self):
    for name, values, kind in (('rules', self.rules, Rule), ('phases', self.phases, Phase)):
      if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
        raise ValueError(f'{name} must be a tuple of {kind.__name__}, found {values!r}')
    if not callable(self.masked_decay) and not is_decay(self.masked_decay):
      raise ValueError(f'masked_decay={self.masked_decay} must be a finite number of zero or more, or a schedule')
    check_choices(self)
    check_whole('refresh_every', self.refresh_every, 1)
    if self.total_steps is not None:
      check_whole('total_steps', self.total_steps, 1)
    total = sum(phase.fraction for phase in self.phases)
    if not math.isclose(total, 1.0, abs_tol=1e-6):
      raise ValueError(f'the fractions of the phases add up to {total}, not 1: {self.phases}')

  def describe(self) -> dict[str, Any]:
    """Plain values for logs and checkpoints: equal for two recipes that train alike.

    >>> import sparse24_jax as s24
    >>> s24.recipes.ste('.*/mlp/.*').describe()['rules'][0]['projection']
    'magnitude 2:4'
    """
    decay = self.masked_decay
    return {
      'name': self.name,
      'rules': [
        {
          'path': rule.path,
          'projection': rule.policy.projection.name if rule.policy.projection else None,
          'input_grad': rule.policy.input_grad,
          'weight_grad': rule.policy.weight_grad,
          'precision': rule.policy.precision,
        }
        | ({'activation': rule.activation.describe()} if rule.activation else {})
        | ({'exact': list(rule.exact)} if rule.exact else {})
        for rule in self.rules
      ],
      # A schedule is known by its values.
      'masked_decay': [float(decay(10**k)) for k in range(7)] if callable(decay) else float(decay),
      'decay_on': self.decay_on,
      'refresh_every': int(self.refresh_every),
      'phases': [
        [phase.name, phase.fraction] + ([describe_attention(phase.attention)] if phase.attention else [])
        for phase in self.phases
      ],
      'flip_rate': self.flip_rate,
      'freezes_second_moment': self.freezes_second_moment,
    }

  def with_dense(self, *paths: str) -> 'Recipe':
    """The recipe with some of the weights that its rules match left as a dense model has them.

    Args:
      *paths: regular expressions that match the whole path of those weights. What they match may be dense anyway, as
        the scale of a norm is until a scan stacks it; one that matches nothing is an error.

    >>> import jax.numpy as jnp, sparse24_jax as s24
    >>> params = {'table': jnp.ones((8, 8)), 'up': jnp.ones((8, 8))}
    >>> recipe = s24.recipes.ste('.*').with_dense('table')
    >>> [rule.path for rule in recipe.rules], recipe.rules[0].is_plain
    (['table', '.*'], True)
    """
    if not paths:
      return self
    return dataclasses.replace(self, rules=(*(Rule(path, DotPolicy()) for path in paths), *self.rules))

  def with_exact_gradients(self, *paths: str) -> 'Recipe':
    """The recipe with some weight gradients taken of all of the output gradient, where it samples that by MVUE.

    A block stays fused where the gradient of its last weight is exact and the others are not. Optimizer state and
    variables serve both recipes, so that a run may also take exact gradients in its last steps alone.

    Args:
      *paths: regular expressions that match the whole path of the weights; none is all of them.

    >>> import sparse24_jax as s24
    >>> recipe = s24.recipes.s_ste('.*/mlp/.*').with_exact_gradients('.*/down/.*')
    >>> [recipe.rules[0].of(path).policy.weight_grad for path in ('h_0/mlp/up/kernel', 'h_0/mlp/down/kernel')]
    ['mvue', 'dense']
    """

    def exact(rule: Rule) -> Rule:
      if rule.policy.weight_grad == 'dense':
        return rule
      if not paths:
        return dataclasses.replace(rule, policy=dataclasses.replace(rule.policy, weight_grad='dense'), exact=())
      return dataclasses.replace(rule, exact=tuple(dict.fromkeys((*rule.exact, *paths))))

    return dataclasses.replace(self, rules=tuple(map(exact, self.rules)))

  def without(self, paths: Collection[str], rules: tuple[Rule, ...]) -> 'Recipe':
    """The recipe with other rules, under which the weights at `paths` are dense."""
    return dataclasses.replace(self, rules=rules)

  @property
  def layouts(self) -> Layouts:
    """How weights are stored where it is not `[stacked..., in, out]`, which only `bind` finds out.

    They also say which projection each rule has, to mark what is made under this recipe.
    """
    return Layouts(made_by=MadeBy(tuple((rule.path, _kind(rule.policy.projection)) for rule in self.rules)))

  def layouts_of(self, weights: Mapping[str, Any]) -> Mapping[str, Layout]:
    """How matched weights are stored, by path: nothing is known here; a recipe that `bind` made knows all of them."""
    return {}

  def asked_of(self, path: str) -> Asked:
    """Precision and dtype of the result of a weight's matmul: the plain ones; one that `bind` made knows better."""
    return PLAIN

  @property
  def blocks(self) -> tuple[Mapping[str, str], ...] | None:
    """Paths, by role, of the weights of each feed-forward block that no other matmul reads.

    None: nothing is known; a recipe that `bind` made knows all of them.
    """
    return None

  @property
  def decays(self) -> bool:
    """Whether pruned weights decay: not known to be by a factor of zero."""
    return not isinstance(self.masked_decay, float | int) or self.masked_decay > 0

  def fraction_of(self, phase: PhaseName) -> float:
    """The share of the steps that are in phases of this name.

    >>> import sparse24_jax as s24
    >>> round(s24.recipes.transposable_srste('.*', masked_decay=6e-5).fraction_of('dense'), 3)
    0.167
    """
    return sum(each.fraction for each in self.phases if each.name == phase)

  def in_dense_phase(self) -> 'Recipe | None':
    """What its dense phases run: its layers in FP8, dense. None if that is the plain model.

    >>> import sparse24_jax as s24
    >>> s24.recipes.transposable_srste('.*', masked_decay=6e-5, fp8=True).in_dense_phase().rules
    (Rule(path='.*', policy=DotPolicy(precision='fp8')),)
    >>> s24.recipes.transposable_srste('.*', masked_decay=6e-5).in_dense_phase() is None
    True
    """
    rules = tuple(rule.in_dense_phase() for rule in self.rules)
    if all(rule.is_plain for rule in rules):
      return None
    return dataclasses.replace(self, rules=rules, masked_decay=0.0, phases=(Phase('dense', 1.0),))

  def dense_twin(self) -> 'Recipe':
    """The same weights watched in a dense run: masks are chosen and flip rates counted, nothing is made sparse.

    Layers in FP8 stay in FP8.
    """
    return dataclasses.replace(
      self, name='dense', masked_decay=0.0, phases=(Phase('dense', 1.0),), freezes_second_moment=False
    )
