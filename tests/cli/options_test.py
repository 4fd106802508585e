"""Options of commands: a flag and a file set each field of their dataclasses."""

import dataclasses
from typing import Literal, get_args, get_origin

import pytest
import yaml

from tests.cli import runs
from tunix.cli.commands import chat, generate, rollouts, route, serve
from tunix.cli.commands.eval import main as evaluate
from tunix.cli.commands.planning import serve as plan_serve
from tunix.cli.settings import convert
from tunix.cli.settings.run import DistributedSettings
from tunix.generate.engine.config import EngineConfig
from tunix.serve.settings import HttpSettings, RouteSettings, ServeSettings
from tunix.tinker.settings import TinkerSettings

# A dataclass and a command that takes its fields -> the fields that it does not read.
SECTIONS = {
  (serve.parser, serve.ServeOptions): (),
  (serve.parser, EngineConfig): ("record_routes", "record_head"),
  (serve.parser, ServeSettings): (),
  (serve.parser, TinkerSettings): (),
  (plan_serve.parser, plan_serve.PlanOptions): (),
  (route.parser, RouteSettings): (),
  (route.parser, HttpSettings): (),
  (rollouts.parser, rollouts.HostOptions): (),
  (rollouts.parser, HttpSettings): ("queue_timeout", "request_timeout"),
  (evaluate.parser, evaluate.EvalOptions): (),
  (evaluate.parser, DistributedSettings): (),
  (generate.parser, generate.GenerateOptions): (),
  (chat.parser, chat.ChatOptions): (),
}
# Values of options for which one that is made of the type is refused.
VALUES = {
  "page_tokens": 32,
  "prefill_tokens": 1024,
  "cache_tokens": 2**15,
  "proxy": ["10.0.0.9"],
  "url": ["http://10.0.0.2:1"],
  "host": "localhost",
  "max_length": 16,
  "top_p": 0.5,
  "min_p": 0.5,
}
# Other options that an option of `eval`, `generate` or `chat` needs.
SAMPLED = {"temperature": 1.0, "num_samples": 2}
NEEDS = {
  "eval": {"model": "m", "prompts": "p", "pairs": "p", "reward": ["f"], **SAMPLED},
  "generate": {"model": "m", "prompt": ["p"], **SAMPLED},
  "chat": {"model": "m", "temperature": 1.0},
  "route": {"url": ["http://10.0.0.3:1"]},
  "serve": {"model": "m"},
}
# What an option needs besides, or excludes (None).
BESIDES = {
  "generate": {
    "beam_size": {"temperature": None, "num_samples": None},
    "length_penalty": {"beam_size": 4, "temperature": None},
    "prompt_file": {"prompt": None},
    "image": {"chat": True},
    "stream": {"num_samples": None},
  },
  "chat": {"api_key_env": {"url": "u"}},
  "serve": {"compilation_cache_key": {"compilation_cache": "programs"}},
}


def other(option):
  """A value that is not the default, as YAML has it."""
  kind = next(k for k in convert.options(option.hint) if k is not type(None))
  item, default = convert.item_of(option.hint), option.key.default
  value = VALUES.get(option.name)
  if value is not None and isinstance(value, list) == (item is not None):
    return value
  if get_origin(kind) is Literal:
    return next(name for name in get_args(kind) if name != default)
  if item is not None:
    return [item("1")]
  if kind is bool:
    return not default
  if kind in (int, float):
    return kind(default or 0) + 1
  return {"a": 1} if get_origin(kind) is dict else "there"


def flags(name, value):
  """A value as words of a command line."""
  if isinstance(value, bool):
    return [f"--{'' if value else 'no-'}{name}"]
  if isinstance(value, list):
    return [f"--{name}", *map(str, value)]
  return [f"--{name}={value}"]


