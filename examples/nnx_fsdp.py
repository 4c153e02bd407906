"""An nnx model on a mesh: batches, parameters, moments and masks divided over all devices.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/nnx_fsdp.py

On several hosts call `jax.distributed.initialize()` first, and give each host its part of the batch
(`jax.make_array_from_process_local_data`). Masks need no communication as long as a shard holds whole groups of four.
"""

from flax import nnx
import jax
import jax.numpy as jnp
import optax

import sparse24_jax as s24

FEATURES, HIDDEN, BATCH = 32, 128, 64
RECIPE = s24.recipes.transposable_srste(r'.*/(up|down)/kernel', masked_decay=1e-3, refresh_every=10)


class Block(nnx.Module):

  def __init__(self, rngs):
    init = nnx.initializers.lecun_normal()
    self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
    self.up = nnx.Linear(FEATURES, HIDDEN, kernel_init=nnx.with_partitioning(init, (None, 'fsdp')), rngs=rngs)
    self.down = nnx.Linear(HIDDEN, FEATURES, kernel_init=nnx.with_partitioning(init, ('fsdp', None)), rngs=rngs)

  def __call__(self, x):
    # Divided along tokens as the batch is: otherwise XLA gathers activations, and not the weights.
    hidden = jax.lax.with_sharding_constraint(nnx.gelu(self.up(self.norm(x))), jax.P('fsdp'))
    return x + self.down(hidden)


class Model(nnx.Module):

  def __init__(self, rngs):
    self.blocks = nnx.List([Block(rngs) for _ in range(2)])

  def __call__(self, x):
    for block in self.blocks:
      x = block(x)
    return x


@nnx.jit
def create():
  """Model and optimizer, made where they will be: masks are divided as their weights are."""
  model = s24.sparsify(Model(nnx.Rngs(0)), RECIPE, rngs=nnx.Rngs(mvue=0))
  tx = optax.chain(optax.clip_by_global_norm(1.0), s24.sparse_training(optax.adamw(3e-3), RECIPE, phase='sparse'))
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, x):
  nnx.update(model, s24.sparse_variables(nnx.state(model, nnx.Param), optimizer.opt_state, RECIPE))
  loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - jnp.sin(2 * x)) ** 2))(model)
  optimizer.update(model, grads)
  # Not packed: the model keeps the masks of its new weights, to be evaluated and saved, in arrays as it came with.
  after = s24.sparse_variables(nnx.state(model, nnx.Param), optimizer.opt_state, RECIPE, pack=False)
  nnx.update(model, after)
  return loss


def main(steps=60):
  """Trains; returns the losses, the model and the optimizer."""
  mesh = jax.make_mesh((jax.device_count(),), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,))
  losses = []
  with jax.set_mesh(mesh):
    model, optimizer = create()
    for i in range(steps):
      x = jax.random.normal(jax.random.fold_in(jax.random.key(1), i), (BATCH, FEATURES))
      losses.append(float(train_step(model, optimizer, jax.device_put(x, jax.NamedSharding(mesh, jax.P('fsdp'))))))
  print(f'loss {losses[0]:.4f} to {losses[-1]:.4f}; kernels are {model.blocks[0].up.kernel.get_value().sharding.spec}')
  return losses, model, optimizer


if __name__ == '__main__':
  main()
