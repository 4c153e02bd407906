"""The examples of the README run as they stand there, on small models."""

import ast
import contextlib
import dataclasses
import io
import pathlib
import re
import tempfile

from absl.testing import absltest
from flax import linen as nn
from flax import nnx
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest

import sparse24_jax as s24

ROOT = pathlib.Path(__file__).parents[1]


def blocks(page):
  return re.findall(r'```python\n(.*?)```', (ROOT / page).read_text(), re.DOTALL)


# Whole loops of a linen model, of Equinox, of a function and with a derivative of its own; the examples of nnx, of
# phases and of the weights that a dense end begins with; the loop of nnx.
LOOP, EQUINOX, FUNCTIONS, BY_HAND, *GUIDE = blocks('docs/guide.md')
BLOCKS = (blocks('README.md')[0], *GUIDE)
FUNCTION = blocks('README.md')[1]


class LinenMlp(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Dense(8, name='down')(nn.gelu(nn.Dense(32, name='up')(x)))


class LinenBlocks(nn.Module):
  """Paths like h_0/mlp/up/kernel."""

  @nn.compact
  def __call__(self, tokens):
    return nn.Dense(16)(LinenWrapped(name='h_0')(nn.Embed(16, 8)(tokens)))


class LinenWrapped(nn.Module):
  @nn.compact
  def __call__(self, x):
    return x + LinenMlp(name='mlp')(x)


class NnxMlp(nnx.Module):
  def __init__(self, rngs, dtype):
    self.up, self.down = nnx.Linear(8, 32, dtype=dtype, rngs=rngs), nnx.Linear(32, 8, dtype=dtype, rngs=rngs)

  def __call__(self, x):
    return self.down(nnx.gelu(self.up(x)))


class NnxBlock(nnx.Module):
  def __init__(self, rngs, dtype):
    self.mlp = NnxMlp(rngs, dtype)

  def __call__(self, x):
    return x + self.mlp(x)


class NnxModel(nnx.Module):
  def __init__(self, rngs, dtype=None):
    self.h = nnx.List([NnxBlock(rngs, dtype) for _ in range(2)])

  def __call__(self, x):
    for block in self.h:
      x = block(x)
    return x


class ReadmeTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.tokens = jnp.arange(16).reshape(2, 8)
    self.model = LinenBlocks()
    self.params = jax.jit(self.model.init)(jax.random.key(0), self.tokens)['params']
    self.names = {
      'model': self.model,
      'params': self.params,
      'tokens': self.tokens,
      'key': jax.random.key(1),
      'step': 0,
      'total_steps': 10,
    }

  def test_linen_example(self):
    exec(BLOCKS[0], self.names)
    self.assertLess(len(BLOCKS[0].strip().splitlines()), 13)
    self.assertEqual(self.names['logits'].shape, (2, 8, 16))
    projected = s24.project(self.params, self.names['opt_state'], self.names['recipe'])
    s24.verify24(projected['h_0']['mlp']['up']['kernel'])
    expected = self.model.apply({'params': projected}, self.tokens)
    self.assertTrue(jnp.allclose(self.names['logits'], expected, atol=1e-5))

  def test_function_example(self):
    names = {**self.names, 's24': s24, 'optax': optax, 'jax': jax, 'jnp': jnp}
    exec(BLOCKS[0], names)
    exec(FUNCTION, names)
    projected = s24.project(self.params, names['opt_state'], names['recipe'])
    expected = jax.jit(names['loss_fn'])(projected, self.tokens)
    self.assertAlmostEqual(float(names['loss']), float(expected), places=5)
    self.assertTrue(s24.check(names['recipe'], names['loss_fn'], self.params, self.tokens).ok)

  def test_length(self):
    self.assertLessEqual(len((ROOT / 'README.md').read_text().splitlines()), 120)

  @pytest.mark.slow
  def test_nnx_example(self):
    x = jax.random.normal(jax.random.key(2), (4, 8))
    exec(BLOCKS[0], self.names)  # its recipe is the one meant
    names = {
      **self.names,
      'model': NnxModel(nnx.Rngs(0)),
      'nnx': nnx,
      'optax': optax,
      's24': s24,
      'loss_fn': lambda model: jnp.mean(model(x) ** 2),
    }
    exec(BLOCKS[1], names)
    first = float(names['loss'])
    for _ in range(20):
      loss = names['train_step'](names['model'], names['optimizer'])
    self.assertLess(float(loss), first)

  @pytest.mark.slow
  def test_nnx_function_example(self):
    exec(BLOCKS[0], self.names)
    scope = dict(jax=jax, nnx=nnx, optax=optax, s24=s24, loss_fn=lambda model, x: jnp.mean(model(x) ** 2))
    names = {**self.names, **scope, 'model': NnxModel(nnx.Rngs(0)), 'x': jax.random.normal(jax.random.key(2), (4, 8))}
    exec(BLOCKS[2], names)
    step = [names[name] for name in ('model', 'optimizer')]
    for i in range(20):
      loss = names['train_step'](*step, jax.random.key(i), names['x'])
    self.assertLess(float(loss), float(names['loss']))

  @pytest.mark.slow
  def test_nnx_example_where_weights_are_packed(self):
    """On a GPU with kernels, a step is traced once, and leaves a model like the one before, with its new masks."""

    def build():
      return s24.sparsify(NnxModel(nnx.Rngs(0), jnp.bfloat16), recipe, rngs=nnx.Rngs(mvue=0))

    def loss_fn(model):
      traces.append(model.sparse24.read()['h/0/mlp/up/kernel'])
      return jnp.mean(model(x) ** 2)

    x, traces = jax.random.normal(jax.random.key(2), (16, 8), jnp.bfloat16), []
    exec(BLOCKS[0], self.names)
    (rule,) = self.names['recipe'].rules
    rule = dataclasses.replace(rule, policy=dataclasses.replace(rule.policy, implementation='dense'))
    recipe = dataclasses.replace(self.names['recipe'], rules=(rule,), refresh_every=1)
    model = NnxModel(nnx.Rngs(0), jnp.bfloat16)
    names = {**self.names, 'recipe': recipe, 'model': model, 'nnx': nnx, 'loss_fn': loss_fn}
    exec(BLOCKS[1].replace('3e-4', '3e-2'), names)
    for _ in range(2):
      names['train_step'](names['model'], names['optimizer'])
    self.assertLen(traces, 1)
    self.assertIsInstance(traces[0], s24.PackedWeight)
    model, fresh = names['model'], build()
    expected = s24.transposable_mask(model.h[1].mlp.down.kernel[...])
    self.assertTrue((expected != fresh.sparse24.read()['h/1/mlp/down/kernel']).any())
    self.assertTrue((expected == model.sparse24.read()['h/1/mlp/down/kernel']).all())
    # A checkpoint of the model goes into a fresh one.
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
      saved, wanted = (nnx.to_pure_dict(nnx.state(m, nnx.Not(nnx.RngState))) for m in (model, fresh))
      checkpointer.save(f'{folder}/model', saved)
      checkpointer.wait_until_finished()
      restored = nnx.state(fresh, nnx.Not(nnx.RngState))
      nnx.replace_by_pure_dict(restored, checkpointer.restore(f'{folder}/model', wanted))
    nnx.update(fresh, restored)
    self.assertTrue((fresh(x) == model(x)).all())

  @pytest.mark.slow
  def test_whole_loop(self):
    out, names = io.StringIO(), {}
    with contextlib.redirect_stdout(out):
      exec(LOOP, names)
    sparse, dense, shares = out.getvalue().splitlines()
    self.assertRegex(sparse, r'^6 sparse \d')
    self.assertRegex(dense, r'^12 dense \d')
    self.assertEqual(ast.literal_eval(shares), {'layers_1/kernel': 0.5, 'layers_3/kernel': 0.5})
    # What was evaluated before it was saved is the plain model on what was exported after it was restored.
    tokens = names['batch_of'](12)
    logits = names['model'].apply({'params': names['exported']}, tokens[:, :-1])
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    self.assertAlmostEqual(float(sparse.split()[3]), float(expected), places=5)

  @pytest.mark.slow
  def test_loop_of_equinox(self):
    pytest.importorskip('equinox')
    out, names = io.StringIO(), {}
    with contextlib.redirect_stdout(out):
      exec(EQUINOX, names)
    *steps, shares = out.getvalue().splitlines()
    self.assertLess(float(steps[-1].split()[1]), float(steps[0].split()[1]))
    self.assertEqual(ast.literal_eval(shares), {'layers/0/weight': 0.5, 'layers/1/weight': 0.5})
    x = names['batch_of'](12)
    sparse = names['sparse_loss'](
      names['params'], s24.sparse_variables(names['params'], names['opt_state'], names['recipe']), None, x
    )
    exported = jnp.mean((jax.vmap(names['exported'])(x) - x[:, :4]) ** 2)
    self.assertAlmostEqual(float(sparse), float(exported), places=5)

  @pytest.mark.slow
  def test_loop_of_a_function(self):
    out, names = io.StringIO(), {}
    with contextlib.redirect_stdout(out):
      exec(FUNCTIONS, names)
    steps = [line.split() for line in out.getvalue().splitlines()]
    self.assertEqual([phase for _, phase, _ in steps], ['sparse'] * 10 + ['dense'] * 2)
    self.assertLess(float(steps[-1][2]), float(steps[0][2]))
    self.assertFalse((names['params']['up'] == 0).any())

  def test_loop_with_a_derivative_of_its_own(self):
    out, names = io.StringIO(), {}
    with contextlib.redirect_stdout(out):
      exec(BY_HAND, names)
    down, up, last = out.getvalue().splitlines()
    self.assertRegex(down, '^down: sparse at')
    self.assertRegex(up, '^up: sparse at')
    recipe, params, x = names['recipe'], names['params'], names['batch_of'](12)
    variables = s24.sparse_variables(params, names['opt_state'], recipe)
    plain = names['loss_fn'](names['params'], variables, x)
    found = names['sparse_loss'](params, variables, None, variables, x)
    masked = {name: jnp.where(s24.magnitude_mask(w), w, 0) for name, w in params.items()}
    expected = jnp.mean((jax.nn.gelu(x @ masked['up']) @ masked['down'] - x) ** 2)
    self.assertAlmostEqual(float(found), float(expected), places=5)
    self.assertGreater(abs(float(plain - found)), 1e-4)
    self.assertLess(float(last), 1.5)
    with self.assertRaisesRegex(ValueError, 'recipe.with_dense of its path, and sparse_training and'):
      s24.bind(recipe, names['loss_fn'], params, variables, x)

  @pytest.mark.slow
  def test_loop_of_nnx(self):
    out, names = io.StringIO(), {}
    with contextlib.redirect_stdout(out):
      exec(BLOCKS[5], names)
    steps = [line.split() for line in out.getvalue().splitlines()]
    self.assertEqual([phase for _, phase, _ in steps], ['sparse'] * 10 + ['dense'] * 2)
    # The model is a plain one at the end, and better than at the start.
    plain, x = names['Model'](nnx.Rngs(0)), jax.random.normal(jax.random.key(99), (256, 16))
    start = jnp.mean((plain(x) - x[:, ::-1]) ** 2)
    nnx.update(plain, nnx.state(names['model'], nnx.Param))
    self.assertTrue((plain(x) == names['model'](x)).all())
    self.assertLess(float(jnp.mean((plain(x) - x[:, ::-1]) ** 2)), float(start))

  def test_phase_example(self):
    exec(BLOCKS[0], self.names)
    for step, phase in ((0, 'sparse'), (9, 'dense')):
      exec(BLOCKS[3], self.names | {'step': step, 'total_steps': 10} | (names := {}), names)
      self.assertEqual(names['phase'], phase)
      self.assertEqual(names['sparse'] == self.model, phase == 'dense')
    exec(BLOCKS[4], self.names | names, names)
    self.assertEqual(set(s24.verify_weights(names['params'], self.names['recipe']).values()), {0.5})


if __name__ == '__main__':
  absltest.main()
