"""The tokens of one episode. Ids that were drawn are never decoded and encoded again.

Each prompt is a list of ids in three parts: the prompt before it, the ids that the
policy drew, and the ids of the new messages. A chat template renders only whole
conversations. The text of the new messages is therefore cut out of a rendering: it is
the text after the last answer.

Some templates print an earlier answer differently once messages follow it, for example
without its reasoning. The setting `history` decides what the next action then reads:

- "split": the conversation as the template prints it. The ids before it are no prefix
  of it, and a new row of training begins (see episode.py).
- "keep": the ids so far, with the new messages after them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tunix.data import fields, image_parts
from tunix.data.chat import TEMPLATE_DATE
from tunix.data.images import ImageReader, Picture, reference
from tunix.generate.answer_reader import AnswerReader
from tunix.generate.answers.formats import format_for
from tunix.generate.answers.pieces import Piece
from tunix.generate.tokenizer.template_limits import ChatTemplateError
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.images.processor import Pixels
from tunix.models.images.prompt_images import PromptImages
from tunix.rl.env import env as env_lib
from tunix.rl.env.env import Action, EnvError, Message, Observation

History = Literal["split", "keep"]

# A private-use character of Unicode, which no answer contains.
_PLACEHOLDER = "\ue000"
# Another one, for the placeholders of images that a text spells.
_SPELLED = "\ue001"
_NO_PIXELS = np.zeros((0, 0, 3), np.uint8)
# Characters at the end of an answer that a template must print as they were drawn, even
# if it prints the rest of a call in another form.
_SAME_END = 4


class Conversation:
  """Messages and ids of an episode.

  Args:
    tokenizer: tokenizer of the policy.
    tools: JSON schemas of tools that the template shows.
    history: see the module.
    reader: reads the images of observations; None: images are refused.
    max_image_tokens: see `EpisodeConfig`.

  Attributes:
    messages: the messages so far; empty if observations are ids.
    observed: tokens of the last observation, with what the template prints around it.
      For an observation of ids, the tokens that the prompt grew by.
    image_tokens: number of soft tokens of all images so far.
  """

  def __init__(
    self,
    tokenizer: TokenizerAdapter,
    tools: Sequence[Mapping[str, Any]] = (),
    history: History = "split",
    reader: ImageReader | None = None,
    max_image_tokens: int = 0,
  ):
    self._reader, self._room = reader, max_image_tokens
    # Without their files' pixels; `_pixels` has those that the model reads.
    self._pictures: list[Picture] = []
    self._pixels: list[Pixels] = []
    self._images: PromptImages | None = None  # of `_pixels`
    self.image_tokens = 0
    self._tokenizer, self._tools = tokenizer, list(tools) or None
    self._schemas = dict(map(_schema, tools))
    self._format = format_for(tokenizer.chat_template, self._schemas)
    self._history = history
    self.messages: list[Message] = []
    self.observed = 0
    self._ids: list[int] = []
    self._calls = 0  # of tools so far
    self._prompt_text = ""  # of the last action
    self._answer_ids: list[int] = []  # the last action

  def observe(self, observation: Observation) -> list[int]:
    """Takes an observation; returns the ids of the prompt of the next action.

    Raises:
      EnvError: the observation has another form, or the template refuses it.
    """
    ids, before = env_lib.ids_of(observation), len(self._ids)
    if ids is not None:
      self._ids, self.observed = ids, len(ids) - before
      self._check_soft_tokens()
      return list(ids)
    new = self._opened(env_lib.messages_of(observation))
    try:
      self._ids, self.observed = self._with(new, observation)
    except (ChatTemplateError, TypeError, ValueError) as error:
      raise EnvError(f"the chat template refuses an observation: {error}") from error
    self._check_soft_tokens()
    self.messages += new
    return list(self._ids)

  def _check_soft_tokens(self) -> None:
    """Refuses a prompt whose soft tokens are not those of its images.

    A text that spells a soft token has no vector for it.
    """
    if self._reader is None:
      return
    found = self._ids.count(self._reader.soft_token)
    if found != self.image_tokens:
      raise EnvError(
        f"a prompt has {found} tokens of images (id {self._reader.soft_token}) and its "
        f"images {self.image_tokens}; expected equal numbers. Give images as parts of "
        "messages, and take the text of such tokens out of observations"
      )

  @property
  def images(self) -> PromptImages | None:
    """The images of the prompt of the next action; None without images."""
    if self._images is None and self._reader is not None and self._pixels:
      processor = self._reader.processor
      self._images = PromptImages.of(processor, self._pixels, self._room)
    return self._images

  def _opened(self, new: list[Message]) -> list[Message]:
    """Opens the images of new messages, which then name them by path or data URI.

    Raises:
      EnvError: an image cannot be read, or images are refused.
    """
    contents = [message.get("content") for message in new]
    if not any(isinstance(content, list | tuple) for content in contents):
      return new
    where = "an observation"
    try:
      for content in contents:
        _check_sources(content)
      gathered = image_parts.gathered({"messages": new}, where)["messages"]
      if not (sources := image_parts.sources(gathered)):
        return new
      for message in gathered:
        if any(image_parts.parts(message)):
          fields.check_parts(message["content"], str(message.get("role")), where)
      if self._reader is None:
        raise EnvError(
          "an observation has an image and max_image_tokens is 0; expected text. Set "
          "max_image_tokens (episode.max_image_tokens), and load the model with "
          "images"
        )
      pictures = self._reader.open(sources, None, where)
    except (ImportError, ValueError) as error:
      raise EnvError(str(error)) from error
    for source, picture, part in zip(sources, pictures, _image_parts(gathered)):
      part["image"] = reference(source, picture.image, None)
      self._pixels.append(self._reader.processor(picture.image))
      self._pictures.append(picture._replace(image=_NO_PIXELS))
    self._images = None
    self.image_tokens += sum(picture.num_tokens for picture in pictures)
    return gathered

  def act(self, ids: Sequence[int] | np.ndarray, finish_reason: str) -> Action:
    """Takes the ids that were drawn; returns them as the environment receives them."""
    self._answer_ids = ids = [int(i) for i in ids]
    self._ids = [*self._ids, *ids]
    tokenizer, action = self._tokenizer, Action(ids)
    is_ended = bool(ids) and ids[-1] in tokenizer.special_ids()
    kept = ids[:-1] if is_ended else ids
    action.text, action.finish_reason = tokenizer.decode(kept), finish_reason
    reader = AnswerReader(tokenizer, self._format, self._schemas, self._prompt_text)
    if tokenizer.message_form == "given":
      # A run of an earlier version, whose journal has the special tokens as text.
      whole = tokenizer.decode(kept, skip_special_tokens=False)
      piece = reader.push((), whole, is_last=True)
    else:
      piece = reader.push(ids, action.text, is_last=True)
    piece = dataclasses.replace(piece, content=self._without_frame(piece.content))
    action.message, action.problem = _message(piece, self._calls), reader.problem
    self._calls += len(piece.calls)
    if self.messages:
      self.messages.append(action.message)
    return action

  def _with(
    self, new: list[Message], observation: Observation
  ) -> tuple[list[int], int]:
    """Returns the ids of the next prompt, and how many of them are new."""
    if not self._tokenizer.has_chat_template():
      if not isinstance(observation, str):
        raise EnvError(
          "an observation has messages, and the tokenizer has no chat template: give "
          "texts or token ids, or a tokenizer with a template"
        )
      text = observation
      if self.messages:
        return self._followed_by(text)
      ids = list(map(int, self._tokenizer.tokenize(text, add_eos=False)))
      return ids, len(ids)
    whole = self._rendered([*self.messages, *new], True)
    before, self._prompt_text = self._prompt_text, whole
    if not self.messages:
      ids = self._tokenizer.encode(whole)
      return ids, len(ids)
    rest = self._after_answer(before, whole)
    if rest is not None:
      return self._followed_by(rest)
    ids, observed = self._followed_by(self._after_any_answer(new))
    if self._history == "split":
      ids = self._tokenizer.encode(whole)
    # The prompt may have become shorter; the count is the observation's alone.
    return ids, observed

  @property
  def _answer(self) -> str:
    """Text of the last action, with special tokens. Many episodes never need it."""
    return self._tokenizer.decode(self._answer_ids, skip_special_tokens=False)

  def _followed_by(self, text: str) -> tuple[list[int], int]:
    added = self._tokenizer.encode_continuation(text)
    return [*self._ids, *added], len(added)

  def _without_frame(self, text: str) -> str:
    """Removes what the template prints around every answer, such as a line break."""
    if not self.messages or not self._tokenizer.has_chat_template():
      return text
    plain = {"role": "assistant", "content": _PLACEHOLDER}
    try:
      rendering = self._rendered([*self.messages, plain], False)
    except (ChatTemplateError, TypeError, ValueError):  # it may refuse two answers
      return text
    if not rendering.startswith(self._prompt_text):
      return text
    before, _, after = rendering[len(self._prompt_text) :].partition(_PLACEHOLDER)
    text = text.removeprefix(before)
    end = self._split_end()[1]
    return text.removesuffix(after.rstrip().removesuffix(end) or "\0")

  def _after_answer(self, prompt: str, whole: str) -> str | None:
    """Returns the text after the last answer: the end of its turn, and what is new.

    Args:
      prompt: text of the prompt that was answered.
      whole: text with the answer, the new messages and the header of the next answer.

    Returns: the text; None if `whole` does not show prompt and answer as they were.
    """
    if not whole.startswith(prompt):
      return None
    text, end = self._split_end()
    at = self._end_of_answer(text, prompt, whole)
    if at is None:
      return None
    rest = whole[at:]
    if not end:
      # White space at the end of the answer was drawn; a template prints its own.
      answer = self._answer
      tail = answer[len(answer.rstrip()) :]
      shared = [n for n in range(len(tail) + 1) if rest.startswith(tail[:n])]
      return rest[shared[-1] :]
    # White space between the answer and the end of its turn was not drawn.
    return rest.lstrip()[len(end) :] if rest.lstrip().startswith(end) else None

  def _end_of_answer(self, text: str, prompt: str, whole: str) -> int | None:
    """Returns the place in `whole` where the last answer ends; None if it is not there.

    A template may print calls of tools in another form than they were drawn. Their end
    is the same.
    """
    region = whole[len(prompt) :]
    space = len(region) - len(region.lstrip())
    if region.startswith(text, space):
      return len(prompt) + space + len(text)
    alone = self._rendered(self.messages, False)
    if len(self.messages[-1]) == 2 or not alone.startswith(prompt):
      return None
    for first in range(len(text) - _SAME_END + 1):
      at = alone.rfind(text[first:], len(prompt))
      if at >= 0:
        at += len(text) - first
        return at if whole.startswith(alone[:at]) else None
    return None

  def _after_any_answer(self, new: list[Message]) -> str:
    """Returns the text after an answer that no template changes."""
    plain = {"role": "assistant", "content": _PLACEHOLDER}
    whole = self._rendered([*self.messages[:-1], plain, *new], True)
    rest = whole.rpartition(_PLACEHOLDER)[2]
    return rest.lstrip().removeprefix(self._split_end()[1] or "\0")

  def _split_end(self) -> tuple[str, str]:
    """Returns the last answer without and with only the special token that ended it."""
    special, answer = self._tokenizer.special_tokens(), self._answer
    end = next((t for t in special if t and answer.endswith(t)), "")
    return answer[: len(answer) - len(end)].strip(), end

  def _rendered(self, messages: list[Message], adds_prompt: bool) -> str:
    tools: dict[str, Any] = {"tools": self._tools} if self._tools else {}
    # A fixed date, as in the rows of fine-tuning: tokens do not depend on the day.
    if self._reader is None:
      return self._tokenizer.apply_chat_template(
        messages, adds_prompt, now=TEMPLATE_DATE, **tools
      )
    # A placeholder that a text spells stands for no image.
    spelled = self._reader.processor.PLACEHOLDER
    text = self._tokenizer.apply_chat_template(
      [_replaced(image_parts.bare(message), spelled, _SPELLED) for message in messages],
      adds_prompt,
      now=TEMPLATE_DATE,
      **tools,
    )
    count = len(image_parts.sources(messages))
    text = self._reader.expand_text(self._pictures[:count], text)
    return text.replace(_SPELLED, spelled)


def _replaced(value: Any, old: str, new: str) -> Any:
  """Returns a message with a text replaced in all of its texts."""
  if isinstance(value, str):
    return value.replace(old, new)
  if isinstance(value, Mapping):
    return {key: _replaced(x, old, new) for key, x in value.items()}
  return [_replaced(x, old, new) for x in value] if isinstance(value, list) else value


def _check_sources(content: Any) -> None:
  """Refuses parts that are no mappings, and images without a source.

  Raises:
    ValueError: see above.
  """
  for part in content if isinstance(content, list | tuple) else ():
    if not isinstance(part, Mapping) or "type" not in part:
      raise ValueError(
        f'an observation has the part {part!r:.80}; expected {{"type": "text", "text": '
        '...}} or {"type": "image", "image": ...}'
      )
    if part["type"] == "image" and not any(map(part.get, ("image", "path", "url"))):
      raise ValueError(
        'an observation has a part {"type": "image"} without an image; add it under '
        '"image": a path, a data URI, bytes or a Pillow image'
      )


def _image_parts(messages: list[Message]) -> list[dict[str, Any]]:
  return [part for message in messages for part in image_parts.parts(message)]


def _message(piece: Piece, calls: int) -> Message:
  """Returns an answer as a message; `calls` is the number of calls before it."""
  message: Message = {"role": "assistant", "content": piece.content}
  if piece.reasoning:
    message["reasoning_content"] = piece.reasoning
  if piece.calls:
    message["tool_calls"] = [
      {
        # Templates print ids, so they must not be random. Mistral's takes nine letters
        # and digits.
        "id": f"call{number:05}",
        "type": "function",
        "function": {"name": call.name, "arguments": json.loads(call.arguments)},
      }
      for number, call in enumerate(piece.calls, calls)
    ]
  return message


def _schema(tool: Mapping[str, Any]) -> tuple[str, Any]:
  """Returns the name of a tool and the JSON schema of its arguments."""
  function = tool.get("function")
  function = function if isinstance(function, Mapping) else tool
  return str(function.get("name", "")), function.get("parameters")
