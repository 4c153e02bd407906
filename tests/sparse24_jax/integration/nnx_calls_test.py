"""Calls of sparsified nnx models: what they change, what can be copied, and what is refused."""

import copy
import pickle
import warnings

from absl.testing import absltest, parameterized
from flax import nnx
import jax
import numpy as np
import pytest

import sparse24_jax as s24
from tests.sparse24_jax.integration.nnx_test import (
  assert_trees_close,
  assert_trees_equal,
  FST,
  grads_of,
  Loop,
  plain,
  projected,
  STE,
  X,
)  # fmt: skip


class Stateful(nnx.Module):
  """Statistics, noise, what is kept for later: all that a forward may change besides its result."""

  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(16, rngs=rngs)
    self.up = nnx.Linear(16, 16, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.halves(x)[0]

  def halves(self, x):
    h = self.up(self.norm(x))
    self.hidden = nnx.Variable(h)
    return self.dropout(h), h


class Reader(nnx.Module):
  def __init__(self, rngs):
    self.inner = nnx.Linear(16, 16, rngs=rngs)

  def __call__(self, x):
    return x @ self.inner.kernel[...]

  @classmethod
  def make(cls):
    return cls(nnx.Rngs(0))


class Parts(nnx.Module):
  """A part that reads a weight of its child, parts in a list, and a kernel that two layers share."""

  def __init__(self, rngs):
    self.reader = Reader(rngs)
    self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs)])
    self.tied = nnx.Linear(16, 16, rngs=rngs)
    self.tied.kernel = self.layers[0].kernel

  def __call__(self, x):
    return self.tied(self.layers[0](self.reader(x)))

  def _private(self, x):
    return self(x)


