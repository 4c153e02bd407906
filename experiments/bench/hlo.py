"""Reads compiled programs: which kernels are in a step, and what each instruction was in the source."""

import re

ROLES: tuple[str, ...] = ('forward', 'input_grad', 'weight_grad')
_CALL = re.compile(r'custom_call_target="([^"]+)"')
# `mosaic_gpu` is Pallas' target on every GPU.
_SPARSE_TARGET = re.compile(r'mosaic_gpu|cusparselt', re.IGNORECASE)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%?([\w.-]+) = ')
_FIRST_OPERAND = re.compile(r'operand_layout_constraints=\{\w+\[([\d,]*)\]')


def op_names(text: str) -> dict[str, str]:
  """Instruction name -> `op_name`, the path of named scopes that it came from; '' where XLA dropped it.

  >>> op_names('  %add.1 = f32[] add(%a, %b), metadata={op_name="jit(f)/optimizer/add" id=1}')
  {'add.1': 'jit(f)/optimizer/add'}
  """
  found = {}
  for line in text.splitlines():
    if instruction := _INSTRUCTION.match(line):
      name = _OP_NAME.search(line)
      found[instruction.group(1)] = name.group(1) if name else ''
  return found


def sparse_calls(text: str, *, tokens: int | None = None) -> dict[str, int]:
  """Number of 2:4 matmul calls in a compiled program, by role.

  The role is the named scope around the call; without one, what is not differentiated (or is recomputed) is a forward,
  and of the rest a call that sums over tokens is a weight gradient. A call in the body of a loop counts once.

  Args:
    text: `compiled.as_text()`.
    tokens: tokens a step, to tell the gradients apart without scopes.

  Returns:
    Role -> count; `'other'` for calls whose role nothing tells.
  """
  counts: dict[str, int] = dict.fromkeys((*ROLES, 'other'), 0)
  for line in text.splitlines():
    target = _CALL.search(line)
    if target and _SPARSE_TARGET.search(target.group(1)):
      counts[_role(line, tokens)] += 1
  return counts


def recomputed(text: str) -> int:
  """Number of instructions that XLA computes again because memory is short; they cost time, so take a smaller batch.

  >>> recomputed('  %dot.1 = f32[] dot(%a, %b)\\n  %dot.1.remat2 = f32[] dot(%a, %b)')
  1
  """
  return len(re.findall(r'^\s*(?:ROOT )?%?[\w.-]+\.remat[\w.]* = ', text, re.MULTILINE))


def _role(line: str, tokens: int | None) -> str:
  found = _OP_NAME.search(line)
  name = found.group(1) if found else ''
  for role in ROLES:
    if re.search(rf'\b{role}\b', name):
      return role
  if 'transpose(' not in name or 'rematted_computation' in name:
    return 'forward'
  operand = _FIRST_OPERAND.search(line)
  if tokens is None or operand is None:
    return 'other'
  kept = int(operand.group(1).split(',')[-1])  # half the contracted axis: the values of A
  return 'weight_grad' if 2 * kept == tokens else 'input_grad'
