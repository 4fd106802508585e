import copy
import datetime
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from tests import toys_text
from tunix.data import chat
from tunix.generate.tokenizer import chat_template
from tunix.generate.tokenizer_adapter import Tokenizer, TokenizerAdapter

TEXTS = [
  "hello there",
  " The sea,\n\nis  wide.",
  "naïve ☃ 日本 a <|im_end|> b",
  "<s>how many days?</s>",
  "",
]

CHAT = [
  {"role": "user", "content": " hello there "},
  {"role": "assistant", "content": "<think>\nhm\n</think>\n\nhello "},
  {"role": "user", "content": "how many <b>days</b>?"},
]
ANSWER = {"role": "assistant", "content": " seven "}
SYSTEM = {"role": "system", "content": "You are brief. "}


class Letters:
  """A user's own tokenizer: ids as methods, 0 is BOS, no padding token."""

  def encode(self, text):
    return [ord(c) for c in text]

  def decode(self, ids):
    return "".join(chr(i) for i in ids)

  def bos_id(self):
    return 0

  def eos_id(self):
    return 1

  def pad_id(self):
    return -1

  def __len__(self):
    return 128


def saved(tmp_path, template="chatml", **kwargs):
  toys_text.chat_tokenizer(template).save(tmp_path)
  for name, value in kwargs.items():
    (tmp_path / f"{name}.json").write_text(json.dumps(value))
  return tmp_path


def test_objects_with_methods_or_attributes():
  adapter = TokenizerAdapter(Letters())
  assert adapter.encode("ab") == [97, 98]
  assert adapter.encode("ab", add_special_tokens=True) == [0, 97, 98]
  assert adapter.decode(np.array([0, 97, 98, 1])) == "ab"
  assert adapter.decode([0, 97], skip_special_tokens=False) == "\0a"
  assert (adapter.bos_id(), adapter.eos_id()) == (0, 1)
  assert adapter.pad_id() == 1  # falls back to EOS
  assert adapter.vocab_size == 128
  assert adapter.special_ids() == {0, 1}
  np.testing.assert_array_equal(adapter.tokenize("ab"), [0, 97, 98, 1])

  class Fields(Letters):
    bos_id, eos_id, pad_id = None, 5, 0
    bos_token, eos_token = None, "!"

  adapter = TokenizerAdapter(Fields())
  assert (adapter.bos_id(), adapter.eos_id(), adapter.pad_id()) == (None, 5, 0)
  assert adapter.special_tokens() == {"!": 5}
  np.testing.assert_array_equal(adapter.tokenize("a"), [97, 5])


def test_unknown_objects_are_refused_with_the_missing_methods():
  with pytest.raises(ValueError, match="a str is no tokenizer: it lacks decode, bos"):
    TokenizerAdapter("gpt2")
  with pytest.raises(ValueError, match="its own bos_id"):
    TokenizerAdapter(Letters(), eos_token="!")
  without = TokenizerAdapter(Letters(), bos_token="")
  assert without.bos_id() is None and without.eos_id() == 1
  assert without.encode("a", add_special_tokens=True) == [97]


def test_tokenize_frames_the_text_once():
  adapter = toys_text.chat_tokenizer("llama2")
  bos, eos = adapter.bos_id(), adapter.eos_id()
  ids = adapter.tokenize("hello", prefix="User: ", suffix="\n")
  assert ids.dtype == np.int32
  assert ids.tolist() == [bos, *adapter.encode("User: hello\n"), eos]
  assert adapter.tokenize("<s>hello", add_eos=False).tolist().count(bos) == 1
  no_end = TokenizerAdapter(toys_text.bpe(), eos_token="")
  with pytest.raises(ValueError, match="no end-of-sequence token"):
    no_end.tokenize("hello")
  assert len(no_end.tokenize("hello", add_eos=False))


def test_roles_of_a_bare_tokenizer_are_conventional_or_stated():
  adapter = TokenizerAdapter(toys_text.bpe())
  assert (adapter.bos_token, adapter.eos_token) == ("<|begin_of_text|>", "<|im_end|>")
  stated = TokenizerAdapter(adapter, bos_token="<s>", eos_token="</s>", pad_token="")
  assert (stated.bos_token, stated.eos_token) == ("<s>", "</s>")
  assert stated.pad_id() == stated.eos_id()
  with pytest.raises(ValueError, match="'nothing' is not in the tokenizer's vocab"):
    TokenizerAdapter(toys_text.bpe(), eos_token="nothing")


