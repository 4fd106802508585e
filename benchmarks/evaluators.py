"""lm-eval and inspect-ai: their own Hugging Face backends against `tunix serve`.

  PYTHON_WITH_EVALUATORS benchmarks/evaluators.py --model SMOLLM2 --tunix PYTHON

The environment of the evaluators has lm-eval, inspect-ai, openai, torch and
transformers; `--tunix` names a Python that has tunix. SMOLLM2 is a Hugging Face folder.
Both backends compute in float32. The tasks are in lm-eval's own format, with items from
this file:

- `facts`: 60 questions with 4 answers each, scored by log-likelihood.
- `texts`: 20 of the questions, continued greedily by 16 tokens.
- `rolling`: 8 texts, scored as a whole.
- `chat` (inspect-ai): the 20 questions as conversations, answered by 16 tokens.

The last line gives the largest difference of two log-likelihoods in nats, the
accuracies of both, and how many greedy texts are equal.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import subprocess
import tempfile

CHOICES, NEW_TOKENS, TEXTS = 4, 16, 20
CAPITALS = (
  "France:Paris Italy:Rome Spain:Madrid Japan:Tokyo Egypt:Cairo Greece:Athens "
  "Kenya:Nairobi Peru:Lima Cuba:Havana Norway:Oslo Austria:Vienna Portugal:Lisbon "
  "Poland:Warsaw Ireland:Dublin Germany:Berlin Russia:Moscow Canada:Ottawa "
  "Iraq:Baghdad Hungary:Budapest Sweden:Stockholm"
)
OPPOSITES = (
  "hot:cold up:down big:small fast:slow day:night open:closed early:late left:right "
  "hard:soft rich:poor old:new dark:light full:empty wet:dry strong:weak near:far "
  "high:low true:false happy:sad first:last"
)


def items():
  """Returns 60 questions, each with four choices and the number of the right one."""
  draw = random.Random(0)
  pairs = [
    *(("The capital of {} is", x.split(":")) for x in CAPITALS.split()),
    *(('The opposite of "{}" is', x.split(":")) for x in OPPOSITES.split()),
  ]
  sums = [(draw.randint(2, 9), draw.randint(2, 9)) for _ in range(20)]
  pairs += [("{} =", (f"{a} + {b}", str(a + b))) for a, b in sums]
  out = []
  for template, (given, answer) in pairs:
    others = sorted({x for other, (_, x) in pairs if other == template} - {answer})
    choices = [answer, *draw.sample(others, CHOICES - 1)]
    draw.shuffle(choices)
    out.append(
      {
        "question": template.format(given),
        "choices": choices,
        "answer": choices.index(answer),
      }
    )
  return out


def tasks(folder):
  """Writes the items; returns the tasks of lm-eval."""
  rows = items()
  joined = [" ".join(x["question"] for x in rows[i::8]) for i in range(8)]
  files = {
    "facts": rows,
    "texts": rows[:: len(rows) // TEXTS],
    "rolling": [{"text": text} for text in joined],
  }
  for name, lines in files.items():
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / f"{name}.jsonl").write_text(text)
  rules = {"until": ["\n\n"], "max_gen_toks": NEW_TOKENS, "temperature": 0}
  forms = {
    "facts": {
      "output_type": "multiple_choice",
      "doc_to_text": "{{question}}",
      "doc_to_choice": "{{choices}}",
      "doc_to_target": "answer",
    },
    "texts": {
      "output_type": "generate_until",
      "doc_to_text": "{{question}}",
      "doc_to_target": "",
      "generation_kwargs": rules,
    },
    "rolling": {
      "output_type": "loglikelihood_rolling",
      "doc_to_text": "",
      "doc_to_target": "{{text}}",
    },
  }
  return [
    {
      "task": name,
      "dataset_path": "json",
      "dataset_kwargs": {
        "data_files": {"test": str(folder / f"{name}.jsonl")},
        "cache_dir": str(folder / "cache"),
      },
      "test_split": "test",
      **form,
    }
    for name, form in forms.items()
  ]


def by_lm_eval(backend, arguments, folder):
  """Returns the log-likelihoods, the accuracy and the texts of one backend."""
  import lm_eval

  found = lm_eval.simple_evaluate(
    backend, model_args=arguments, tasks=tasks(folder), bootstrap_iters=0, batch_size=4
  )
  samples = {
    name: sorted(rows, key=lambda x: x["doc_id"])
    for name, rows in found["samples"].items()
  }
  first = lambda pair: float(pair[0] if isinstance(pair, list | tuple) else pair)
  return {
    "likelihoods": [first(p) for x in samples["facts"] for p in x["filtered_resps"]],
    "rolling": [first(p) for x in samples["rolling"] for p in x["filtered_resps"]],
    "accuracy": found["results"]["facts"]["acc,none"],
    "texts": [x["resps"][0][0] for x in samples["texts"]],
  }


def by_inspect(name, arguments, folder, **rules):
  """Returns the accuracy and the answers of one of inspect-ai's providers."""
  import inspect_ai
  from inspect_ai import dataset, model, scorer, solver

  rows = items()[:: 60 // TEXTS]
  samples = [
    dataset.Sample(input=x["question"] + "?", target=x["choices"][x["answer"]])
    for x in rows
  ]
  task = inspect_ai.Task(
    dataset=samples, solver=solver.generate(), scorer=scorer.includes()
  )
  [log] = inspect_ai.eval(
    task,
    model=model.get_model(name, **arguments),
    max_tokens=NEW_TOKENS,
    **rules,
    log_dir=str(folder / "logs"),
    display="none",
  )
  if log.status != "success":
    raise RuntimeError(f"inspect-ai: {log.error}")
  return {
    "accuracy": log.results.scores[0].metrics["accuracy"].value,
    "texts": [sample.output.completion for sample in log.samples],
  }


@contextlib.contextmanager
def serving(python, model):
  """Yields the address of a server of the model."""
  words = ["--port", "0", "--dtype", "float32", "--slots", "4"]
  command = [python, "-m", "tunix.cli.main", "serve", model, *words]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  assert process.stdout is not None
  try:
    lines = (line for line in process.stdout if " at http" in line)
    yield next(lines).split(" at ")[1].strip()
  finally:
    process.kill()
    process.wait()


def compared(theirs, ours):
  """Returns the figures of the last line."""
  report = {}
  for tool, one in theirs.items():
    other = ours[tool]
    for name in ("likelihoods", "rolling"):
      if name in one:
        pairs = zip(one[name], other[name], strict=True)
        report[f"{tool} {name}"] = max(abs(a - b) for a, b in pairs)
    report[f"{tool} accuracy"] = one["accuracy"], other["accuracy"]
    same = sum(a == b for a, b in zip(one["texts"], other["texts"], strict=True))
    report[f"{tool} equal texts"] = f"{same} of {len(one['texts'])}"
  return report


def main():
  """Runs both backends of both evaluators."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--model", required=True)
  parser.add_argument("--tunix", required=True)
  args = parser.parse_args()
  os.environ |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
  name = pathlib.Path(args.model).name
  with tempfile.TemporaryDirectory() as scratch:
    folder = pathlib.Path(scratch)
    # This provider refuses a temperature of 0.
    greedy = {"model_path": args.model, "device": "cpu", "do_sample": False}
    theirs = {
      "lm-eval": by_lm_eval(
        "hf",
        {"pretrained": args.model, "dtype": "float32", "device": "cpu"},
        folder,
      ),
      "inspect-ai": by_inspect("hf/local", greedy, folder),
    }
    with serving(args.tunix, args.model) as url:
      completions = {
        "model": name,
        "base_url": f"{url}/v1/completions",
        "tokenizer": args.model,
        "num_concurrent": 4,
      }
      chat = {"base_url": f"{url}/v1", "api_key": "none"}
      ours = {
        "lm-eval": by_lm_eval("local-completions", completions, folder),
        "inspect-ai": by_inspect(
          f"openai-api/tunix/{name}", chat, folder, temperature=0
        ),
      }
  print(json.dumps({"theirs": theirs, "ours": ours}))
  print(json.dumps(compared(theirs, ours)))


if __name__ == "__main__":
  main()
