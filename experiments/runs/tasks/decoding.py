"""Tokens one after another, greedy or sampled, by running the whole model for each: there is no cache of keys.

The sequence has one length throughout, so that one program serves all steps. A step costs as much as a forward pass of
the whole length, which short texts and evaluations can afford.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def pick(logits_BxV: jax.Array, key: jax.Array | None, *, temperature: float = 1.0, top_k: int = 0) -> jax.Array:
  """The next token of each row, int32 [B]: the likeliest without a key or at temperature 0, else drawn.

  Args:
    logits_BxV: of the next token.
    key: for sampling, or None.
    temperature: logits are divided by it.
    top_k: draw among so many of the likeliest; 0 is all.

  >>> pick(jnp.array([[0.0, 3.0, 1.0]]), None).tolist()
  [1]
  """
  if key is None or temperature == 0:
    return jnp.argmax(logits_BxV, axis=-1).astype(jnp.int32)
  if top_k:
    least_Bx1 = jax.lax.top_k(logits_BxV, min(top_k, logits_BxV.shape[-1]))[0][:, -1:]
    logits_BxV = jnp.where(logits_BxV < least_Bx1, -jnp.inf, logits_BxV)
  return jax.random.categorical(key, logits_BxV / temperature, axis=-1).astype(jnp.int32)


def complete(
  logits_of: Callable[[jax.Array], jax.Array],
  tokens_BxT: jax.Array,
  begin: int,
  *,
  vocab_size: int,
  until: int | None = None,
  end: int | None = None,
  key: jax.Array | None = None,
  temperature: float = 1.0,
  top_k: int = 0,
) -> jax.Array:
  """Fills positions `begin` to `until`, or to the last, of each row, int32 [B, T].

  Args:
    logits_of: tokens [B, T] -> logits [B, T, V], causal.
    tokens_BxT: what is at the positions before `begin`, and anything after.
    begin: first position to fill, 1 or more.
    vocab_size: tokens below it may be chosen; those above it fill up tiles, or are marks.
    until: first position that is left as it is.
    end: a row that has it is filled with it to its end, and all rows that have it end the work.
    key: see `pick`, as `temperature` and `top_k`.
  """
  ended_B = jnp.zeros(len(tokens_BxT), bool)
  for at in range(begin, tokens_BxT.shape[1] if until is None else until):
    step_key = None if key is None else jax.random.fold_in(key, at)
    logits_BxV = logits_of(tokens_BxT)[:, at - 1, :vocab_size]
    new_B = pick(logits_BxV, step_key, temperature=temperature, top_k=top_k)
    if end is not None:
      new_B = jnp.where(ended_B, end, new_B)
      ended_B |= new_B == end
    tokens_BxT = tokens_BxT.at[:, at].set(new_B)
    if end is not None and bool(ended_B.all()):
      return tokens_BxT.at[:, at:].set(end)
  return tokens_BxT
