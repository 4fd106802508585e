"""Logits by llama.cpp; runs in an environment that has llama-cpp-python.

Usage: python llama_cpp_logits.py FILE.gguf TOKENS.npy LOGITS.npy
"""

import sys

import llama_cpp
import numpy as np


def of_row(model, row):
  """float32 [T, V]: the logits after each token."""
  params = llama_cpp.llama_context_default_params()
  params.n_ctx = params.n_batch = params.n_ubatch = 512
  params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
  params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
  context = llama_cpp.llama_init_from_model(model, params)
  batch = llama_cpp.llama_batch_init(len(row), 0, 1)
  batch.n_tokens = len(row)
  for i, token in enumerate(row):
    batch.token[i], batch.pos[i], batch.logits[i] = int(token), i, 1
    batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
  assert llama_cpp.llama_decode(context, batch) == 0
  size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
  rows = [llama_cpp.llama_get_logits_ith(context, i) for i in range(len(row))]
  out = np.stack([np.ctypeslib.as_array(x, (size,)) for x in rows])
  llama_cpp.llama_free(context)
  return out


if __name__ == "__main__":
  llama_cpp.llama_backend_init()
  params = llama_cpp.llama_model_default_params()
  model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
  np.save(sys.argv[3], [of_row(model, row) for row in np.load(sys.argv[2])])
