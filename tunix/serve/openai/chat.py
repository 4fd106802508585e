"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tunix.data.images import Picture
from tunix.generate.answer_reader import AnswerReader
from tunix.generate.answers.formats import format_for
from tunix.generate.answers.pieces import Piece
from tunix.generate.tokenizer.template_limits import ChatTemplateError
from tunix.generate.tokens import Completion, Delta
from tunix.serve.http import forms
from tunix.serve.http.bodies import Call
from tunix.serve.http.errors import bad
from tunix.serve.http.fields import Fields
from tunix.serve.openai import logprobs
from tunix.serve.openai.context import Context, new_id
from tunix.serve.openai.images import read_images
from tunix.serve.openai.logprobs import Scored
from tunix.serve.openai.messages import read_messages, read_tools
from tunix.serve.openai.running import Part, Run
from tunix.serve.openai.sampling import read_sampling, read_top


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """A rendered conversation.

  Attributes:
    text: text of the prompt.
    ids: its token ids.
    pictures: its images.
    tools: JSON schemas of the arguments, by name of the tool.
  """

  text: str
  ids: list[int]
  pictures: Sequence[Picture]
  tools: Mapping[str, Any]


def read_prompt(fields: Fields, context: Context) -> Prompt:
  """Takes the fields of a conversation and renders it.

  Raises:
    ApiError: 400 if a field is malformed, the model has no chat template, or the
      template refuses the conversation.
  """
  tokenizer = context.tokenizer
  if not tokenizer.has_chat_template():
    raise bad(
      None,
      "this model has no chat template: use /v1/completions, or start the server with "
      "a template",
      "no_chat_template",
    )
  messages, tools = read_messages(fields), read_tools(fields)
  messages, pictures = read_images(messages, context)
  variables = fields.object("chat_template_kwargs")
  documents = fields.raw("documents")
  if tools and not tokenizer.reads_tools():
    raise bad(
      "tools",
      f"tools has {len(tools)} functions, and the chat template of this model prints "
      "none; expected no tools. Start the server with a template that prints them "
      "(chat_template.jinja in the model's folder), or describe them in a message",
      "unsupported_parameter",
    )
  adds = fields.flag("add_generation_prompt", True)
  fields.neutral(continue_final_message=(False,), add_special_tokens=(False,))
  context.check_size([messages, tools, documents, variables], "messages")
  try:
    tokenizer.check_template_variables(variables, "chat_template_kwargs")
    text = tokenizer.apply_chat_template(
      messages, adds, tools=tools or None, documents=documents, **variables
    )
  except (ChatTemplateError, TypeError, ValueError) as error:
    raise bad("messages", str(error), "chat_template_error") from error
  context.check_size(text, "messages")  # a template may print a text several times
  expanded = text
  if pictures:
    assert context.images is not None
    try:
      expanded = context.images.expand_text(pictures, text)
    except ValueError as error:
      raise bad("messages", str(error), "invalid_image") from error
  functions = [tool["function"] for tool in tools]
  schemas = {function["name"]: function.get("parameters") for function in functions}
  ids = tokenizer.encode(expanded)
  return Prompt(text=text, ids=ids, pictures=pictures, tools=schemas)


@dataclasses.dataclass(kw_only=True)
class Choice:
  """State of one completion while it is read.

  Attributes:
    reader: reader of reasoning and tool calls.
    calls: number of calls so far.
    is_begun: an event was sent.
  """

  reader: AnswerReader
  calls: int = 0
  is_begun: bool = False

  def read(self, grown: Delta | Completion) -> Piece:
    """Returns what new tokens settle."""
    is_last = grown.finish_reason is not None
    piece = self.reader.push(grown.ids, grown.text, is_last)
    self.calls += len(piece.calls)
    return piece