def test_the_users_tokenizer_is_never_changed():
  rust = toys_text.bpe()
  rust.enable_truncation(3)
  rust.enable_padding(length=7)
  before = rust.to_str()
  adapter = TokenizerAdapter(rust, pad_token="<pad>")
  assert len(adapter.encode("hello there, how are you today?")) > 7
  assert len(adapter.encode("a")) == 1
  assert rust.to_str() == before
  assert adapter.tokenizer is rust


def test_continuations_join_without_a_space():
  adapter = TokenizerAdapter(toys_text.metaspace())
  naive = adapter.encode("The teach") + adapter.encode("er answers")
  assert adapter.decode(naive) == "The teach er answers"
  joined = adapter.encode("The teach") + adapter.encode_continuation("er answers")
  assert adapter.decode(joined) == "The teacher answers"
  bytes_level = toys_text.chat_tokenizer()
  for text in TEXTS:
    assert bytes_level.encode_continuation(text) == bytes_level.encode(text)


@pytest.mark.parametrize("template", list(toys_text.TEMPLATES))
def test_saved_folders_load_alike(tmp_path, template):
  before = toys_text.chat_tokenizer(template)
  after = TokenizerAdapter.from_pretrained(saved(tmp_path, template))
  for text in TEXTS:
    assert after.encode(text) == before.encode(text)
    assert after.decode(after.encode(text)) == before.decode(before.encode(text))
  for name in ("bos_id", "eos_id", "pad_id", "special_tokens", "eos_ids"):
    assert getattr(after, name)() == getattr(before, name)()
  assert after.chat_template == before.chat_template
  assert after.has_chat_template() == (template is not None)


def test_end_ids_come_from_the_models_configuration(tmp_path):
  saved(
    tmp_path, config={"eos_token_id": 4}, generation_config={"eos_token_id": [9, 3]}
  )
  adapter = TokenizerAdapter.from_pretrained(tmp_path)
  assert adapter.eos_ids() == (adapter.eos_id(), 9, 3, 4)
  assert {3, 4, 9} <= adapter.special_ids()
  assert TokenizerAdapter(toys_text.bpe(), eos_ids=[0]).eos_ids() == (8, 0)


