"""`tunix generate`: continues prompts with a model, and an adapter if one is given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from tunix.cli import loading
from tunix.cli.arguments import Parser, add_sampling, check_sampling, sampling_options
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter


def main(argv: Sequence[str]) -> None:
  """Runs `tunix generate`.

  Raises:
    FileNotFoundError: there is no such model or adapter.
    ValueError: a number out of range, or --chat without a chat template.
  """
  args = _parse(argv)
  _check(args)
  tokenizer = loading.load_tokenizer(args.model, args.adapter, args.tokenizer)
  if args.chat and not tokenizer.has_chat_template():
    raise ValueError(
      "--chat is given and the tokenizer has no chat template: leave it out, or put "
      "a chat_template.jinja into the model's folder"
    )
  prompts = [_as_chat(text, tokenizer) if args.chat else text for text in args.prompt]
  model = loading.load_model(args.model, args.adapter, args.dtype)
  sampler = Sampler(model, tokenizer)
  if args.stream:
    for part in sampler.stream(
      prompts, args.max_new_tokens, every=1, **sampling_options(args)
    ):
      print(part.text, end="", flush=True)
    print()
    return
  steps = args.max_new_tokens
  output = sampler(prompts, max_generation_steps=steps, **sampling_options(args))
  for row, text in enumerate(output.text):
    if len(output.text) > 1:
      print(f"--- {args.prompt[row // (args.num_samples or 1)]}")
    print(text)


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
  add_sampling(parser)
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
  check_sampling(args)
  if args.stream and (len(args.prompt) > 1 or (args.num_samples or 1) > 1):
    raise ValueError("--stream prints one completion: give one prompt and no samples")
  if args.stream and args.beam_size is not None:
    raise ValueError("--stream cannot show beams, whose text changes to the end")
