"""Samples with an SGLang-JAX server, over its native HTTP interface.

Written for sglang-jax 0.0.1.post1, which pins other versions of JAX and Flax than ours:
the server has an environment of its own, and nothing of it is imported. Tested against
a fake of that interface, not against the engine. Every completion is one request; the
server shares the prefix of those of one prompt.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunix.generate import engine_rows, outputs
from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.generate.engine_http import Client
from tunix.generate.engine_rows import EngineError
from tunix.generate.options import SamplingOptions
from tunix.generate.outputs import Row, find_stop
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

  name = "SGLang-JAX"
  not_honoured = frozenset(
    {
      *("return_logits", "forbidden_tokens", "beam_size", "exact"),
      *("seed", "first_prompt", "eos_tokens"),
    }
  )

  def _sample(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> SamplerOutput:
    """`engine_options` are more of the engine's sampling parameters, such as
    {"regex": "[0-9]+"}. An empty list of `eos_tokens` is honoured, other ids are not.

    Returns: as `Sampler`. The engine's log-probs are under softmax(logits /
      temperature): at another temperature than 1 `logprobs` is None.

    Raises:
      ValueError: log-probs of filtered draws at another temperature than 1; or what the
        server refuses, in its words.
      EngineError: the server is dead, late, or answers what cannot be used.
    """
    is_scaled = options.temperature not in (0, 1)
    if options.return_logprobs and is_scaled and options.filters:
      raise ValueError(
        f"SGLang-JAX does not honour return_logprobs of draws filtered by "
        f"{', '.join(options.filters)} at temperature {options.temperature}: leave the "
        "filters out, or sample at temperature 1"
      )
    bodies = self._bodies(prompts, options)
    answers = self._client.ask_all("/generate", bodies)
    rows = [self._row(answer, options) for answer in answers]
    return outputs.sampler_output(self.tokenizer, prompts, rows, options)

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
    with engine_rows.weights_folder(source, self._weights_dir) as folder:
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
      "stop_token_ids": self._eos_ids(options),
      "ignore_eos": options.eos_tokens is not None,  # it is empty: others are refused
    }
    engine_rows.check_engine_options(options, (*common, "max_new_tokens", "n"))
    return [
      {
        "input_ids": prompt.tolist(),
        "sampling_params": {
          **common,
          **options.engine_options,
          "max_new_tokens": int(limit),
        },
        # The ids come with the log-probs only.
        "return_logprob": True,
      }
      for prompt, limit in zip(prompts, options.limits(len(prompts)))
      for _ in range(options.num_samples)
    ]

  def _row(self, answer: Any, options: SamplingOptions) -> Row:
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
    # Before filters, but after the temperature.
    kind = "raw" if options.temperature == 1 else "processed"
    return engine_rows.row(tokens, logprobs, reason, options, kind)

  def _at_the_limit(self, tokens: Sequence[int], options: SamplingOptions) -> str:
    """The engine says "length" also when the last token that it may is an end."""
    if tokens[-1] in self._eos_ids(options):
      return "eos"
    ids = np.asarray(tokens, np.int32)
    end = find_stop(self.tokenizer.decode, ids, options.stops)
    return "length" if end is None else "stop"
