"""Evaluators, unmodified, against `tunix serve` as a process.

lm-eval and inspect-ai are not in the extra `test`: install them beside it to run this.
"""

import importlib
import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pytest

from tests import toys_text
from tests.cli import serve_test
from tunix.generate import scoring
from tunix.generate.sampler import Sampler
from tunix.models.automodel import AutoModel

QUESTIONS = ["what is the sea?", "why is it five?", "who walks?", "is it so?"]
CHOICES = [" the sea is five", " it walks", " no"]


def needs(package, install):
  """A mark; inside a test it would be too late, because the server has started."""
  reason = f"{package} is not installed: pip install {install}"
  return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return serve_test.write_model(tmp_path_factory.mktemp("evaluators") / "tiny")


@pytest.fixture(scope="module")
def server(folder):
  with serve_test.serving(folder) as made:
    yield made


@pytest.fixture
def lm_eval(monkeypatch):
  monkeypatch.setenv("HF_HUB_OFFLINE", "1")
  monkeypatch.setenv("OPENAI_API_KEY", "secret")
  return importlib.import_module("lm_eval")


def task(tmp_path, name, **fields):
  """A task of lm-eval over a local file."""
  source = tmp_path / f"{name}.jsonl"
  lines = [{"question": question, "choices": CHOICES} for question in QUESTIONS]
  source.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return {
    "task": name,
    "dataset_path": "json",
    "dataset_kwargs": {
      "data_files": {"test": str(source)},
      "cache_dir": str(tmp_path / "cache"),
    },
    "test_split": "test",
    "doc_to_text": "{{question}}",
    **fields,
  }


def samples(lm_eval, server, made):
  """The samples of a run, by question."""
  arguments = {
    "model": "tiny",
    "base_url": f"{server.url}/v1/completions",
    "auth_token": "secret",  # of the routes that give the tokenizer
    "num_concurrent": 4,
    "max_retries": 1,
  }
  found = lm_eval.simple_evaluate(
    "local-completions", model_args=arguments, tasks=[made], bootstrap_iters=0
  )
  return {x["doc"]["question"]: x for x in found["samples"][made["task"]]}


def likelihood(model, tokenizer, prompt, completion):
  start = tokenizer.encode(prompt)
  ids = tokenizer.encode(prompt + completion)[len(start) :]
  row = lambda tokens: jnp.asarray([tokens], jnp.int32)
  ones = lambda tokens: jnp.ones((1, len(tokens)), bool)
  scores = scoring.score_completions(
    model, row(start), ones(start), row(ids), ones(ids)
  )
  return float(jnp.sum(scores.logps))


@needs("lm_eval", "'lm-eval[api]'")
@pytest.mark.slow
@pytest.mark.ci
def test_likelihoods_of_lm_eval_are_ours(lm_eval, server, folder, tmp_path):
  fields = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}"}
  made = task(tmp_path, "likely", doc_to_target=0, target_delimiter="", **fields)
  found = samples(lm_eval, server, made)
  model, tokenizer = AutoModel.from_pretrained(folder), toys_text.chat_tokenizer()
  for question in QUESTIONS:
    theirs = [float(number) for number, _ in found[question]["filtered_resps"]]
    ours = [likelihood(model, tokenizer, question, choice) for choice in CHOICES]
    np.testing.assert_allclose(theirs, ours, atol=1e-4)


@needs("lm_eval", "'lm-eval[api]'")
@pytest.mark.slow
@pytest.mark.ci
def test_texts_of_lm_eval_are_ours(lm_eval, server, folder, tmp_path):
  rules = {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0}
  fields = {"output_type": "generate_until", "generation_kwargs": rules}
  found = samples(lm_eval, server, task(tmp_path, "texts", doc_to_target="", **fields))
  tokenizer = toys_text.chat_tokenizer()
  sampler = Sampler(AutoModel.from_pretrained(folder), tokenizer)
  ids = [np.asarray(tokenizer.encode(question)) for question in QUESTIONS]
  texts = sampler(ids, 12, stop_strings=["\n\n"]).text
  assert [found[question]["resps"][0][0] for question in QUESTIONS] == texts


@needs("inspect_ai", "inspect-ai openai")
@pytest.mark.slow
@pytest.mark.ci
def test_inspect_ai_scores_conversations(server, tmp_path):
  names = ("", ".dataset", ".model", ".scorer", ".solver")
  inspect_ai, dataset, models, scorer, solver = (
    importlib.import_module(f"inspect_ai{name}") for name in names
  )
  bodies = [
    {"messages": [{"role": "user", "content": question}], "max_tokens": 12}
    for question in QUESTIONS
  ]
  replies = [
    server.post("/v1/chat/completions", model="tiny", temperature=0, **body).json()
    for body in bodies
  ]
  texts = [reply["choices"][0]["message"]["content"] for reply in replies]
  model = models.get_model(
    "openai-api/tunix/tiny", base_url=f"{server.url}/v1", api_key="secret"
  )
  made = inspect_ai.Task(
    dataset=[dataset.Sample(input=q, target=text) for q, text in zip(QUESTIONS, texts)],
    solver=solver.generate(),
    scorer=scorer.includes(),
  )
  [log] = inspect_ai.eval(
    made,
    model=model,
    temperature=0,
    max_tokens=12,
    log_dir=str(tmp_path),
    display="none",
  )
  assert log.status == "success", log.error
  assert [s.output.completion for s in log.samples] == texts
  assert log.results.scores[0].metrics["accuracy"].value == 1.0