class ChangesTest(absltest.TestCase):

  def test_copies(self):
    recipe = s24.recipes.ste('.*kernel')
    sparse = s24.sparsify(Parts(nnx.Rngs(0)), recipe)
    for copied in (pickle.loads(pickle.dumps(sparse)), copy.deepcopy(sparse), nnx.merge(*nnx.split(sparse))):
      self.assertIs(type(copied), type(sparse))
      np.testing.assert_array_equal(copied(X), sparse(X))

  def test_what_a_call_changes_is_that_of_the_plain_model(self):
    """Twice, since a second call starts from what the first one left."""
    recipe = s24.recipes.ste('up/kernel')
    model = projected(Stateful(nnx.Rngs(0)), recipe)
    sparse = s24.sparsify(Stateful(nnx.Rngs(0)), recipe)
    for _ in range(2):
      for found, expected in zip(sparse.halves(X), model.halves(X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    changed = nnx.Not(nnx.Any(nnx.Param, nnx.PathContains('sparse24')))
    found, expected = (nnx.to_pure_dict(nnx.state(m, changed)) for m in (sparse, model))
    self.assertEqual(set(found), {'norm', 'dropout', 'hidden'})
    keys = [state['dropout']['rngs'].pop('key') for state in (found, expected)]
    assert_trees_equal(*map(jax.random.key_data, keys))
    assert_trees_close(found, expected)
    self.assertEqual(int(sparse.dropout.rngs.count[...]), 2)

  def test_captured_values_are_those_of_the_plain_model(self):
    class Sows(Loop):

      def __call__(self, x):
        y = super().__call__(x)
        self.sow(nnx.Intermediate, 'mean', y.mean())
        return y

    model = Sows(nnx.Rngs(0))
    sparse = s24.sparsify(model, STE)
    for captured in (nnx.capture(sparse, nnx.Intermediate), nnx.capture(nnx.Intermediate)(sparse)):
      y, found = captured(X)
      np.testing.assert_allclose(found['mean'].get_value()[0], np.mean(y), rtol=1e-5)
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # of a `sow` that nothing captures
      np.testing.assert_array_equal(sparse(X), y)

  def test_a_parameter_that_a_forward_assigns_to(self):
    class Shrinks(nnx.Linear):
      def __call__(self, x):
        self.kernel[...] = self.kernel[...] / 2
        return super().__call__(x)

    model, recipe = Shrinks(16, 8, rngs=nnx.Rngs(0)), s24.recipes.ste('kernel')
    sparse = s24.sparsify(model, recipe)
    np.testing.assert_allclose(sparse(X), projected(model, recipe)(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(sparse.kernel[...], model.kernel[...] / 2)

  @pytest.mark.slow
  def test_axes_of_attention_and_einsum(self):
    class Heads(nnx.Module):
      def __init__(self, rngs):
        self.attend = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
        self.mix = nnx.Einsum('btd,dhk->bthk', (16, 4, 8), rngs=rngs)

      def __call__(self, x):
        return self.mix(x + self.attend(x))

    x, model = X[None], Heads(nnx.Rngs(0))
    recipe = s24.recipes.ste('.*kernel')
    with self.assertRaisesRegex(ValueError, 'attend/key/kernel of shape .* the model reads it as in 0, out 1 2.*bind'):
      s24.sparsify(model, recipe)(x)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    bound = s24.bind(recipe, lambda params, x: nnx.merge(graph, params, rest)(x), params, x)
    sparse = s24.sparsify(model, bound)
    run = nnx.jit(lambda model, x: model(x))
    np.testing.assert_allclose(run(sparse, x), run(projected(model, bound), x), rtol=1e-5, atol=1e-6)
    # As a function, the states that an nnx model takes serve, too.
    function = s24.sparsify(lambda params, x: nnx.merge(graph, params, rest)(x), bound)
    states = s24.sparse_variables(params, None, bound)
    np.testing.assert_allclose(jax.jit(function)(params, states, None, x), run(sparse, x), rtol=1e-5)


class RefusalTest(parameterized.TestCase):

  def test_gradient_without_rngs(self):
    with self.assertRaisesRegex(ValueError, "h/0/up/kernel, h/0/down/kernel: weight_grad='mvue' needs"):
      grads_of(s24.sparsify(plain('loop'), FST))

  def test_rngs_without_the_stream(self):
    with self.assertRaisesRegex(ValueError, r"streams \['params'\], none named 'mvue': pass nnx.Rngs\(mvue=seed\)"):
      s24.sparsify(plain('loop'), FST, rngs=nnx.Rngs(params=0))

  def test_a_key_in_place_of_streams(self):
    with self.assertRaisesRegex(ValueError, r'rngs must be streams, nnx.Rngs\(mvue=seed\), found PRNGKeyArray'):
      s24.sparsify(plain('loop'), FST, rngs=jax.random.key(0))

  def test_an_abstract_model(self):
    with self.assertRaisesRegex(ValueError, r'h/0/down/kernel: the model is abstract; .* inside nnx.eval_shape'):
      s24.sparsify(nnx.eval_shape(lambda: Loop(nnx.Rngs(0))), STE)
    nnx.eval_shape(lambda: s24.sparsify(Loop(nnx.Rngs(0)), STE))

  @parameterized.parameters('sparse', 'dense')
  def test_rule_without_a_match(self, phase):
    with self.assertRaisesRegex(ValueError, r"rule 'mlp/\.\*' .* for no weight; weights are 2 of h/\*/down/kernel"):
      s24.sparsify(plain('loop'), s24.recipes.ste('mlp/.*'), phase=phase)

  def test_matched_weight_that_no_matmul_contracts(self):
    class Model(nnx.Module):
      def __init__(self, rngs):
        self.conv = nnx.Conv(16, 16, (4,), rngs=rngs)
        self.up = nnx.Linear(16, 8, rngs=rngs)

      def __call__(self, x):
        return self.up(self.conv(x))

    with self.assertRaisesRegex(ValueError, r'conv/kernel of shape \(4, 16, 16\): conv_general_dilated at'):
      s24.sparsify(Model(nnx.Rngs(0)), s24.recipes.ste('.*'))(X)

  def test_a_part_called_from_outside(self):
    """One that reads a weight of its child, one with a weight of another, one in a list."""
    sparse = s24.sparsify(Parts(nnx.Rngs(0)), s24.recipes.ste('.*kernel'))
    for part in (sparse.reader, sparse.tied, sparse.layers[0]):
      with self.assertRaisesRegex(ValueError, 'of a sparsified model was called from outside'):
        part(X)
    np.testing.assert_array_equal(sparse._private(X), sparse(X))
    self.assertEqual(type(type(sparse.reader).make()), Reader)

  def test_a_part_that_is_sparse_by_itself(self):
    model, recipe = Parts(nnx.Rngs(0)), s24.recipes.ste('.*kernel')
    model.reader = s24.sparsify(model.reader, recipe)
    with self.assertRaisesRegex(ValueError, r"\['reader'\] of the model are sparsified by themselves"):
      s24.sparsify(model, recipe)

  def test_a_class_that_takes_arguments_from_its_subclasses(self):
    class Base(nnx.Linear):
      def __init_subclass__(cls, *, kind, **kwargs):
        super().__init_subclass__(**kwargs)

    class Own(Base, kind='own'):
      pass

    with self.assertRaisesRegex(ValueError, r"Own: its __init_subclass__ .*'kind'.* function of the model"):
      s24.sparsify(Own(16, 8, rngs=nnx.Rngs(0)), s24.recipes.ste('kernel'))

  def test_methods_that_cannot_be_traced(self):
    class Decides(nnx.Linear):
      def __call__(self, x):
        return super().__call__(x) if x.sum() > 0 else x

    class Names(nnx.Linear):
      def __call__(self, x):
        return {'y': super().__call__(x), 'name': 'linear'}

    def call(kind):
      return s24.sparsify(kind(16, 8, rngs=nnx.Rngs(0)), s24.recipes.ste('kernel'))(X)

    with self.assertRaises(jax.errors.TracerBoolConversionError) as raised:
      call(Decides)
    self.assertIn('sparse24_jax traces what it makes sparse', '\n'.join(raised.exception.__notes__))
    with self.assertRaisesRegex(ValueError, r"the result holds a str at .*'name'.*around the call"):
      call(Names)

  def test_a_layer_called_from_outside(self):
    sparse = s24.sparsify(plain('loop'), STE)
    for call in (lambda: sparse.h[0].up(X), lambda: sparse.h[0](X)):
      with self.assertRaisesRegex(ValueError, '(Linear|MLP).__call__ of a sparsified model was called from'):
        call()
    self.assertEqual(sparse.head(X).shape, (8, 4))  # no rule matches it

  def test_a_module_in_place_of_its_parameters(self):
    model = s24.sparsify(plain('loop'), STE)
    with self.assertRaisesRegex(ValueError, r'nnx.state\(model, nnx.Param\)'):
      s24.sparse_variables(model, None, STE)

  def test_weight_that_holds_no_whole_groups(self):
    with self.assertRaisesRegex(ValueError, r'kernel of shape \(6, 8\) has length 6 along axis -2.*multiple of 4'):
      s24.sparsify(nnx.Linear(6, 8, rngs=nnx.Rngs(0)), s24.recipes.ste('kernel'))


if __name__ == '__main__':
  absltest.main()
