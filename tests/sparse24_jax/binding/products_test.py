"""What is made of a weight by a matmul and is a matrix itself: warned of, and what only looks alike."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

import sparse24_jax as s24
from tests.sparse24_jax.binding.functions import shape, traces


def _checked(f, shapes):
  """The check of `f(params, x)` whose matched weights begin with w."""
  recipe, given = s24.recipes.ste('w.*'), (f, {name: shape(*sizes) for name, sizes in shapes.items()}, shape(8, 16))
  traces(s24.bind(recipe, *given), *given)
  return s24.check(recipe, *given)


def _perceiver(p, x):
  q, k = jnp.einsum('ld,dhk->lhk', p['latents'], p['wq']), jnp.einsum('td,dhk->thk', x, p['wk'])
  scores = jax.nn.softmax(jnp.einsum('lhk,thk->hlt', q, k))
  return jnp.einsum('hlt,thk->lhk', scores, jnp.einsum('td,dhk->thk', x, p['wv']))


def _heads_share_keys(p, x):
  q = jnp.einsum('td,dhk->thk', x, p['wq'])
  return jnp.einsum('hts,sk->thk', jax.nn.softmax(jnp.einsum('thk,sk->hts', q, x @ p['wk'])), x @ p['wv'])


def _heads_see_heads(p, x):
  q, k = (jnp.einsum('td,dhk->thk', x, p[name]) for name in ('wq', 'wk'))
  return jnp.einsum('thk,tgk->thg', q, k)


def _experts(p, x):
  return jnp.einsum('te,tef->tf', jax.nn.softmax(x[:, :4]), jnp.einsum('td,edf->tef', x, p['w']))


def _experts_with_room(p, x):
  sent = jax.nn.one_hot(jnp.argsort(x[:, :12], 1).reshape(8, 4, 3)[:, :, 0], 3)
  y = jnp.einsum('ecd,edf->ecf', jnp.einsum('tec,td->ecd', sent, x), p['w'])
  return jnp.einsum('tec,ecf->tf', sent, y)


def _mixed_layers(p, x):
  layers = jnp.einsum('le,eio->lio', p['mix'], p['w'])
  return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0]


def _mixed_in_calls(p, x):
  w = jnp.einsum('e,ieo->io', p['mix'], p['w'])
  return jax.checkpoint(lambda w, x: jax.jit(lambda x, w: x @ w)(x, w.astype(x.dtype)))(2 * w, x)


def _mixed_kernels(p, x):
  kernel = jnp.tensordot(p['mix'], p['w'], 1).reshape(3, 1, 1, 8).transpose(3, 2, 0, 1)
  return jax.lax.conv(x[None, None], kernel, (1, 1), 'SAME')


ATTENTION = {'wq': (16, 2, 8), 'wk': (16, 2, 8), 'wv': (16, 2, 8)}


class ProductsTest(parameterized.TestCase):

  @parameterized.named_parameters(
    ('experts', lambda p, x: x @ jnp.einsum('e,eio->io', p['mix'], p['w']), {'w': (4, 16, 32), 'mix': (4,)}),
    ('of_constants', lambda p, x: x @ jnp.tensordot(jnp.ones(4) / 4, p['w'], 1), {'w': (4, 16, 32)}),
    ('added_to_another', lambda p, x: x @ (p['base'] + jnp.tensordot(p['mix'], p['w'], 1)),
     {'w': (4, 16, 32), 'base': (16, 32), 'mix': (4,)}),
    ('on_the_left', lambda p, x: jnp.tensordot(p['mix'], p['w'], 1).T @ x.T, {'w': (4, 16, 32), 'mix': (4,)}),
    ('layers', _mixed_layers, {'w': (4, 16, 16), 'mix': (3, 4)}),
    ('in_calls', _mixed_in_calls, {'w': (16, 4, 32), 'mix': (4,)}),
    ('kernels', _mixed_kernels, {'w': (4, 24), 'mix': (4,)}),
    ('kronecker', lambda p, x: x @ jnp.einsum('nij,nkl->ikjl', p['a'], p['w']).reshape(16, 32),
     {'w': (4, 4, 8), 'a': (4, 4, 4)}),
    ('generated', lambda p, x: x @ jnp.tanh(p['z'] @ p['w']).reshape(16, 8), {'w': (16, 128), 'z': (16,)}),
  )  # fmt: skip
  def test_a_matrix_that_is_mixed_of_a_weight_is_warned_of(self, f, shapes):
    checked = _checked(f, shapes)
    self.assertFalse([w for w in checked.weights if w.problem], checked)
    message = 'WARNING  w: the matmul at .* makes a dense matrix of it, .* multiply by each and mix the results'
    self.assertRegex('\n'.join(checked.notes), message)

  @parameterized.named_parameters(
    ('learnt_queries', _perceiver, {**ATTENTION, 'latents': (5, 16)}),
    ('positions', lambda p, x: jnp.tanh(x + p['at'] @ p['w']) @ p['w'], {'w': (16, 16), 'at': (8, 16)}),
    ('relative_positions', lambda p, x: (x @ p['wq']) @ (jnp.sin(jnp.arange(48.0)).reshape(3, 16) @ p['wr']).T,
     {'wq': (16, 16), 'wr': (16, 16)}),
    ('one_key_for_all_heads', _heads_share_keys, {**ATTENTION, 'wk': (16, 8), 'wv': (16, 8)}),
    ('learnt_queries_of_one_key',
     lambda p, x: jnp.einsum('qhk,tk->qht', jnp.einsum('qd,dhk->qhk', p['at'], p['wq']), x),
     {'wq': (16, 2, 16), 'at': (5, 16)}),
    ('heads_of_one_token', _heads_see_heads, {'wq': (16, 2, 8), 'wk': (16, 2, 8)}),
    ('experts', _experts, {'w': (4, 16, 32)}),
    ('experts_with_room', _experts_with_room, {'w': (4, 16, 32)}),
    ('linear_attention', lambda p, x: (x @ p['wq']) @ ((x @ p['wk']).T @ (x @ p['wv'])),
     {name: (16, 16) for name in ATTENTION}),
    ('each_head_by_one_matrix', lambda p, x: jnp.einsum('thk,kd->thd', jnp.einsum('td,dhk->thk', x, p['wq']), p['out']),
     {'wq': (16, 2, 8), 'out': (8, 4)}),
    ('decoding', lambda p, x: jnp.einsum('bhk,bsk->bhs', (x[:2] @ p['w']).reshape(2, 2, 8), x.reshape(2, 8, 8)),
     {'w': (16, 16)}),
    ('generated_by_inputs', lambda p, x: x @ jnp.tanh(x.mean(0) @ p['w']).reshape(16, 8), {'w': (16, 128)}),
    ('resized', lambda p, x: jnp.tile(x, (1, 2)) @ (jnp.ones((32, 16)) @ p['w']), {'w': (16, 32)}),
  )  # fmt: skip
  def test_what_only_looks_alike(self, f, shapes):
    checked = _checked(f, shapes)
    self.assertFalse([w for w in checked.weights if w.problem], checked)
    self.assertFalse([note for note in checked.notes if 'matrix' in note])


if __name__ == '__main__':
  absltest.main()
