"""The task of the notebooks: sums with an answer in brackets.

    from tunix.examples.sums import Sums, plot

    task = Sums()
    result = tunix.sft(model=task.base(steps=200), data=task.train, **task.options)
    print(task.accuracy(result.model))

A small model reads `3+8=` and answers `[11]`. A real model reads a question in words.
Both answer without reasoning: `tokenizer` has a chat template with `enable_thinking`
false, in training rows, prompts, rollouts and evaluations alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import pathlib
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from tunix.cli import one_call
from tunix.data import chat
from tunix.examples.quickstart.task import make_tokenizer
from tunix.generate.sampler import Sampler
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.automodel import AutoModel
from tunix.models.llama3.model import ModelConfig
from tunix.models.safetensors_saver import save_pretrained
from tunix.models.transformer.model import Transformer

Record = dict[str, Any]
Answer = Callable[[int, int], str]

# A small chat template in the form of Qwen3's. The last answer has a block of
# reasoning, which is empty here. A prompt ends with this empty block only if
# `enable_thinking` is false.
TEMPLATE = (
  "{%- for message in messages -%}{{ '<' + message.role + '>' }}"
  "{%- if message.role == 'assistant' and loop.last -%}{{ '<think></think>' }}"
  "{%- endif -%}{{ message.content + '<end>' }}{%- endfor -%}"
  "{%- if add_generation_prompt -%}{{ '<assistant>' }}"
  "{%- if enable_thinking is defined and not enable_thinking -%}"
  "{{ '<think></think>' }}{%- endif -%}{%- endif -%}"
)
_WORDS = ("<user>", "<assistant>", "<think>", "</think>")
_HELD_OUT = 64


def bracketed(a: int, b: int) -> str:
  """Returns the usual answer, such as `[8]`."""
  return f"[{a + b}]"


@dataclasses.dataclass(frozen=True)
class Sums:
  """Records of sums, a tokenizer, a base model, and the accuracy of answers.

  Attributes:
    tiny: if True, sums of two digits for a fresh model of about 100,000 weights, which
      learns them in seconds on a CPU. If False, sums of numbers below 100 for `model`.
    model: hub id or folder of the model if `tiny` is False.
  """

  tiny: bool = True
  model: str = "Qwen/Qwen3-0.6B"

  @functools.cached_property
  def _sums(self) -> list[tuple[int, int]]:
    terms = range(10 if self.tiny else 100)
    sums = [(a, b) for a in terms for b in terms]
    random.Random(0).shuffle(sums)
    return sums

  @property
  def train(self) -> list[Record]:
    """Records to train on: {"prompt", "response", "answer"}."""
    return self.records()

  @property
  def held_out(self) -> list[Record]:
    """Records that `train` does not have: an eighth of all sums, 64 at most."""
    return self.records(held_out=True)

  def records(
    self, answer: Answer = bracketed, *, held_out: bool = False
  ) -> list[Record]:
    """Returns records with another form of answers.

    Args:
      answer: function of both terms that returns the text of the answer.
      held_out: return the held-out sums instead of those to train on.
    """
    rest = [sums for i, sums in enumerate(self._sums) if i % 8]
    chosen = self._sums[::8][:_HELD_OUT] if held_out else rest
    return [
      {"prompt": self._question(a, b), "response": answer(a, b), "answer": a + b}
      for a, b in chosen
    ]

  def _question(self, a: int, b: int) -> str:
    if self.tiny:
      return f"{a}+{b}="
    return f"What is {a} + {b}? Answer with the number in brackets, like [7]."

  @functools.cached_property
  def tokenizer(self) -> TokenizerAdapter:
    """The tokenizer, whose chat template leaves reasoning out."""
    no_reasoning = {"enable_thinking": False}
    if not self.tiny:
      return TokenizerAdapter.from_pretrained(self.model, template_args=no_reasoning)
    plain = make_tokenizer(_WORDS)
    # As Qwen3's, the tokenizer has no BOS token.
    return TokenizerAdapter(
      plain, chat_template=TEMPLATE, bos_token="", template_args=no_reasoning
    )

  @property
  def max_prompt_length(self) -> int:
    """Tokens of the longest prompt, rounded up."""
    return 12 if self.tiny else 64

  @property
  def max_answer_length(self) -> int:
    """Tokens of the longest answer, with room for other forms of answers."""
    return 12 if self.tiny else 32

  @property
  def options(self) -> dict[str, Any]:
    """Keyword arguments of every job: the tokenizer, and a mesh of all devices."""
    return {"tokenizer": self.tokenizer, "mesh": {"fsdp": -1}}

  @property
  def max_length(self) -> int:
    """Tokens of a training row."""
    return self.max_prompt_length + self.max_answer_length

  def fresh_model(self, *, layers: int = 2, seed: int = 0) -> Transformer:
    """Returns a small model with random weights."""
    config = ModelConfig(
      num_layers=layers,
      vocab_size=self.tokenizer.vocab_size,
      embed_dim=64,
      hidden_dim=128,
      num_heads=4,
      num_kv_heads=4,
      head_dim=16,
      tie_embeddings=True,
    )
    return AutoModel.from_config(config, seed=seed)

  def base(self, steps: int, answer: Answer = bracketed) -> str:
    """Returns the model that a notebook starts from: `model`, or a small base model.

    The small base model is a fresh one after `steps` steps of `tunix.sft`. With more
    steps it knows more sums.

    Args:
      steps: steps of the small model; a real model is not trained.
      answer: form of the answers that the small model learns.

    Returns:
      A hub id or a folder in Hugging Face format.
    """
    if not self.tiny:
      return self.model
    folder = pathlib.Path(tempfile.mkdtemp(prefix="base-"))
    with contextlib.redirect_stdout(io.StringIO()):
      result = one_call.sft(
        model=self.fresh_model(),
        data=self.records(answer),
        tokenizer=self.tokenizer,
        max_length=self.max_length,
        global_batch_size=32,
        learning_rate=2e-3,
        max_steps=steps,
        logging={"progress_bar": False},
      )
    end = {"eos_token_id": self.tokenizer.eos_id()}
    save_pretrained(result.model, folder, hf_fields=end)
    self.tokenizer.save(folder)
    return str(folder)

  def load(self, folder: str) -> Transformer:
    """Returns the model of a folder or hub id; a real one computes in bfloat16."""
    return AutoModel.from_pretrained(folder, dtype=None if self.tiny else "bfloat16")

  def answers(
    self, model: Transformer | str, records: Sequence[Record] | None = None
  ) -> list[str]:
    """Returns greedy answers.

    Args:
      model: model, folder or hub id.
      records: records with a prompt; None: `held_out`.
    """
    model = self.load(model) if isinstance(model, str) else model
    prompts = [
      chat.render_completion(record["prompt"], None, self.tokenizer).prompt.tolist()
      for record in (self.held_out if records is None else records)
    ]
    steps = self.max_answer_length
    out = Sampler(model, self.tokenizer)(prompts, steps, self.max_prompt_length)
    return [text.strip() for text in out.text]

  def accuracy(self, model: Transformer | str, answer: Answer = bracketed) -> float:
    """Returns the share of held-out sums with exactly the text of `answer`."""
    records = self.records(answer, held_out=True)
    right = [r["response"] for r in records]
    answers = self.answers(model, records)
    return sum(map(str.__eq__, answers, right)) / len(right)

  def show(self, model: Transformer | str, count: int = 4) -> dict[str, str]:
    """Returns {prompt: greedy answer} of some held-out sums."""
    records = self.held_out[:count]
    prompts = [record["prompt"] for record in records]
    return dict(zip(prompts, self.answers(model, records)))


def plot(unit: str, **curves: Any) -> None:
  """Plots training curves on one axis.

  Args:
    unit: label of the vertical axis.
    **curves: by name, values of successive steps, or (steps, values) as in
      `JobResult.history`.
  """
  import matplotlib.pyplot as plt

  _, axes = plt.subplots(figsize=(5, 2.4), dpi=80)
  for name, values in curves.items():
    pair = values if isinstance(values, tuple) else (range(len(values)), values)
    axes.plot(*pair, label=name.replace("_", " "))
  axes.set_xlabel("step")
  axes.set_ylabel(unit)
  axes.grid(alpha=0.3)
  axes.legend(frameon=False)
  plt.show()
