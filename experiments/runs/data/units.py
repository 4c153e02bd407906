"""Shared by the readers of text: units (every twentieth is held out), the mark between documents, the error."""

from collections.abc import Callable, Iterator
import pathlib

END_OF_TEXT = '<|endoftext|>'  # between the documents of a .txt, and the special token of GPT-2
HOLD_OUT = 20  # every HOLD_OUT-th unit belongs to the validation split

# (folder, wanted) -> (name, paragraphs), over the units whose position `wanted` accepts.
Reader = Callable[[pathlib.Path | None, Callable[[int], bool]], Iterator[tuple[str, list[str]]]]


class DataError(ValueError):
  """Data that cannot be used; the message names the path, package or argument, and the remedy."""
