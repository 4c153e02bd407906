"""Which layers of a model gain from sparse matmuls on a GPU, by what was measured there."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from sparse24_jax.asked import Asked
from sparse24_jax.availability import priced_on, Target
from sparse24_jax.binding.bound import require_axes
from sparse24_jax.layer_plan import LayerPlan
from sparse24_jax.matmuls import Role
from sparse24_jax.plan import plan_layer
from sparse24_jax.policy import DotPolicy
from sparse24_jax.precision import ROLES
from sparse24_jax.recipe import Recipe
from sparse24_jax.rules import leaves_by_path, listed, match_rules
from sparse24_jax.steps import total
from sparse24_jax.weight_errors import errors_name


@dataclasses.dataclass(frozen=True)
class RoleGain:
  """One matmul of a layer.

  Attributes:
    role: 'forward', 'input_grad' or 'weight_grad'.
    dense_ms: expected time of the dense matmul in 16 bits; None if nothing near was measured.
    sparse_ms: of the fastest sparse kernel, likewise; None also if the policy leaves the matmul dense.
    packing_ms: of the passes that only this matmul needs: the MVUE sample of the output gradient; in FP8 the rounding
      of what the forward reads, and of the gradient. None where a pass was not measured, as sampling by XLA was not.
    chosen: what runs: a back end, 'dense', 'dense_fp8', or 'simulated', see `LayerGain`.
    dense_fp8_ms: as `dense_ms`, in FP8; None also where the policy is none of FP8.
    checked: how many times as fast as dense the kernel was when it was checked on this very GPU; None where the times
      are of a record.
  """

  role: Role
  dense_ms: float | None
  sparse_ms: float | None
  packing_ms: float | None
  chosen: str
  dense_fp8_ms: float | None = None
  checked: float | None = None

  @property
  def matmul_ms(self) -> float | None:
    """Expected time of the chosen matmul."""
    return {'dense': self.dense_ms, 'dense_fp8': self.dense_fp8_ms}.get(self.chosen, self.sparse_ms)

  @property
  def expected_ms(self) -> float | None:
    """Expected time of the chosen matmul with its packing."""
    return total((self.matmul_ms, self.packing_ms))


@dataclasses.dataclass(frozen=True)
class LayerGain:
  """One weight, or one stack of weights of scanned layers.

  Attributes:
    path: of the kernel.
    shape: `(in, out)`.
    layers: how many such weights are stacked.
    roles: the three matmuls of one of them.
    packing_ms: of the operands of one weight, which are packed once per optimizer step: the share of a micro-batch.
      None where a pass was not measured.
    packed_bytes: what the operands of all of them take.
    state_bytes: what their masks or scales take in the optimizer state.
    saved_bytes: what the x that the backward of all of them keeps takes less in FP8, at a byte an entry.
    dense_fp8_ms: of one weight's three dense matmuls in FP8, with the passes that round all operands both ways; None
      where the policy is none of FP8.
    simulated: why no kernel serves a policy of FP8. Its matmuls are then simulated in wider ones, slower than dense
      ones by a time that nobody measured: `expected_ms` is None.
    plain: why no kernel serves the layer, so that all three run dense: its masks, dtype or sizes, the machine, or what
      the model asks of the weight's matmul, which a recipe that `bind` made knows.

  >>> from sparse24_jax.where_it_pays import LayerGain, RoleGain
  >>> roles = (RoleGain('forward', 2.0, 1.0, 0.0, 'mosaic_gpu'), RoleGain('input_grad', 2.0, None, 0.0, 'dense'))
  >>> layer = LayerGain('up/kernel', (64, 256), 1, roles, packing_ms=0.2, packed_bytes=0, state_bytes=0)
  >>> layer.dense_ms, layer.expected_ms, layer.gain
  (4.0, 3.2, 1.25)
  """

  path: str
  shape: tuple[int, int]
  layers: int
  roles: tuple[RoleGain, ...]
  packing_ms: float | None
  packed_bytes: int
  state_bytes: int
  saved_bytes: int = 0
  dense_fp8_ms: float | None = None
  simulated: str | None = None
  plain: str | None = None

  @property
  def dense_ms(self) -> float | None:
    """Expected time of the three dense matmuls of one weight."""
    return total(role.dense_ms for role in self.roles)

  @property
  def expected_ms(self) -> float | None:
    """Expected time of the three chosen matmuls with all packing."""
    return total((self.packing_ms, *(role.expected_ms for role in self.roles)))

  @property
  def gain(self) -> float | None:
    """Dense time over expected time, of the layer by itself; below 1 it is better left out of the recipe."""
    return None if self.expected_ms is None or self.dense_ms is None else self.dense_ms / self.expected_ms

  def stacked(self, layers: int) -> 'LayerGain':
    """The gain of a stack of so many such weights; times stay those of one."""
    sizes = {name: layers * getattr(self, name) for name in ('layers', 'packed_bytes', 'state_bytes', 'saved_bytes')}
    return dataclasses.replace(self, **sizes)


def require_positive(**numbers: int) -> None:
  """ValueError for a number below 1."""
  for name, number in numbers.items():
    if number < 1:
      raise ValueError(f'{name}={number} must be positive')


def require_timed(path: str, policy: DotPolicy) -> None:
  """ValueError for a policy that runs what no record has."""
  if policy.implementation == 'dense':
    raise ValueError(f"{path}: implementation='dense' decompresses what it packed, which was never timed")


def where_it_pays(
  params: Any, recipe: Recipe, *, tokens: int, micro_batches: int = 1, dtype: Any = jnp.bfloat16,
  device: str | None = None,
) -> list[LayerGain]:  # fmt: skip
  """Expected times of the layers that a recipe makes sparse, from the records of a GPU.

  Matmuls are those of the nearest measured problem within a factor of two in each size, scaled; passes over memory are
  bytes over the measured bandwidth of their kernel, and 5 us each. Times of float16 are those of bfloat16 where none
  near was measured. Where this machine's GPU has no record near a matmul, a kernel is checked there now, as
  `implementation=None` does at first use. It is the plan that runs which is priced: the back ends that a policy names,
  or those that it chooses: kernels where they measured faster, and on Hopper for a sampled weight gradient always. For
  this machine's GPU that is on the mesh that is set and with what is installed; for a GPU that is named, with all
  kernels that it has and cuSPARSELt, and without records as if it were a Hopper.

  Each layer is counted by itself. A feed-forward block that runs fused shares passes among its layers: `block_gain`,
  not the gains of its layers, says whether it pays, and whether the exact gradient of `weight_grad='dense'`, which
  fuses less, pays more. To keep a layer dense, put a rule in front of the others, `Rule(path, DotPolicy())`: the first
  match decides. `only_where_it_pays` writes that rule.

  An FP8 recipe has a sparse forward, an input gradient in FP8 that is dense but under transposable masks, and a weight
  gradient that is sparse if it is sampled. `LayerGain.dense_ms` and the gain still compare with dense training in 16
  bits.

  Records are made in short bursts, and a GPU that is kept busy runs at a lower clock: sustained steps take longer,
  dense and sparse ones alike. `docs/speed.md` says how near expected gains come to measured ones.

  Args:
    params: parameters, or their shapes (`jax.eval_shape` of the model's init).
    recipe: its rules select the layers. One that `bind` made knows the axes of each weight, stacked ones too; one by
      itself serves kernels with two axes, as in `project`.
    tokens: tokens of a micro-batch on one device.
    micro_batches: of an optimizer step. Weights are packed for all of them at once, where `sparse_variables` is called
      outside of their loop.
    dtype: of activations.
    device: folder of the records under `pallas_kernels/tuned`, such as 'nvidia_h100_80gb_hbm3'; None is this machine's
      GPU.

  Returns:
    One entry a weight that the recipe makes sparse, in the order of the tree; layers that are dense in FP8 have none.

  Raises:
    ValueError: a rule that fits no weight, weights whose axes nothing tells, weights of a block with sparse
      activations, a named implementation that does not serve its layer or was never timed ('dense'), or no positive
      number of tokens or micro-batches.

  >>> import jax, sparse24_jax as s24
  >>> params = {'up': {'kernel': jax.ShapeDtypeStruct((4096, 16384), 'bfloat16')}}
  >>> recipe = s24.recipes.transposable_srste('.*', masked_decay=1e-4)
  >>> (layer,) = s24.where_it_pays(params, recipe, tokens=16384, device='nvidia_h100_80gb_hbm3')
  >>> [role.chosen for role in layer.roles], layer.gain > 1.3
  (['mosaic_gpu', 'mosaic_gpu', 'mosaic_gpu'], True)
  """
  require_positive(tokens=tokens, micro_batches=micro_batches)
  on = priced_on(device)
  sparse = {path: rule for path, rule in match_rules(params, recipe).items() if rule.policy.projection is not None}
  if inside := [path for path, rule in sparse.items() if rule.activation is not None]:
    raise ValueError(
      f'where_it_pays: {listed(inside)}: a block with sparse activations runs other matmuls than its two layers do by'
      ' themselves; block_gain prices such a block, and recipe.with_dense(pattern) leaves it out here'
    )
  require_axes('where_it_pays', params, sparse, recipe)
  leaves = dict(leaves_by_path(params))
  return [
    _layer(path, leaves[path], rule.policy, tokens, micro_batches, dtype, on, recipe.asked_of(path))
    for path, rule in sparse.items()
  ]


def _layer(
  path: str, leaf: Any, policy: DotPolicy, tokens: int, micro_batches: int, dtype: Any, on: Target, asked: Asked
) -> LayerGain:
  projection = policy.projection
  assert projection is not None
  *lead, d_in, d_out = projection.layout_of(leaf).matrix_shape(leaf.shape)
  policy = policy.of_matrix
  wide, device = jnp.dtype(leaf.dtype).itemsize, on.device.slug
  require_timed(path, policy)
  with errors_name(path):
    plan = plan_layer(policy, tokens, d_in, d_out, dtype, on=on, asked=asked)
  assert policy.projection is not None
  state = jax.eval_shape(policy.projection.init, jax.ShapeDtypeStruct((d_in, d_out), leaf.dtype))
  packing, rival = plan.packing(wide).expected_ms(device), plan.rival_steps(wide)
  return LayerGain(
    path, (d_in, d_out), 1, tuple(_role(role, plan, device) for role in ROLES),
    packing_ms=None if packing is None else packing / micro_batches, packed_bytes=plan.packed_bytes,
    state_bytes=math.prod(state.shape) * state.dtype.itemsize, saved_bytes=plan.saved_bytes,
    dense_fp8_ms=total(step.expected_ms(device) for step in rival) if rival else None,
    simulated=plan.simulated, plain=plan.plain,
  ).stacked(math.prod(lead))  # fmt: skip


def _role(role: Role, plan: LayerPlan, device: str) -> RoleGain:
  matmul, precision, sparse = plan.matmul(role, role), plan.precision, role in plan.sparse
  dense8 = plan.rival(role, role).expected_ms(device) if precision.scales else None
  sparse_ms = matmul.expected_ms(device) if matmul.backend else None
  if sparse and not (matmul.backend or plan.simulated):
    sparse_ms = plan.fastest_kernel_ms(role, device)
  chosen = 'simulated' if plan.simulated else matmul.backend or precision.dense
  packing = total(step.expected_ms(device) for step in plan.prepared(role))
  checked = matmul.checked(device) if sparse else None
  return RoleGain(role, plan.dense(role, role).expected_ms(device), sparse_ms, packing, chosen, dense8, checked)


# Of `table`, from left to right, and of two columns more where a recipe has FP8.
_HEAD = ('', 'runs on', 'sparse ms', 'dense ms', 'times faster')
_HEAD_FP8 = ('FP8 dense ms', 'times faster')
_PARTS = {'forward': 'forward', 'input_grad': 'input gradient', 'weight_grad': 'weight gradient'}
LEGEND = (
  'Each weight is a layer with three matmuls. runs on: a sparse kernel, such as mosaic_gpu; or dense or dense_fp8,'
  ' where the recipe has a dense matmul or no kernel is known to be faster. On Hopper a sampled weight gradient takes'
  ' its kernel even where that is slower, since XLA would have to draw the sample. sparse ms: as the recipe runs it,'
  ' with all that samples or rounds operands. dense ms: in bfloat16. FP8 dense ms: of a layer all in FP8, with the'
  ' rounding of all operands. times faster: the dense ms on its left over sparse ms. packing: of the weight, for the'
  ' kernels, once a step, here the share of a micro-batch.'
)


def table(layers: Sequence[LayerGain], *, said: str | None = None) -> str:
  """The gains as text, a line a matmul and one for all of a weight; with columns of FP8 where a recipe has that.

  Below them are notes on layers that no kernel serves; not those whose reason, `said`, the reader has.
  """
  in_fp8 = any(layer.dense_fp8_ms is not None or layer.saved_bytes for layer in layers)
  head = (*_HEAD, *_HEAD_FP8) if in_fp8 else _HEAD
  titles, rows = [], []
  for layer in layers:
    alike = f', {layer.layers} of them, each' if layer.layers > 1 else ''
    titles.append(f'{layer.path}, {layer.shape[0]} x {layer.shape[1]}{alike}')
    rows.append([
      *((_PARTS[r.role], r.chosen, *_times(r.expected_ms, r.dense_ms), '', '') for r in layer.roles),
      ('packing', '', _ms(layer.packing_ms), '', '', '', ''),
      ('all of it', '', *_times(layer.expected_ms, layer.dense_ms),
       *_times(layer.expected_ms, layer.dense_fp8_ms)[1:]),
    ])  # fmt: skip
  widths = [max(len(row[i]) for row in (head, *(row for of in rows for row in of))) for i in range(len(head))]

  def line(row: Sequence[str]) -> str:
    cells = zip(row, widths, strict=False)
    return '  ' + '  '.join(f'{cell:<{w}}' if i < 2 else f'{cell:>{w}}' for i, (cell, w) in enumerate(cells)).rstrip()

  lines = [line(head)]
  for title, of in zip(titles, rows, strict=True):
    lines += [title, *map(line, of)]
  return '\n'.join(lines + [note for layer in layers for note in _notes(layer, said)])


def _ms(value: float | None) -> str:
  return '-' if value is None else f'{value:.3f}'


def _times(expected: float | None, dense: float | None) -> tuple[str, str, str]:
  known = expected is not None and dense is not None
  return _ms(expected), _ms(dense), f'{dense / expected:.2f}' if known else '-'


def _notes(layer: LayerGain, said: str | None) -> list[str]:
  if said is not None and said in (layer.simulated, layer.plain):
    return []
  if layer.simulated is not None:
    return [f'{layer.path}: FP8 would be simulated: {layer.simulated}']
  if layer.plain is not None:
    return [f'{layer.path}: no kernel: {layer.plain}']
  checked = ', '.join(f'{r.role} {r.checked:.2f} times dense' for r in layer.roles if r.checked is not None)
  notes = [f'{layer.path}: no record, checked here: {checked}'] if checked else []
  unknown = ', '.join(f'{r.role} {r.chosen}' for r in layer.roles if r.matmul_ms is None)
  why = 'nothing within a factor of two in each size was measured, so chosen blindly'
  return [*notes, f'{layer.path}: {why}: {unknown}'] if unknown else notes
