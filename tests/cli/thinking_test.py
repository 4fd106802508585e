"""Variables of the chat template: one value for rows, prompts, rollouts and exports."""

import json

import numpy as np
import pytest

from tests import toys_text
from tests.cli import runs
from tunix.cli import config as config_lib
from tunix.cli.make import data as build_data, loading
from tunix.data import chat
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.reward import functions as reward_fns

QUESTION = [{"role": "user", "content": "2+3"}]
NO_THOUGHT = {"enable_thinking": False}
EMPTY = "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def keys(model, tmp_path_factory):
  """Settings of fine-tuning on two answers, with a template in the form of Qwen3's."""
  folder = tmp_path_factory.mktemp("thinking")
  (folder / "qwen3.jinja").write_text(toys_text.QWEN3)
  sums = [("2+3", "[5]"), ("3+4", "[7]")]
  for name, response in (("sft", "response"), ("rl", "answer")):
    lines = [json.dumps({"prompt": q, response: a}) for q, a in sums]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
  return {
    "model__path": model,
    "tokenizer__chat_template": folder / "qwen3.jinja",
    "tokenizer__template_args": "{enable_thinking: false}",
    "data__train": folder / "sft.jsonl",
    "data__max_length": 48,
    "training__global_batch_size": 2,
    "training__max_steps": 40,
    "training__learning_rate": 0.01,
    "logging__tensorboard": "false",
    "output_dir": folder / "sft",
  }


def tokenizer(keys, **more):
  config = config_lib.load(runs.arguments(**(keys | more)))
  return config, loading.ModelLoader(config).tokenizer()


@pytest.mark.parametrize(
  ("args", "header", "answer", "keep"),
  [
    ("{enable_thinking: false}", EMPTY, "[5]", 1.0),
    # The model must write the empty think block itself.
    ("{}", "", f"{EMPTY}[5]", 0.0),
  ],
)
def test_rows_continue_the_prompt_of_generation(keys, args, header, answer, keep):
  _, adapter = tokenizer(keys, tokenizer__template_args=args)
  record = {"prompt": "2+3", "response": "[5]"}
  prompt = adapter.apply_chat_template(QUESTION, tokenize=True)
  assert adapter.decode(prompt, skip_special_tokens=False) == (
    f"<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n{header}"
  )
  row = chat.render(record, adapter)
  np.testing.assert_array_equal(row.prompt, prompt)
  completion = adapter.decode(row.completions[0][row.masks[0] == 1])
  assert completion == answer
  columns = {"prompts": ["2+3"], "completions": [completion], "answer": ["[5]"]}
  assert reward_fns.exact_match()(**columns) == [1.0]
  assert reward_fns.exact_match(reasoning="keep")(**columns) == [keep]


def test_answers_that_reason_are_refused_by_the_name_of_the_key(keys, tmp_path):
  file = tmp_path / "a.jsonl"
  record = {"prompt": "2+3", "response": "<think>hm</think>[5]"}
  file.write_text(json.dumps(record) + "\n")
  config, adapter = tokenizer(keys, data__train=file)
  says = r'a\.jsonl:1: messages\[1\] holds .* set data\.reasoning to "strip"'
  with pytest.raises(ValueError, match=says):
    build_data.build_data(config, adapter)
  config, adapter = tokenizer(keys, data__train=file, data__reasoning="strip")
  assert build_data.build_data(config, adapter).reports["train"].stripped == 1


def test_data_and_calls_override(keys):
  thinks = "{enable_thinking: true}"
  config, adapter = tokenizer(keys, data__template_args=thinks)
  data = build_data.build_data(config, adapter)
  text = adapter.decode(next(iter(data.train))["input_tokens"][0])
  assert EMPTY in text
  assert not adapter.apply_chat_template(QUESTION, enable_thinking=True).endswith(EMPTY)
  plain = TokenizerAdapter(toys_text.chat_tokenizer("qwen3"))
  assert not plain.apply_chat_template(QUESTION).endswith(EMPTY)


def test_a_run_learns_keeps_and_reinforces_answers_without_reasoning(
  keys, tmp_path, capsys
):
  assert runs.tunix("train", *runs.arguments(**keys)) == 0
  export, prompts = (
    keys["output_dir"] / "export",
    keys["output_dir"].parent / "rl.jsonl",
  )
  capsys.readouterr()
  # The export's own chat template has the variable.
  runs.tunix("generate", "--model", export, "--chat", "--prompt", "2+3")
  assert capsys.readouterr().out == "[5]\n"
  evaluation = ["--prompts", prompts, "--reward", "exact_match"]
  runs.tunix(
    "eval", export, *evaluation, "--max_new_tokens", 8, "--out", tmp_path / "e"
  )
  metrics = json.loads((tmp_path / "e" / "results.json").read_text())["results"][0]
  assert metrics["metrics"]["reward"]["value"] == 1.0
  rl = {
    "job": "grpo",
    "model__path": export,
    "data__train": prompts,
    "reward__functions": "exact_match",
    "rollout__max_prompt_length": 48,
    "rollout__max_tokens_to_generate": 8,
    "training__global_batch_size": 2,
    "training__max_steps": 1,
    "output_dir": tmp_path / "rl",
  }
  assert runs.tunix("train", *runs.arguments(**rl)) == 0
  assert runs.metrics(tmp_path / "rl")[1]["rewards/score/mean"] > 0.5
  capsys.readouterr()
  # A resumed run must render alike.
  changed = keys | {"tokenizer__template_args": "{}", "training__max_steps": 41}
  assert runs.tunix("train", *runs.arguments(**changed)) != 0
  assert "tokenizer.template_args" in capsys.readouterr().err


def test_variables_that_no_template_can_have(keys):
  for args, error in (
    ("{tools: []}", r"tokenizer\.template_args\.tools is set; expected variables"),
    ("{now: 1}", r"tokenizer\.template_args\.now is a name that every rendering"),
    ("{a-b: 1}", r"tokenizer\.template_args has the name 'a-b'; expected the name"),
  ):
    with pytest.raises(ValueError, match=error):
      tokenizer(keys, tokenizer__template_args=args)