class ChatJob:
  """A call of the route; see `calls.Job`."""

  def __init__(self, call: Call, context: Context):
    fields = Fields(call.body)
    self._context = context
    self.model = fields.text("model", context.settings.model_name)
    adapter = context.adapter(self.model)
    self._prompt = read_prompt(fields, context)
    sampling = read_sampling(fields, context)
    self._has_logprobs = fields.flag("logprobs")
    self._top = read_top(fields, "top_logprobs", context) or 0
    if self._top and not self._has_logprobs:
      raise bad("top_logprobs", "top_logprobs is set, which needs logprobs: true")
    self._as_ids = fields.flag("return_tokens_as_token_ids")
    self._with_ids = fields.flag("return_token_ids")
    self._with_reasoning = fields.flag("include_reasoning", True)
    self.stream = forms.read_stream(fields)
    older = fields.whole("max_tokens", low=1)
    max_tokens = fields.whole("max_completion_tokens", older, low=1)
    fields.neutral(echo=(False,), skip_special_tokens=(True,))
    self.id = fields.text("request_id") or new_id("chatcmpl")
    fields.end()
    self.headers = forms.ignored_header(fields)
    self._created, self._tokens = int(time.time()), 0
    self._is_free = sampling.options["constraint"] is None
    room = context.room(self._prompt.ids, max_tokens)
    images = context.images and context.images.prompt(self._prompt.pictures)
    self.requests = [
      sampling.request(
        self._prompt.ids,
        room,
        images=images,
        adapter=adapter,
        logprobs=self._has_logprobs,
        top_logprobs=self._top,
      )
    ]
    self._choices = [self._new_choice() for _ in range(sampling.n)]

  def _new_choice(self) -> Choice:
    context, settings = self._context, self._context.settings
    tokenizer, tools = context.tokenizer, self._prompt.tools
    tool_format = format_for(tokenizer.chat_template, tools, settings.tool_format)
    # A constraint holds from the first token on, so its text has no reasoning.
    has_reasoning = settings.split_reasoning and self._is_free
    prompt = self._prompt.text if has_reasoning else None
    return Choice(reader=AnswerReader(tokenizer, tool_format, tools, prompt))

  def answer(self, run: Run, rows: list[list[Completion]]) -> Any:
    choices = [self._choice(number, whole) for number, whole in enumerate(rows[0])]
    ids = {"prompt_token_ids": self._prompt.ids} if self._with_ids else {}
    return {
      **self._head("chat.completion"),
      "choices": choices,
      "usage": forms.usage(run.tickets, self._tokens),
      **ids,
    }

  def chunks(self, run: Run, part: Part) -> list[Any]:
    number, grown = part.delta.sample, part.delta
    state = self._choices[number]
    first_call = state.calls
    piece = state.read(grown)
    delta = self._message(piece)
    for i, call in enumerate(delta.get("tool_calls", ())):
      call["index"] = first_call + i
    is_last = grown.finish_reason is not None
    if not (delta or is_last or self._has_logprobs or self._with_ids):
      self._tokens += len(grown.ids)
      return []  # all of it is held back
    if not state.is_begun:
      delta = {"role": "assistant", "content": "", **delta}
    ids = {}
    if self._with_ids and not state.is_begun:
      ids["prompt_token_ids"] = self._prompt.ids
    state.is_begun = True
    choice = {"index": number, "delta": delta, **self._rest(state, grown)}
    return [self._chunk([choice], None, **ids)]

  def last_chunks(self, run: Run) -> list[Any]:
    if not self.stream.with_usage:
      return []
    return [self._chunk([], forms.usage(run.tickets, self._tokens))]

  def _chunk(self, choices: list[Any], usage: object, **more: object) -> dict[str, Any]:
    usage = {"usage": usage} if self.stream.with_usage else {}
    return {**self._head("chat.completion.chunk"), "choices": choices, **usage, **more}

  def _head(self, kind: str) -> dict[str, Any]:
    return {
      "id": self.id,
      "object": kind,
      "created": self._created,
      "model": self.model,
      "system_fingerprint": f"weights-{self._context.engine.version}",
    }

  def _choice(self, number: int, whole: Completion) -> dict[str, Any]:
    state = self._choices[number]
    piece = state.read(whole)
    message = {"role": "assistant", "content": None, "refusal": None}
    message |= self._message(piece)
    if not piece.calls and message["content"] is None:
      message["content"] = ""
    return {"index": number, "message": message, **self._rest(state, whole)}

  def _message(self, piece: Piece) -> dict[str, Any]:
    """Returns the fields of a message, or of a stream's delta, that are not empty."""
    message: dict[str, Any] = {}
    if piece.content:
      message["content"] = piece.content
    if piece.reasoning and self._with_reasoning:
      # Clients read one name or the other: DeepSeek's and vLLM's.
      message["reasoning_content"] = message["reasoning"] = piece.reasoning
    if piece.calls:
      message["tool_calls"] = [
        {
          "id": call.id,
          "type": "function",
          "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in piece.calls
      ]
    return message

  def _rest(self, state: Choice, grown: Delta | Completion) -> dict[str, Any]:
    """Returns the fields of a choice next to its message."""
    tokens, reason = grown.ids.tolist(), forms.finish_reason(grown.finish_reason)
    self._tokens += len(tokens)
    if reason == "stop" and state.calls:
      reason = "tool_calls"
    rest: dict[str, Any] = {"logprobs": None, "finish_reason": reason}
    if reason is not None and state.reader.problem is not None:
      rest["malformed_tool_call"] = state.reader.problem
    if self._has_logprobs:
      scored = Scored.of(grown, self._top)
      texts = self._context.texts
      rest["logprobs"] = logprobs.chat_form(scored, texts, as_ids=self._as_ids)
    if self._with_ids:
      rest["token_ids"] = tokens
    return rest
