"""Golden numbers of SmolLM2-135M-Instruct by transformers and PEFT, in float32.

  PYTHON_WITH_PEFT tests/golden/make_smollm2.py

writes smollm2.json: logits of the last token of four prompts, greedy tokens, and the
losses before and after one step of AdamW with an adapter. The environment also needs
the package `gguf`. The versions are in the file.
"""

import importlib.metadata
import json
import pathlib
import sys
import tempfile

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
from tests.models.real import smollm2


def greedy(model, ids):
  """Returns the most likely tokens before the end, and the smallest lead of one."""
  out = model.generate(
    torch.tensor([ids]),
    max_new_tokens=smollm2.NEW_TOKENS,
    do_sample=False,
    output_logits=True,
    return_dict_in_generate=True,
  )
  best = torch.topk(torch.cat(out.logits), 2).values
  lead = float((best[:, 0] - best[:, 1]).min())
  tokens = out.sequences[0, len(ids) :].tolist()
  return [x for x in tokens if x != model.config.eos_token_id], lead


def losses_of(model, tokenizer):
  """Returns the losses of the records before and after a step of AdamW."""
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch) / "adapter"
    smollm2.write_adapter(folder)
    model = PeftModel.from_pretrained(model, folder, is_trainable=True)
  rows = []
  for record in smollm2.RECORDS:
    prompt = tokenizer.encode(record["prompt"])
    answer = tokenizer.encode(record["completion"] + smollm2.END)
    rows.append((prompt + answer, len(prompt), len(answer)))

  def loss():
    total = 0.0
    for ids, start, _ in rows:
      logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
      wanted = torch.tensor(ids[start:])
      total += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
    return total / sum(count for *_, count in rows)

  trained = [x for x in model.parameters() if x.requires_grad]
  optimizer = torch.optim.AdamW(trained, lr=smollm2.LEARNING_RATE, weight_decay=0.0)
  before = loss()
  before.backward()
  torch.nn.utils.clip_grad_norm_(trained, 1.0)
  optimizer.step()
  with torch.no_grad():
    return [float(before), float(loss())]


def main():
  """Writes the file."""
  file = smollm2.file()
  options = {"gguf_file": file.name}
  tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
  model = AutoModelForCausalLM.from_pretrained(
    file.parent, dtype=torch.float32, **options
  ).eval()
  ids = [tokenizer.encode(text) for text in smollm2.PROMPTS]
  with torch.no_grad():
    logits = [model(torch.tensor([row])).logits[0, -1] for row in ids]
  tokens, lead = greedy(model, ids[0])
  golden = {
    "versions": {x: importlib.metadata.version(x) for x in ("transformers", "peft")},
    "ids": ids,
    "logits": [[round(float(x), 5) for x in row[:: smollm2.EVERY]] for row in logits],
    "greedy": tokens,
    "lead": lead,
    "losses": losses_of(model, tokenizer),
  }
  smollm2.GOLDEN.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
  main()