@pytest.mark.parametrize(
  ("parser", "kind"), SECTIONS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_flag_and_a_file_set_each_field(parser, kind, tmp_path, monkeypatch):
  monkeypatch.delenv("TUNIX_API_KEY", raising=False)
  made = parser()
  command = made.prog.split()[-1]
  [section] = [s for s in made._sections if s.kind is kind]
  unread = {field.name for field in dataclasses.fields(kind)} - {*section.options()}
  assert unread == {*SECTIONS[parser, kind]}
  file, secret = tmp_path / "options.yaml", tmp_path / "secret"
  secret.write_text("ann tml-1")
  for field, option in section.options().items():
    value = str(secret) if option.key.facts.secret else other(option)
    given = NEEDS.get(command, {}) | BESIDES.get(command, {}).get(option.name, {})
    given = {name: x for name, x in given.items() if x is not None}
    given |= {option.name: value}
    file.write_text(yaml.safe_dump(given))
    by_file = made.read([f"--{made._config}={file}"]).build(kind)
    by_flag = made.read([w for x in given.items() for w in flags(*x)]).build(kind)
    assert by_file == by_flag, option.name
    found = getattr(by_flag, field)
    assert found != option.key.default, option.name
    if option.key.facts.secret:
      assert found in ("ann tml-1", {"ann": "tml-1"})
    else:
      assert convert.plain(found) == value, option.name


def test_later_files_override_earlier_ones_and_arguments_override_files(tmp_path):
  first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
  first.write_text("model: m\nslots: 2\nrounds: 2\nproxy: [10.0.0.1]\nname: x\n")
  second.write_text("slots: 3\nrounds: 3\nport:\n")  # null leaves the default
  words = [f"--config={first},{second}", "--rounds", "4", "--proxy", "10.0.0.2", "n"]
  values = serve.parser().read(words)
  config, settings = values.build(EngineConfig), values.build(ServeSettings)
  assert (config.slots, config.rounds) == (3, 4)
  assert (settings.proxies, settings.port) == (("10.0.0.2",), 8000)
  assert (settings.model_name, values.build(serve.ServeOptions).model) == ("x", "n")


@pytest.mark.parametrize("text", ['"a"', "a: b", "[a]", "", "~", "null", "1e3", "# a"])
def test_texts_of_the_command_line_stay_as_they_were_typed(text):
  words = ["--model=m", "--prompt", text, "--stop", "x" + text]
  args = generate.parser().read(words).build(generate.GenerateOptions)
  assert (args.prompt, args.stop_strings) == ((text,), ("x" + text,))


def test_numbers_null_and_json_of_the_command_line():
  words = ["m", "--tinker", "--tinker_root=null", "--queue_timeout=1e-1", "--tp=null"]
  values = serve.parser().read(words[:-1])
  assert values.build(TinkerSettings).root is None
  assert values.build(ServeSettings).queue_timeout == 0.1
  with pytest.raises(ValueError, match="--tp is null, expected a whole number"):
    serve.parser().read(words)
  words = ["m", "--data=d", '--template_args={"a":"b","c":[1,null],"d":true}']
  args = evaluate.parser().read(words).build(evaluate.EvalOptions)
  assert args.template_args == {"a": "b", "c": [1, None], "d": True}


def test_sections_of_a_file_are_prefixes_with_a_point(tmp_path):
  file = tmp_path / "eval.yaml"
  file.write_text("model: m\ndata: d\ndistributed: {num_processes: 2}\n")
  values = evaluate.parser().read([f"--config={file}"])
  assert values.build(DistributedSettings).num_processes == 2


@pytest.mark.parametrize(
  ("command", "text", "words", "message"),
  [
    ("serve", "slot: 2", (), "{f}: the key 'slot' is unknown: did you mean slots?"),
    (
      "serve",
      "slots: two",
      (),
      "{f}: slots is the text 'two', expected a whole number",
    ),
    ("serve", "model: m\nport: -1", (), "{f}: port is -1: it must be a whole number"),
    ("serve", "model: m", ("--port=-1",), "--port is -1: it must be a whole number"),
    ("serve", "model: m", ("--model=a", "b"), "--model is a and MODEL is b: give one"),
    ("serve", "model: m", ("a", "b"), "'b' is one argument too many; see tunix serve"),
    ("serve", "model: m", ("--slot=2",), "the option --slot is unknown: did you mean"),
    ("serve", "slots: 2", (), "MODEL is missing: give it; see tunix serve --help"),
    ("serve", "tinker_max_rank: 4\nmodel: m", (), "{f}: tinker_max_rank has no effect"),
    ("serve", "tinker: true\nmodel: m\ntinker_max_rank: 0", (), "tinker_max_rank is 0"),
    ("route", "url: [h]", (), "{f}: url has 'h', expected http://HOST:PORT"),
    ("route", "max_choices: 2", (), "the key 'max_choices' is unknown"),
    ("generate", "prompt: [a]", (), "--model is missing"),
    ("generate", "model: m", (), "expected --prompt or --prompt_file, found none"),
    ("chat", "model: m\ntop_k: 2", (), "{f}: top_k is 2, and at temperature 0"),
    ("eval", "model: m", ("--data=d", "--stop", "x"), "--stop has no effect without"),
  ],
)
def test_errors_name_file_key_and_remedy(
  command, text, words, message, tmp_path, capsys
):
  file = tmp_path / "mine.yaml"
  file.write_text(text)
  assert runs.tunix(command, f"--config={file}", *words) == 2
  error = capsys.readouterr().err
  assert message.format(f=file) in error and error.count("\n") == 1


def test_the_host_of_a_run_has_a_file_beside_that_of_the_run(tmp_path):
  file = tmp_path / "host.yaml"
  file.write_text("port: 1\ntp: 2")
  words = ["run.yaml", "--job=grpo", "--config=mine.yaml"]
  values, rest = rollouts.parser().read_known([f"--host_config={file}", *words])
  assert rest == words
  assert (
    values.build(HttpSettings).port == 1 and values.build(rollouts.HostOptions).tp == 2
  )
