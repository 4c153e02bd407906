"""What PyTorch and `transformers` do for finetune_hf_test.py, in a process of its own, perhaps of another Python.

    python hf_torch.py make TOKENS FOLDER           writes a tiny checkpoint of each kind, and its logits of the tokens
    python hf_torch.py logits TOKENS CHECKPOINT     writes CHECKPOINT.npy
"""

import sys

import numpy as np
import torch
import transformers

SIZES = {
  'vocab_size': 160, 'hidden_size': 32, 'intermediate_size': 64, 'num_hidden_layers': 1, 'num_attention_heads': 4,
  'num_key_value_heads': 2, 'head_dim': 16, 'max_position_embeddings': 64,
}  # fmt: skip
# Turns of a head's eight pairs lie on both sides of the bounds, and between them.
LLAMA3 = {
  'rope_type': 'llama3', 'rope_theta': 100.0, 'factor': 4.0, 'low_freq_factor': 1.0, 'high_freq_factor': 2.0,
  'original_max_position_embeddings': 32,
}  # fmt: skip
KINDS = {
  'llama': transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
  'qwen2': transformers.Qwen2Config(**{**SIZES, 'head_dim': 8}),
  'qwen3': transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
  'gemma': transformers.GemmaConfig(**SIZES),
}


def make(tokens, folder):
  for kind, config in KINDS.items():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
      for parameter in model.parameters():  # biases and scales too
        parameter.add_(torch.randn_like(parameter) * 0.2)
    if kind == 'qwen2':
      model = model.to(torch.bfloat16)
    model.save_pretrained(f'{folder}/{kind}', max_shard_size='20KB' if kind == 'llama' else '1GB')
    logits(tokens, f'{folder}/{kind}')


def logits(tokens, checkpoint):
  model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype='auto').eval()
  with torch.no_grad():
    np.save(f'{checkpoint}.npy', model(torch.from_numpy(np.load(tokens))).logits.float().numpy())


if __name__ == '__main__':
  {'make': make, 'logits': logits}[sys.argv[1]](*sys.argv[2:])
