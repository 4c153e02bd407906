"""The plan of a layer: which of its matmuls runs where, as a value. `dot` carries it out, `where_it_pays` prices it."""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _partitioning, _records
from pallas_kernels.sparse_matmul import api
from sparse24_jax.asked import Asked, PLAIN
from sparse24_jax.availability import log_once, Target, target
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projection import Form, Masked, SoftThreshold, TransposableMasked
from sparse24_jax.steps import Matmul, PACKED8, Pass, rounded, sampled, sampled_in_fp8, Step, Timing

ROLES: Mapping[str, Any] = {
  # Sizes of the sparse operand's rows, of the dense operand's rows and of the sum; layout of the dense operand.
  'forward': lambda tokens, d_in, d_out: (d_out, tokens, d_in, 'nk'),
  'input_grad': lambda tokens, d_in, d_out: (d_in, tokens, d_out, 'nk'),
  'weight_grad': lambda tokens, d_in, d_out: (d_out, d_in, tokens, 'kn'),
}


@dataclasses.dataclass(frozen=True)
class Backends:
  """The back end of each matmul; None is a plain one with the projected weight, or with the sampled gradient.

  With `fp8` they are those of `sparse24_jax.fp8`, where None is a dense matmul in FP8; without it, an FP8 policy is
  simulated.
  """

  forward: str | None = None
  input_grad: str | None = None
  weight_grad: str | None = None
  fp8: bool = False

  @property
  def packs(self) -> bool:
    """Whether some matmul reads the packed weight."""
    return self.fp8 or self.forward is not None or self.input_grad is not None

  @property
  def sole(self) -> str | None:
    """The back end that all three matmuls share, or None."""
    return self.forward if self.forward == self.input_grad == self.weight_grad else None


