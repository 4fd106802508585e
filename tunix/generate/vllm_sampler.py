"""Samples with a vLLM server, over its OpenAI-compatible HTTP interface.

Nothing of vLLM is imported: the server has an environment of its own. Every prompt is
one request, with token ids in and out; the server batches them. `vllm_server` starts
one on this machine.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from tunix.generate import engine_rows, outputs
from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.generate.engine_http import Client, Refused
from tunix.generate.engine_rows import EngineError, LogprobKind
from tunix.generate.options import SamplingOptions
from tunix.generate.outputs import Row
from tunix.models.transformer.model import Transformer


class VllmSampler(BaseSampler):
  """A sampler whose model lives in a vLLM server.

  Attributes:
    model: the name that the server knows the model by.
    logprob_kind: "raw" or "processed", see `engine_rows.LogprobKind`.
  """

  def __init__(
    self,
    url: str,
    tokenizer: Any,
    *,
    model: str | None = None,
    logprob_kind: LogprobKind | None = None,
    timeout_s: float = 600.0,
    weights_dir: str | os.PathLike[str] | None = None,
  ):
    """Asks the server what it serves.

    Args:
      url: http://host:port.
      tokenizer: the model's (see BaseSampler).
      model: the served name; None: the only one.
      logprob_kind: what the server was started with, `--logprobs-mode raw_logprobs` or
        `processed_logprobs`. None asks the server, which says it in development mode
        (VLLM_SERVER_DEV_MODE=1) only.
      timeout_s: seconds that any answer may take.
      weights_dir: where `update_weights` writes; the server must see the same folder.
        None: the system's temporary one.

    Raises:
      EngineError: no server answers.
      ValueError: it serves another model, or several, or does not say its kind of
        log-probs.
    """
    super().__init__(tokenizer)
    self._client = Client(url, timeout_s)
    self._weights_dir = weights_dir
    self.model = self._served(model)
    self.logprob_kind: LogprobKind = logprob_kind or self._kind()

  name = "vLLM"
  not_honoured = frozenset({"return_logits", "forbidden_tokens", "beam_size", "exact"})

  def _sample(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> SamplerOutput:
    """`engine_options` are more fields of vLLM's request, such as
    {"structured_outputs": {"regex": "[0-9]+"}}.

    Returns: as `Sampler`; of the two kinds of log-probs the one that the server does
      not give is None, unless both are the same. Draws are reproducible from `seed`
      as far as the engine is, and differ from those of `Sampler`.

    Raises:
      ValueError: what the server refuses, in its words.
      EngineError: the server is dead, late, or answers without token ids.
    """
    bodies = self._bodies(prompts, options)
    answers = self._client.ask_all("/v1/completions", bodies)
    rows = [row for answer in answers for row in self._rows(answer, options)]
    return outputs.sampler_output(self.tokenizer, prompts, rows, options)

  def update_weights(self, source: Transformer | str | os.PathLike[str]) -> None:
    """Gives the server new weights of the same architecture.

    Args:
      source: a model, which is written to a folder first (adapters merged); or a
        folder with safetensors that the server can read.

    Raises:
      FileNotFoundError: the folder holds no safetensors.
      ValueError: the server is not in development mode.
      EngineError: loading failed; vLLM does not survive that.
    """
    with engine_rows.weights_folder(source, self._weights_dir) as folder:
      self._load(folder)

  def _load(self, folder: pathlib.Path) -> None:
    # vLLM takes a folder that is not there for a name on the hub, and dies.
    if not any(folder.glob("*.safetensors")):
      raise FileNotFoundError(f"{folder} holds no safetensors: give a model's folder")
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    try:
      self._client.ask("POST", "/collective_rpc", call)
      # Cached prompts were computed with the old weights.
      cleared = self._client.ask("POST", "/reset_prefix_cache")
    except Refused as error:
      if error.status != 404:
        raise
      raise ValueError(
        f"{self._client.url} takes no weights: start it with VLLM_SERVER_DEV_MODE=1"
      ) from error
    if not (isinstance(cleared, dict) and cleared.get("success", True)):
      raise EngineError(
        f"{self._client.url} has new weights and kept prompts of the old ones in its "
        "cache: wait for its running requests, then update again"
      )

  def _served(self, wanted: str | None) -> str:
    answer = self._client.ask("GET", "/v1/models")
    names = [str(entry["id"]) for entry in answer["data"]]
    if wanted is None and len(names) == 1:
      return names[0]
    if wanted is None or wanted not in names:
      raise ValueError(
        f"{self._client.url} serves {names}, not {wanted!r}: give model="
      )
    return wanted

  def _kind(self) -> LogprobKind:
    try:
      info = self._client.ask("GET", "/server_info?config_format=json")
      mode = info["vllm_config"]["model_config"]["logprobs_mode"]
    except (Refused, KeyError, TypeError) as error:
      raise ValueError(
        f"{self._client.url} does not say what its log-probs are: give logprob_kind="
        "'raw' or 'processed', as it was started, or start it with "
        "VLLM_SERVER_DEV_MODE=1"
      ) from error
    kinds: dict[str, LogprobKind]
    kinds = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
    if mode not in kinds:
      raise ValueError(
        f"{self._client.url} gives {mode}: start it with --logprobs-mode raw_logprobs "
        "or processed_logprobs"
      )
    return kinds[mode]

  def _bodies(
    self,
    prompts: Sequence[np.ndarray],
    options: SamplingOptions,
  ) -> list[dict[str, Any]]:
    """A request a prompt."""
    greedy = options.temperature == 0
    filters = options.filters
    common = {
      "model": self.model,
      # Greedy samples of a prompt are equal; vLLM refuses more than one.
      "n": 1 if greedy else options.num_samples,
      "temperature": options.temperature,
      # Said, because the server's defaults come from the model's generation config.
      "top_p": filters.get("top_p", 1.0),
      "top_k": filters.get("top_k", 0),
      "min_p": filters.get("min_p", 0.0),
      "repetition_penalty": 1.0,
      "presence_penalty": 0.0,
      "frequency_penalty": 0.0,
      "stop": list(options.stops),
      "stop_token_ids": self._eos_ids(options),
      "ignore_eos": True,  # those above are all
      "return_token_ids": True,
      **({"logprobs": 0} if options.return_logprobs else {}),
    }
    per_prompt = ("prompt", "max_tokens", "seed", "stream", "echo")
    engine_rows.check_engine_options(options, (*common, *per_prompt))
    limits = options.limits(len(prompts))
    drawn = {} if greedy else {"seed": engine_rows.seeds(options, len(prompts))}
    return [
      {
        **common,
        **options.engine_options,
        **{name: values[i] for name, values in drawn.items()},
        "prompt": prompt.tolist(),
        "max_tokens": int(limits[i]),
      }
      for i, prompt in enumerate(prompts)
    ]

  def _rows(self, answer: Any, options: SamplingOptions) -> list[Row]:
    """The rows of a prompt."""
    count = 1 if options.temperature == 0 else options.num_samples
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != count:
      raise EngineError(f"vLLM answered {str(answer)[:200]}, not {count} completions")
    choices = sorted(choices, key=lambda choice: choice["index"])
    rows = [_row(choice, options, self.logprob_kind) for choice in choices]
    return rows * (options.num_samples // count)


def _row(choice: dict[str, Any], options: SamplingOptions, kind: LogprobKind) -> Row:
  tokens = choice.get("token_ids")
  if tokens is None:
    raise EngineError(
      "vLLM answered without token ids: it does not know return_token_ids; use a "
      "version from 0.11 on"
    )
  reason, why = choice.get("finish_reason"), choice.get("stop_reason")
  if reason not in ("stop", "length"):
    raise EngineError(
      f"vLLM ended a completion with {reason!r}, neither stop nor length"
    )
  if reason == "stop":
    reason = "stop" if isinstance(why, str) else "eos"
  logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
  if options.return_logprobs and (logprobs is None or len(logprobs) != len(tokens)):
    raise EngineError(
      f"vLLM answered {len(logprobs or ())} log-probs for {len(tokens)} tokens"
    )
  return engine_rows.row(tokens, logprobs, reason, options, kind)
