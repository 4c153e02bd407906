"""What XLA makes of the block and of a training step for an H100: compiled without one, read from the optimised HLO.

Runs where the CUDA plug-in wheels are, in the kernels' environment. All for one target, see `_device.compile_report`.
"""

import contextlib
import functools
import math
import re
from unittest import mock

from absl.testing import absltest, parameterized
from flax import linen as nn
import jax
import jax.extend
import jax.numpy as jnp
import optax
import pytest

from pallas_kernels import _compat, _device, _triton
from pallas_kernels.sparse_matmul import api
import sparse24_jax as s24
from sparse24_jax import numerics
from tests.pallas_kernels import triton_interpreter

TARGET = 'sm_90a'
TOKENS, D, HIDDEN = 256, 128, 512
BF16 = jnp.bfloat16
POLICY = s24.DotPolicy(s24.transposable(), input_grad='sparse', weight_grad='mvue')
SPARSE, TRITON = 'mosaic_gpu_v2', 'triton_kernel_call'
# Nothing of a hidden layer's size is moved; keys and counters are.
SMALL = 4096


@contextlib.contextmanager
def hopper():
  """Dispatch as on an H100 whose records favour the kernels."""
  with (
    mock.patch.object(_device, 'current', lambda: _device.target_device(TARGET)),
    mock.patch.object(_device, 'arrays_are_whole', lambda: True),
    mock.patch.object(api, 'candidates_for', lambda *args, **kwargs: ('mosaic_gpu', 'dense')),
    _triton.lowering_for(90),
    _compat.assumed_capability(9, 0),
  ):
    yield


@functools.cache
def sharding():
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    platform='cuda', target_config=_device._description(TARGET), topology='1x1x1'
  )
  return jax.sharding.NamedSharding(topologies.make_mesh(topology, (1,), ('x',)), jax.sharding.PartitionSpec())


def compiled(f, *args) -> str:
  """Optimised HLO of `f` for the target, from trees of arrays or of shapes."""
  structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding()), args)
  with hopper():
    return jax.jit(f).lower(*structs).compile().as_text() or ''


def struct(*shape: int, dtype=BF16) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def computations(hlo: str) -> dict[str, list[str]]:
  """Instructions of each computation by its name; that of the entry is 'ENTRY'."""
  found, name = {}, None
  for line in hlo.splitlines():
    head = re.match(r'(ENTRY )?%?([\w.\-]+) .*\{$', line)
    if head and not line.startswith(' '):
      name = 'ENTRY' if head.group(1) else head.group(2)
      found[name] = []
    elif line.startswith('}'):
      name = None
    elif name:
      found[name].append(line)
  return found


def reached(hlo: str, name: str) -> list[str]:
  """The instructions of a computation and of all that it calls."""
  every = computations(hlo)
  lines, waiting, seen = [], [name], set()
  while waiting:
    if (one := waiting.pop()) in seen:
      continue
    seen.add(one)
    lines += every.get(one, [])
    for line in every.get(one, []):
      waiting += re.findall(r'(?:calls|body|condition|to_apply)=%([\w.\-]+)', line)
  return lines


def calls(lines: list[str], target: str) -> list[str]:
  return [line for line in lines if f'custom_call_target="{target}"' in line]


def result(line: str) -> tuple[str, tuple[int, ...]]:
  """dtype and shape of an instruction's first result."""
  kind, sides = re.findall(r'= \(?(\w+)\[([\d,]*)\]', line)[0]
  return kind, tuple(map(int, filter(None, sides.split(','))))


def result_bytes(line: str) -> int:
  kind, shape = result(line)
  sizes = {'pred': 1, 's8': 1, 'u8': 1, 'u16': 2, 's16': 2, 'bf16': 2, 'f16': 2, 'f64': 8, 's64': 8, 'u64': 8}
  return math.prod(shape) * sizes.get(kind, 4)


def kernels_of(jaxpr) -> list:
  """The inner jaxpr of each call of a kernel; two are one object where JAX lowers them once."""
  found = []
  for equation in jaxpr.eqns:
    if equation.params.get('name') in ('mosaic_kernel', 'triton_kernel'):
      found.append(equation.params['jaxpr'])
      continue
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      found += kernels_of(inner)
  return found


def moves(lines: list[str]) -> list[str]:
  """Copies and transposes of anything large, fused ones by the name that XLA gives to their fusion."""
  pattern = r'= \(?\w+\[[\d,]*\]\S* (transpose|copy|copy-start)\(|%[\w.]*(transpose|copy)[\w.]*fusion[\w.]* ='
  return [line for line in lines if re.search(pattern, line) and result_bytes(line) > SMALL]


