"""Tokens of conversations, for templates with the structure of many models."""

import random

import numpy as np
import pytest

from tests import toys_calls
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.tokens import Tokens
from tunix.rl.env.conversation import Conversation
from tunix.rl.env.env import EnvError
from tunix.rl.env.episode import Episode, Turn

TEMPLATES = {**toys_calls.TEMPLATES, **toys_calls.UNLIKE_JSON}
NAMES = sorted(TEMPLATES)
WORDS = "the sum of two numbers is seven , so we ask again ?".split()  # noqa: SIM905


def sentence(rng):
  return " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))


def pieces(tokenizer, text):
  """Ids of a text as no tokenizer cuts it: a policy may draw them."""
  special, ids = tokenizer.special_tokens(), []
  while text:
    mark = next((t for t in special if text.startswith(t)), text[0])
    ids += tokenizer.encode(mark)
    text = text[len(mark) :]
  return ids


def answer(rng, tokenizer, messages, *, ends=True, thinks=False):
  """An answer as the template prints it, up to the token that ends the turn."""
  message = {"role": "assistant", "content": sentence(rng)}
  if thinks:
    message["reasoning_content"] = sentence(rng)
  asked = {"role": "user", "content": "so ?"}
  prompt = tokenizer.apply_chat_template(messages, True)
  # A turn that others follow shows the end; only the last one shows its reasoning.
  whole = tokenizer.apply_chat_template([*messages, message, asked], True)
  before, shown, after = whole[len(prompt) :].partition(message["content"])
  if thinks:
    alone = tokenizer.apply_chat_template([*messages, message], False)
    before = alone[len(prompt) :].partition(shown)[0]
  if not ends:
    return tokenizer.encode(before + shown)
  stops = [after.find(t) + len(t) for t in tokenizer.special_tokens() if t in after]
  return pieces(tokenizer, before + shown + after[: min(stops, default=0)])


def episode_of(name, rng, history="split", turns=4, **options):
  """A random conversation: (episode, conversation, tokenizer)."""
  tokenizer = toys_calls.tokenizer_of(name)
  talk, episode = Conversation(tokenizer, history=history), Episode()
  observation = [{"role": "user", "content": sentence(rng)}]
  if "system" in TEMPLATES[name][3]:
    observation.insert(0, {"role": "system", "content": sentence(rng)})
  for _ in range(turns):
    prompt = talk.observe(observation)
    drawn = answer(rng, tokenizer, talk.messages, **options)
    action = talk.act(drawn, "eos" if options.get("ends", True) else "length")
    tokens = Tokens(
      prompt=np.array(prompt, np.int32),
      ids=np.array(drawn, np.int32),
      sampling_logps=np.zeros(len(drawn), np.float32),
    )
    episode.turns.append(Turn(tokens=tokens, action=action))
    observation = sentence(rng)
  return episode, talk, tokenizer


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_the_prompt_before_the_answer_and_what_is_new(name):
  for seed in range(5):
    rng = random.Random(f"{name} {seed}")
    episode, talk, tokenizer = episode_of(name, rng)
    messages = talk.messages
    seen = []
    for number, turn in enumerate(episode.turns):
      prompt = turn.prompt.tolist()
      assert prompt[: len(seen)] == seen
      seen = [*prompt, *turn.action]
      # The text is what the template prints of the conversation.
      count = len(messages) - 2 * (len(episode.turns) - number) + 1
      wanted = tokenizer.apply_chat_template(messages[:count], True)
      assert tokenizer.decode(prompt, skip_special_tokens=False) == wanted
    (row,) = episode.rows()
    drawn = [i for turn in episode.turns for i in turn.action]
    assert row.ids[row.is_drawn].tolist() == drawn
    assert [*row.prompt, *row.ids] == seen


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_was_cut_is_closed_by_the_next_prompt(name):
  rng = random.Random(name)
  episode, talk, tokenizer = episode_of(name, rng, turns=2, ends=False)
  second = episode.turns[1].prompt.tolist()
  wanted = tokenizer.apply_chat_template(talk.messages[:-1], True)
  assert tokenizer.decode(second, skip_special_tokens=False) == wanted
  assert len(episode.rows()) == 1


@pytest.mark.parametrize("name", ["qwen3", "smollm3", "ministral3"])
@pytest.mark.parametrize("history", ["split", "keep"])
def test_reasoning_that_a_template_drops(name, history):
  rng = random.Random(name)
  episode, talk, tokenizer = episode_of(name, rng, history, turns=3, thinks=True)
  rows = episode.rows()
  drawn = [i for turn in episode.turns for i in turn.action]
  assert [i for row in rows for i in row.ids[row.is_drawn]] == drawn
  last = tokenizer.decode(episode.turns[-1].prompt, skip_special_tokens=False)
  whole = tokenizer.apply_chat_template(talk.messages[:-1], True)
  if history == "split":
    assert last == whole
  else:
    mark = "[/THINK]" if name == "ministral3" else "</think>"
    assert len(rows) == 1 and last.count(mark) == 2


