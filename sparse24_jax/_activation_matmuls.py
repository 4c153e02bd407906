"""Which side makes the matmuls of the squared-ReLU block: plain jnp or sparse tensor cores."""

from collections.abc import Callable

from jax import Array

from sparse24_jax._activation_kernels import SparseVNM, SparseVNMTwoOfFour
from sparse24_jax._activation_reference import Matmuls, Reference
from sparse24_jax.neuron_plan import NeuronLevelPlan
from sparse24_jax.policy import ActivationPolicy, TwoOfFour


def make(
  policy: ActivationPolicy, plan: NeuronLevelPlan | None, feature_mask: Callable[..., Array],
  token_mask: Callable[..., Array],
) -> Matmuls:  # fmt: skip
  """The functions that carry out a plan; without one plain jnp, with the masks that define the policy's patterns."""
  if plan is None:
    ops = Reference(policy, feature_mask, token_mask)
  else:
    ops = SparseVNMTwoOfFour(plan) if isinstance(policy.tokens, TwoOfFour) else SparseVNM(plan)
  return Matmuls(*(getattr(ops, name) for name in Matmuls._fields))
