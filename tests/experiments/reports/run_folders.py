"""Run folders to report on, and what a page holds."""

from html.parser import HTMLParser
import json
from pathlib import Path

import numpy as np

from experiments.runs import methods
from experiments.runs.experiment import load_config

NAMES = ('h_0/mlp/c_fc/kernel', 'h_0/mlp/c_proj/kernel')


def write_run(
  folder, method, seed, final, *, base='nano', tail=1e-3, finished=True, second_per_step=0.01, device='1 x H100',
  **overrides,
):  # fmt: skip
  """A run folder of a given final loss, whose flip rate rises to 0.05 and falls to `tail`."""
  config = methods.configure(load_config(base), method, seed)
  config.update({'steps': 4000, **overrides})  # as many as its lines are of
  folder = Path(folder) / f'{method}-seed{seed}'
  folder.mkdir(parents=True)
  sparse_until = 3000 if method.startswith('fst') else (0 if 'dense' in config.recipe.name else 4000)
  lines, timing = [], []
  for step in range(100, 4001, 100):
    rate = 0.05 * np.exp(-(((step - 600) / 300) ** 2)) + (tail if step > 600 else 0.01)
    loss = final + 2 * np.exp(-step / 500)
    phase = 'sparse' if step <= sparse_until else 'dense'
    lines.append(
      {
        'step': step,
        'kind': 'train',
        'loss': loss,
        'grad_norm': 1.0,
        'learning_rate': 1e-3,
        'phase': phase,
        'flip_rate': rate,
        'flip_rates': dict.fromkeys(NAMES, rate),
      }
    )
    spent = {'spent': {'training': step * second_per_step, 'compiling': 31.0, 'evaluation': 7.0, 'checkpoints': 3.0}}
    timing.append({'step': step, 'kind': 'timing', 'seconds': step / 100, **spent, 'tokens_per_s': 9e4})
    if step % 500 == 0:
      lines.append({'step': step, 'kind': 'validation', 'loss': final if step == 4000 else loss, 'phase': phase})
  (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  (folder / 'timing.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in timing))
  (folder / 'config.json').write_text(json.dumps(config.to_dict()))
  environment = {
    'device': device, 'python': '3.12.1', 'versions': {'jax': '0.11.2'}, 'commit': None,
    'command': 'python -m experiments train',
  }  # fmt: skip
  (folder / 'environment.json').write_text(json.dumps(environment))
  if finished:
    (folder / 'summary.json').write_text(json.dumps({'seconds': 40.0, 'validation_loss': final, **spent}))
  return folder


class _Page(HTMLParser):
  """Collects what a page would load or run, and its visible text."""

  def __init__(self):
    super().__init__()
    self.tags, self.links, self.text = [], [], []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.links += [value for name, value in attrs if name in ('src', 'href', 'xlink:href')]

  def handle_data(self, data):
    self.text.append(data)


def read_page(path):
  page = _Page()
  page.feed(Path(path).read_text())
  return page
