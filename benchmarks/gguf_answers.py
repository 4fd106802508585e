"""Greedy answers of exported GGUF files: tunix's sampler, llama.cpp and transformers.

  python -m benchmarks.gguf_answers --model FOLDER --llama PYTHON_WITH_LLAMA_CPP \\
    --transformers PYTHON_WITH_TRANSFORMERS [--adapter]

The model is exported with `tunix export`, once for each kind, and each program writes
`--tokens` tokens after 20 prompts. The other programs get the prompts as text, so that
their tokenizers take part. llama.cpp keeps its KV cache in float32. tunix computes in
float32, from the original folder ("original") and from the exported file ("same file").

A line counts the prompts and the answers with equal tokens, and the tokens before the
first difference. For each first difference it gives how far the logits of the two
tokens are apart in tunix, relative to the largest logit. With `--adapter` a random LoRA
adapter is exported as an adapter file, on top of the f32 file of the base.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

PROMPTS = (
  *("The capital of France is", "def fibonacci(n):", "Once upon a time", "1, 2, 3, 4,"),
  *("Water boils at", "The largest planet is", "Roses are red,", "To be or not to be"),
  *("The three primary colors are", "import numpy as np\n", "Dear Sir or Madam,"),
  *("A recipe for bread:\n", "SELECT name FROM", "The opposite of hot is", "Bonjour,"),
  *("In 1969, humans first", "The sum of 7 and 5 is", "My favorite animal is the"),
  *("Photosynthesis is the process", "Breaking news:"),
)
KINDS = ("f32", "f16", "q8_0")


def llama(file, tokens, adapter):
  """Answers with llama.cpp; runs in another Python."""
  import llama_cpp

  model = llama_cpp.Llama(
    file,
    n_ctx=512,
    type_k=llama_cpp.GGML_TYPE_F32,
    type_v=llama_cpp.GGML_TYPE_F32,
    lora_path=adapter,
    verbose=False,
  )
  for text in json.load(sys.stdin):
    prompt = model.tokenize(text.encode(), add_bos=True, special=True)
    answer = []
    for token in model.generate(prompt, temp=0.0, repeat_penalty=1.0):
      if llama_cpp.llama_vocab_is_eog(model._model.vocab, token):
        break
      answer.append(token)
      if len(answer) == tokens:
        break
    print(json.dumps([prompt, answer]), flush=True)


def transformers(file, tokens, adapter):
  """Answers with transformers' reader; runs in another Python."""
  import torch
  from transformers import AutoModelForCausalLM, AutoTokenizer

  assert adapter is None, "transformers reads no adapter files of llama.cpp"
  path = pathlib.Path(file)
  where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
  tokenizer = AutoTokenizer.from_pretrained(**where)
  model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
  for text in json.load(sys.stdin):
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(
      ids, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
    )
    answer = out[0, ids.shape[1] :].tolist()
    ends = [i for i, x in enumerate(answer) if x == tokenizer.eos_token_id]
    print(json.dumps([ids[0].tolist(), answer[: ends[0]] if ends else answer]))


