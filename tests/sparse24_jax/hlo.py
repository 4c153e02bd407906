"""Reading optimised HLO: which kernels a program calls, in which loop, and what it moves."""

import math
import re

SPARSE, TRITON = 'mosaic_gpu_v2', 'triton_kernel_call'
# Nothing of a hidden layer's size is moved; keys and counters are.
SMALL = 4096


def computations(hlo: str) -> dict[str, list[str]]:
  """Instructions of each computation by its name; that of the entry is 'ENTRY'."""
  found, name = {}, None
  for line in hlo.splitlines():
    head = re.match(r'(ENTRY )?%?([\w.\-]+) .*\{$', line)
    if head and not line.startswith(' '):
      name = 'ENTRY' if head.group(1) else head.group(2)
      found[name] = []
    elif line.startswith('}'):
      name = None
    elif name:
      found[name].append(line)
  return found


def reached(hlo: str, name: str) -> list[str]:
  """The instructions of a computation and of all that it calls."""
  every = computations(hlo)
  lines, waiting, seen = [], [name], set()
  while waiting:
    if (one := waiting.pop()) in seen:
      continue
    seen.add(one)
    lines += every.get(one, [])
    for line in every.get(one, []):
      waiting += re.findall(r'(?:calls|body|condition|to_apply)=%([\w.\-]+)', line)
  return lines


def calls(lines: list[str], target: str) -> list[str]:
  return [line for line in lines if f'custom_call_target="{target}"' in line]


def result(line: str) -> tuple[str, tuple[int, ...]]:
  """dtype and shape of an instruction's first result."""
  kind, sides = re.findall(r'= \(?(\w+)\[([\d,]*)\]', line)[0]
  return kind, tuple(map(int, filter(None, sides.split(','))))


def result_bytes(line: str) -> int:
  kind, shape = result(line)
  sizes = {'pred': 1, 's8': 1, 'u8': 1, 'u16': 2, 's16': 2, 'bf16': 2, 'f16': 2, 'f64': 8, 's64': 8, 'u64': 8}
  return math.prod(shape) * sizes.get(kind, 4)


def moves(lines: list[str]) -> list[str]:
  """Copies and transposes of anything large, fused ones by the name that XLA gives to their fusion."""
  pattern = r'= \(?\w+\[[\d,]*\]\S* (transpose|copy|copy-start)\(|%[\w.]*(transpose|copy)[\w.]*fusion[\w.]* ='
  return [line for line in lines if re.search(pattern, line) and result_bytes(line) > SMALL]
