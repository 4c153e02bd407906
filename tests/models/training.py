"""A model of somebody else's, trained by its trace and, beside it, on the weights of `project`."""

import os
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparse24_jax as s24
from sparse24_jax.rules import leaves_by_path
from tests.quick import jit

os.environ['KERAS_BACKEND'] = 'jax'  # whoever imports Keras first, as packages beside it do


def package(name: str) -> Any:
  """A package of the extra `models`; the tests of a file are skipped without it. Warnings at its import are its own."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return pytest.importorskip(name, exc_type=ImportError)


def random_like(tree: Any, seed: int = 0) -> Any:
  """Normal numbers of a fifth, also where a model begins with zeros, whose masks would say nothing."""
  leaves, structure = jax.tree.flatten(tree)
  rng = np.random.default_rng(seed)
  return jax.tree.unflatten(
    structure, [jnp.asarray(0.2 * rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves]
  )


def check_recipes(recipe: s24.Recipe, loss: Any, params: Any, *args: Any, steps: int = 20) -> None:
  """Trains by FST and by S-STE as they ship, and compares every loss with that of the weights of `project`.

  Their weight gradients are samples, so each run is compared with the dense function on its own way.

  Args:
    recipe: of one rule, whose weights are meant.
    loss: of params and args, the model's own, dense.
    params: where both begin.
    *args: the batch.
    steps: of the optimizer.
  """
  path = recipe.rules[0].path
  fst = s24.recipes.transposable_srste(path, masked_decay=1e-3, refresh_every=5, dense_fraction=0)
  for chosen in (fst, s24.recipes.s_ste(path)):
    bound = s24.bind(chosen, loss, params, *args)
    sparse, tx = s24.sparsify(loss, bound), s24.sparse_training(optax.sgd(0.02), bound)

    @jit
    def step(params, state, key, bound=bound, sparse=sparse, tx=tx):
      variables = s24.sparse_variables(params, state, bound)
      value, grads = jax.value_and_grad(sparse)(params, variables, key, *args)
      wanted = loss(s24.project(params, state, bound), *args)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state, (value, wanted)

    trained, state, losses = params, jit(tx.init)(params), []
    first = dict(leaves_by_path(state.projections))
    for i in range(steps):
      trained, state, values = step(trained, state, jax.random.key(i))
      losses.append(values)
    found, wanted = np.asarray(losses).T
    assert np.isfinite(found).all(), (chosen.name, found)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=chosen.name)
    before, after = dict(leaves_by_path(params)), dict(leaves_by_path(trained))
    for weight in bound.weights:
      assert (np.asarray(before[weight.path]) != np.asarray(after[weight.path])).mean() > 0.5, weight.path
    if chosen is fst:
      masks = dict(leaves_by_path(state.projections))
      assert any((np.asarray(masks[name]) != np.asarray(first[name])).any() for name in masks), 'no mask moved'


def check_training(
  bound: s24.Bound, loss: Any, params: Any, *args: Any, expected: dict[str, str], sparse: Any = None, steps: int = 20
) -> None:
  """Trains twice by a recipe, and compares every loss and, at the end, every weight; then by FST and S-STE.

  Args:
    bound: a recipe that is bound to the model, with masks chosen anew at every step.
    loss: of params and args, the model's own, dense.
    params: where both begin.
    *args: the batch.
    expected: for each weight that must be sparse the roles of its axes, as read in the model's source.
    sparse: as `loss`, with the variables and a key after params; None has `sparsify` make it.
    steps: of the optimizer.
  """
  assert {weight.path: weight.layout.describe() for weight in bound.weights} == expected
  if sparse is None:
    check_recipes(bound.unbound(), loss, params, *args, steps=steps)
  sparse = sparse or s24.sparsify(loss, bound)
  tx = s24.sparse_training(optax.sgd(0.02, momentum=0.9), bound)

  def by_trace(params, state):
    variables = s24.sparse_variables(params, state, bound)
    return jax.value_and_grad(lambda p: sparse(p, variables, None, *args))(params)

  def by_projection(params, state):
    return jax.value_and_grad(lambda p: loss(s24.project(p, state, bound), *args))(params)

  def train(value_and_grad):
    @jit
    def step(params, state):
      value, grads = value_and_grad(params, state)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state, value

    trained, state, losses = params, jit(tx.init)(params), []
    for _ in range(steps):
      trained, state, value = step(trained, state)
      losses.append(float(value))
    return trained, state, losses

  trained, state, losses = train(by_trace)
  reference, _, wanted = train(by_projection)
  assert np.isfinite(losses).all(), losses
  np.testing.assert_allclose(losses, wanted, rtol=1e-4, atol=1e-5)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), trained, reference)
  # Neither is dense, and the weights did move, those that are pruned too.
  assert abs(losses[0] - float(jit(loss)(params, *args))) > 1e-4 * abs(losses[0]), 'as if dense'
  projected = dict(leaves_by_path(jit(lambda *given: s24.project(*given, bound))(trained, state)))
  before, after = dict(leaves_by_path(params)), dict(leaves_by_path(trained))
  for weight in bound.weights:
    groups = np.moveaxis(np.asarray(weight.layout.matrix(projected[weight.path])), -2, -1)
    kept = (groups.reshape(-1, 4) != 0).sum(-1)
    assert kept.max() == 2, weight.path
    pruned = np.asarray(projected[weight.path]) == 0
    moved = np.asarray(before[weight.path]) != np.asarray(after[weight.path])
    assert moved[pruned].mean() > 0.5, weight.path