def others(python, program, file, texts, tokens, adapter=None):
  """Returns (prompt, answer) of each text, as another program's process gives them."""
  words = ["--serve", program, "--file", file, "--tokens", tokens]
  words += ["--adapter-file", adapter] if adapter else []
  done = subprocess.run(
    [python, __file__, *map(str, words)],
    input=json.dumps(texts),
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return [json.loads(line) for line in done.stdout.splitlines() if line[:2] == "[["]


def texts_of(tokenizer):
  """Returns the prompts, in the model's chat template if it has one."""
  if not tokenizer.has_chat_template():
    return list(PROMPTS)
  render = lambda text: tokenizer.apply_chat_template(
    [{"role": "user", "content": f"Continue: {text}"}]
  )
  return [render(text) for text in PROMPTS]


def ours(model, tokenizer, texts, tokens):
  """Returns (prompt, answer) of each text, sampled by tunix."""
  import tunix

  sampler = tunix.Sampler(model, tokenizer)
  prompts = [tokenizer.tokenize(text, add_eos=False).tolist() for text in texts]
  out = sampler(texts, max_generation_steps=tokens, temperature=0.0)
  ends = tokenizer.eos_ids()
  answers = [[int(x) for x in np.asarray(row)] for row in out.tokens]
  cut = lambda row: row[: next((i for i, x in enumerate(row) if x in ends), len(row))]
  return [[prompt, cut(row)] for prompt, row in zip(prompts, answers, strict=True)]


def compare(name, model, want, got):
  """Prints how many answers are equal, and the gaps where they are not."""
  import jax.numpy as jnp

  same_prompts = sum(a[0] == b[0] for a, b in zip(want, got, strict=True))
  equal, total, gaps = 0, 0, []
  for (prompt, mine), (_, theirs) in zip(want, got, strict=True):
    pairs = list(zip(mine, theirs))
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
    equal, total = equal + at, total + max(len(mine), len(theirs))
    if at < len(pairs):
      row = np.asarray(model(jnp.asarray([[*prompt, *mine[:at]]]))[0])[0, -1]
      gaps.append(float(row[mine[at]] - row[theirs[at]]) / float(np.abs(row).max()))
  answers = sum(a[1] == b[1] for a, b in zip(want, got, strict=True))
  print(
    f"{name}: prompts {same_prompts}/{len(want)}, answers {answers}/{len(want)}, "
    f"equal tokens {equal}/{total}, gaps {[f'{x:.1e}' for x in gaps]}",
    flush=True,
  )


def export(model, to, *words):
  from tunix.cli import main

  assert main.main(["export", "--model", str(model), "--to", str(to), *words]) == 0


def with_adapter(model, folder):
  """Returns the model with a random adapter, and writes it as llama.cpp's file."""
  import jax
  from flax import nnx

  import tunix
  from tunix.models import lora
  from tunix.models.gguf import writer

  adapted = lora.apply(model, tunix.LoraConfig(rank=8, alpha=16))
  for path, value in nnx.to_flat_state(nnx.state(adapted, nnx.LoRAParam)):
    if path[-1] == "lora_b":
      key = jax.random.key(len(path))
      value.set_value(0.01 * jax.random.normal(key, value.shape))
  writer.write_adapter(adapted, folder / "adapter.gguf", "f32")
  return adapted, folder / "adapter.gguf"


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", type=pathlib.Path)
  parser.add_argument("--llama")
  parser.add_argument("--transformers")
  parser.add_argument("--tokens", type=int, default=32)
  parser.add_argument("--kinds", nargs="+", default=KINDS)
  parser.add_argument("--adapter", action="store_true")
  parser.add_argument("--serve", choices=("llama", "transformers"))
  parser.add_argument("--file")
  parser.add_argument("--adapter-file")
  args = parser.parse_args()
  if args.serve:
    return globals()[args.serve](args.file, args.tokens, args.adapter_file)
  import tunix

  tokenizer = tunix.TokenizerAdapter.from_pretrained(args.model)
  texts = texts_of(tokenizer)
  model = tunix.AutoModel.from_pretrained(args.model, dtype="float32")
  with tempfile.TemporaryDirectory() as scratch:
    folder, adapter = pathlib.Path(scratch), None
    if args.adapter:
      model, adapter = with_adapter(model, folder)
    sources = {"original": (model, ours(model, tokenizer, texts, args.tokens))}
    for kind in args.kinds:
      export(args.model, folder / kind, "--gguf", kind)
      file = folder / kind / f"model-{kind}.gguf"
      if not args.adapter:
        same = tunix.AutoModel.from_pretrained(file, dtype="float32")
        sources["same file"] = same, ours(same, tokenizer, texts, args.tokens)
      for program in ("llama", "transformers"):
        if python := getattr(args, program):
          got = others(python, program, file, texts, args.tokens, adapter)
          for source, (module, want) in sources.items():
            name = f"{args.model.name} {program} {kind} {source}"
            compare(name, module, want, got)
      file.unlink()


if __name__ == "__main__":
  main()
