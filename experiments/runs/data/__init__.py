"""Text for the experiments: corpora, tokenizers, packed tokens and the input pipeline; start at `pipeline.load`."""
