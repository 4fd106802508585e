"""The engine beside the padded sampler, on several kinds of load.

  python -m benchmarks.ragged ragged host --passes 5     # without names: all cases

Each case prints JSON lines. The model is a random Qwen 3 of 58 million parameters,
float32. The two jobs of a case run in turn in one process, with new prompts of the same
lengths in each pass; the first passes compile and are not counted. A ratio is the
seconds of the second job over those of the first, pass by pass: above 1, the first job
is faster. A median that is closer to 1 than its spread is a tie.

  ragged  64 requests, prompts of 16-256 tokens, completions of 9-256 (mean about 60)
  equal   8 and 32 requests of 64 + 128 tokens; also the time until each has a token
  group   8 samples of a prompt of 512 tokens: tokens that were prefilled
  turns   8 turns of a conversation: tokens that were prefilled
  copy    prompt lookup against none, on text that is copied and on other text
  host    share of the host in a launch, on the load of `ragged`
  first   seconds of each load of `ragged`, without `warm_up()` and after it
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.adapter import complete, complete_padded
from benchmarks.groups import Ids
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.generate.sampler import Sampler
from tunix.models.automodel import AutoModel
from tunix.models.qwen3.model import ModelConfig

CASES = ("ragged", "equal", "group", "turns", "copy", "host", "first")
HEADS = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 64}
WARM = 2  # passes that compile: the second meets the cache that the first left


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("cases", nargs="*", metavar="case", help="default: all")
  parser.add_argument("--passes", type=int, default=5)
  parser.add_argument("--requests", type=int, default=64, help="of ragged, host, first")
  parser.add_argument(
    "--slots", type=int, default=8, help="of ragged, copy, host, first"
  )
  parser.add_argument("--draft", type=int, default=4, help="of copy: draft tokens")
  parser.add_argument("--layers", type=int, default=8)
  parser.add_argument("--vocab", type=int, default=32000)
  args = parser.parse_args()
  if unknown := set(args.cases) - set(CASES):
    parser.error(f"unknown cases {sorted(unknown)}: choose from {CASES}")
  return args


def random_model(args: argparse.Namespace) -> Any:
  sizes: Any = {"num_layers": args.layers, "vocab_size": args.vocab, **HEADS}
  sizes |= {"embed_dim": 512, "hidden_dim": 1536, "tie_embeddings": False}
  return AutoModel.from_config(ModelConfig(**sizes), seed=0, dtype="float32")


def counting_model(args: argparse.Namespace) -> Any:
  """Returns a model of the same cost whose most likely token after v is v + 1."""
  model = random_model(args)
  for kernel in (model.layers.attn.o_proj.kernel, model.layers.mlp.down_proj.kernel):
    kernel[...] = jnp.zeros_like(kernel[...])  # so that a layer returns its input
  model.lm_head.kernel[...] = jnp.roll(model.embed_tokens.embedding[...], 1, 0).T
  return model


def engine_of(model: Any, slots: int, tokens: int, **options: Any) -> Engine:
  return Engine(model, Ids(), EngineConfig(slots=slots, max_tokens=tokens, **options))


def spread(values: Any) -> dict[str, float]:
  names, found = ("median", "lowest", "highest"), np.quantile(values, (0.5, 0, 1))
  return dict(zip(names, found.round(3).tolist()))


def compare(jobs: dict[str, Any], passes: int, tokens: int) -> dict[str, Any]:
  """Runs two functions of the pass in turn; a pass has `tokens` useful tokens."""
  times: dict[str, list[np.ndarray]] = {name: [] for name in jobs}
  rows: dict[str, Any] = {}
  now = lambda: np.array([time.perf_counter(), time.process_time()])
  for number in range(WARM + passes):
    for name in list(jobs) if number % 2 else reversed(jobs):
      begun = now()
      rows[name] = jobs[name](number)
      times[name].append(now() - begun)
  out: dict[str, Any] = {"equal_rows": sum(map(np.array_equal, *rows.values()))}
  for name in jobs:
    wall, cpu = np.median(times[name][WARM:], axis=0)
    out[name] = {"tokens_per_s": round(tokens / wall, 1), "cpu_s": round(cpu, 3)}
  first, second = (np.array(x[WARM:]) for x in times.values())
  return out | dict(zip(("wall_ratio", "cpu_ratio"), map(spread, (second / first).T)))


def random_prompts(args: argparse.Namespace, sizes: Any, seed: int) -> list[np.ndarray]:
  rng = np.random.default_rng(seed)
  return [rng.integers(0, args.vocab, size).astype(np.int32) for size in sizes]


def ragged_sizes(count: int) -> tuple[Any, Any]:
  """Returns the tokens of each prompt and of each completion."""
  rng = np.random.default_rng(1)
  prompts = np.exp(rng.uniform(np.log(16), np.log(256), count)).astype(int)
  return prompts, np.minimum(8 + rng.geometric(1 / 54, count), 256)


def engine_and_padded(
  args: argparse.Namespace, engine: Engine, sampler: Sampler, sizes: Any, lengths: Any
) -> dict[str, Any]:
  slots, rows = engine.config.slots, partial(random_prompts, args, sizes)
  padded = lambda n: complete_padded(sampler, rows(n), lengths, slots)
  return {"engine": lambda n: complete(engine, rows(n), lengths), "padded": padded}


def case_ragged(args: argparse.Namespace):
  model, (sizes, lengths) = random_model(args), ragged_sizes(args.requests)
  engine, sampler = engine_of(model, args.slots, 512), Sampler(model, Ids())
  jobs = engine_and_padded(args, engine, sampler, sizes, lengths)
  yield compare(jobs, args.passes, int(lengths.sum()))


def case_equal(args: argparse.Namespace):
  model = random_model(args)
  for batch in (8, 32):
    engine, sampler = engine_of(model, batch, 192), Sampler(model, Ids())
    jobs = engine_and_padded(args, engine, sampler, [64] * batch, [128] * batch)
    yield {"batch": batch, **compare(jobs, args.passes, 128 * batch)}
    prompts = partial(random_prompts, args, [64] * batch)
    jobs = {
      "engine": partial(first_deltas, engine, prompts),
      "padded": partial(first_increments, sampler, prompts),
    }
    yield {"first tokens of": batch, **compare(jobs, args.passes, batch)}


def first_deltas(engine: Engine, prompts: Any, number: int) -> list[int]:
  """Steps until every request has a delta; returns the first token of each."""
  tickets, arrived = [], set()
  for prompt in prompts(1000 + number):  # new ones: pages of earlier ones are kept
    request = EngineRequest(prompt=prompt, max_tokens=128, stop_ids=())
    tickets.append(engine.submit(request))
    tickets[-1].listen(partial(arrived.add, len(tickets)))
  while len(arrived) < len(tickets):
    engine.step()
  for ticket in tickets:
    engine.cancel(ticket)
  return [int(ticket.get(0).tokens[0]) for ticket in tickets]


def first_increments(sampler: Sampler, prompts: Any, number: int) -> list[int]:
  stream = sampler.stream(prompts(1000 + number), 128, eos_tokens=[])
  found = {new.row: int(new.tokens[0]) for new, _ in zip(stream, prompts(0))}
  return [found[row] for row in sorted(found)]


def case_group(args: argparse.Namespace):
  model, options = random_model(args), {"num_samples": 8, "temperature": 1.0}
  engine, sampler = engine_of(model, 8, 576), Sampler(model, Ids())
  sample = partial(sampler, max_generation_steps=16, eos_tokens=[], **options)
  prompts = partial(random_prompts, args, [512])
  jobs = {
    "engine": lambda n: complete(engine, prompts(n), [16], seed=n, **options),
    "padded": lambda n: sample(prompts(n), seed=n).tokens,
  }
  figures = compare(jobs, args.passes, 8 * 16)
  share = engine.stats().prefilled_tokens / (WARM + args.passes) / 512
  yield {"prefilled_over_prompt": round(share, 3), **figures}


def case_turns(args: argparse.Namespace):
  engine, text = engine_of(random_model(args), 8, 1024), np.zeros(0, np.int32)
  for question in random_prompts(args, [48] * 8, 0):
    text = np.concatenate([text, question])
    text = np.concatenate([text, *complete(engine, [text], [64])])
  prefilled = engine.stats().prefilled_tokens  # without answers: they were drawn
  figures = {"prefilled": prefilled, "questions": 8 * 48, "distinct": len(text)}
  yield {**figures, "over_distinct": round(prefilled / len(text), 3)}


def case_copy(args: argparse.Namespace):
  new, sampled = 128, {"temperature": 1.0, "seed": 0}
  for text in ("copied", "edited", "misleading", "random"):
    model = random_model(args) if text == "random" else counting_model(args)
    options = sampled if text == "random" else {}

    def job(engine, number, text=text, options=options):
      rng = np.random.default_rng(number)
      prompts = [copy_prompt(text, args.vocab, new, rng) for _ in range(args.slots)]
      return complete(engine, prompts, [new] * args.slots, **options)

    lookup = engine_of(model, args.slots, 1024, draft_tokens=args.draft)
    off = engine_of(model, args.slots, 1024)
    jobs = {"lookup": partial(job, lookup), "off": partial(job, off)}
    figures = compare(jobs, args.passes, new * args.slots)
    drafts = lookup.stats().draft_tokens, lookup.stats().accepted_tokens
    yield {"text": text, "proposed_accepted": drafts, **figures}


def copy_prompt(text: str, vocab: int, count: int, rng: Any) -> np.ndarray:
  """Returns a document, a question, and the first two tokens of a completion.

  The completion counts on for `count` tokens. "copied": it is the document; "edited":
  but for one token of 24; "misleading": in the document something else follows each two
  tokens of it; "random": neither counts.
  """
  answer = (rng.integers(vocab) + np.arange(count + 2)) % vocab
  noise = rng.integers(0, vocab, count + 1)
  document = noise if text == "random" else answer.copy()
  if text == "edited":
    document[12::24] = rng.integers(0, vocab, len(document[12::24]))
  if text == "misleading":
    document = np.stack([answer[:-1], answer[1:], noise], axis=1).ravel()
  return np.concatenate([document, noise[:16], answer[:2]])


def case_host(args: argparse.Namespace):
  """Measures the CPU time of the thread that steps the engine. Programs run in other
  threads while this one sleeps. `share` is that of all CPU time: other work on the
  machine makes a launch longer, and changes this share little."""
  (sizes, lengths), rows = ragged_sizes(args.requests), []
  clocks = time.perf_counter, time.process_time, time.thread_time
  now = lambda: np.array([clock() for clock in clocks])
  engine = engine_of(random_model(args), args.slots, 512)
  for number in range(WARM + args.passes):
    before, prompts = engine.stats().launches, random_prompts(args, sizes, number)
    begun = now()
    complete(engine, prompts, lengths)
    rows.append((now() - begun) / (engine.stats().launches - before) * 1e3)
  medians = np.median(rows[WARM:], axis=0).round(2).tolist()
  names = ("launch_ms", "launch_cpu_ms", "host_ms")
  share = spread([host / cpu for _, cpu, host in rows[WARM:]])
  yield {**dict(zip(names, medians)), "share": share}


def case_first(args: argparse.Namespace):
  """Loads may differ in what they compile, so each engine starts without programs."""
  model, (sizes, lengths) = random_model(args), ragged_sizes(args.requests)
  warm_ups = {"none": None, "warm_up": {}, "all_widths": {"all_widths": True}}
  for name, options in warm_ups.items():
    jax.clear_caches()
    engine, marks = engine_of(model, args.slots, 512), [time.perf_counter()]
    if options is not None:
      engine.warm_up(**options)
    marks.append(time.perf_counter())
    for number in range(WARM + args.passes):
      complete(engine, random_prompts(args, sizes, number), lengths)
      marks.append(time.perf_counter())
    engine.close()
    warm_up_s, *loads_s = np.diff(marks).round(2).tolist()
    ratio = round(loads_s[0] / loads_s[-1], 2)  # a thread compiles beside some loads
    row = {"warm_up_s": warm_up_s, "loads_s": loads_s, "first_to_last": ratio}
    yield {"warm_up": name, **row}


def main() -> None:
  args = arguments()
  for case in args.cases or CASES:
    for figures in globals()[f"case_{case}"](args):
      row = {"case": case, **figures, "load": round(os.getloadavg()[0], 2)}
      print(json.dumps(row), flush=True)


if __name__ == "__main__":
  main()
