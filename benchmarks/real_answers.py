"""Completions of a real model by tunix and by others: wall and CPU seconds.

  python -m benchmarks.real_answers generate --model SMOLLM2 [--dtype bfloat16]
  python -m benchmarks.real_answers serve --clients 8 --model SMOLLM2
  python -m benchmarks.real_answers round --slots 8 --clients 1 --model SMOLLM2
  python -m benchmarks.real_answers pairs generate --model SMOLLM2 --torch PYTHON -n 5
  python -m benchmarks.real_answers pairs serve --model SMOLLM2 --llama PYTHON \
    --gguf FILE -n 5

`generate` completes 16 prompts of 20 to 110 tokens at once, greedily, with 128 tokens
each. `serve` answers `--clients` clients, each with `--requests` answers of 64 tokens,
one after the other: tunix by `tunix serve`, transformers and llama.cpp
(llama-cpp-python, with the file of `tunix export --gguf`) by a call for each request in
turn, without a server.
`round` prints the milliseconds and CPU milliseconds of a round of the engine with
`--slots` slots, of which `--clients` work: the median of five runs of 64 tokens.
The seconds are those of a second run in the same process, whose texts begin otherwise
and are as long; `first_s` are those of the first run, which compiles. transformers
compile nothing, and have one run. CPU seconds of `serve` are those of the server.
`pairs` runs the libraries in turn, each in a fresh process.
"""

import argparse
import concurrent.futures
import itertools
import json
import pathlib
import re
import statistics
import subprocess
import sys
import time

PROMPTS, NEW_TOKENS = 16, 128
ANSWER = 64


def prompts(count, opening):
  """Returns texts of different lengths with the same first word."""
  words = pathlib.Path(__file__).with_name("real.py").read_text().split()
  parts = (words[9 * i : 9 * i + 8 + 5 * (i % 8)] for i in range(count))
  return [" ".join((opening, *part)) for part in parts]


def measured(run, count, clock=time.process_time, runs=("One", "Two")):
  """Returns wall seconds of the first and the last run, and CPU seconds of the last."""
  walls = []
  for opening in runs:  # no prefix of a text is in the cache
    wall, cpu = time.perf_counter(), clock()
    run(prompts(count, opening))
    walls.append(time.perf_counter() - wall)
  return walls[0], walls[-1], clock() - cpu


def tunix_generate(args):
  from tunix.generate.sampler import Sampler
  from tunix.generate.tokenizer_adapter import TokenizerAdapter
  from tunix.models.automodel import AutoModel

  model = AutoModel.from_pretrained(args.model, dtype=args.dtype)
  sampler = Sampler(model, TokenizerAdapter.from_pretrained(args.model))
  none = [49151]  # an id that is hardly drawn
  return measured(lambda texts: sampler(texts, NEW_TOKENS, eos_tokens=none), PROMPTS)


def tunix_serve(args):
  import httpx
  import psutil

  words = [sys.executable, "-m", "tunix.cli.main", "serve", args.model, "--port", "0"]
  words += ["--dtype", args.dtype, "--slots", "8", "--max_tokens", "512"]
  server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, bufsize=1)
  try:
    assert server.stdout is not None
    found = (re.search(r"http://[\w.]+:\d+", line) for line in server.stdout)
    url = next(match[0] for match in found if match)
    name = pathlib.Path(args.model).name

    def client(texts):
      for text in texts:
        body = {"model": name, "prompt": text, "max_tokens": ANSWER, "temperature": 0}
        reply = httpx.post(
          f"{url}/v1/completions", json=body | {"ignore_eos": True}, timeout=600
        )
        assert reply.json()["usage"]["completion_tokens"] == ANSWER, reply.text

    process = psutil.Process(server.pid)

    def clock():
      used = process.cpu_times()
      return used.user + used.system

    def run(texts):
      with concurrent.futures.ThreadPoolExecutor(args.clients) as pool:
        list(pool.map(client, (texts[i :: args.clients] for i in range(args.clients))))

    return measured(run, args.clients * args.requests, clock)
  finally:
    server.terminate()
    server.wait()