needs_plugins = absltest.skipUnless(
  _device.can_compile_for_gpu() and triton_interpreter.HAS_TRITON, 'needs the CUDA plugin wheels'
)


class ReaderTest(absltest.TestCase):

  def test_finds_calls_and_moves(self):
    hlo = '''
%fused (p: bf16[256,512]) -> bf16[512,256] {
  ROOT %transpose.1 = bf16[512,256]{1,0} transpose(%p), dimensions={1,0}
}

%body (t: f32[8]) -> f32[8] {
  ROOT %call.3 = bf16[8,8]{1,0} custom-call(%t), custom_call_target="inner"
}

ENTRY %main (x: bf16[256,512]) -> bf16[512,256] {
  %small = u32[2]{0} copy(%key)
  %loop = f32[8]{0} while(%z), condition=%cond, body=%body
  %copy.2 = bf16[256,512]{0,1} copy(%x)
  %wrapped_transpose_fusion = bf16[512,256]{1,0} fusion(%copy.2), kind=kInput, calls=%fused
  ROOT %call.4 = bf16[8,8]{1,0} custom-call(%loop), custom_call_target="outer"
}
'''
    entry = computations(hlo)['ENTRY']
    self.assertLen(entry, 5)
    self.assertLen(moves(entry), 2)
    self.assertLen(calls(entry, 'outer'), 1)
    self.assertEmpty(calls(entry, 'inner'))
    self.assertLen(calls(reached(hlo, 'ENTRY'), 'inner'), 1)


@needs_plugins
@pytest.mark.few
class BlockTest(parameterized.TestCase):

  @parameterized.named_parameters(('gelu', 'gelu', False), ('swiglu', 'silu', True))
  def test_six_sparse_products_and_nothing_moved(self, activation, gated):
    def step(x, weights, states, dy, key):
      def block(x, weights):
        return s24.ffn(
          x, weights['up'], weights['down'], states, policy=POLICY, activation=activation,
          w_gate=weights.get('gate'), key=jax.random.wrap_key_data(key),
        )  # fmt: skip

      y, vjp = jax.vjp(block, x, weights)
      return y, vjp(dy)

    weights = {'up': struct(D, HIDDEN), 'down': struct(HIDDEN, D)} | ({'gate': struct(D, HIDDEN)} if gated else {})
    states = {role: struct(*w.shape, dtype=jnp.bool_) for role, w in weights.items()}
    hlo = compiled(step, struct(TOKENS, D), weights, states, struct(TOKENS, D), struct(2, dtype=jnp.uint32))
    entry = computations(hlo)['ENTRY']
    sparse = calls(entry, SPARSE)
    self.assertLen(sparse, 6)
    # The results of the six: forward, input gradient and weight gradient of either map, gate and up being one.
    width = HIDDEN * (2 if gated else 1)
    expected = [(TOKENS, width), (TOKENS, D), (TOKENS, HIDDEN), (TOKENS, D), (D, width), (HIDDEN, D)]
    found = [result(line)[1] for line in sparse]
    self.assertCountEqual(found, expected)
    # Packs of the weights, the sample of dy, and the pass that makes dz and its sample.
    self.assertLen(calls(entry, TRITON), 5 if gated else 4)
    self.assertEmpty(moves(entry))
    self.assertNotRegex(hlo, r'__cublas|dot\(')


  def test_layers_call_the_same_kernels(self):
    """However many layers, recomputed or not, a program has each kernel once to lower and to compile."""
    def step(layers, x, weights, states):
      block = jax.checkpoint(lambda x: s24.ffn(x, *weights, states, policy=POLICY, key=jax.random.key(0)))

      def loss(x):
        for _ in range(layers):
          x = block(x)
        return jnp.sum(x.astype(jnp.float32))

      return jax.grad(loss)(x)

    weights = struct(D, HIDDEN), struct(HIDDEN, D)
    states = {role: struct(*w.shape, dtype=jnp.bool_) for role, w in zip(('up', 'down'), weights, strict=True)}
    with hopper():
      one, three = (
        kernels_of(jax.make_jaxpr(functools.partial(step, layers))(struct(TOKENS, D), weights, states).jaxpr)
        for layers in (1, 3)
      )
    self.assertGreaterEqual(len(one), 10)
    self.assertLen(three, 3 * len(one))
    self.assertEqual(set(map(id, three)), set(map(id, one)))

  def test_traces_inside_shard_map(self):
    """Kernels do not say that their results vary over the mesh; a gradient must."""
    plain, split = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec('d')

    def loss(weights, x, states):
      key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index('d'))
      y = s24.ffn(x, weights['up'], weights['down'], states, policy=POLICY, key=key)
      y = s24.dot(y, weights['up'], states['up'], policy=POLICY, key=key)
      return jax.lax.psum(jnp.sum(y.astype(jnp.float32)), 'd')

    gradient = jax.shard_map(
      jax.grad(loss, argnums=(0, 1)), mesh=jax.sharding.Mesh(jax.devices(), ('d',)),
      in_specs=(plain, split, plain), out_specs=(plain, split),
    )  # fmt: skip
    weights = {'up': struct(D, HIDDEN), 'down': struct(HIDDEN, D)}
    states = {role: struct(*w.shape, dtype=jnp.bool_) for role, w in weights.items()}
    x = struct(8 * TOKENS, D)
    with hopper():
      found = jax.eval_shape(gradient, weights, x, states)
    self.assertEqual(jax.tree.map(lambda a: a.shape, found), jax.tree.map(lambda a: a.shape, (weights, x)))


