"""Sampler for an SGLang-JAX server, over its native HTTP interface.

This file is written for sglang-jax 0.0.1.post1, which needs other versions of JAX and
Flax than this package. The server therefore runs in its own environment, and SGLang-JAX
is not imported. The tests use a fake server, not the engine. Each completion is one
request; the server computes the common prefix of the requests of one prompt once.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunix.generate import outputs
from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.external import rows as engine_rows
from tunix.generate.external.http import Client
from tunix.generate.external.rows import EngineError
from tunix.generate.tokens import Completion
from tunix.models.transformer.model import Transformer


class SglangJaxSampler(BaseSampler):
  """A sampler whose model is in an SGLang-JAX server."""

  def __init__(
    self,
    url: str,
    tokenizer: object,
    *,
    timeout_s: float = 600.0,
    restart: Callable[[pathlib.Path], str] | None = None,
    weights_dir: str | os.PathLike[str] | None = None,
  ):
    """Connects to the server and checks that its model generates text.

    Args:
      url: http://host:port.
      tokenizer: the model's tokenizer (see BaseSampler).
      timeout_s: longest time to wait for an answer, in seconds.
      restart: function for `update_weights`. It ends the server, starts it on the
        folder of a model, and returns its address when it is ready. This release of
        the engine cannot take new weights while it runs.
      weights_dir: folder for the weights of `update_weights`; the server must see the
        same folder. None: the system's temporary folder.

    Raises:
      EngineError: no server answers.
      ValueError: the server's model does not generate text.
    """
    super().__init__(tokenizer)
    self._timeout_s = timeout_s
    self._restart = restart
    self._weights_dir = weights_dir
    self._connect(url)

  name = "SGLang-JAX"
  not_honoured = frozenset(
    {
      *("return_logits", "forbidden_tokens", "beam_size", "exact", "return_routes"),
      *("seed", "first_prompt", "eos_tokens", "images"),
    }
  )

  def _sample(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> SamplerOutput:
    """Sends one request per completion and collects the answers.

    `engine_options` are further sampling parameters of the engine, such as
    {"regex": "[0-9]+"}. An empty list of `eos_tokens` is honored; other ids are not.

    Returns:
      The output, as from `Sampler`. The engine's log-probs are under softmax(logits /
      temperature): at another temperature than 1 `logprobs` is None.

    Raises:
      ValueError: the call has `return_logprobs` with filters at another temperature
        than 1; or the server refuses the request, and its message is quoted.
      EngineError: the server does not run or does not answer in time, or its answer
        cannot be used.
    """
    is_scaled = options.temperature not in (0, 1)
    if options.return_logprobs and is_scaled and options.filters:
      raise ValueError(
        f"SGLang-JAX does not honor return_logprobs of draws filtered by "
        f"{', '.join(options.filters)} at temperature {options.temperature}: leave the "
        "filters out, or sample at temperature 1"
      )
    answers = self._client.ask_all("/generate", self._bodies(prompts, options))
    rows = [self._row(answer, options) for answer in answers]
    # The engine computes log-probs after the temperature and before the filters.
    kind = "raw" if options.temperature == 1 else "processed"
    return engine_rows.sampler_output(self.tokenizer, prompts, options, rows, kind)

  def update_weights(self, source: Transformer | str | os.PathLike[str]) -> None:
    """Restarts the server with other weights.

    Args:
      source: a model, which is written to a folder first with its adapters merged; or
        the folder of a model. The written folder holds no tokenizer: `restart` must
        give the server one.

    Raises:
      ValueError: the sampler was made without `restart`.
      EngineError: the new server does not answer.
    """
    if self._restart is None:
      raise ValueError(
        "restart is None; expected a function, because this release of SGLang-JAX "
        "cannot load weights while it runs. Give SglangJaxSampler a restart function"
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
    self, prompts: Sequence[np.ndarray], options: SamplingOptions
  ) -> list[dict[str, Any]]:
    """Returns the JSON body of each completion's request."""
    common = {
      "temperature": options.temperature,
      **engine_rows.filter_values(options, self.name, top_p=1.0, top_k=-1, min_p=0.0),
      "stop": list(options.stops),
      # `ignore_eos` would switch these ids off too, so it is set only if no id may end
      # a row. Without `eos_tokens`, the model's own ids also end a row. The only
      # accepted `eos_tokens` is an empty list; other ids are refused.
      "stop_token_ids": self._eos_ids(options),
      "ignore_eos": options.eos_tokens is not None,
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
        # The engine returns token ids only together with log-probs.
        "return_logprob": True,
      }
      for prompt, limit in zip(prompts, options.limits(len(prompts)))
      for _ in range(options.num_samples)
    ]

  def _row(self, answer: object, options: SamplingOptions) -> Completion:
    meta = answer.get("meta_info", {}) if isinstance(answer, dict) else {}
    entries = meta.get("output_token_logprobs")
    if not entries:
      raise EngineError(
        f"SGLang-JAX answered {str(answer)[:200]}, without output_token_logprobs"
      )
    logps = np.array([entry[0] for entry in entries], np.float32)
    tokens = np.array([entry[1] for entry in entries], np.int32)
    finish = meta.get("finish_reason") or {}
    if finish.get("type") not in ("stop", "length"):
      raise EngineError(f"SGLang-JAX ended a completion with {finish}")
    if finish["type"] == "length":
      reason = self._reason_at_limit(tokens, options)
    else:
      # `matched` is the stop string, or the id of the end-of-sequence token.
      reason = "stop" if isinstance(finish.get("matched"), str) else "eos"
    return Completion(ids=tokens, logps=logps, finish_reason=reason)

  def _reason_at_limit(self, tokens: np.ndarray, options: SamplingOptions) -> str:
    """Returns the finish reason of a row for which the engine returns "length".

    The engine checks the limit first. It returns "length" even if the last token is an
    end-of-sequence token or completes a stop string.
    """
    if tokens[-1] in self._eos_ids(options):
      return "eos"
    end = outputs.find_stop(self.tokenizer.decode, tokens, options.stops)
    return "length" if end is None else "stop"