TOOL = {
  "type": "function",
  "function": {
    "name": "add",
    "description": "Adds.",
    "parameters": {
      "type": "object",
      "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
  },
}


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
CALLS = {
  "qwen25": HERMES,
  "qwen3": HERMES,
  "smollm3": HERMES,
  "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 3, "b": 4}}]',
  "granite3": '<|tool_call|>[{"name": "add", "arguments": {"a": 3, "b": 4}}]',
  "olmo3": "<function_calls>add(a=3, b=4)</function_calls>",
  "qwen35": "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n"
  "<parameter=b>\n4\n</parameter>\n</function>\n</tool_call>",
  "glm47": "<tool_call>add<arg_key>a</arg_key><arg_value>3</arg_value>"
  "<arg_key>b</arg_key><arg_value>4</arg_value></tool_call>",
  "gemma4": "<|tool_call>call:add{a:3,b:4}<tool_call|>",
  "ministral3": '[TOOL_CALLS]add[ARGS]{"a": 3, "b": 4}',
}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_calls_of_tools_and_their_results(name):
  tokenizer = toys_calls.tokenizer_of(name)
  # Mistral's template adds ids to the calls of earlier answers.
  history = "keep" if name == "mistral" else "split"
  talk = Conversation(tokenizer, [TOOL], history)
  first = talk.observe("what is 3 + 4 ?")
  # Other ends than EOS: OLMo 3's template ends only the last answer with it, and those
  # of GLM and Gemma 4 end a call with the header of the result.
  ends = {"olmo3": "<|im_end|>", "glm47": "<|observation|>"}
  end = (ends | {"gemma4": "<|tool_response>"}).get(name, "")
  drawn = tokenizer.encode(CALLS[name] + end)
  drawn += [] if end else [tokenizer.eos_ids()[0]]
  action = talk.act(drawn, "eos")
  (made,) = action.message["tool_calls"]
  assert made["function"] == {"name": "add", "arguments": {"a": 3, "b": 4}}
  assert action.problem is None and made["id"] == "call00000"
  result = {
    "role": "tool",
    "name": "add",
    "tool_call_id": made["id"],
    "content": "7",
  }
  second = talk.observe([result])
  assert second[: len(first) + len(drawn)] == [*first, *drawn]
  wanted = tokenizer.apply_chat_template(talk.messages, True, tools=[TOOL])
  got = tokenizer.decode(second, skip_special_tokens=False)
  assert got.count("7") == wanted.count("7") and got.endswith(wanted[-12:])


def test_white_space_at_the_end_of_a_cut_answer_is_there_once():
  tokenizer = toys_calls.tokenizer_of("qwen25")
  talk = Conversation(tokenizer)
  talk.observe("so ?")
  talk.act(tokenizer.encode("move\n"), "stop")
  text = tokenizer.decode(talk.observe("and ?"), skip_special_tokens=False)
  assert "move\n<|im_end|>" in text or "move<|im_end|>" not in text
  assert "\n\n<|im_end|>" not in text


@pytest.mark.parametrize(("form", "content"), [("plain", "75"), ("given", "7<pad>5")])
def test_special_tokens_are_text_in_runs_of_earlier_versions_only(form, content):
  tokenizer = TokenizerAdapter(toys_calls.tokenizer_of(NAMES[0]), message_form=form)
  mark = tokenizer.decode([tokenizer.pad_id()], skip_special_tokens=False)
  talk = Conversation(tokenizer)
  talk.observe([{"role": "user", "content": "so ?"}])
  ids = [*tokenizer.encode("7"), tokenizer.pad_id(), *tokenizer.encode("5")]
  action = talk.act(ids, "length")
  assert action.message["content"] == content.replace("<pad>", mark)


def test_a_template_that_refuses_a_conversation_is_an_error_of_the_environment():
  source = "{% for m in messages %}{% if m.role == 'tool' %}"
  source += "{{ raise_exception('no tools') }}{% endif %}{{ m.content }}{% endfor %}"
  tokenizer = TokenizerAdapter(toys_calls.raw_tokenizer(), chat_template=source)
  talk = Conversation(tokenizer)
  talk.observe("hello")
  with pytest.raises(EnvError, match=r"refuses an observation.*no tools"):
    talk.observe([{"role": "tool", "content": "7"}])