class Block(nn.Module):
  """A layer of a small model, with the hidden part as one module or as two Dense layers."""

  one: bool

  @nn.compact
  def __call__(self, x, _):
    if self.one:
      mlp = s24.linen.Sparse24MLP(HIDDEN, dtype=BF16, name='mlp')
      return x + mlp(x), None
    h = nn.gelu(nn.Dense(HIDDEN, use_bias=False, dtype=BF16, name='up')(x))
    return x + nn.Dense(D, use_bias=False, dtype=BF16, name='down')(h), None


class Model(nn.Module):
  one: bool

  @nn.compact
  def __call__(self, x):
    axes, rngs = {'params': 0, 'sparse24': 0}, {'params': True, 'mvue': True}
    return nn.scan(nn.remat(Block), axes, split_rngs=rngs, length=2)(self.one, name='h')(x, None)[0]


def both(z):
  return z[..., 0, :], z[..., 1, :]


def swiglu(gate, up, down):
  return (jax.nn.silu(gate) * up) @ down


@needs_plugins
@pytest.mark.few
class TrainingStepTest(parameterized.TestCase):

  @parameterized.named_parameters(('module', True), ('dense_layers', False))
  def test_weights_are_packed_once_for_all_micro_batches(self, one):
    model = Model(one)
    recipe = s24.Recipe('r', (s24.Rule('h/.*kernel', POLICY),), refresh_every=40)
    tx = s24.sparse_training(optax.sgd(0.1), recipe)
    x = struct(TOKENS, D)
    params = jax.eval_shape(model.init, jax.random.key(0), x)['params']
    # The step reads the state and does not refresh it: the search for masks is compiled elsewhere.
    opt_state = jax.eval_shape(tx.init, params)
    sparse = s24.sparsify(model, recipe)

    def accumulated(params, opt_state, batches, key):
      states = s24.sparse_variables(params, opt_state, recipe)

      def micro(total, given):
        x, i = given
        rngs = {'mvue': jax.random.fold_in(jax.random.wrap_key_data(key), i)}

        def loss(params):
          y = sparse.apply({'params': params, 'sparse24': states}, x, rngs=rngs)
          return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return jax.tree.map(jnp.add, total, jax.grad(loss)(params)), None

      zeros = jax.tree.map(jnp.zeros_like, params)
      return jax.lax.scan(micro, zeros, (batches, jnp.arange(4)))[0]

    hlo = compiled(accumulated, params, opt_state, struct(4, TOKENS, D), struct(2, dtype=jnp.uint32))
    outside = computations(hlo)['ENTRY']
    packs = calls(outside, TRITON)
    # Both operands of either map, for both layers at once: values [layers, rows, kept] on the way.
    self.assertLen(packs, 2)
    self.assertEmpty(calls(outside, SPARSE))
    loops = [name for line in outside for name in re.findall(r'body=%([\w.\-]+)', line)]
    inside = [line for name in loops for line in reached(hlo, name)]
    # Forward; forward again for remat; two gradients of either map. The layers are a loop.
    shapes = [result(line)[1] for line in calls(inside, SPARSE)]
    for shape in ((D, HIDDEN), (HIDDEN, D)):  # weight gradients
      self.assertEqual(shapes.count(shape), 1)
    self.assertGreaterEqual(shapes.count((TOKENS, HIDDEN)), 3)  # z twice, dh
    self.assertGreaterEqual(shapes.count((TOKENS, D)), 2)  # y, dx
    if one:  # a forward that is recomputed keeps no z
      z_and_h = [line for line in calls(inside, SPARSE) if line.count(f'bf16[{TOKENS},{HIDDEN}]') == 2]
      self.assertLen(z_and_h, 1)
    # Samples of both gradients and no packing of weights.
    self.assertLen(calls(inside, TRITON), 2)

  @parameterized.named_parameters(
    ('split', lambda p, x: swiglu(*jnp.split(x @ p['wi'], 2, axis=-1), p['wo']), {'wi': (D, 2 * HIDDEN)}),
    ('gating_einsum', lambda p, x: swiglu(*both(jnp.einsum('td,nhd->tnh', x, p['wi'])), p['wo']),
     {'wi': (2, HIDDEN, D)}),
    ('each_token', lambda p, x: jax.vmap(lambda x: p['wo'].T @ (jax.nn.silu(p['gate'] @ x) * (p['up'] @ x)))(x),
     {'gate': (HIDDEN, D), 'up': (HIDDEN, D)}),
  )  # fmt: skip
  def test_gate_and_up_as_models_write_them_are_the_fused_op(self, f, shapes):
    """The same kernels on the same sizes as `ffn` itself. Gate and up in one weight are never put together or apart."""
    shapes = {name: struct(*shape) for name, shape in {**shapes, 'wo': (HIDDEN, D)}.items()}

    def loss(params, x):
      return jnp.sum(jnp.square(f(params, x).astype(jnp.float32)))

    bound = s24.bind(s24.Recipe('r', (s24.Rule('.*', POLICY),)), loss, shapes, struct(TOKENS, D))
    sparse = s24.sparsify(loss, bound)

    def by_trace(params, masks, x, key):
      state = s24.sparse_training(optax.sgd(0.1), bound).init(params)._replace(projections=masks)
      return jax.grad(sparse)(params, s24.sparse_variables(params, state, bound), jax.random.wrap_key_data(key), x)

    def by_op(params, masks, x, key):
      def loss(params):
        y = s24.ffn(
          x, params['up'], params['down'], masks, policy=POLICY, activation='silu', w_gate=params['gate'],
          key=jax.random.wrap_key_data(key),
        )  # fmt: skip
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

      return jax.grad(loss)(params)

    kernels = []
    weights = {'gate': struct(D, HIDDEN), 'up': struct(D, HIDDEN), 'down': struct(HIDDEN, D)}
    for step, params in ((by_trace, shapes), (by_op, weights)):
      masks = jax.tree.map(lambda w: struct(*w.shape, dtype=bool), params)
      hlo = compiled(step, params, masks, struct(TOKENS, D), struct(2, dtype=jnp.uint32))
      kernels.append(sorted(result(line) for line in calls(hlo.splitlines(), SPARSE)))
      if 'wi' in params:
        self.assertEmpty(re.findall(r'%wrapped_(?:slice|concatenate)\S* =', hlo))
    self.assertEqual(*kernels)
    self.assertLen(kernels[0], 5)  # no gradient of x

  @parameterized.named_parameters(('gelu', False, False), ('swiglu_fp8', True, True))
  @pytest.mark.slow
  def test_no_product_runs_twice_where_residuals_are_stacked(self, gated, fp8):
    class Layer(nn.Module):
      @nn.compact
      def __call__(self, x, _):
        activation = 'silu' if gated else 'gelu'
        return x + s24.linen.Sparse24MLP(HIDDEN, dtype=BF16, gated=gated, activation=activation, name='mlp')(x), None

    class Layers(nn.Module):
      @nn.compact
      def __call__(self, x):
        axes, rngs = {'params': 0, 'sparse24': 0}, {'params': True, 'mvue': True}
        return nn.scan(Layer, axes, split_rngs=rngs, length=2)(name='h')(x, None)[0]

    model, x = Layers(), struct(TOKENS, D)
    recipe = s24.recipes.s_ste('h/.*', fp8=True) if fp8 else s24.Recipe('r', (s24.Rule('h/.*kernel', POLICY),))
    params = jax.eval_shape(model.init, jax.random.key(0), x)['params']
    opt_state = jax.eval_shape(s24.sparse_training(optax.sgd(0.1), recipe).init, params)
    sparse = s24.sparsify(model, recipe)

    def gradient(params, opt_state, x, key):
      states = s24.sparse_variables(params, opt_state, recipe)

      def loss(params):
        rngs = {'mvue': jax.random.wrap_key_data(key)}
        y = sparse.apply({'params': params, 'sparse24': states}, x, rngs=rngs)
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

      return jax.grad(loss)(params)

    hlo = compiled(gradient, params, opt_state, x, struct(2, dtype=jnp.uint32))
    # FP8 keeps the input gradients dense.
    self.assertLen(calls(hlo.splitlines(), SPARSE), 4 if fp8 else 6)
    # Three weights, and gate and up are one product; or two, both ways, as one call each.
    self.assertLen(calls(computations(hlo)['ENTRY'], TRITON), 3 if fp8 else 2)

  @parameterized.parameters(
    s24.recipes.transposable_srste('.*', masked_decay=1e-4, refresh_every=40), s24.recipes.s_ste('.*')
  )
  @pytest.mark.slow
  def test_a_step_without_a_search_neither_copies_nor_keeps_weights(self, recipe):
    tx = s24.sparse_training(optax.adam(1e-3), recipe)
    w = struct(D, HIDDEN, dtype=jnp.float32)
    opt_state = jax.eval_shape(tx.init, {'w': w})

    def step(params, opt_state, grads):
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    with mock.patch.object(jax, 'jit', functools.partial(jax.jit, donate_argnums=(0, 1))):
      hlo = compiled(step, {'w': w}, opt_state, {'w': w})
    entry = computations(hlo)['ENTRY']
    self.assertEmpty(moves(entry))
    # Weight and two moments; an update beside them would be a fourth.
    written = [line for line in entry if re.search(r' fusion\(', line) and result_bytes(line) == 4 * D * HIDDEN]
    self.assertLen(written, 1)
    self.assertLen(re.findall(rf'f32\[{D},{HIDDEN}\]', written[0].split(' fusion(')[0]), 3)

  def test_a_step_that_moves_no_link_copies_nothing(self):
    tx = s24.sparse_training(optax.adam(1e-3), s24.recipes.rigl('.*', total_steps=1000, density=0.2))
    w = struct(D, HIDDEN, dtype=jnp.float32)

    def step(params, opt_state, grads):
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    with mock.patch.object(jax, 'jit', functools.partial(jax.jit, donate_argnums=(0, 1))):
      hlo = compiled(step, {'w': w}, jax.eval_shape(tx.init, {'w': w}), {'w': w})
    self.assertEmpty(moves(computations(hlo)['ENTRY']))

  @parameterized.parameters('e4m3', 'e5m2')
  def test_the_simulation_of_fp8_rounds(self, fmt):
    """XLA drops a cast to fewer bits and back on GPUs."""
    hlo = compiled(functools.partial(numerics.round_to_fp8, fmt=fmt), struct(TOKENS, D))
    self.assertIn('round-nearest-even', hlo)


