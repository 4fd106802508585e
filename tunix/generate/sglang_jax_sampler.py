"""Samples with an SGLang-JAX server, over its native HTTP interface.

Written for sglang-jax 0.0.1.post1, which pins other versions of JAX and Flax than ours:
the server has an environment of its own, and nothing of it is imported. Tested against
a fake of that interface, not against the engine. Every completion is one request; the
server shares the prefix of those of one prompt.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tunix.generate import engine_rows
from tunix.generate.base_sampler import BaseSampler, Prompt, SamplerOutput
from tunix.generate.completions import find_stop
from tunix.generate.engine_http import Client
from tunix.generate.engine_rows import EngineError, EngineRow
from tunix.generate.options import SamplingOptions
from tunix.models import safetensors_saver
from tunix.models.transformer.model import Transformer


class SglangJaxSampler(BaseSampler):
  """A sampler whose model lives in an SGLang-JAX server."""

  def __init__(
    self,
    url: str,
    tokenizer: Any,
    *,
    timeout_s: float = 600.0,
    restart: Callable[[pathlib.Path], str] | None = None,
    weights_dir: str | os.PathLike[str] | None = None,
  ):
    """Asks the server whether it generates.

    Args:
      url: http://host:port.
      tokenizer: the model's (see BaseSampler).
      timeout_s: seconds that any answer may take.
      restart: for `update_weights`: ends the server, starts it on a model's folder, and
        gives its address when it is ready. This release of the engine has no other way
        to take new weights.
      weights_dir: where `update_weights` writes; the server must see the same folder.
        None: the system's temporary one.

    Raises:
      EngineError: no server answers.
      ValueError: its model does not generate text.
    """
    super().__init__(tokenizer)
    self._timeout_s = timeout_s
    self._restart = restart
    self._weights_dir = weights_dir
    self._connect(url)

  def __call__(
    self,
    input_strings: str | Sequence[Prompt],
    max_generation_steps: int | Sequence[int],
    max_prompt_length: int | None = None,
    echo: bool = False,
    return_logits: bool = False,
    eos_tokens: Sequence[int] | None = None,
    forbidden_tokens: Sequence[int] | None = None,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    beam_size: int | None = None,
    seed: int | jax.Array | None = None,
    pad_output: bool = False,
    *,
    min_p: float | None = None,
    num_samples: int = 1,
    stop_strings: str | Sequence[str] = (),
    return_logprobs: bool = False,
    include_eos: bool = False,
    length_penalty: float = 1.0,
    first_prompt: int = 0,
    engine_options: Mapping[str, Any] | None = None,
  ) -> SamplerOutput:
    """Completes prompts; the arguments are those of `Sampler.__call__`, and:

    Args:
      engine_options: more of the engine's sampling parameters, such as
        {"regex": "[0-9]+"}.

    Returns: as `Sampler`. The engine's log-probs are under softmax(logits /
      temperature): at another temperature than 1 `logprobs` is None.

    Raises:
      TypeError: a prompt, or a stop string of another kind.
      ValueError: what the engine does not honour: return_logits, forbidden_tokens,
        beam_size, a seed for draws, end-of-sequence ids other than the model's own, or
        log-probs of filtered draws at another temperature than 1; an option out of its
        range; or what the server refuses, in its words.
      EngineError: the server is dead, late, or answers what cannot be used.
    """
    options = SamplingOptions(
      max_generation_steps=max_generation_steps,
      max_prompt_length=max_prompt_length,
      echo=echo,
      eos_tokens=eos_tokens,
      temperature=temperature,
      top_p=top_p,
      top_k=top_k,
      beam_size=beam_size,
      seed=seed,
      pad_output=pad_output,
      min_p=min_p,
      num_samples=num_samples,
      stop_strings=stop_strings,
      return_logprobs=return_logprobs,
      include_eos=include_eos,
      length_penalty=length_penalty,
      first_prompt=first_prompt,
    )
    scaled = temperature not in (0, 1) and bool(options.filters)
    refused = {
      "return_logits": return_logits,
      "beam_size": beam_size is not None,
      "forbidden_tokens": bool(len(forbidden_tokens or ())),
      "seed": seed is not None and temperature > 0,
      "first_prompt": bool(first_prompt),
      "eos_tokens": bool(len(eos_tokens or ())),
      "return_logprobs (of filtered draws)": return_logprobs and scaled,
    }
    engine_rows.refuse("SGLang-JAX", refused)
    prompts = engine_rows.prompts_of(self, input_strings, options)
    bodies = self._bodies(prompts, options, engine_options or {})
    answers = self._client.ask_all("/generate", bodies)
    rows = [self._row(answer, options) for answer in answers]
    # Before filters, but after the temperature.
    kind = "raw" if temperature == 1 else "processed"
    return engine_rows.output(self.tokenizer, prompts, options, rows, kind)

  def update_weights(self, source: Transformer | str | os.PathLike[str]) -> None:
    """Restarts the server with other weights.

    Args:
      source: a model, which is written to a folder first (adapters merged); or a
        model's folder. The folder of a model holds no tokenizer: `restart` must give
        the server one.

    Raises:
      ValueError: the sampler was made without `restart`.
      EngineError: the new server does not answer.
    """
    if self._restart is None:
      raise ValueError(
        "this release of SGLang-JAX takes no new weights while it runs: give "
        "SglangJaxSampler a restart function"
      )
    if isinstance(source, (str, os.PathLike)):
      self._connect(self._restart(pathlib.Path(source).absolute()))
      return
    with tempfile.TemporaryDirectory(dir=self._weights_dir) as parent:
      folder = pathlib.Path(parent).absolute() / "weights"
      safetensors_saver.save_pretrained(source, folder)
      self._connect(self._restart(folder))

  def _connect(self, url: str) -> None:
    self._client = Client(url, self._timeout_s)
    info = self._client.ask("GET", "/get_model_info")
    if not info.get("is_generation"):
      raise ValueError(
        f"{url} serves {info.get('model_path')}, which generates no text"
      )

  def _bodies(
    self,
    prompts: Sequence[np.ndarray],
    options: SamplingOptions,
    extra: Mapping[str, Any],
  ) -> list[dict[str, Any]]:
    """A request a row."""
    filters = options.filters
    common = {
      "temperature": options.temperature,
      "top_p": filters.get("top_p", 1.0),
      "top_k": filters.get("top_k", -1),
      "min_p": filters.get("min_p", 0.0),
      "stop": list(options.stops),
      # ignore_eos would switch these off too: the model's own ids always count.
      "stop_token_ids": list(self._eos(options)),
      "ignore_eos": options.eos_tokens is not None,  # an empty list: see `refused`
    }
    if taken := sorted((set(common) | {"max_new_tokens", "n"}) & set(extra)):
      raise ValueError(f"engine_options has {taken}: use the sampler's own arguments")
    return [
      {
        "input_ids": prompt.tolist(),
        "sampling_params": {**common, **extra, "max_new_tokens": int(limit)},
        # The ids come with the log-probs only.
        "return_logprob": True,
      }
      for prompt, limit in zip(prompts, options.limits(len(prompts)))
      for _ in range(options.num_samples)
    ]

  def _eos(self, options: SamplingOptions) -> Sequence[int]:
    return self.tokenizer.eos_ids() if options.eos_tokens is None else ()

  def _row(self, answer: Any, options: SamplingOptions) -> EngineRow:
    meta = answer.get("meta_info", {}) if isinstance(answer, dict) else {}
    known = meta.get("output_token_logprobs")
    if not known:
      raise EngineError(
        f"SGLang-JAX answered {str(answer)[:200]}, without output_token_logprobs"
      )
    logprobs, tokens = [x[0] for x in known], [int(x[1]) for x in known]
    finish = meta.get("finish_reason") or {}
    if finish.get("type") not in ("stop", "length"):
      raise EngineError(f"SGLang-JAX ended a completion with {finish}")
    if finish["type"] == "stop":
      reason = "stop" if isinstance(finish.get("matched"), str) else "eos"
    else:
      reason = self._at_the_limit(tokens, options)
    return EngineRow(tokens, logprobs, reason)

  def _at_the_limit(self, tokens: Sequence[int], options: SamplingOptions) -> str:
    """The engine says "length" also when the last token that it may is an end."""
    if tokens[-1] in self._eos(options):
      return "eos"
    found = options.stops and find_stop(
      self.tokenizer.decode, np.asarray(tokens, np.int32), options.stops
    )
    return "stop" if found else "length"
