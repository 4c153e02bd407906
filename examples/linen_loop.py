"""A whole training loop around a linen model: micro-batches, phases, flip rates, resuming, and the model to serve.

    python examples/linen_loop.py --folder runs/linen_loop

Start it again after an interruption and it goes on from its last checkpoint, with the same bits. Needs orbax-checkpoint
besides the package.
"""

import argparse
import functools
from pathlib import Path

from flax import linen as nn
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import sparse24_jax as s24

STEPS, SAVE_EVERY, MICRO_BATCHES, BATCH, FEATURES = 120, 40, 2, 32, 16
RECIPE = s24.recipes.transposable_srste(r'block_\d+/.*', masked_decay=1e-3, refresh_every=10)


class Model(nn.Module):

  @nn.compact
  def __call__(self, x):
    for i in range(2):
      x = x + s24.linen.Sparse24MLP(hidden=64, name=f'block_{i}')(nn.LayerNorm(name=f'norm_{i}')(x))
    return nn.Dense(1, name='head')(x)


def batch_of(step):
  """Inputs and targets of a step, a function of its number: what a data iterator with a saved position gives."""
  x = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (MICRO_BATCHES, BATCH, FEATURES))
  return x, jnp.tanh(x[..., :1] - x[..., 1:2])


@functools.cache
def make_step(phase):
  """The compiled step of a phase: 'sparse' or 'dense'. The optimizer state is the same in both."""
  tx = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.adamw(1e-2), RECIPE, phase=phase))
  model = s24.sparsify(Model(), RECIPE, phase=phase)

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, opt_state, batch, key):
    # Once a step, for all micro-batches: on a GPU with kernels this packs the weights.
    sparse24 = s24.sparse_variables(params, opt_state, RECIPE, phase=phase)

    def loss_fn(params, x, y, key):
      return jnp.mean((model.apply({'params': params, 'sparse24': sparse24}, x, rngs={'mvue': key}) - y) ** 2)

    def add(total, micro):
      return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, *micro)), None

    nothing = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
    total, _ = jax.lax.scan(add, nothing, (*batch, jax.random.split(key, MICRO_BATCHES)))
    loss, grads = jax.tree.map(lambda a: a / MICRO_BATCHES, total)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return tx, step


def main(folder, steps=STEPS):
  """Trains, or goes on; returns the last loss and the parameters as the sparse model reads them."""
  by_phase = {phase.name: make_step(phase.name) for phase in RECIPE.phases}
  params = Model().init(jax.random.key(0), jnp.ones((1, FEATURES)))['params']
  opt_state = by_phase['sparse'][0].init(params)  # masks, counters and moments: all that a run has besides parameters
  loss = float('nan')
  with ocp.CheckpointManager(Path(folder).resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
    start = manager.latest_step() or 0
    if start:
      params, opt_state = manager.restore(start, args=ocp.args.StandardRestore((params, opt_state)))
    for i in range(start, steps):
      _, step = by_phase[s24.phase_at(RECIPE, i, STEPS)]
      params, opt_state, loss = step(params, opt_state, batch_of(i), jax.random.fold_in(jax.random.key(2), i))
      if (i + 1) % SAVE_EVERY == 0:
        flips = float(s24.get_flip_rate(opt_state).overall)
        print(f'step {i + 1}: {s24.phase_at(RECIPE, i, STEPS)}, loss {float(loss):.4f}, flip rate {flips:.4f}')
        manager.save(i + 1, args=ocp.args.StandardSave((params, opt_state)))
        manager.wait_until_finished()  # the next step takes these very buffers
  # What a run that ends sparse would serve; this recipe ends dense, and serves `params`.
  served = s24.project(params, opt_state, RECIPE, phase='sparse')
  kernel = served['block_0']['up']['kernel']
  packed = s24.compress(kernel, kernel != 0)
  print(f'block_0/up: {kernel.nbytes} bytes dense, {sum(a.nbytes for a in jax.tree.leaves(packed))} packed')
  return float(loss), params, served


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--folder', default='runs/linen_loop')
  main(parser.parse_args().folder)
