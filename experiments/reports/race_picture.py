"""Loss against seconds of training, of the contenders of one race, each at its best."""

from collections.abc import Mapping
import math

import numpy as np

from experiments.reports import charts
from experiments.reports.race_table import Seeds


def curves(found: Mapping[str, Seeds]) -> dict[str, list[list[float]]]:
  """Label -> rows of seconds, mean loss, lowest and highest over the seeds, where all seeds were evaluated."""
  rows = {}
  for own in found.values():
    # Seeds on machines of other speed are evaluated after other seconds, by a percent or two.
    points = np.array([own.curves[seed] for seed in sorted(own.curves) if math.isfinite(own.losses[seed])])
    if len(points):
      seconds, losses = points[..., 0].mean(0), points[..., 1]
      rows[own.title] = np.stack([seconds, losses.mean(0), losses.min(0), losses.max(0)], 1).round(4).tolist()
  return rows


def draw(found: Mapping[str, Seeds]) -> str:
  """An SVG file, that says in its `<desc>` what it shows; the first descent, the same for all, lies above its frame."""
  rows = curves(found)
  lines = []
  for (label, points), colour in zip(rows.items(), charts.PALETTE, strict=False):
    x, y, low, high = np.array(points).T
    lines.append(charts.Line(label, colour, x, y, low, high))
  lowest = min(float(line.y.min()) for line in lines)
  y_range = (lowest - 0.02, max(float(line.y[len(line.y) // 4]) for line in lines))
  drawn = charts.line_chart(
    lines, title='Validation loss against seconds of training', y_label='validation loss, nats a byte',
    x_label='seconds of training', y_range=y_range, width=900, height=380, opaque=True,
  )  # fmt: skip
  return charts.described(drawn, rows)
