"""Prepares a corpus and shows what came of it: `python -m experiments data --corpus=aws_docs --tokenizer=bytes`."""

import argparse
import sys

from experiments.runs.data import corpora, pipeline, storage, tokenizer


def main(argv: list[str] | None = None) -> int:
  """Runs the command; returns 0, or 1 after an error message."""
  known = '\n'.join(f'  {corpus.name:12} {corpus.summary}' for corpus in corpora.CORPORA.values())
  parser = argparse.ArgumentParser(
    prog='python -m experiments data',
    description='Prepares a corpus and shows its size and a sample. Later runs open the same files at once.',
    epilog=f'corpora:\n{known}\n  {", ".join(corpora.ONLINE_SETS)}: prepared by TFDS beforehand',
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--corpus', default='aws_docs', help='see below; default: %(default)s')
  parser.add_argument('--tokenizer', default='bytes', help=f'{tokenizer.NAMES}; default: %(default)s')
  parser.add_argument('--seq-len', type=int, default=64, help='tokens a sequence; default: %(default)s')
  parser.add_argument('--max-tokens', type=int, help='prepare only this many tokens of each split')
  parser.add_argument('--manual-dir', help='your own text, for the corpora that need it')
  parser.add_argument(
    '--data-dir', help=f'existing folder for prepared data; default: ${storage.ENVIRONMENT_VARIABLE} or the user cache'
  )
  options = parser.parse_args(argv)
  try:
    data = pipeline.load(batch_size=1, **vars(options))
    sample = data.validation(1)[0]['inputs'][0]
  except corpora.DataError as e:
    print(f'error: {e}', file=sys.stderr)
    return 1
  print(f'data folder  {storage.data_root(options.data_dir)}')
  print(f'fingerprint  {data.fingerprint}')
  print(f'vocabulary   {data.vocab_size:,}')
  for split in corpora.SPLITS:
    counts = f'{data.num_documents[split]:,} documents, {data.num_tokens[split]:,} tokens, {data.num_windows[split]:,}'
    print(f'{split:12} {counts} sequences of {options.seq_len}')
  print(f'sample       {data.tokenizer.decode(sample)!r}')
  return 0
