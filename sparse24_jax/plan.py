"""Which matmul of a layer runs where; the one place that decides. `dot` executes a plan, `where_it_pays` prices it."""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

from jax import Array
import jax.numpy as jnp

from pallas_kernels import _checks, _partitioning, arch
from pallas_kernels.pack import api as pack
from pallas_kernels.sparse_matmul import api
from sparse24_jax.asked import Asked, PLAIN
from sparse24_jax.availability import log_once, Target, target
from sparse24_jax.fp8 import FP8, FP8_E4M3
from sparse24_jax.layer_plan import Backends, LayerPlan
from sparse24_jax.matmuls import Role
from sparse24_jax.policy import DotPolicy
from sparse24_jax.precision import NATIVE, Precision, ROLES
from sparse24_jax.projection import Form, Masked, SoftThreshold

NO_PACKER = 'no kernel packs these masks; recipes with kernels are transposable_srste and s_ste'

# What policies name.
PRECISIONS: dict[str, Precision] = {'default': NATIVE, 'fp8': FP8, 'fp8_e4m3': FP8_E4M3}


def plan_layer(
  policy: DotPolicy, tokens: int, d_in: int, d_out: int, dtype: Any, arrays: Any = (), *, on: Target | None = None,
  asked: Asked = PLAIN,
) -> LayerPlan:  # fmt: skip
  """Decides where the three matmuls of x `[tokens, d_in]` and w `[d_in, d_out]` run.

  A named implementation takes every matmul that the policy makes sparse. None asks the GPU's records, and where they
  have nothing near a check on the GPU itself: a matmul goes to the back end that measured fastest. On Hopper a sampled
  weight gradient takes a kernel in any case, since drawing the sample costs XLA more than the matmul. FP8 has kernels
  on Hopper alone; there the forward leaves the kernel only where that measured slower than the dense FP8 matmul, since
  the pass that rounds the weight packs it in any case, and under a transposable mask never. A weight that no kernel
  packs (masks by magnitude) stays with XLA. Without kernels or measurements of this GPU, for this dtype or sharding,
  all are plain; so they are where the layer asks for what kernels do not give, see `Asked`.

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

  >>> import sparse24_jax as s24
  >>> from sparse24_jax.availability import target
  >>> policy = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
  >>> h100 = target('nvidia_h100_80gb_hbm3')
  >>> plan_layer(policy, 16384, 4096, 16384, 'bfloat16', on=h100).backends.sole
  'mosaic_gpu'
  """
  on, precision = target() if on is None else on, PRECISIONS[policy.precision]
  if wrong := asked.unfit_for(policy.precision):
    raise ValueError(wrong)
  roles = kernel_roles(policy, d_in, d_out, dtype, asked)
  layer = functools.partial(
    LayerPlan, tokens, d_in, d_out, jnp.dtype(dtype).name, form=packed_form(policy),
    sampled=policy.weight_grad == 'mvue', sparse=roles,
  )  # fmt: skip
  if not tokens:
    return layer(precision=precision.without_kernels)
  named = backend_of(policy.implementation, on, precision)
  reason = _why_plain(policy, d_in, d_out, dtype, arrays, on, asked)
  if reason is not None:
    if named not in (None, 'reference'):
      raise ValueError(f'implementation={policy.implementation!r} cannot serve this layer: {reason}')
    if named is None and on.here:
      if on.has_kernels(precision):
        log_once(f'no kernels for a layer {d_in} x {d_out} on {tokens} tokens: {reason}')
      elif precision.without_kernels.simulates:
        log_once(f'precision={policy.precision!r} is simulated: {reason}')
    return layer(precision=precision.without_kernels, plain=reason)
  if named is None and not roles and policy.projection is not None:
    return layer(precision=precision.without_kernels, plain=NO_PACKER)
  backends = tuple(pack.candidates(precision.packed_dtype(dtype), on.device))
  precision = dataclasses.replace(precision, pass_backends=backends)
  if named is not None:
    found, looked_up = dict.fromkeys(sparse_roles(policy), named), ()
  else:
    by_records = precision.by_records(packed_form(policy))
    kernel, size = backend_of('sparse', on, precision), (tokens, d_in, d_out)
    found = {role: _fastest(on, precision, role, *size, dtype) if role in by_records else kernel for role in roles}
    looked_up = [precision.key(role, *size, dtype) for role in roles if role in by_records]
  return layer(Backends(**found), precision, checks=_checks_of(on, *looked_up))


