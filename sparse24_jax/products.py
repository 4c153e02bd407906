"""The three products of a linear layer, each on a kernel or as a plain matmul: which, and how.

`plan` chooses by the policy, the shapes and the records of the card; the other functions carry a plan out. A product
that runs on a kernel takes a `PackedWeight` or an MVUE operand; one that does not takes the projected weight.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import AxisType

from pallas_kernels import _device, _partitioning, _records
from pallas_kernels.gated_activation import api as activations
from pallas_kernels.mvue.reference import mvue24
from pallas_kernels.pack import api as packers
from pallas_kernels.sparse_matmul import api
from pallas_kernels.sparse_matmul.operand import concatenate, SparseOperand
from sparse24_jax._kernels_here import is_installed, kernels_are_here, log_once
from sparse24_jax.numerics import Format, round_to_fp8
from sparse24_jax.packing import pack, PackedWeight
from sparse24_jax.packing8 import pack8, PackedWeight8
from sparse24_jax.policy import DotPolicy
from sparse24_jax.projection import Form, Masked, SoftThreshold


@dataclasses.dataclass(frozen=True)
class Plan:
  """The back end of each product; None is a plain matmul with the projected weight, or with the sampled gradient.

  With `fp8` the products are those of `sparse24_jax.fp8`, where None is a dense product in FP8; without it, an FP8
  policy is simulated.
  """

  forward: str | None = None
  input_grad: str | None = None
  weight_grad: str | None = None
  fp8: bool = False

  @property
  def packs(self) -> bool:
    """Whether some product reads the packed weight."""
    return self.fp8 or self.forward is not None or self.input_grad is not None

  @property
  def sole_backend(self) -> str | None:
    """The back end that all three products share, or None."""
    return self.forward if self.forward == self.input_grad == self.weight_grad else None


def plan(policy: DotPolicy, tokens: int, d_in: int, d_out: int, dtype: Any, arrays: Any = ()) -> Plan:
  """Where the three products of x `[tokens, d_in]` and w `[d_in, d_out]` run.

  A named implementation takes every product that the policy makes sparse. None asks the card's records: a product goes
  to the back end that measured fastest. On Hopper a sampled weight gradient takes a kernel in any case, since drawing
  the sample costs XLA more than the product. FP8 has kernels on Hopper alone; there the forward leaves the kernel only
  where that measured slower than the dense FP8 product, since the pass that rounds the weight packs it in any case. A
  weight that no kernel packs (masks by magnitude) stays with XLA. Without kernels or records of this card, for this
  dtype or sharding, all are plain. The types of `arrays` say on which mesh they are, if none is set.
  """
  if not tokens:
    return Plan()
  named = backend_of(policy.implementation)
  reason = _unfit(policy, d_in, d_out, dtype)
  if reason is None and _partitioning.mixed(arrays):
    reason = 'kernels run on a mesh whose axes are all automatic or all explicit, this one has both'
  if named == 'reference' or (named is None and not kernels_are_here(policy.precision)):
    if named is None and policy.precision == 'fp8':
      log_once('FP8 is simulated: its kernels need one Hopper GPU and the extra sparse24-jax[cuda]')
    return Plan()
  if reason is not None:
    if named is not None:
      raise ValueError(f'implementation={policy.implementation!r} cannot serve this layer: {reason}')
    log_once(f'no kernels for a layer {d_in} x {d_out} on {tokens} tokens: {reason}')
    return Plan()
  if policy.precision == 'fp8':
    loses = named is None and _loses_in_fp8(tokens, d_in, d_out)
    return Plan(forward=None if loses else named or 'mosaic_gpu', weight_grad=named or 'mosaic_gpu', fp8=True)
  if named is not None:
    return Plan(**{role: named if sparse else None for role, sparse in _sparse_roles(policy).items()})
  wanted = kernel_roles(policy, d_in, d_out, dtype)
  faster = functools.partial(_fastest, tokens=tokens, d_in=d_in, d_out=d_out, dtype=jnp.dtype(dtype))
  found = {role: faster(role, always=role == 'weight_grad') for role, sparse in wanted.items() if sparse}
  return Plan(**found)


def backend_of(implementation: str | None) -> str | None:
  """What `sparse_matmul` calls an implementation of a policy: of our kernels the one that this GPU runs."""
  if implementation != 'sparse':
    return implementation
  device = _device.current()
  return 'mosaic_gpu_sm80' if device.platform == 'gpu' and not device.has_sparse_wgmma else 'mosaic_gpu'


def _read_packed(policy: DotPolicy) -> Form | None:
  """The form of the weight, where it is 2:4 along axis -2, as the forward reads it."""
  form = policy.projection and policy.projection.form
  return None if form == SoftThreshold(-1) else form


def _sparse_roles(policy: DotPolicy) -> dict[str, bool]:
  weight = _read_packed(policy) is not None
  return dict(
    forward=weight, input_grad=weight and policy.input_grad == 'sparse', weight_grad=policy.weight_grad == 'mvue'
  )


def kernel_roles(policy: DotPolicy, d_in: int, d_out: int, dtype: Any) -> dict[str, bool]:
  """By product, whether a policy that names no implementation may give it to a kernel on a card that has them."""
  wanted = _sparse_roles(policy)
  if _unfit(policy, d_in, d_out, dtype) is not None:
    return dict.fromkeys(wanted, False)
  if isinstance(_read_packed(policy), Masked):
    wanted['forward'] = False
  return wanted


def _unfit(policy: DotPolicy, d_in: int, d_out: int, dtype: Any) -> str | None:
  """Why no kernel can serve, or None."""
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
    return f'activations are {jnp.dtype(dtype).name}, the kernels take bfloat16 and float16'
  if policy.precision == 'fp8':
    if not isinstance(_read_packed(policy), SoftThreshold):
      return f'only the soft threshold is packed in FP8, found {policy.projection and policy.projection.name!r}'
    if policy.weight_grad != 'mvue':
      return f"FP8 kernels take weight_grad='mvue', found {policy.weight_grad!r}"
  if d_in % 4 or d_out % 4:
    return f'packing takes multiples of four, found a weight {d_in} x {d_out}'
  return None


ROLES: Mapping[str, Any] = {
  # Sizes of the sparse operand's rows, of the dense operand's rows and of the sum; layout of the dense operand.
  'forward': lambda tokens, d_in, d_out: (d_out, tokens, d_in, 'nk'),
  'input_grad': lambda tokens, d_in, d_out: (d_in, tokens, d_out, 'nk'),
  'weight_grad': lambda tokens, d_in, d_out: (d_out, d_in, tokens, 'kn'),
}


def _fastest(role: str, *, tokens: int, d_in: int, d_out: int, dtype: jnp.dtype, always: bool) -> str | None:
  for share in _shares(tokens):
    m, n, k, b_layout = ROLES[role](share, d_in, d_out)
    first = api.candidates_for(m, n, k, dtype=dtype, out_dtype=dtype, b_layout=b_layout, out_layout='nm')[0]
    if first != 'dense' and is_installed(first):
      return first
  return 'mosaic_gpu' if always and _device.current().has_sparse_wgmma else None


def _loses_in_fp8(tokens: int, d_in: int, d_out: int) -> bool:
  """Whether the records say of every share of the tokens that the dense product of a forward in FP8 is faster."""
  keys = [fp8_key('forward', share, d_in, d_out) for share in _shares(tokens)]
  choices = [_records.lookup(_device.current().slug, api.OP, key) for key in keys]
  return all(choice is not None and choice.implementation == 'dense' for choice in choices)


def fp8_key(role: str, tokens: int, d_in: int, d_out: int) -> dict[str, Any]:
  """What records of a product in FP8 are looked up by; that of an input gradient, which is dense, by its sizes."""
  m, n, k, _ = ROLES[role](tokens, d_in, d_out)
  dtype = 'float8_e5m2' if role == 'weight_grad' else 'float8_e4m3fn'
  return dict(m=m, n=n, k=k, dtype=dtype, out_dtype='bfloat16', b_layout='nk', out_layout='nm')


def _shares(tokens: int) -> tuple[int, ...]:
  """How many tokens a device may get, where it is not known while tracing: an equal share, or all."""
  if _device.arrays_are_whole():
    return (tokens,)
  devices = jax.sharding.get_abstract_mesh().size or jax.device_count()
  return (tokens,) if tokens % devices else (tokens // devices, tokens)


def multiply(
  role: str, a: SparseOperand, b: Array, *, backend: str, bias: Array | None = None, activation: str | None = None,
  keep_preactivation: bool = False,
) -> Any:  # fmt: skip
  """`sparse_matmul` in a role of `ROLES`: D `[..., m]` from b `[..., k]`, for a weight gradient `[n, m]` from `[k, n]`.

  With `keep_preactivation` (D, Z), as there. The role names the call in profiles and compiled programs.
  """
  b_layout = 'kn' if role == 'weight_grad' else 'nk'

  def one(a, b, bias):
    return api.sparse_matmul(
      a, b, bias=bias, activation=activation, b_layout=b_layout, out_layout='nm',
      keep_preactivation=keep_preactivation, implementation=backend,
    )  # fmt: skip

  lead = b.shape[:-1] if b_layout == 'nk' else b.shape[-1:]
  # Neither kernel has a batching rule: under vmap they run one after the other.
  with jax.named_scope(role):
    d = jax.custom_batching.sequential_vmap(one)(a, b.reshape(-1, b.shape[-1]), bias)
    if role == 'forward':
      # XLA joins a kernel with what writes its result into the residuals of a scan; where the result is read as well,
      # the kernel then runs twice.
      d = jax.lax.optimization_barrier(d)
  return jax.tree.map(lambda x: x.reshape(*lead, -1), d)


def multiply_pair(
  role: str, gate: SparseOperand, up: SparseOperand, b: Array, *, backend: str, bias: Array | None = None
) -> Array:
  """`multiply` by [W_gate | W_up]: z `[tokens, 2, h]` from x `[tokens, d]`, or dx `[tokens, d]` from dz.

  Each device puts its parts of the two side by side: put together before, the mesh would divide them anew, some
  devices with gate alone and some with up. `bias` is `[2, h]`.
  """
  of_b, d = {'forward': ('n k*64', 'n . m*64'), 'input_grad': ('n . k*64', 'n m*64')}[role]
  arguments = (of_b, *('m*64 k*32', 'm k .') * 2, *(() if bias is None else ('. m*64',)))
  rule = _partitioning.Rule(arguments, (d,), order=('n', 'k', 'm'), sums=('k',))
  return _partitioning.partitioned('multiply_pair', _multiply_pair, rule, b, gate, up, bias, role=role, backend=backend)


def _multiply_pair(shard, b, gate, up, bias, *, role, backend):
  a = concatenate(gate, up, axis=-2 if role == 'forward' else -1)
  bias = None if bias is None else bias.reshape(-1)
  partial = shard.sums('k')
  d = multiply(role, a, b.reshape(b.shape[0], -1), backend=backend, bias=None if partial else bias)
  if partial:
    d = add_bias(shard.sum(d, 'k'), bias)
  return d.reshape(b.shape[0], 2, -1) if role == 'forward' else d


def sampled_weight_grad(dz: Array, key: Array, x: Array, *, backend: str, column: int = 0) -> Array:
  """dw = x^T V(dz), `[in, out]`, from x `[tokens, in]` and the sample that `mvue24` draws of dz `[tokens, out]`."""
  # Whole groups of four tokens a device, and of columns, since neighbours share a call of the generator.
  rule = _partitioning.Rule(
    ('k*4 m*4', _partitioning.undivided(key), 'k*4 n'), ('n m*4',), order=('k', 'n', 'm'), sums=('k',)
  )

  def one(dz, key, x):
    with jax.named_scope('weight_grad'):
      return _partitioning.partitioned(
        'sampled_weight_grad', _sampled_weight_grad, rule, dz, key, x, backend=backend, column=column
      )

  return jax.custom_batching.sequential_vmap(one)(dz, key, x)


def _sampled_weight_grad(shard, dz, key, x, *, backend, column):
  origin = (0, shard.offset('k'), column + shard.offset('m', 4))
  operand = packers.mvue_pack(dz, key, axis=-2, origin=origin)
  return shard.sum(multiply('weight_grad', operand, x, backend=backend), 'k')


def activation_and_weight_grad(
  dh: Array, z: Array, key: Array, x: Array, *, backend: str, activation: str, gated: bool
) -> tuple[Array, ...]:
  """dz from dh, and dw = x^T V(dz), with a gate that of gate and that of up; the pass that makes dz also samples it."""
  # z holds gate and up side by side, so that a part of its columns is none of either.
  features = '.' if gated else 'm*4'
  rule = _partitioning.Rule(
    (f'k*4 {features}', f'k*4 {features}', _partitioning.undivided(key), 'k*4 n'),
    (f'k*4 {features}', *(f'n {features}',) * (2 if gated else 1)), order=('k', 'n', 'm'), sums=('k',),
  )

  def one(dh, z, key, x):
    with jax.named_scope('weight_grad'):
      return _partitioning.partitioned(
        'activation_and_weight_grad', _activation_and_weight_grad, rule, dh, z, key, x,
        backend=backend, activation=activation, gated=gated,
      )  # fmt: skip

  return jax.custom_batching.sequential_vmap(one)(dh, z, key, x)


def _activation_and_weight_grad(shard, dh, z, key, x, *, backend, activation, gated):
  origin = (0, shard.offset('k'), shard.offset('m', 4))
  dz, operand = activations.activation_backward_pack(dh, z, key, activation=activation, gated=gated, origin=origin)
  dw = multiply('weight_grad', operand, x, backend=backend)
  return dz, *(shard.sum(part, 'k') for part in (jnp.split(dw, 2, axis=1) if gated else [dw]))


def forward(
  p: Plan, policy: DotPolicy, x: Array, w: Any, operand: SparseOperand | None, bias: Array | None = None
) -> Array:
  """z = x W~ + bias, `[..., out]`, from x `[..., in]` and the operand of the plan, or the projected weight `w`."""
  if p.forward is not None:
    return multiply('forward', operand, x, backend=p.forward, bias=bias)
  z = matmul(x, w, policy.precision, ('e4m3', 'e4m3'))
  return add_bias(z, bias)


def add_bias(z: Array, bias: Array | None) -> Array:
  """z `[..., out]` plus a bias `[out]`, or None; ranks are made equal, as JAX can be told to ask."""
  return z if bias is None else z + bias.astype(z.dtype).reshape((1,) * (z.ndim - 1) + (-1,))


def input_grad(
  p: Plan, policy: DotPolicy, dz: Array, w: Any, operand: SparseOperand | None, like: Array
) -> Array:
  """dx = dz W~^T, `[..., in]`, from the operand of the plan, or the projected weight `w`."""
  if p.input_grad is not None:
    return _partitioning.like(multiply('input_grad', operand, dz, backend=p.input_grad), like)
  return matmul(dz, w.T, policy.precision, ('e5m2', 'e4m3'), like=like)


def weight_grad(
  p: Plan, policy: DotPolicy, x: Array, dz: Array, key: Array | None, like: Array | None, column: int = 0
) -> Array:
  """dw = x^T V(dz), `[in, out]`, from `[..., in]` and `[..., out]`; `column` is where dz stands in what is sampled."""
  x, dz = x.reshape(-1, x.shape[-1]), dz.reshape(-1, dz.shape[-1])
  if p.weight_grad is not None:
    return _partitioning.whole(sampled_weight_grad(dz, key, x, backend=p.weight_grad, column=column))
  if policy.weight_grad == 'mvue':
    dz = mvue24(dz, key, axis=-2, origin=(0, 0, column))
  return matmul(x.T, dz, policy.precision, ('e4m3', 'e5m2'), like=like)


def matmul(a: Array, b: Array, precision: str, formats: tuple[Format, Format], like: Array | None = None) -> Array:
  """a b over a's last and b's first axis, summed in float32, in the dtype of `a`; sharded as `like` if need be."""
  if precision == 'fp8':
    a, b = round_to_fp8(a, formats[0]), round_to_fp8(b, formats[1])
  # On a mesh of explicit axes JAX does not choose how a product is sharded; a gradient is sharded as its variable.
  sharding = None if like is None else jax.typeof(like).sharding
  if sharding is not None and AxisType.Explicit not in sharding.mesh.axis_types:
    sharding = None
  return jnp.dot(a, b, preferred_element_type=jnp.float32, out_sharding=sharding).astype(a.dtype)


def may_pack(policy: DotPolicy, w: Array) -> bool:
  """Whether some plan for `w` would read it packed: what a caller asks who knows neither tokens nor dtype."""
  form = _read_packed(policy)
  if form is None or policy.implementation == 'reference':
    return False
  fits = _unfit(policy, w.shape[-2], w.shape[-1], jnp.bfloat16) is None and not _partitioning.mixed(w)
  chosen = not isinstance(form, Masked) and kernels_are_here(policy.precision)
  return fits and (policy.implementation is not None or chosen)


def packed_weight(
  p: Plan, policy: DotPolicy, w: Array, state: Any, dtype: Any
) -> PackedWeight | PackedWeight8 | None:
  """The weight as the plan's products read it: what was handed over, or packed here; None if the plan packs nothing."""
  if not p.packs:
    return None
  if isinstance(state, PackedWeight8) if p.fp8 else isinstance(state, PackedWeight) and state.dtype == dtype:
    return state
  one = jax.custom_batching.sequential_vmap(functools.partial(pack_weight, policy, dtype=dtype))
  return one(jax.lax.stop_gradient(w), projection_state(state))


def pack_weight(policy: DotPolicy, w: Array, state: Array, dtype: Any) -> PackedWeight | PackedWeight8:
  """`w` `[..., in, out]` packed under its state. Its cotangent is the straight-through one, so packing has none."""
  form, w = _read_packed(policy), jax.lax.stop_gradient(w)
  if form is None:
    raise ValueError(f'{policy} has no packed form')
  if policy.precision == 'fp8' and isinstance(form, SoftThreshold):
    return pack8(w, state)
  return pack(form, w, state, jnp.dtype(dtype))


def projection_state(state: Any) -> Any:
  """The projection's state, from it or from a packed weight."""
  return state.state if isinstance(state, PackedWeight | PackedWeight8) else state