@dataclasses.dataclass(frozen=True)
class LayerPlan:
  """What runs for x `[tokens, d_in]` and w `[d_in, d_out]`, forward and backward.

  Attributes:
    tokens: of x.
    d_in: rows of w.
    d_out: columns of w.
    dtype: of activations.
    backends: of the three matmuls.
    sampled: whether the weight gradient is taken of a sample that a kernel could draw.
    form: of the packed weight, or None.
    simulated: why no kernel serves a policy of FP8, or None.
    plain: why no kernel serves the layer at all, or None.

  >>> import sparse24_jax as s24
  >>> from sparse24_jax.availability import target
  >>> policy = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
  >>> h100 = target('nvidia_h100_80gb_hbm3')
  >>> plan_layer(policy, 16384, 4096, 16384, 'bfloat16', on=h100).backends.sole
  'mosaic_gpu'
  """

  tokens: int
  d_in: int
  d_out: int
  dtype: str
  backends: Backends = Backends()
  sampled: bool = False
  form: Form | None = None
  simulated: str | None = None
  plain: str | None = None

  @property
  def wide(self) -> int:
    """Bytes of an entry of the activations."""
    return jnp.dtype(self.dtype).itemsize

  def matmul(self, role: str, name: str) -> Matmul:
    """One of the three, as it runs; no record has the time of a simulated one."""
    if self.simulated:
      return Matmul(name, None, ())
    backend, key = getattr(self.backends, role), fp8_key if self.backends.fp8 else self._key
    return Matmul(name, backend, (_timing(key(role, self.tokens, self.d_in, self.d_out), backend or 'dense'),))

  def joined(self, role: str, name: str) -> Matmul:
    """One of the three for two such weights side by side; if nothing near was measured, it takes twice as long.

    Where both were, on an H100, the joined matmul took 0.7 to 1.06 times as long as two, 1.0 in the median.
    """
    one = self.matmul(role, name)
    two = dataclasses.replace(self, d_out=2 * self.d_out).matmul(role, name)
    return dataclasses.replace(one, timings=(*two.timings, *(t._replace(times=2.0) for t in one.timings)))

  def dense(self, role: str, name: str) -> Matmul:
    """One of the three in a dense layer of 16 bits; in FP8 also by what was timed beside that."""
    timings = (_timing(self._key(role, self.tokens, self.d_in, self.d_out), 'dense'),)
    if self.backends.fp8:
      timings += (_timing(fp8_key(role, self.tokens, self.d_in, self.d_out), 'dense_bf16'),)
    return Matmul(name, None, timings)

  def dense_fp8(self, role: str, name: str) -> Matmul:
    """One of the three in a dense layer of FP8."""
    return Matmul(name, None, (_timing(fp8_key(role, self.tokens, self.d_in, self.d_out), 'dense'),))

  def dense_fp8_steps(self, weight_wide: int) -> tuple[Step, ...]:
    """Of a dense layer in FP8: activations, weight (so many bytes an entry) and output gradient rounded both ways."""
    return (
      *(self.dense_fp8(role, role) for role in ROLES), rounded('x rounded', self.tokens * self.d_in, self.wide),
      rounded('w rounded', self.d_in * self.d_out, weight_wide),
      rounded('dz rounded', self.tokens * self.d_out, self.wide),
    )  # fmt: skip

  def fastest_kernel_ms(self, role: str, device: str) -> float | None:
    """Of one of the three by the fastest kernel that was measured, whatever runs."""
    timing = self.matmul(role, role).timings[0]
    return min((ms for row, ms in timing.rows(device).items() if not row.startswith('dense')), default=None)

  def _key(self, role: str, tokens: int, d_in: int, d_out: int) -> dict[str, Any]:
    return key_of(role, tokens, d_in, d_out, self.dtype)

  def prepared(self, role: str) -> tuple[Pass, ...]:
    """The passes that one of the three waits for, in a layer by itself."""
    x, dz = self.tokens * self.d_in, self.tokens * self.d_out
    if self.backends.fp8:
      if role == 'forward':
        return (rounded('x rounded', x, self.wide),)
      # The input gradient reads what the sample left.
      return (sampled_in_fp8('dz sampled and rounded', dz, self.wide),) if role == 'weight_grad' else ()
    if role != 'weight_grad' or not self.sampled or self.simulated:
      return ()
    if self.backends.weight_grad is None:
      return (Pass('dz sampled by XLA', None),)
    return (sampled('dz sampled', dz, self.wide),)

  def packing(self, wide: int) -> Pass:
    """Of the weight, once an optimizer step; of so many bytes an entry."""
    entries, operands = self.d_in * self.d_out, self._operands
    if self.backends.fp8:  # its largest magnitude, then soft threshold, rounding and packing in one pass
      moves = ('amax', entries * wide), ('soft_threshold_pack8', entries * (wide + PACKED8))
      return Pass('packed weight', moves)
    if not operands:
      return Pass('packed weight', ())
    size = entries * wide + operands * self._operand_bytes
    if isinstance(self.form, TransposableMasked):
      # A mask, a byte an entry, is made 16 bits a 4x4 block by a pass of XLA's, about as fast, and these are read.
      return Pass('packed weight', (('masked_pack', size + entries + 2 * (entries // 8)),))
    return Pass('packed weight', (('soft_threshold_pack_axis-2', size),))

  @property
  def packed_bytes(self) -> int:
    """What the packed weight takes."""
    entries = self.d_in * self.d_out
    if self.backends.fp8:
      return entries // 2 + entries // 8 + entries + 4  # operand, dense copy, factor
    return self._operands * self._operand_bytes

  @property
  def saved_bytes(self) -> int:
    """What the x that the backward keeps takes less in FP8, at a byte an entry."""
    return self.tokens * self.d_in * (self.wide - 1) if self.backends.fp8 else 0

  @property
  def _operands(self) -> int:
    return (self.backends.forward is not None) + (self.backends.input_grad is not None)

  @property
  def _operand_bytes(self) -> int:
    # Half of the values, and two bits for each of them.
    entries = self.d_in * self.d_out
    return entries * self.wide // 2 + entries // 8


def _timing(key: Mapping[str, Any], row: str) -> Timing:
  return Timing(api.OP, tuple(key.items()), row)


def key_of(role: str, tokens: int, d_in: int, d_out: int, dtype: Any) -> dict[str, Any]:
  """What records of a matmul in 16 bits are looked up by."""
  m, n, k, b_layout = ROLES[role](tokens, d_in, d_out)
  dtype = jnp.dtype(dtype).name
  return dict(m=m, n=n, k=k, dtype=dtype, out_dtype=dtype, b_layout=b_layout, out_layout='nm')


def fp8_key(role: str, tokens: int, d_in: int, d_out: int) -> dict[str, Any]:
  """What records of a matmul in FP8 are looked up by; that of an input gradient, which is dense, by its sizes."""
  m, n, k, _ = ROLES[role](tokens, d_in, d_out)
  dtype = 'float8_e5m2' if role == 'weight_grad' else 'float8_e4m3fn'
  return dict(m=m, n=n, k=k, dtype=dtype, out_dtype='bfloat16', b_layout='nk', out_layout='nm')


def plan_layer(
  policy: DotPolicy, tokens: int, d_in: int, d_out: int, dtype: Any, arrays: Any = (), *, on: Target | None = None,
  asked: Asked = PLAIN,
) -> LayerPlan:  # fmt: skip
  """Where the three matmuls of x `[tokens, d_in]` and w `[d_in, d_out]` run.

  A named implementation takes every matmul that the policy makes sparse. None asks the GPU's records: a matmul goes to
  the back end that measured fastest. On Hopper a sampled weight gradient takes a kernel in any case, since drawing the
  sample costs XLA more than the matmul. FP8 has kernels on Hopper alone; there the forward leaves the kernel only where
  that measured slower than the dense FP8 matmul, since the pass that rounds the weight packs it in any case. A weight
  that no kernel packs (masks by magnitude) stays with XLA. Without kernels or records of this GPU, for this dtype or
  sharding, all are plain; so they are where the layer asks for what kernels do not give, see `Asked`.

  Args:
    policy: of the layer.
    tokens: of x.
    d_in: rows of w.
    d_out: columns of w.
    dtype: of activations.
    arrays: their types say on which mesh they are, if none is set.
    on: the GPU; None is the one that is here.
    asked: what the layer asks of its matmul.

  Raises:
    ValueError: a named implementation does not serve the layer, or FP8 is not the precision that it asks for.
  """
  on = target() if on is None else on
  if policy.precision == 'fp8' and (wrong := asked.unfit_for_fp8()):
    raise ValueError(wrong)
  layer = functools.partial(
    LayerPlan, tokens, d_in, d_out, jnp.dtype(dtype).name, form=packed_form(policy),
    sampled=kernel_roles(policy, d_in, d_out, dtype, asked)['weight_grad'],
  )  # fmt: skip
  if not tokens:
    return layer()
  named, fp8 = backend_of(policy.implementation, on), policy.precision == 'fp8'
  reason = unfit(policy, d_in, d_out, dtype, asked)
  if reason is None and on.here and _partitioning.mixed(arrays):
    reason = 'kernels run on a mesh whose axes are all automatic or all explicit, this one has both'
  if named == 'reference' or (named is None and not on.has_kernels(policy.precision)):
    if named is None and fp8 and on.here:
      log_once('FP8 is simulated: its kernels need one Hopper GPU and the extra sparse24-jax[cuda]')
    why = f"implementation={named!r}" if named else f'{on.device.slug} has no FP8 kernels, Hopper has'
    return layer(simulated=(reason or why) if fp8 else None)
  if reason is not None:
    if named is not None:
      raise ValueError(f'implementation={policy.implementation!r} cannot serve this layer: {reason}')
    if on.here:
      log_once(f'no kernels for a layer {d_in} x {d_out} on {tokens} tokens: {reason}')
    return layer(simulated=reason if fp8 else None, plain=reason)
  if fp8:
    loses = named is None and _loses_in_fp8(on, tokens, d_in, d_out)
    return layer(Backends(None if loses else named or 'mosaic_gpu', None, named or 'mosaic_gpu', fp8=True))
  if named is not None:
    return layer(Backends(**{role: named if sparse else None for role, sparse in sparse_roles(policy).items()}))
  found = {
    role: _fastest(on, role, tokens, d_in, d_out, dtype)
    for role, sparse in kernel_roles(policy, d_in, d_out, dtype, asked).items() if sparse
  }
  return layer(Backends(**found))


def backend_of(implementation: str | None, on: Target | None = None) -> str | None:
  """What `sparse_matmul` calls an implementation of a policy: of our kernels the one that this GPU runs."""
  if implementation != 'sparse':
    return implementation
  kernel = (on or target()).device.arch.kernel(api.OP)
  return 'mosaic_gpu' if kernel is None else kernel  # which then says that it cannot run here


def packed_form(policy: DotPolicy) -> Form | None:
  """The form of the weight, where it is 2:4 along axis -2, as the forward reads it."""
  form = policy.projection and policy.projection.form
  return None if form == SoftThreshold(-1) else form


def sparse_roles(policy: DotPolicy) -> dict[str, bool]:
  """By role, whether the policy makes the matmul sparse."""
  weight = packed_form(policy) is not None
  return dict(
    forward=weight, input_grad=weight and policy.input_grad == 'sparse', weight_grad=policy.weight_grad == 'mvue'
  )


def kernel_roles(
  policy: DotPolicy, d_in: int, d_out: int, dtype: Any, asked: Asked = PLAIN
) -> dict[str, bool]:
  """By role, whether a policy that names no implementation may give the matmul to a kernel on a GPU that has them."""
  wanted = sparse_roles(policy)
  if unfit(policy, d_in, d_out, dtype, asked) is not None:
    return dict.fromkeys(wanted, False)
  if isinstance(packed_form(policy), Masked):
    wanted['forward'] = False
  return wanted


def unfit(policy: DotPolicy, d_in: int, d_out: int, dtype: Any, asked: Asked = PLAIN) -> str | None:
  """Why no kernel can serve, or None."""
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
    return f'activations are {jnp.dtype(dtype).name}, the kernels take bfloat16 and float16'
  if policy.precision == 'fp8':
    if not isinstance(packed_form(policy), SoftThreshold):
      return f'only the soft threshold is packed in FP8, found {policy.projection and policy.projection.name!r}'
    if policy.weight_grad != 'mvue':
      return f"FP8 kernels take weight_grad='mvue', found {policy.weight_grad!r}"
  if d_in % 4 or d_out % 4:
    return f'packing takes multiples of four, found a weight {d_in} x {d_out}'
  return asked.unfit(dtype)


def _fastest(on: Target, role: str, tokens: int, d_in: int, d_out: int, dtype: Any) -> str | None:
  for share in on.shares(tokens):
    key = key_of(role, share, d_in, d_out, dtype)
    first = api.candidates_for(**key, device=on.device)[0]
    if first != 'dense' and on.has(first):
      return first
  return 'mosaic_gpu' if role == 'weight_grad' and on.device.arch.sparse_instruction == 'wgmma' else None


def _loses_in_fp8(on: Target, tokens: int, d_in: int, d_out: int) -> bool:
  """Whether the records say of every share of the tokens that the dense matmul of a forward in FP8 is faster."""
  keys = [fp8_key('forward', share, d_in, d_out) for share in on.shares(tokens)]
  choices = [_records.lookup(on.device.slug, api.OP, key) for key in keys]
  return all(choice is not None and choice.implementation == 'dense' for choice in choices)