def backend_of(
  implementation: str | None, on: Target | None = None, precision: Precision = NATIVE
) -> str | None:
  """The name that `sparse_matmul` has for a policy's implementation; 'sparse' is the kernel that this GPU runs."""
  if implementation != 'sparse':
    return implementation
  # Where there is none, that of another GPU, which then says that it cannot run here.
  archs = (on or target()).device.arch, arch.of_measured(api.OP, ())
  return next((k.backend for each in archs if (k := each.kernel(api.OP, precision.width(2)))), None)


def packed_form(policy: DotPolicy) -> Form | None:
  """The form of the weight, where it is 2:4 along axis -2, as the forward reads it."""
  form = policy.projection and policy.projection.form
  return None if form == SoftThreshold(-1) else form


def sparse_roles(policy: DotPolicy) -> tuple[Role, ...]:
  """The matmuls that the policy makes sparse."""
  weight = packed_form(policy) is not None
  sparse = dict(
    forward=weight, input_grad=weight and policy.input_grad == 'sparse', weight_grad=policy.weight_grad == 'mvue'
  )
  return tuple(role for role in ROLES if sparse[role])


def kernel_roles(
  policy: DotPolicy, d_in: int, d_out: int, dtype: Any, asked: Asked = PLAIN
) -> tuple[Role, ...]:
  """The matmuls that a policy that names no implementation may give to a kernel, if the GPU has them."""
  if unfit(policy, d_in, d_out, dtype, asked) is not None:
    return ()
  packed_by_xla = ('forward',) if isinstance(packed_form(policy), Masked) else ()
  return tuple(role for role in sparse_roles(policy) if role not in packed_by_xla)


def unfit(policy: DotPolicy, d_in: int, d_out: int, dtype: Any, asked: Asked = PLAIN) -> str | None:
  """Why no kernel can serve, or None."""
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
    return f'activations are {jnp.dtype(dtype).name}, the kernels take bfloat16 and float16'
  if wrong := PRECISIONS[policy.precision].unfit(policy):
    return wrong
  if d_in % 4 or d_out % 4:
    return f'packing takes multiples of four, found a weight {d_in} x {d_out}'
  return asked.unfit(dtype)


def _why_plain(
  policy: DotPolicy, d_in: int, d_out: int, dtype: Any, arrays: Any, on: Target, asked: Asked = PLAIN
) -> str | None:
  """Why no kernel serves a layer, or None."""
  if (reason := unfit(policy, d_in, d_out, dtype, asked)) is not None:
    return reason
  if on.here and _partitioning.mixed(arrays):
    return 'kernels run on a mesh whose axes are all automatic or all explicit, this one has both'
  precision, named = PRECISIONS[policy.precision], policy.implementation
  if named is None and not on.has_kernels(precision):
    return f'{on.device.slug} has {precision.lacks}'
  return "implementation='reference'" if named == 'reference' else None


def may_pack(policy: DotPolicy, w: Array) -> bool:
  """Whether some plan for `w` would read it packed: what a caller asks who knows neither tokens nor dtype."""
  form = packed_form(policy)
  if form is None or (policy.implementation is None and isinstance(form, Masked)):
    return False
  return _why_plain(policy, w.shape[-2], w.shape[-1], jnp.bfloat16, w, target()) is None


def _fastest(
  on: Target, precision: Precision, role: Role, tokens: int, d_in: int, d_out: int, dtype: Any
) -> str | None:
  """The back end of a matmul that may take a kernel and names none, by records."""
  kernel = backend_of('sparse', on, precision)
  keys = [precision.key(role, share, d_in, d_out, dtype) for share in on.shares(tokens)]
  if precision.scales:  # the pass that rounds the weight packs it in any case
    return None if all(api.chosen(key, on.device) == 'dense' for key in keys) else kernel
  for key in keys:
    first = api.candidates_for(**key, device=on.device)[0]
    if first != 'dense' and on.has(first):
      return first
  own = on.device.arch.kernel(api.OP, precision.width(2))
  return kernel if role == 'weight_grad' and own is not None and own.by_default else None


def _checks_of(on: Target, *keys: Mapping[str, Any]) -> dict[tuple, _checks.Entry]:
  """The outcomes of the checks that `chosen` asked for, if the plan is priced."""
  found = {} if not on.priced else {tuple(key.items()): api.checked(key, on.device) for key in keys}
  return {key: entry for key, entry in found.items() if entry is not None}
