"""Logits by transformers; runs in an environment that has it, torch and gguf.

Usage: python transformers_logits.py FILE.gguf TOKENS.npy LOGITS.npy CONFIG.json

Its reader of GGUF files takes few settings from them. It gets all from CONFIG.json, and
the weights from the file.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

if __name__ == "__main__":
  file = pathlib.Path(sys.argv[1])
  settings = json.loads(pathlib.Path(sys.argv[4]).read_text())
  config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    file.parent,
    gguf_file=file.name,
    config=config,
    dtype=torch.float32,
    attn_implementation="eager",
  )
  with torch.no_grad():
    logits = model.eval()(torch.tensor(np.load(sys.argv[2])).long()).logits
  np.save(sys.argv[3], logits.numpy())
