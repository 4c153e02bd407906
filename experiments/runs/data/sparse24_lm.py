"""TFDS data set `sparse24_lm`: one config a corpus, documents as text, stored as array_record.

Importing this module registers the builder. TFDS works here without TensorFlow, in one way only: array_record files
read through `tfds.data_source` (`tfds.load` and the default file format need TensorFlow). By hand:

  from experiments.runs.data import sparse24_lm
  builder = sparse24_lm.Sparse24Lm(config='stdlib', data_dir=..., file_format='array_record')
  builder.download_and_prepare()
  source = tfds.data_source('sparse24_lm/stdlib', split='train', data_dir=...,
                            builder_kwargs={'file_format': 'array_record'})

`open_documents` does this for the pipeline, and finds the sets that TFDS itself knows when they are already prepared.
"""

from collections.abc import Callable, Sequence
import contextlib
import io
import pathlib
import re
import shutil
from typing import Any, ClassVar

import tensorflow_datasets as tfds

from experiments.runs.data import corpora


def _tfds_version(name: str) -> str:
  """Three-number form of a corpus' version, so that data prepared from an older package is never taken for current."""
  if corpora.get(name).needs_folder:
    return '1.0.0'  # the folder's digest is part of data_dir instead, see `open_documents`
  try:
    numbers = re.findall(r'\d+', corpora.version(name))[:3]
  except corpora.DataError:
    return '0.0.0'  # package not installed: the config is listed, and preparing it says what to install
  return '.'.join(str(int(number)) for number in (numbers + ['0'] * 3)[:3])


class Sparse24Lm(tfds.core.GeneratorBasedBuilder):
  """Documents for language modelling from sources that need no network."""

  VERSION = tfds.core.Version('1.0.0')
  BUILDER_CONFIGS: ClassVar = [
    tfds.core.BuilderConfig(name=corpus.name, version=_tfds_version(corpus.name), description=corpus.summary)
    for corpus in corpora.CORPORA.values()
  ]
  MANUAL_DOWNLOAD_INSTRUCTIONS = (
    'Configs brown, folder and openwebtext read the folder given as manual_dir; the others need no folder.'
  )
  on_document: Callable[[], Any] | None = None  # called once a document while preparing, for progress reports

  def _info(self) -> tfds.core.DatasetInfo:
    return self.dataset_info_from_configs(
      features=tfds.features.FeaturesDict({'name': tfds.features.Text(), 'text': tfds.features.Text()}),
      disable_shuffling=True,  # order is part of the data: it decides where packed windows begin
    )

  def _split_generators(self, dl_manager: tfds.download.DownloadManager):
    assert self.builder_config is not None  # TFDS asks for a config, as there are several
    name = self.builder_config.name
    folder = dl_manager.manual_dir if corpora.get(name).needs_folder else None
    # TFDS writes the splits in this order, as `corpora.read` asks.
    return {split: self._generate_examples(docs) for split, docs in corpora.read(name, folder).items()}

  def _generate_examples(self, documents):
    for name, text in documents:
      if self.on_document is not None:
        self.on_document()
      yield name, {'name': name, 'text': text}


class Documents(Sequence[str]):
  """One split as a random-access sequence of texts."""

  def __init__(
    self, builder: Any, split: str, field: str
  ):  # any TFDS builder; its decorated methods defeat type checks
    self._folder, self._field = builder.data_path, field
    with self._reading():
      self._source = builder.as_data_source(split)

  @contextlib.contextmanager
  def _reading(self):
    try:
      yield
    except ImportError:
      raise
    except Exception as e:  # array_record raises types of its own, and TFDS others
      raise corpora.DataError(f'{self._folder} is damaged ({e}); delete this folder and prepare it again') from e

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index) -> str:
    if not 0 <= index < len(self):
      raise IndexError(index)  # array_record raises ValueError, which does not end a for loop
    with self._reading():
      text = self._source[index][self._field]
    return text.decode('utf-8', 'replace') if isinstance(text, bytes) else str(text)


def find_online_set(name: str, data_dir: pathlib.Path) -> pathlib.Path:
  """Returns the folder in which TFDS prepared an online set, without using the network.

  Args:
    name: A key of `corpora.ONLINE_SETS`.
    data_dir: Folder to look in, besides TFDS's own (TFDS_DATA_DIR or ~/tensorflow_datasets).

  Raises:
    DataError: It was not prepared, or not as array_record. Says how to prepare it.
  """
  roots = [data_dir, pathlib.Path(tfds.core.constants.DATA_DIR).expanduser()]
  found = [info.parent for root in roots for info in sorted(root.glob(f'{name}/*/dataset_info.json'), reverse=True)]
  ready = [folder for folder in found if any(folder.glob('*.array_record*'))]
  if ready:
    return ready[0]
  reason = f'{found[0]} is not in array_record format' if found else f'not found under {" or ".join(map(str, roots))}'
  raise corpora.DataError(
    f'{name} is not prepared: {reason}. Nothing is downloaded here. On a machine with network:\n'
    f"  pip install -e '.[prepare]'   # TensorFlow and Beam, needed for this step only\n"
    f'  python -c "import tensorflow_datasets as tfds; tfds.builder({name!r}, data_dir={str(data_dir)!r},'
    f" file_format='array_record').download_and_prepare()\""
  )


def open_online_set(name: str, data_dir: pathlib.Path) -> dict[str, Documents]:
  """Returns the splits of an online set as {'train': ..., 'validation': ...}; raises like `find_online_set`."""
  builder = tfds.builder_from_directory(find_online_set(name, data_dir))
  online = corpora.ONLINE_SETS[name]
  splits = {'train': 'train', 'validation': online.validation}
  return {split: Documents(builder, their, online.field) for split, their in splits.items()}


def open_documents(
  name: str,
  data_dir: pathlib.Path,
  manual_dir: str | pathlib.Path | None = None,
  on_document: Callable[[], Any] | None = None,
) -> dict[str, Documents]:
  """Returns the documents of a corpus, preparing them first if need be.

  Args:
    name: A key of `corpora.CORPORA` or of `corpora.ONLINE_SETS`.
    data_dir: Existing folder that receives the prepared files; call with its lock held (`storage.preparing`).
    manual_dir: The user's folder, for the corpora that need one.
    on_document: Called once for each document prepared.

  Returns:
    {'train': documents, 'validation': documents}.

  Raises:
    DataError: The corpus, its package, its folder or its preparation is missing, or a prepared file is damaged.
  """
  if name in corpora.ONLINE_SETS:
    return open_online_set(name, data_dir)
  version = corpora.version(name, manual_dir)
  root = data_dir / f'reader{corpora.REVISION}'
  if corpora.get(name).needs_folder:
    root = root / version
  tfds.disable_progress_bar()
  builder = Sparse24Lm(config=name, data_dir=root, file_format='array_record')
  builder.on_document = on_document
  for left_over in builder.data_path.parent.glob('incomplete.*'):  # by a preparation that was killed
    shutil.rmtree(left_over, ignore_errors=True)
  try:
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces a download, which does not take place
      builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=manual_dir, try_download_gcs=False)
      )
  except RuntimeError as e:  # array_record's form of a full disk
    raise corpora.DataError(f'cannot write {builder.data_path} ({e}); free space, or name another data folder') from e
  return {split: Documents(builder, split, 'text') for split in corpora.SPLITS}
