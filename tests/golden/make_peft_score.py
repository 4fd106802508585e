"""Makes the folder peft_score beside this file: an adapter with a head of scores.

Run where the `parity` extra is installed: `python tests/golden/make_peft_score.py`.
The base is the committed qwen3 with a head of two scores; PEFT trains head and final
norm whole (`modules_to_save`). `expected.npz` holds tokens [2, 12] and the float32
scores [2, 2] of their last positions.
"""

import pathlib

import numpy as np
import peft
import torch
import transformers

HERE = pathlib.Path(__file__).parent


def main():
  torch.manual_seed(0)
  base = transformers.AutoModelForSequenceClassification.from_pretrained(
    HERE / "qwen3", num_labels=2
  )
  config = peft.LoraConfig(
    task_type="SEQ_CLS",
    r=2,
    lora_alpha=4,
    target_modules=["q_proj"],
    modules_to_save=["model.norm"],
  )
  model = peft.get_peft_model(base, config)
  with torch.no_grad():
    for value in (x for x in model.parameters() if x.requires_grad):
      value.add_(0.3 * torch.randn_like(value))
  folder = HERE / "peft_score"
  model.save_pretrained(folder)
  (folder / "README.md").unlink()
  tokens = np.random.default_rng(0).integers(3, 48, (2, 12)).astype(np.int32)
  with torch.no_grad():
    scores = model.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
  np.savez(folder / "expected.npz", tokens=tokens, scores=scores)


if __name__ == "__main__":
  main()
