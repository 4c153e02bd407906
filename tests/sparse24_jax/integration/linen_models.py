"""Linen models in a loop, with remat, in a scan, and both, for the tests of sparsified ones."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import sparse24_jax as s24
from tests.draws import parameters
from tests.standard import project

LAYERS = 2


class MLP(nn.Module):
  @nn.compact
  def __call__(self, x):
    return x + nn.Dense(16, name='down')(nn.relu(nn.Dense(32, name='up')(x)))


class Loop(nn.Module):
  remat: bool = False

  @nn.compact
  def __call__(self, x):
    layer = nn.remat(MLP) if self.remat else MLP
    for i in range(LAYERS):
      x = layer(name=f'h_{i}')(x)
    return nn.Dense(4, name='head')(x)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return MLP(name='mlp')(x), None


class Scan(nn.Module):
  remat: bool = False
  axes: tuple = ('params', 'sparse24')
  rngs: tuple = ('params', 'mvue')

  @nn.compact
  def __call__(self, x):
    block = nn.remat(Block) if self.remat else Block
    scan = nn.scan(block, dict.fromkeys(self.axes, 0), split_rngs=dict.fromkeys(self.rngs, True), length=LAYERS)
    return nn.Dense(4, name='head')(scan(name='h')(x, None)[0])


MODELS = {
  'loop': Loop(),
  'remat': Loop(remat=True),
  'scan': Scan(),
  'scan_remat': Scan(remat=True),
}
RULE = r'h.*/(up|down)/kernel'
X, Y = (jnp.asarray(np.random.default_rng(size).standard_normal((8, size), np.float32)) for size in (16, 4))
KEY = jax.random.key(2)
FST = s24.recipes.transposable_srste(RULE, masked_decay=1e-3)
RECIPES = {
  'ste': s24.recipes.ste(RULE),
  'fst': FST,
  's_ste': s24.recipes.s_ste(RULE),
  'fst_without_mvue': s24.Recipe('fst', (s24.Rule(RULE, s24.DotPolicy(s24.transposable(), input_grad='sparse')),)),
}


@functools.cache
def init(model, shape=X.shape):
  return parameters(model, jax.ShapeDtypeStruct(shape, X.dtype))


def opt_state(params, recipe):
  return jax.jit(s24.sparse_training(optax.sgd(0.1), recipe).init)(params)


@functools.cache
def _at_start(recipe):
  def both(params):
    state = s24.sparse_training(optax.sgd(0.1), recipe).init(params)
    return s24.sparse_variables(params, state, recipe), project(params, state, recipe)

  return jax.jit(both)


def at_start(params, recipe):
  """(variables, projected parameters) at the start of a run, by one program."""
  states, projected = _at_start(recipe)(params)
  return {'params': params, 'sparse24': states}, projected


def variables(params, recipe):
  return at_start(params, recipe)[0]


@functools.cache
def _program(model):
  return jax.jit(model.apply)


def apply(model, v, x=X):
  """`model.apply` as one program."""
  return _program(model)(v, x)


@functools.cache
def prepared(name, recipe_name):
  """Model, recipe, parameters, variables and projected parameters of a case; remat and no remat share them."""
  recipe, plain = RECIPES[recipe_name], MODELS[name.removesuffix('_remat').replace('remat', 'loop')]
  if plain != MODELS[name]:
    _, _, *rest = prepared('scan' if 'scan' in name else 'loop', recipe_name)
    return MODELS[name], recipe, *rest
  params = init(plain)
  return plain, recipe, params, *at_start(params, recipe)
