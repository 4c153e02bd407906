"""The tasks that there are, by name."""

from experiments.runs.tasks import classification, images, language, translation
from experiments.runs.tasks.task import Task

TASKS = {
  'language_model': language.NEXT_TOKEN,
  'masked_lm': language.MASKED,
  'image_classification': images.CLASSIFICATION,
  'text_classification': classification.CLASSIFICATION,
  'translation': translation.TRANSLATION,
}


def get(name: str) -> Task:
  """Returns a task by its name; ValueError with all names otherwise."""
  if name not in TASKS:
    raise ValueError(f'task is {name!r}; known: {", ".join(TASKS)}')
  return TASKS[name]
