"""`tunix generate`: continues prompts with a model, and an adapter if one is given."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from tunix.cli.arguments import Parser
from tunix.generate import tokenizer_files
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import lora
from tunix.models.automodel import AutoModel

_TOKENIZER = "tokenizer.json"
_SAMPLING = (
  *("temperature", "seed", "top_k", "top_p", "min_p", "num_samples", "stop_strings"),
  *("beam_size", "length_penalty"),
)


def main(argv: Sequence[str]) -> None:
  """Runs `tunix generate`.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: a number out of range, or --chat without a chat template.
  """
  args = _parse(argv)
  _check(args)
  tokenizer = _load_tokenizer(args)
  prompts = [_as_chat(text, tokenizer) if args.chat else text for text in args.prompt]
  model = AutoModel.from_pretrained(args.model, dtype=args.dtype)
  if args.adapter is not None:
    model = lora.load_adapter(model, args.adapter)
  sampler = Sampler(model, tokenizer)
  if args.stream:
    for part in sampler.stream(prompts, args.max_new_tokens, every=1, **_options(args)):
      print(part.text, end="", flush=True)
    print()
    return
  steps = args.max_new_tokens
  output = sampler(prompts, max_generation_steps=steps, **_options(args))
  for row, text in enumerate(output.text):
    if len(output.text) > 1:
      print(f"--- {args.prompt[row // (args.num_samples or 1)]}")
    print(text)


def _options(args: argparse.Namespace) -> dict[str, Any]:
  """What was asked for of the sampler's options; `SamplingOptions` checks it."""
  given = {name: getattr(args, name) for name in _SAMPLING}
  return {name: value for name, value in given.items() if value is not None}


def _load_tokenizer(args: argparse.Namespace) -> TokenizerAdapter:
  """The tokenizer that was named, else the adapter's if it has one, else the model's.

  An adapter may have been trained with another chat template than its model's.
  """
  if args.tokenizer is not None:
    return TokenizerAdapter.from_pretrained(args.tokenizer)
  if args.adapter is None or not (pathlib.Path(args.adapter) / _TOKENIZER).is_file():
    return TokenizerAdapter.from_pretrained(args.model)
  # What ends a generation stands in the model's own configuration.
  ends = tokenizer_files.read_eos_ids(pathlib.Path(args.model).expanduser())
  own = TokenizerAdapter.from_pretrained(args.adapter)
  return TokenizerAdapter(own, eos_ids=ends)


def _as_chat(text: str, tokenizer: TokenizerAdapter) -> str:
  return tokenizer.apply_chat_template([{"role": "user", "content": text}])


def _parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = Parser("tunix generate", (__doc__ or "").split(":", 1)[1].strip())
  parser.add_argument(
    "--model", metavar="FOLDER", required=True, help="Hugging Face folder"
  )
  parser.add_argument("--adapter", metavar="FOLDER", help="PEFT folder")
  parser.add_argument(
    "--tokenizer", metavar="FOLDER", help="the adapter's or the model's if not given"
  )
  parser.add_argument(
    "--prompt", metavar="TEXT", nargs="+", required=True, help="one or several"
  )
  parser.add_argument("--chat", action="store_true", help="prompts are a user's turns")
  parser.add_argument("--max_new_tokens", type=int, default=128, metavar="N")
  parser.add_argument(
    "--temperature", type=float, default=0.0, help="0, the default, is greedy"
  )
  parser.add_argument("--seed", type=int, help="repeats a sampled output")
  parser.add_argument(
    "--top_k", type=int, metavar="K", help="draw from the K most likely tokens"
  )
  parser.add_argument(
    "--top_p",
    type=float,
    metavar="P",
    help="draw from the most likely tokens that make up the probability P",
  )
  parser.add_argument(
    "--min_p",
    type=float,
    metavar="P",
    help="draw from tokens at least P times as likely as the best",
  )
  parser.add_argument(
    "--num_samples", type=int, metavar="N", help="completions a prompt"
  )
  parser.add_argument(
    "--stop",
    dest="stop_strings",
    metavar="TEXT",
    nargs="+",
    help="texts that end a completion",
  )
  parser.add_argument(
    "--beam_size", type=int, metavar="K", help="search with K beams, nothing is drawn"
  )
  parser.add_argument(
    "--length_penalty", type=float, help="above 1, longer beams win more often"
  )
  parser.add_argument(
    "--stream", action="store_true", help="print text as it comes; one completion"
  )
  parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
  return parser.parse_args(argv)


def _check(args: argparse.Namespace) -> None:
  if args.max_new_tokens < 1:
    raise ValueError(
      f"--max_new_tokens is {args.max_new_tokens}: it must be at least 1"
    )
  if args.seed is not None and not args.temperature:
    raise ValueError(
      "--seed is given and nothing is drawn at --temperature 0: raise the temperature, "
      "or leave the seed out"
    )
  if not args.temperature >= 0:
    raise ValueError(f"--temperature is {args.temperature}: it must not be negative")
  if args.stream and (len(args.prompt) > 1 or (args.num_samples or 1) > 1):
    raise ValueError("--stream prints one completion: give one prompt and no samples")
  if args.stream and args.beam_size is not None:
    raise ValueError("--stream cannot show beams, whose text changes to the end")