class CheckStepOnHopperTest(parameterized.TestCase):

  @parameterized.parameters(False, True)
  def test_kernels_in_a_step_are_sparse_matmuls(self, fp8):
    """Packed once a step, read by the fused block of a scanned layer, forward and backward."""
    recipe = s24.recipes.s_ste('.*', fp8=True) if fp8 else s24.recipes.transposable_srste('.*', masked_decay=1e-4)
    tx = s24.sparse_training(optax.sgd(0.1), recipe)

    def loss(params, x):
      layer = jax.checkpoint(lambda x, w: (x + jax.nn.gelu(x @ w['up']) @ w['down'], None))
      return jax.lax.scan(layer, x, params)[0].astype(jnp.float32).sum()

    def step(params, state, x, sparse):
      if sparse:
        variables = s24.sparse_variables(params, state, recipe)
        self.assertIsInstance(variables['up'], s24.PackedWeight)
        grads = jax.grad(s24.sparsify(loss, recipe))(params, variables, jax.random.key(0), x)
      else:
        grads = jax.grad(loss)(params, x)
      return tx.update(grads, state, params)

    with hopper():
      params = {'up': struct(2, D, HIDDEN), 'down': struct(2, HIDDEN, D)}
      given = params, jax.eval_shape(tx.init, params), struct(TOKENS, D)
      self.assertEqual(set(s24.check_step(step, *given, sparse=True).weights), {'up', 'down'})
      with self.assertRaisesRegex(ValueError, 'down: the step reads it dense at'):
        s24.check_step(step, *given, sparse=False)


if __name__ == '__main__':
  absltest.main()
