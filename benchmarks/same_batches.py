"""tunix and TRL train one model on the same batches: losses, gradient norms, logits.

  python -m benchmarks.same_batches sft --model SMOLLM2 --trl PYTHON_WITH_TRL

Cases: `sft` (all weights), `lora` (SFT with adapters), `dpo` (with adapters) and `grpo`
(with adapters; TRL gets the completions that tunix sampled). Each makes `--steps`
updates in float32 by AdamW without weight decay, with a constant learning rate and
gradients clipped to norm 1, on the records of `benchmarks.real` in the order of the
file. Adapters start from the same weights, which PEFT draws. The last line gives the
largest relative difference of a loss and of a gradient norm over the steps, and the
norm of the difference of the final logits of four prompts over the norm of the logits.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

ROWS, COMPLETIONS, NEW_TOKENS = 2, 4, 24
CHARACTERS = 240  # of a question, and of an answer
RATES = {"sft": 1e-5, "lora": 2e-4, "dpo": 1e-5, "grpo": 1e-4}
PROBES = ("The capital of France is", "def add(a, b):", "1, 2, 3,", "Once upon a time")


def records(case, steps):
  """Returns plain texts, for which both libraries make the same tokens."""
  sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
  from benchmarks import real

  pairs = list(real.texts())
  rows = 1 if case == "grpo" else ROWS
  out = []
  for i in range(rows * steps):
    question, answer = (text[:CHARACTERS] for text in pairs[i % len(pairs)])
    prompt, answer = f"Question: {question}\nAnswer:", f" {answer}<|im_end|>"
    out.append(
      {
        "dpo": {"prompt": prompt, "chosen": answer, "rejected": f" no{answer}"},
        "grpo": {"prompt": prompt},
      }.get(case, {"prompt": prompt, "completion": answer})
    )
  return out


def score(text):
  """Returns the reward of a completion: the letters e of a thousand letters.

  With smaller rewards the gradients differ: TRL adds 1e-4 to their standard deviation.
  """
  return 1000 * text.count("e") / max(1, len(text))


def by_tunix(case, model, folder, steps):
  """Trains with tunix; returns losses, gradient norms and final logits."""
  import jax

  import tunix
  from tunix.generate.engine_sampler import EngineSampler
  from tunix.rl.rollout import vanilla_rollout

  module = tunix.AutoModel.from_pretrained(model, dtype="float32")
  if case != "sft":
    module = tunix.load_adapter(module, folder / "adapter")
  drawn = []

  class Recording(EngineSampler):
    # The ids, because TRL would make other tokens of a text.
    def complete(self, *args):
      rows = super().complete(*args)
      drawn.append([row.ids.tolist() for row in rows])
      return rows

  vanilla_rollout.EngineSampler = Recording

  def reward(prompts, completions):
    return [score(text) for text in completions]

  settings = {"max_length": 1024}
  if case == "grpo":
    settings = {
      "rewards": reward,
      "beta": 0,
      "num_generations": COMPLETIONS,
      "max_tokens_to_generate": NEW_TOKENS,
      "max_prompt_length": 512,
      "loss_agg_mode": "token-mean",
    }
  result = getattr(tunix, "sft" if case == "lora" else case)(
    model=module,
    tokenizer=model,
    data={"train": records(case, steps), "shuffle": False, "chat": False},
    learning_rate=RATES[case],
    optimizer={"name": "adamw", "args": {"weight_decay": 0.0}},
    global_batch_size=1 if case == "grpo" else ROWS,
    max_steps=steps,
    **settings,
  )
  (folder / "drawn.json").write_text(json.dumps(drawn))
  tokenizer = tunix.TokenizerAdapter.from_pretrained(model)
  logits = []
  for text in PROBES:
    tokens = np.array([tokenizer.encode(text)], np.int32)
    logits.append(np.asarray(jax.jit(lambda x: module(x)[0])(tokens))[0])
  prefix = "train/actor" if case == "grpo" else "train"
  history = result.history
  return [history[f"{prefix}/{name}"][1] for name in ("loss", "grad_norm")], logits


def make_adapter(model, folder):
  """Saves an adapter that PEFT draws."""
  import torch
  from peft import LoraConfig, get_peft_model
  from transformers import AutoModelForCausalLM

  torch.manual_seed(0)
  base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
  config = LoraConfig(
    r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
  )
  get_peft_model(base, config).save_pretrained(folder / "adapter")


def by_trl(case, model, folder, steps):
  """Trains with TRL; returns losses, gradient norms and final logits."""
  import torch
  import trl
  from datasets import Dataset
  from peft import PeftModel
  from torch.utils.data import SequentialSampler
  from transformers import AutoModelForCausalLM, AutoTokenizer

  torch.manual_seed(0)
  tokenizer = AutoTokenizer.from_pretrained(model)
  module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
  if case != "sft":
    module = PeftModel.from_pretrained(module, folder / "adapter", is_trainable=True)
  name = {"lora": "SFT"}.get(case, case.upper())
  drawn = iter(json.loads((folder / "drawn.json").read_text()))
  losses = []

  class Watched(getattr(trl, f"{name}Trainer")):
    def training_step(self, *args, **kwargs):  # the log rounds the loss
      loss = super().training_step(*args, **kwargs)
      losses.append(float(loss))
      return loss

    def _get_train_sampler(self, *args, **kwargs):
      if case == "grpo":
        return super()._get_train_sampler(*args, **kwargs)
      return SequentialSampler(self.train_dataset)

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
      return next(drawn), None

  options = {
    "output_dir": str(folder / "trl"),
    "per_device_train_batch_size": COMPLETIONS if case == "grpo" else ROWS,
    "max_steps": steps,
    "learning_rate": RATES[case],
    "lr_scheduler_type": "constant",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
  }
  more = {}
  if case == "grpo":
    options |= {
      "num_generations": COMPLETIONS,
      "max_completion_length": NEW_TOKENS,
      "shuffle_dataset": False,
      "beta": 0.0,
    }
    more["reward_funcs"] = lambda completions, **_: [score(x) for x in completions]
  else:
    options["max_length"] = 1024
  trainer = Watched(
    module,
    args=getattr(trl, f"{name}Config")(**options),
    train_dataset=Dataset.from_list(records(case, steps)),
    processing_class=tokenizer,
    **more,
  )
  trainer.train()
  norms = [x["grad_norm"] for x in trainer.state.log_history if "grad_norm" in x]
  module = trainer.model.eval()
  logits = []
  with torch.no_grad():
    for text in PROBES:
      tokens = tokenizer(text, return_tensors="pt")["input_ids"]
      logits.append(module(tokens).logits[0].numpy())
  return [losses, norms], logits


def run(args, folder):
  """Runs one library and writes its figures to the folder."""
  if args.lib == "peft":
    make_adapter(args.model, folder)
    return
  by = {"tunix": by_tunix, "trl": by_trl}[args.lib]
  scalars, logits = by(args.case, args.model, folder, args.steps)
  np.savez(folder / f"{args.lib}.npz", *logits, scalars=np.array(scalars, np.float64))


def compare(folder):
  """Prints both libraries' figures of each step, and their differences."""
  ours, theirs = (dict(np.load(folder / f"{x}.npz")) for x in ("tunix", "trl"))
  (loss, norm), (other_loss, other_norm) = ours.pop("scalars"), theirs.pop("scalars")
  print("step  loss tunix    loss TRL      norm tunix    norm TRL")
  for i, row in enumerate(zip(loss, other_loss, norm, other_norm), 1):
    print(f"{i:4}  " + "  ".join(f"{x:12.8f}" for x in row))
  apart = lambda a, b: float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-3)))
  gaps = [np.linalg.norm(ours[k] - theirs[k]) / np.linalg.norm(ours[k]) for k in ours]
  print(
    f"loss {apart(loss, other_loss):.1e}, gradient norm {apart(norm, other_norm):.1e}, "
    f"final logits {max(gaps):.1e}"
  )


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("case", choices=tuple(RATES))
  parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
  parser.add_argument("--trl", help="an interpreter that has TRL and PEFT")
  parser.add_argument("--steps", type=int, default=100)
  parser.add_argument("--lib", choices=("tunix", "trl", "peft"), help=argparse.SUPPRESS)
  parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.lib:
    run(args, args.folder)
    return
  with tempfile.TemporaryDirectory() as name:
    for lib, python in (
      ("peft", args.trl),
      ("tunix", sys.executable),
      ("trl", args.trl),
    ):
      words = [python, __file__, args.case, "--lib", lib, "--model", args.model]
      words += ["--folder", name, "--steps", str(args.steps)]
      subprocess.run(words, check=True, stdout=sys.stderr)
    compare(pathlib.Path(name))


if __name__ == "__main__":
  main()
