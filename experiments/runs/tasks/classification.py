"""Classification of texts and of pairs of texts, as in GLUE (Wang et al., arXiv 1804.07461): fine-tuning.

With `init_from`, the folder of a run of a language model on the same tokenizer, the trunk starts from its weights.
"""

from experiments.runs.data import labelled
from experiments.runs.data.batches import Batches, DataConfig
from experiments.runs.tasks import images, task


def load(**fields) -> Batches:
  """Labelled texts of a corpus of `labelled`, as batches."""
  config = DataConfig(**fields)
  found = labelled.load(config)
  names = {'tokens': 'inputs', 'length': 'lengths', 'label': 'labels'}

  def make(rows, rng):
    del rng
    return {batch: rows[row] for row, batch in names.items()}

  data = Batches(config, found.splits, make, found.fingerprint, 'texts')
  data.sizes = {'vocab_size': found.vocab_size, 'classes': len(found.classes)}
  return data


CLASSIFICATION = task.Task(
  families=('text_classifier',),
  inputs=('inputs', 'lengths'),
  load=load,
  loss=images.loss,
  sizes=lambda data: data.sizes,
  measures=images.accuracy,
)
