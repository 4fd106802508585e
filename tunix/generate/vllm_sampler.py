"""Sampler for a vLLM server, through its OpenAI-compatible HTTP interface.

vLLM is not imported: the server runs in its own environment. Each prompt is one
request, with token ids in both directions; the server batches the requests.
`vllm_server` starts a server on this machine.
"""

from __future__ import annotations

import logging
import os
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from tunix.generate.base_sampler import BaseSampler, SamplerOutput
from tunix.generate.drawing.options import SamplingOptions
from tunix.generate.external import gpu_handles, rows as engine_rows
from tunix.generate.external.http import Client, Refused
from tunix.generate.external.rows import EngineError, LogprobKind
from tunix.generate.tokens import Completion
from tunix.models import families, safetensors_saver
from tunix.models.adapters import lora_modules
from tunix.models.adapters.lora_modules import CastError
from tunix.models.transformer.model import Transformer

_log = logging.getLogger(__name__)


class VllmSampler(BaseSampler):
  """A sampler whose model is in a vLLM server.

  Attributes:
    model: name of the model on the server.
    logprob_kind: "raw" or "processed", see `engine_rows.LogprobKind`.
  """

  def __init__(
    self,
    url: str,
    tokenizer: object,
    *,
    model: str | None = None,
    logprob_kind: LogprobKind | None = None,
    timeout_s: float = 600.0,
    weights_dir: str | os.PathLike[str] | None = None,
    weights: Literal["disk", "ipc"] = "disk",
  ):
    """Connects to the server and reads the name of its model.

    Args:
      url: http://host:port.
      tokenizer: the model's tokenizer (see BaseSampler).
      model: name of the model on the server. None: the only model it serves.
      logprob_kind: "raw" or "processed", as the server was started with
        `--logprobs-mode raw_logprobs` or `processed_logprobs`. None: the sampler reads
        it from the server, which must run in development mode (VLLM_SERVER_DEV_MODE=1).
      timeout_s: longest time to wait for an answer, in seconds.
      weights_dir: folder for the weights of `update_weights`; the server must see the
        same folder. None: the system's temporary folder.
      weights: how `update_weights` sends the weights of a model. "disk" writes them to
        `weights_dir`. "ipc" hands them over in the memory of the model's GPUs, which
        the server must share (docs/guides/engines.md). Folders are always read by the
        server.

    Raises:
      EngineError: no server answers.
      ImportError: `weights` is "ipc" and torch is not installed.
      ValueError: the server has no model of that name, or has several and `model` is
        None, or does not report its kind of log-probs; or `weights` is unknown, or
        "ipc" without a GPU or with `weights_dir`.
    """
    super().__init__(tokenizer)
    self._client = Client(url, timeout_s)
    if weights not in ("disk", "ipc"):
      raise ValueError(f"weights is {weights!r}; expected 'disk' or 'ipc'")
    if weights == "ipc" and weights_dir is not None:
      raise ValueError(
        f"weights is 'ipc' and weights_dir is {weights_dir!r}; expected one way. Leave "
        "weights_dir out"
      )
    self._weights_dir = weights_dir
    self._torch: Any = gpu_handles.torch_on_gpus() if weights == "ipc" else None
    self.model = self._served(model)
    self.logprob_kind: LogprobKind = logprob_kind or self._kind()

  name = "vLLM"
  not_honoured = frozenset(
    {
      *("return_logits", "forbidden_tokens", "beam_size", "exact", "return_routes"),
      "images",
    }
  )

  def _sample(
    self, prompts: list[np.ndarray], options: SamplingOptions
  ) -> SamplerOutput:
    """Sends one request per prompt and collects the completions.

    `engine_options` are further fields of vLLM's request, such as
    {"structured_outputs": {"regex": "[0-9]+"}}.

    Returns:
      The output, as from `Sampler`. A kind of log-probs that the server does not return
      is None. The same `seed` gives the same tokens only if the engine is
      deterministic; they differ from the tokens of `Sampler`.

    Raises:
      ValueError: the server refuses the request; its message is quoted.
      EngineError: the server does not run or does not answer in time, or its answer has
        no token ids.
    """
    answers = self._client.ask_all("/v1/completions", self._bodies(prompts, options))
    choices = [x for answer in answers for x in self._choices(answer, options)]
    rows = [_row(choice, options) for choice in choices]
    return engine_rows.sampler_output(
      self.tokenizer, prompts, options, rows, self.logprob_kind
    )

  def update_weights(self, source: Transformer | str | os.PathLike[str]) -> None:
    """Gives the server new weights of the same architecture.

    Args:
      source: a model, which is written to a folder first with its adapters merged; or
        a folder with safetensors that the server can read.

    Raises:
      FileNotFoundError: the folder holds no safetensors.
      ValueError: the server is not in development mode.
      EngineError: loading failed, which vLLM does not survive.
    """
    if self._torch is not None and isinstance(source, Transformer):
      self._hand_over(source)
    else:
      with engine_rows.weights_folder(source, self._weights_dir) as folder:
        self._load(folder)
    self._forget_prefixes()

  def _load(self, folder: pathlib.Path) -> None:
    # vLLM treats a missing folder as the name of a model on the hub, and then exits.
    if not any(folder.glob("*.safetensors")):
      raise FileNotFoundError(f"{folder} holds no safetensors: give a model's folder")
    call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    self._control("/collective_rpc", call)

  def _hand_over(self, model: Transformer) -> None:
    """Gives the server the weights of a model part by part, in the GPUs' memory."""
    errors: list[CastError] = []
    family = families.of_config(model.config)
    tensors = safetensors_saver.new_tensors(model, family, None, errors)
    devices = jax.tree.leaves(nnx.state(model))[0].devices()
    gpus = sorted({device.local_hardware_id or 0 for device in devices})
    self._control("/init_weight_transfer_engine", {"init_info": {"packed": True}})
    self._control("/start_weight_update")
    for part in gpu_handles.parts(tensors, self._torch, gpus):
      self._control("/update_weights", {"update_info": part})
    self._control("/finish_weight_update")
    self._torch.cuda.ipc_collect()
    lora_modules.report_errors(errors, None, _log)

  def _control(self, path: str, body: object = None) -> Any:
    """Calls one of the paths that the server may not have.

    Raises:
      ValueError: the server does not offer the path.
    """
    try:
      return self._client.ask("POST", path, body)
    except Refused as error:
      if error.status != 404:
        raise
      remedy = "VLLM_SERVER_DEV_MODE=1"
      if self._torch is not None:
        remedy += " VLLM_ALLOW_INSECURE_SERIALIZATION=1 and --weight-transfer-config "
        remedy += '\'{"backend": "ipc"}\''
      raise ValueError(
        f"{self._client.url} has no {path}, and cannot take weights. Start it with "
        f"{remedy}"
      ) from error

  def _forget_prefixes(self) -> None:
    # The prefix cache holds keys and values of the old weights.
    cleared = self._control("/reset_prefix_cache")
    if not (isinstance(cleared, dict) and cleared.get("success", True)):
      raise EngineError(
        f"{self._client.url} has new weights, but its prefix cache still has keys and "
        "values of the old weights. Wait until its requests have ended, then update "
        "again"
      )

  def _served(self, name: str | None) -> str:
    answer = self._client.ask("GET", "/v1/models")
    names = [str(entry["id"]) for entry in answer["data"]]
    if name is None and len(names) == 1:
      return names[0]
    if name is None or name not in names:
      raise ValueError(f"{self._client.url} serves {names}, not {name!r}: give model=")
    return name

  def _kind(self) -> LogprobKind:
    try:
      info = self._client.ask("GET", "/server_info?config_format=json")
      mode = info["vllm_config"]["model_config"]["logprobs_mode"]
    except (Refused, KeyError, TypeError) as error:
      raise ValueError(
        f"{self._client.url} does not report its kind of log-probs. Give logprob_kind="
        "'raw' or 'processed', as the server was started, or start it with "
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
    self, prompts: Sequence[np.ndarray], options: SamplingOptions
  ) -> list[dict[str, Any]]:
    """Returns the JSON body of each prompt's request."""
    is_greedy = options.temperature == 0
    common = {
      "model": self.model,
      # Greedy samples of a prompt are equal, and vLLM refuses more than one.
      "n": 1 if is_greedy else options.num_samples,
      "temperature": options.temperature,
      # Every value is written out: the server's defaults come from the model's
      # generation_config.json, which may hold filters and penalties.
      **engine_rows.filter_values(options, self.name, top_p=1.0, top_k=0, min_p=0.0),
      "repetition_penalty": 1.0,
      "presence_penalty": 0.0,
      "frequency_penalty": 0.0,
      "stop": list(options.stops),
      "stop_token_ids": self._eos_ids(options),
      "ignore_eos": True,  # `stop_token_ids` holds every id that ends a row.
      "return_token_ids": True,
      **({"logprobs": 0} if options.return_logprobs else {}),
    }
    per_prompt = ("prompt", "max_tokens", "seed", "stream", "echo")
    engine_rows.check_engine_options(options, (*common, *per_prompt))
    limits = options.limits(len(prompts))
    seeds = [] if is_greedy else engine_rows.seeds(options, len(prompts))
    return [
      {
        **common,
        **options.engine_options,
        **({"seed": seeds[i]} if seeds else {}),
        "prompt": prompt.tolist(),
        "max_tokens": int(limits[i]),
      }
      for i, prompt in enumerate(prompts)
    ]

  def _choices(self, answer: object, options: SamplingOptions) -> list[dict[str, Any]]:
    """Returns vLLM's record of each completion of a prompt."""
    count = 1 if options.temperature == 0 else options.num_samples
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != count:
      raise EngineError(f"vLLM answered {str(answer)[:200]}, not {count} completions")
    choices = sorted(choices, key=lambda choice: choice["index"])
    return choices * (options.num_samples // count)


def _row(choice: dict[str, Any], options: SamplingOptions) -> Completion:
  tokens, reason = choice.get("token_ids"), choice.get("finish_reason")
  if tokens is None:
    raise EngineError(
      "vLLM answered without token ids: it does not know return_token_ids; use a "
      "version from 0.11 on"
    )
  if reason not in ("stop", "length"):
    raise EngineError(
      f"vLLM ended a completion with {reason!r}, neither stop nor length"
    )
  # vLLM returns "stop" for both a stop string and an end-of-sequence token.
  # `stop_reason` is then the string, or the id of the token.
  if reason == "stop" and not isinstance(choice.get("stop_reason"), str):
    reason = "eos"
  logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
  if options.return_logprobs and len(logprobs) != len(tokens):
    raise EngineError(
      f"vLLM answered {len(logprobs)} log-probs for {len(tokens)} tokens"
    )
  return Completion(
    ids=np.asarray(tokens, np.int32),
    logps=np.asarray(logprobs, np.float32),
    finish_reason=reason,
  )