def test_files_of_other_shapes_are_read(tmp_path):
  folder = saved(tmp_path)
  (folder / "chat_template.jinja").unlink()
  config = json.loads((folder / "tokenizer_config.json").read_text())
  config |= {
    "eos_token": {"content": "</s>", "special": True},
    "chat_template": [
      {"name": "default", "template": "plain"},
      {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ],
    "added_tokens_decoder": {"514": {"content": "<new>", "special": True}},
    "additional_special_tokens": ["The"],
  }
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  adapter = TokenizerAdapter.from_pretrained(folder / "tokenizer.json")
  assert adapter.eos_token == "</s>"
  assert adapter.apply_chat_template(CHAT) == "plain"
  assert adapter.apply_chat_template(CHAT, tools=[{}, {}]) == "tools 2"
  assert adapter.encode("<new>") == [514]
  assert adapter.decode(adapter.encode("The<new> sea")) == " sea"
  again = tmp_path / "again"
  adapter.save(again)
  assert TokenizerAdapter.from_pretrained(again).chat_template == adapter.chat_template
  given = TokenizerAdapter.from_pretrained(folder, chat_template="mine")
  assert given.apply_chat_template(CHAT) == "mine"
  given.save(again)  # a variant of the earlier template would be used for tools
  assert TokenizerAdapter.from_pretrained(again).chat_template == "mine"


def test_damaged_or_absent_files_are_named(tmp_path, monkeypatch):
  with pytest.raises(FileNotFoundError, match="no tokenizer folder '/no/such"):
    TokenizerAdapter.from_pretrained("/no/such/folder")
  monkeypatch.chdir(tmp_path)
  (tmp_path / "models").mkdir()
  with pytest.raises(FileNotFoundError, match="no tokenizer folder 'models/llama'"):
    TokenizerAdapter.from_pretrained("models/llama")  # no id: "models" is a folder
  folder = saved(tmp_path)
  config = folder / "tokenizer_config.json"
  config.write_text("{")
  with pytest.raises(ValueError, match=r"tokenizer_config.json is no valid JSON"):
    TokenizerAdapter.from_pretrained(folder)
  config.write_text('{"added_tokens_decoder": {"3": {"content": "<s>"}}}')
  with pytest.raises(ValueError, match=r"gives '<s>' the id 3, tokenizer.json 1"):
    TokenizerAdapter.from_pretrained(folder)
  (folder / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer"):
    TokenizerAdapter.from_pretrained(folder)
  with pytest.raises(ValueError, match=r"and no GGUF file; give its"):
    TokenizerAdapter.from_pretrained(config)


def test_a_folder_without_tokenizer_json_says_what_is_missing(tmp_path):
  # Without transformers the package to install is named, with it the folder.
  with pytest.raises((ImportError, FileNotFoundError)) as error:
    TokenizerAdapter.from_pretrained(tmp_path)
  assert str(tmp_path) in str(error.value)
  assert "pip install transformers" in str(error.value) or "check" in str(error.value)


def test_chat_is_text_or_tokens():
  adapter = toys_text.chat_tokenizer("chatml")
  text = adapter.apply_chat_template([{"role": "user", "content": "a"}])
  assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
  ids = adapter.apply_chat_template([{"role": "user", "content": "a"}], tokenize=True)
  assert ids == adapter.encode(text)
  shorter = adapter.apply_chat_template(
    [{"role": "user", "content": "a"}], add_generation_prompt=False
  )
  assert text == shorter + "<|im_start|>assistant\n"


def test_chat_errors_say_what_is_wrong():
  with pytest.raises(ValueError, match="no chat template; pass chat_template"):
    toys_text.chat_tokenizer(None).apply_chat_template(CHAT)
  with pytest.raises(chat_template.ChatTemplateError, match="no system turn here"):
    toys_text.chat_tokenizer("llama2").apply_chat_template([SYSTEM, *CHAT])
  broken = TokenizerAdapter(toys_text.bpe(), chat_template="{% if %}")
  with pytest.raises(chat_template.ChatTemplateError, match=r"no valid jinja \(line 1"):
    broken.apply_chat_template(CHAT)
  with pytest.raises(TypeError, match="JSON schemas"):
    toys_text.chat_tokenizer("qwen3").apply_chat_template(CHAT, tools=[print])
  named = TokenizerAdapter(toys_text.bpe(), chat_template={"rag": "x"})
  with pytest.raises(ValueError, match=r"\['rag'\] and none named 'default'"):
    named.apply_chat_template(CHAT)


def test_templates_have_the_tools_that_they_expect():
  def render(source, **kwargs):
    return chat_template.render(source, CHAT[:1], **kwargs)

  assert render("{{ {'a': '<ü>'} | tojson }}") == '{"a": "<ü>"}'
  assert render("{{ 'a' | tojson(indent=1) }}") == '"a"'
  assert render("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}") == "1"
  assert render("{% generation %}x{{ 1 }}{% endgeneration %}y") == "x1y"
  assert render("  {% if true %}\nx{% endif %}") == "x"
  assert render("{{ strftime_now('%Y') }}", now=datetime.datetime(1999, 1, 1)) == "1999"
  assert render("{{ strftime_now('%Y') }}") >= "2024"
  with pytest.raises(chat_template.ChatTemplateError):
    render("{{ ''.__class__.__mro__[1].__subclasses__() }}")
  thought = [{"role": "assistant", "content": None, "reasoning": "hm"}]
  source = "{{ messages[0].reasoning_content }} {{ messages[0].content is defined }}"
  assert chat_template.render(source, thought) == "hm False"


def test_own_renderers_are_used():
  class Chatty(Letters):
    def apply_chat_template(self, messages, add_generation_prompt, tokenize, end="."):
      return "|".join(m["content"] for m in messages) + end * add_generation_prompt

  adapter = TokenizerAdapter(Chatty())
  assert adapter.has_chat_template()
  assert adapter.apply_chat_template([{"content": "a"}], end="!") == "a!"


def processed(kind):
  """A tokenizer whose post-processor puts BOS before a text, does not, or is none."""
  rust = toys_text.bpe()
  if kind == "adds":
    rust.post_processor = tokenizers.processors.TemplateProcessing(
      single="<s> $A", special_tokens=[("<s>", 1)]
    )
  elif kind == "adds none":
    rust.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
  return rust


@pytest.mark.parametrize(
  "kind, follows", [("adds", True), ("adds none", False), ("none", True)]
)
def test_plain_text_gets_bos_as_the_tokenizer_itself_gives_it(kind, follows, tmp_path):
  hello = processed(kind).encode("hello", add_special_tokens=False).ids
  adapter = TokenizerAdapter(processed(kind), bos_token="<s>")
  assert adapter.add_bos  # a BOS token that is given is wanted
  adapter.save(tmp_path)
  assert TokenizerAdapter.from_pretrained(tmp_path).add_bos
  config = tmp_path / "tokenizer_config.json"
  fields = json.loads(config.read_text())
  assert fields.pop("add_bos_token", None) == (None if follows else True)
  config.write_text(json.dumps(fields))
  for given, adds in ((None, follows), (True, True), (False, False)):
    one = TokenizerAdapter.from_pretrained(tmp_path, add_bos=given)
    for adapter in (one, TokenizerAdapter(one)):
      bos = [1] if adds else []
      assert adapter.tokenize("hello", add_eos=False).tolist() == [*bos, *hello]
      assert adapter.tokenize("<s>hello", add_eos=False).tolist() == [1, *hello]
      row = chat.render({"text": "hello"}, TokenizerAdapter(adapter, eos_token="</s>"))
      assert row.tokens.tolist() == [*bos, *hello, 2]
    for again in (False, True, False):  # a later folder forgets no choice
      one = TokenizerAdapter(one, add_bos=again)
      one.save(tmp_path / "saved")
      one = TokenizerAdapter.from_pretrained(tmp_path / "saved")
      assert one.add_bos == again


@pytest.mark.parametrize("kind", ["adds", "adds none", "none"])
def test_a_text_that_begins_with_bos_gets_no_second_one(kind):
  adapter = TokenizerAdapter(processed(kind), bos_token="<s>")
  plain = adapter.encode("hello")
  for count in (1, 2):  # the text itself may have two
    text = "<s>" * count + "hello"
    assert adapter.encode(text, add_special_tokens=True) == [1] * count + plain
  bare = TokenizerAdapter(Letters())
  assert bare.encode("b", add_special_tokens=True)[0] == bare.bos_id()


def test_tokenizer_by_type_and_path(tmp_path):
  folder = saved(tmp_path, "llama2")
  full = Tokenizer(tokenizer_path=folder)
  bos, eos = full.bos_id(), full.eos_id()
  ids = full.encode("hello")
  assert full.tokenize("hello").tolist() == [bos, *ids, eos]
  assert full.tokenize("hello", add_eos=False).tolist() == [bos, *ids]
  bare = Tokenizer("huggingface", folder, add_bos=False, add_eos=False)
  assert bare.tokenize("hello").tolist() == ids
  assert bare.chat_template == full.chat_template == toys_text.LLAMA2
  with pytest.raises(ValueError, match=r"one of \['huggingface', 'sentencepiece'\]"):
    Tokenizer("tiktoken", folder)
  with pytest.raises(FileNotFoundError, match="no SentencePiece model"):
    Tokenizer("sentencepiece", folder / "none.model")


def test_adapters_can_be_copied(tmp_path):
  adapter = toys_text.chat_tokenizer("llama3")
  for twin in (copy.deepcopy(adapter), pickle.loads(pickle.dumps(adapter))):
    assert twin.encode("hello") == adapter.encode("hello")
    assert twin.apply_chat_template(CHAT) == adapter.apply_chat_template(CHAT)
  with pytest.raises(TypeError, match=r"cannot be written as tokenizer.json"):
    TokenizerAdapter(Letters()).save(tmp_path)


def test_importing_the_adapter_loads_nothing_heavy():
  code = (
    "import sys, tunix.generate.tokenizer_adapter;"
    "print({'jax', 'jinja2', 'tokenizers', 'transformers'} & set(sys.modules))"
  )
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
  assert out.stdout.strip() == "set()", out.stderr


# Parity with transformers, where it is installed.

CONVERSATIONS = {
  "question": (CHAT, True),
  "answered": ([*CHAT, ANSWER], False),
  "system": ([SYSTEM, *CHAT], True),
}


@pytest.mark.parametrize("template", [t for t in toys_text.TEMPLATES if t])
def test_parity_with_transformers(tmp_path, template):
  transformers = pytest.importorskip("transformers")
  adapter = toys_text.chat_tokenizer(template)
  theirs = transformers.AutoTokenizer.from_pretrained(saved(tmp_path, template))
  wrapped = TokenizerAdapter(theirs)
  light = TokenizerAdapter.from_pretrained(tmp_path)
  assert isinstance(light.tokenizer, tokenizers.Tokenizer)
  for ours in (adapter, wrapped, light):
    for text in TEXTS:
      for special in (False, True):
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
        decoded = theirs.decode(ids, skip_special_tokens=special)
        assert ours.decode(ids, skip_special_tokens=special) == decoded
    assert (ours.bos_id(), ours.eos_id()) == (theirs.bos_token_id, theirs.eos_token_id)
    assert (ours.pad_id(), ours.vocab_size) == (theirs.pad_token_id, len(theirs))
    assert ours.special_tokens() == wrapped.special_tokens()
    for name, (messages, prompt) in CONVERSATIONS.items():
      if template == "llama2" and name == "system":
        continue
      text = theirs.apply_chat_template(
        messages, add_generation_prompt=prompt, tokenize=False
      )
      assert ours.apply_chat_template(messages, prompt) == text
      ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
      assert ours.apply_chat_template(messages, False, tokenize=True) == ids


def test_parity_of_template_arguments(tmp_path):
  transformers = pytest.importorskip("transformers")
  theirs = transformers.AutoTokenizer.from_pretrained(saved(tmp_path, "qwen3"))
  ours = toys_text.chat_tokenizer("qwen3")
  schema = {"type": "function", "function": {"name": "f<x>", "parameters": {}}}
  call = {
    "role": "assistant",
    "content": None,
    "thinking": "hm",
    "tool_calls": [{"function": {"name": "f<x>", "arguments": {"n": 1}}}],
  }
  for kwargs in ({"enable_thinking": False}, {"tools": [schema]}):
    for messages in (CHAT, [*CHAT, call]):
      assert ours.apply_chat_template(messages, **kwargs) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **kwargs
      )


def test_parity_for_a_tokenizer_that_puts_a_space_first(tmp_path):
  transformers = pytest.importorskip("transformers")
  TokenizerAdapter(toys_text.metaspace()).save(tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  ours = TokenizerAdapter.from_pretrained(tmp_path)
  for text in TEXTS:
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(text)) == theirs.decode(
      theirs.encode(text, add_special_tokens=False), skip_special_tokens=True
    )


def test_a_transformers_tokenizer_is_not_changed_and_is_saved(tmp_path):
  transformers = pytest.importorskip("transformers")
  folder = saved(tmp_path / "a", None, generation_config={"eos_token_id": [0, 7]})
  theirs = transformers.AutoTokenizer.from_pretrained(folder)
  theirs.pad_token = None
  adapter = TokenizerAdapter(theirs, chat_template=toys_text.CHATML)
  assert adapter.pad_id() == adapter.eos_id()
  assert theirs.pad_token is None and theirs.chat_template is None
  assert adapter.eos_ids() == (adapter.eos_id(), 0, 7)
  assert TokenizerAdapter(theirs, eos_token="<|im_end|>").eos_token == "<|im_end|>"
  with pytest.raises(ValueError, match="chat template"):
    TokenizerAdapter(theirs).apply_chat_template(CHAT)
  adapter.save(tmp_path / "b")
  again = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
  assert again.chat_template == toys_text.CHATML
  assert adapter.tokenizer is theirs


def test_names_that_are_nothing_end_in_one_line(tmp_path):
  pytest.importorskip("transformers")
  code = (
    "from tunix.generate.tokenizer_adapter import TokenizerAdapter\n"
    "try: TokenizerAdapter.from_pretrained('no/such-model')\n"
    "except FileNotFoundError as error: print(error)"
  )
  out = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True,
    text=True,
    env={**os.environ, "HF_HUB_OFFLINE": "1"},
  )
  assert out.stdout.startswith("no tokenizer at 'no/such-model': neither"), out.stderr
