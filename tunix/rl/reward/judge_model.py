"""The language model that answers a judge's questions, and the answers that it gave.

The model is behind a server with OpenAI's chat completions, or in this process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import pathlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.data.reading import files
from tunix.generate.base_sampler import BaseSampler
from tunix.generate.decoders import decoders
from tunix.generate.engine_sampler import sampler_of
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models import automodel
from tunix.rl.reward.outcomes import Failed
from tunix.sandbox.errors import MAX_MESSAGE, message_of
from tunix.utils import attributes, checks, env
from tunix.utils.optional import require
from tunix.utils.record_file import RecordFile

_URL = "TUNIX_JUDGE_URL"
_PACKAGE = "openai", "a judge behind a server", "'tunix[judge]'"
_LONGEST_PAUSE_S = 60.0  # that the client makes between two attempts


@dataclasses.dataclass(kw_only=True, eq=False)
class JudgeModel:
  """The language model of a judge: one of `model`, `folder` and `sampler`.

  Attributes:
    model: name of the model at the server `url`.
    url: address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1. None:
      the variable TUNIX_JUDGE_URL, which may differ when a run is resumed.
    key_variable: variable of the environment that holds the server's key. None: no key.
    folder: Hugging Face folder or hub id of a model that runs in this process, on its
      first device.
    sampler: a sampler in this process, whose weights may change. Its answers are not
      kept.
    max_tokens: largest number of tokens of an answer.
    temperature: divisor of the logits; 0 is greedy. None: the server's default.
    options: further fields of each request to the server, by its names.
    concurrency: largest number of requests at the same time.
    timeout_s: seconds that an attempt may take.
    retries: further attempts after a time-out, a lost connection, or a status of 408,
      409, 429 or at least 500, with pauses of up to 8 s or as the server asks for.
    cache: folder that keeps the answers for several runs. None: the folder of the run.

  Raises:
    FileNotFoundError: there is no such folder.
    ImportError: the package `openai` is missing.
    ValueError: not exactly one model is named, an option has no effect or is out of
      range, the address holds a secret, or its variable or that of the key is not set.
  """

  model: str | None = None
  url: str | None = None
  key_variable: str | None = None
  folder: str | None = None
  # Not stored here: the digest of a reward function covers what its fields call.
  sampler: dataclasses.InitVar[BaseSampler | None] = None
  max_tokens: int = 1024
  temperature: float | None = 0.0
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  concurrency: int = 16
  timeout_s: float = 120.0
  retries: int = 4
  cache: str | None = None

  def __post_init__(self, sampler: BaseSampler | None):
    checks.fields(
      self,
      max_tokens=checks.COUNT,
      temperature=checks.NOT_NEGATIVE,
      concurrency=checks.COUNT,
      timeout_s=checks.POSITIVE,
      retries=checks.NOT_NEGATIVE,
    )
    named = {"model": self.model, "folder": self.folder, "sampler": sampler}
    given = [name for name, value in named.items() if value is not None]
    if len(given) != 1:
      raise ValueError(
        f"a judge has {' and '.join(given) or 'no model'}; expected one of model (at a "
        "server), folder and sampler (in this process)"
      )
    # Both raise what is missing.
    if self.folder is not None:
      automodel.resolve_folder(self.folder)
    if self.model is not None:
      require(*_PACKAGE)
      self.connection()
    for name, value in attributes.of(self, ("url", "key_variable", "options")).items():
      if self.model is None and value:
        raise ValueError(
          f"{name} is {value!r} and model is not set; only a server has "
          f"it. Leave {name} out, or set model"
        )
    self.asker = Asker(self, sampler)

  def connection(self) -> tuple[str, str]:
    """Returns the address and the key of the server.

    Raises:
      ValueError: a variable is not set, or the address holds a secret.
    """
    if (url := self.url or env.value(_URL)) is None:
      raise ValueError(
        f"url is not set, and the variable {_URL} neither; expected the address of a "
        "server, such as http://127.0.0.1:8000/v1"
      )
    files.check_address("url", url)
    # A server without keys ignores the word.
    key = env.value(self.key_variable) if self.key_variable else "none"
    if key is None:
      raise ValueError(
        f"key_variable is {self.key_variable!r}, a variable that is not set. Set it to "
        "the server's key, or leave key_variable out"
      )
    return url, key

  def identity(self) -> list[Any]:
    """Returns the plain values that answers depend on; address and key do not."""
    name: Any = self.model
    if self.folder is not None:
      stats = {
        x.name: x.stat() for x in automodel.resolve_folder(self.folder).iterdir()
      }
      name = sorted((file, x.st_size, x.st_mtime_ns) for file, x in stats.items())
    return [name, self.max_tokens, self.temperature, sorted(self.options.items())]


@dataclasses.dataclass(frozen=True)
class Answer:
  """An answer of a judge.

  Attributes:
    text: the answer with its reasoning.
    finish_reason: "length" if a limit has cut it, else "stop" or a server's word.
    prompt_tokens, completion_tokens: its cost, in tokens.
  """

  text: str
  finish_reason: str
  prompt_tokens: int
  completion_tokens: int


class Asker:
  """Asks the questions that were not asked before.

  Args:
    model: the settings.
    sampler: answers in place of a server; None: the folder's, if there is one.
  """

  def __init__(self, model: JudgeModel, sampler: BaseSampler | None):
    self._model, self._sampler = model, sampler
    self._kept = _Kept(model)
    self._keeps = sampler is None
    self._spent = (0, 0)
    if model.cache is not None:
      self.keep_in(pathlib.Path(model.cache).expanduser())

  def keep_in(self, folder: pathlib.Path) -> None:
    """Keeps answers in a folder, if the judge has none and is no sampler.

    Raises:
      RecordError: a file in the folder is damaged.
    """
    if self._keeps and self._kept.folder is None:
      self._kept.open(folder)

  def take_tokens(self) -> tuple[int, int]:
    """Returns the tokens of prompts and of answers since the last call.

    Answers that were kept cost nothing.
    """
    spent, self._spent = self._spent, (0, 0)
    return spent

  async def ask(self, questions: Sequence[str]) -> dict[str, Answer | Failed]:
    """Returns the answer to each question, or why there is none."""
    kept = {question: self._kept.get(question) for question in questions}
    new = [question for question, answer in kept.items() if answer is None]
    ask = self._ask_here if self._model.model is None else self._ask_server
    answers = iter(await ask(new) if new else ())
    return {question: kept[question] or next(answers) for question in questions}

  def _note(self, question: str, answer: Answer) -> Answer:
    self._kept.add(question, answer)  # at once: a killed run shall not pay again
    prompts, completions = self._spent
    self._spent = prompts + answer.prompt_tokens, completions + answer.completion_tokens
    return answer

  async def _ask_server(self, questions: Sequence[str]) -> list[Answer | Failed]:
    openai, model = require(*_PACKAGE), self._model
    url, key = model.connection()
    fields = {} if model.temperature is None else {"temperature": model.temperature}
    # The client limits each read, and a server may send a byte now and then.
    limit = (model.retries + 1) * (model.timeout_s + _LONGEST_PAUSE_S)
    gate = asyncio.Semaphore(model.concurrency)

    # A server may repeat the key in an error, and an error goes to logs and journals.
    def hidden(text):
      return text.replace(key, "***") if model.key_variable else text

    async def one(question: str) -> Answer | Failed:
      try:
        async with gate, asyncio.timeout(limit):
          reply = await client.chat.completions.create(
            model=model.model,
            messages=[{"role": "user", "content": question}],
            max_completion_tokens=model.max_tokens,
            extra_body=dict(model.options),
            **fields,
          )
        answer = _answer_of(reply)
        answer = dataclasses.replace(answer, text=hidden(answer.text))
        return self._note(question, answer)
      except (openai.OpenAIError, TimeoutError, ValueError) as error:
        text = " ".join(hidden(message_of(error))[:MAX_MESSAGE].split())
        return Failed(f"{type(error).__name__}: {text}")

    async with openai.AsyncOpenAI(
      api_key=key, base_url=url, timeout=model.timeout_s, max_retries=model.retries
    ) as client:
      return await asyncio.gather(*map(one, questions))

  async def _ask_here(self, questions: Sequence[str]) -> list[Answer | Failed]:
    if (sampler := self._sampler) is None:
      folder, most = self._model.folder or "", self._model.max_tokens
      loaded = automodel.AutoModel.from_pretrained(folder)
      tokenizer = TokenizerAdapter.from_pretrained(folder)
      sampler = self._sampler = sampler_of(loaded, tokenizer, frozen=True)
    most, tokenizer = self._model.max_tokens, sampler.tokenizer
    room = decoders.max_positions(getattr(sampler, "transformer", None))
    too_long = Failed(f"the question is too long; the judge has {room} positions")
    answers: dict[str, Answer | Failed] = dict.fromkeys(questions, too_long)
    ids = {q: sampler.tokenize(_rendered(tokenizer, q)) for q in questions}
    fits = [q for q in questions if room is None or len(ids[q]) + most <= room]
    if fits:
      drawn = {"temperature": self._model.temperature or 0.0, "seed": 0}
      out = sampler([ids[q] for q in fits], most, **drawn)
      rows = zip(fits, out.text, out.finish_reasons, out.tokens)
      for q, text, reason, tokens in rows:
        reason = "length" if reason == "length" else "stop"
        answers[q] = self._note(q, Answer(text, reason, len(ids[q]), len(tokens)))
    return list(answers.values())


class _Kept:
  """Answers by the digest of their question, in files that survive a kill.

  Each judge of each process adds to a file of its own, so runs may share a folder.
  """

  def __init__(self, model: JudgeModel):
    self._model, self.folder = model, None
    self._places: dict[str, tuple[RecordFile, int]] = {}

  def open(self, folder: pathlib.Path) -> None:
    self.folder, self._identity = folder, self._model.identity()
    self._file: RecordFile | None = None
    for path in sorted(folder.glob("*.answers")):
      file = RecordFile(path, reads=True)
      for offset, record in file.placed():
        self._places.setdefault(json.loads(record)["question"], (file, offset))
      file.close()

  def get(self, question: str) -> Answer | None:
    if self.folder is None or (at := self._places.get(self._digest(question))) is None:
      return None
    fields = json.loads(at[0].at(at[1]))
    return Answer(**{f.name: fields[f.name] for f in dataclasses.fields(Answer)})

  def add(self, question: str, answer: Answer) -> None:
    if self.folder is None:
      return
    if self._file is None:
      self._file = RecordFile(self.folder / f"{secrets.token_hex(8)}.answers")
    digest = self._digest(question)
    record = {"question": digest, **dataclasses.asdict(answer)}
    self._places[digest] = self._file, self._file.append(json.dumps(record).encode())

  def _digest(self, question: str) -> str:
    asked = json.dumps([self._identity, question], default=str)
    return hashlib.sha256(asked.encode()).hexdigest()


def _answer_of(reply: object) -> Answer:
  """Reads an answer of the server, whose form the client does not check.

  Raises:
    ValueError: it has no text.
  """
  choices: Any = getattr(reply, "choices", None) or [None]
  text = getattr(getattr(choices[0], "message", None), "content", None)
  if not isinstance(text, str):
    raise ValueError("the server's answer has no text")

  def count(name):
    return getattr(getattr(reply, "usage", None), name, None) or 0

  cost = count("prompt_tokens"), count("completion_tokens")
  return Answer(text, str(choices[0].finish_reason), *cost)


def _rendered(tokenizer: TokenizerAdapter, question: str) -> str:
  """Returns a question as a turn of the user; as it is without a chat template."""
  if not tokenizer.has_chat_template():
    return question
  return tokenizer.apply_chat_template([{"role": "user", "content": question}])