def round_of(args):
  """Prints wall and CPU milliseconds of a round of the engine."""
  import numpy as np

  from benchmarks.groups import Ids
  from tunix.generate.engine.config import EngineConfig
  from tunix.generate.engine.engine import Engine
  from tunix.generate.engine.request import EngineRequest
  from tunix.models.automodel import AutoModel

  def engine_of(invariant):
    options = {"dtype": args.dtype, "batch_invariant": invariant}
    model = AutoModel.from_pretrained(args.model, **options)
    return Engine(model, Ids(), EngineConfig(slots=args.slots, max_tokens=512))

  def request(prompt):
    drawn = {"temperature": 1.0, "seed": 0, "logprobs": True, "stop_ids": []}
    return EngineRequest(prompt=prompt, max_tokens=ANSWER, **drawn)

  kinds = (False, True) if args.batch_invariant else (False,)
  engines = [engine_of(kind) for kind in kinds]
  figures = [[] for _ in engines]
  for seed in range(args.n + 2):  # the first two compile
    draw = np.random.default_rng(seed)
    texts = [draw.integers(100, 40_000, 40) for _ in range(args.clients)]
    for engine, own in zip(engines, figures):
      wall, cpu = time.perf_counter(), time.process_time()
      engine.run([request(text) for text in texts])
      seconds = time.perf_counter() - wall, time.process_time() - cpu
      own.append([x / ANSWER * 1e3 for x in seconds])
  figures = [own[2:] for own in figures]
  for kind, own in zip(kinds, figures):
    wall, cpu = map(statistics.median, zip(*own))
    name = f"{args.dtype}{', batch-invariant' * kind}"
    print(f"{name}: {wall:.1f} ms, {cpu:.1f} CPU ms")
  if args.batch_invariant:
    for name, at in (("wall", 0), ("CPU", 1)):
      ratios = sorted(y[at] / x[at] for x, y in zip(*figures))
      middle = statistics.median(ratios)
      print(f"{name}: {middle:.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})")


def transformers_of(args):
  """Returns a function that completes texts with a fixed number of tokens."""
  import torch
  from transformers import AutoModelForCausalLM, AutoTokenizer

  model = AutoModelForCausalLM.from_pretrained(
    args.model, dtype=getattr(torch, args.dtype)
  )
  tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
  tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

  def complete(texts, tokens):
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    model.generate(**inputs, **lengths, do_sample=False)

  return complete


def transformers_generate(args):
  complete = transformers_of(args)
  return measured(lambda texts: complete(texts, NEW_TOKENS), PROMPTS)


def transformers_serve(args):
  complete = transformers_of(args)
  complete(prompts(1, "One"), ANSWER)
  each = lambda texts: [complete([text], ANSWER) for text in texts]
  return measured(each, args.clients * args.requests, runs=("Two",))


def llama_serve(args):
  import llama_cpp

  llama = llama_cpp.Llama(args.model, n_ctx=512, n_threads=2, verbose=False)

  def complete(texts):
    for text in texts:
      drawn = llama.generate(llama.tokenize(text.encode()), temp=0.0)
      list(itertools.islice(drawn, ANSWER))

  return measured(complete, args.clients * args.requests)


def pairs(args):
  """Runs both libraries in turn and prints the ratios of their figures."""
  from benchmarks import real  # not by the other interpreters

  runs = {"tunix": (sys.executable, args.model)}
  if args.llama is None:
    runs["transformers"] = args.torch, args.model
  else:
    runs["llama"] = args.llama, args.gguf
  results = {lib: [] for lib in runs}
  for _ in range(args.n):
    for lib, (python, model) in runs.items():
      words = [python, __file__, args.what, "--lib", lib, "--model", model]
      words += ["--dtype", args.dtype, "--clients", str(args.clients)]
      words += ["--requests", str(args.requests)]
      out = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
      results[lib].append(json.loads(out.splitlines()[-1]))
      print(out.splitlines()[-1], flush=True)
  real.print_ratios(results, ("wall_s", "cpu_s"))


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("job", choices=("generate", "serve", "round", "pairs"))
  parser.add_argument("what", nargs="?", choices=("generate", "serve"))
  libs = ("tunix", "transformers", "llama")
  parser.add_argument("--lib", choices=libs, default="tunix")
  parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  parser.add_argument("--clients", type=int, default=1)
  parser.add_argument("--slots", type=int, default=8, help="of round")
  parser.add_argument(
    "--batch_invariant", action="store_true", help="of round: compare the two forms"
  )
  parser.add_argument("--requests", type=int, default=4, help="of a client")
  parser.add_argument("--torch", help="of pairs: an interpreter with transformers")
  parser.add_argument("--llama", help="of pairs: one with llama-cpp-python, for serve")
  parser.add_argument("--gguf", help="of pairs with llama.cpp: its file")
  parser.add_argument("-n", type=int, default=5, help="of pairs")
  args = parser.parse_args()
  if args.job == "pairs":
    if args.what is None or not (args.torch or args.llama):
      parser.error("pairs needs generate or serve, and --torch or --llama PYTHON")
    if args.llama and (args.torch or not args.gguf or args.what != "serve"):
      parser.error("--llama needs serve and --gguf FILE, and excludes --torch")
    pairs(args)
    return
  if args.job == "round":
    round_of(args)
    return
  seconds = globals()[f"{args.lib}_{args.job}"](args)
  figures = {"job": args.job, "lib": args.lib, "dtype": args.dtype}
  figures |= {"clients": args.clients} if args.job == "serve" else {}
  names = ("first_s", "wall_s", "cpu_s")
  print(json.dumps(figures | {n: round(x, 2) for n, x in zip(names, seconds)}))


if __name__ == "__main__":
  main()
