"""Images in `tunix generate`, `parity`, `eval` and `chat`."""

import base64
import io
import json

import numpy as np
import pytest

from tests import toys_images
from tests.cli import runs
from tests.sft import images_test
from tunix.cli.commands.parts import chat_server
from tunix.data.images import ImageReader
from tunix.generate.sampler import Sampler
from tunix.sft import losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return toys_images.long_folder("smolvlm", tmp_path_factory.mktemp("x") / "smolvlm")


def test_images_stand_before_the_text(folder, tmp_path, capsys):
  picture = toys_images.draw(tmp_path / "a.png", 1)
  words = ["--model", folder, "--chat", "--prompt", "what is it?", "--json"]
  words += ["--max_new_tokens", 4]
  assert runs.tunix("generate", *words, "--image", picture) == 0
  record = json.loads(capsys.readouterr().out)
  model, tokenizer = toys_images.load(folder), toys_images.tokenizer("smolvlm")
  reader = ImageReader(folder, model.config)
  pictures = reader.open([picture], None, "a test")
  text = reader.expand_text(
    pictures, "<|im_start|>user: <image>what is it?<end_of_utterance>\nassistant: "
  )
  prompt = np.asarray(tokenizer.encode(text), np.int32)
  out = Sampler(model, tokenizer)([prompt], 4, images=[reader.prompt(pictures)])
  assert record["prompt"] == "what is it?" and [record["completion"]] == out.text


def test_decoding_and_scoring_see_the_same_images(folder, tmp_path, capsys):
  picture = toys_images.draw(tmp_path / "a.png", 1)
  words = ["parity", folder, "--tokens=4", "--image", picture, "--threshold=1e-5"]
  words.append("--dtype=float32")
  assert runs.tunix(*words, "--prompt", "what is it?", "and now?") == 0
  assert "8 sampled tokens" in capsys.readouterr().out
  assert runs.tunix(*words) == 2
  assert "--image is given without --prompt" in capsys.readouterr().err


def test_what_is_refused(folder, tmp_path, capsys):
  words = [
    "generate",
    "--model",
    folder,
    "--prompt",
    "a",
    "--image",
    tmp_path / "no.png",
  ]
  assert runs.tunix(*words) == 2
  assert "--image is given without --chat" in capsys.readouterr().err
  assert runs.tunix(*words, "--chat") == 2
  assert "--image: image 1: there is no file" in capsys.readouterr().err
  (tmp_path / "text").mkdir()
  file = folder / "config.json"
  config = {**json.loads(file.read_text()), "model_type": "llama"}
  (tmp_path / "text" / "config.json").write_text(json.dumps(config))
  toys_images.tokenizer("smolvlm").save(tmp_path / "text")
  words[2] = tmp_path / "text"
  assert runs.tunix(*words, "--chat") == 2
  assert (
    "which has no vision tower; expected a model that reads images"
    in capsys.readouterr().err
  )


def metrics(folder, section):
  read = json.loads((folder / "results.json").read_text())["results"][section]
  return {name: metric["value"] for name, metric in read["metrics"].items()}


def test_evaluations_see_the_images(folder, tmp_path, capsys):
  data = toys_images.write_records(tmp_path)
  model, tokenizer = toys_images.load(folder), toys_images.tokenizer("smolvlm")
  batches = images_test.dataset(
    folder, model, tokenizer, data, shuffle=False, batch_size=8
  )
  loss = losses.next_token_loss(model, **next(iter(batches)))
  rows = [json.loads(line) for line in data.read_text().splitlines()]
  questions = [{"prompt": row["messages"][:1], "answer": "7"} for row in rows]
  prompts = data.with_name("prompts.jsonl")
  prompts.write_text("".join(json.dumps(row) + "\n" for row in questions))
  (tmp_path / "seen_images.py").write_text(
    "def seen(completions, images):\n  return [float(len(x)) for x in images]\n"
  )
  words = ["eval", folder, "--data", data, "--prompts", prompts, "--dtype=float32"]
  words += ["--reward", f"{tmp_path / 'seen_images.py'}:seen", "--max_new_tokens", 4]
  assert runs.tunix(*words, "--out", tmp_path / "out") == 0
  nats = metrics(tmp_path / "out", 0)["nats per token"]
  np.testing.assert_allclose(nats, float(loss.total / loss.weight), rtol=1e-5)
  assert metrics(tmp_path / "out", 1)["reward"] == np.mean([2, 1, 0, 2, 1, 0, 2, 1])
  reader = ImageReader(folder, model.config)
  for number, turn in ((0, rows[0]["messages"][0]), (4, rows[4]["messages"][0])):
    sources = [part["image"] for part in turn["content"] if part["type"] == "image"]
    pictures = reader.open(sources, tmp_path, "a test")
    bare = [{"type": "image"}] * len(sources) + turn["content"][len(sources) :]
    text = tokenizer.apply_chat_template([{"role": "user", "content": bare}])
    prompt = np.asarray(tokenizer.encode(reader.expand_text(pictures, text)), np.int32)
    out = Sampler(model, tokenizer)([prompt], 4, images=[reader.prompt(pictures)])
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines][len(rows) :]
    assert answers[number]["completions"][0]["text"] == out.text[0]
  capsys.readouterr()
  assert runs.tunix(*words, "--no-images") == 2
  assert "only text is read here" in capsys.readouterr().err
  assert runs.tunix(*words[:4], "--max_length", 12) == 2
  assert "do not cut rows within images" in capsys.readouterr().err
  pairs = toys_images.write_records(tmp_path, kind="pair")
  assert runs.tunix("eval", folder, "--pairs", pairs) == 0
  assert "accuracy" in capsys.readouterr().out


def chat(monkeypatch, said, *words):
  monkeypatch.setattr("sys.stdin", io.StringIO(said))
  return runs.tunix("chat", *words, "--max_new_tokens", 4)


def test_a_chat_about_an_image(folder, tmp_path, monkeypatch, capsys):
  picture = toys_images.draw(tmp_path / "a.png", 1)
  words = ["--model", folder, "--chat", "--prompt", "what is it?", "--json"]
  words += ["--max_new_tokens", 4, "--image", picture]
  assert runs.tunix("generate", *words) == 0
  want = json.loads(capsys.readouterr().out)["completion"]
  said = f"/image {tmp_path / 'no.png'}\n/image {picture}\nwhat is it?\nand now?\n"
  assert chat(monkeypatch, said, "--model", folder) == 0
  out = capsys.readouterr()
  assert out.out.split("\n")[0] == want and out.out.count("\n") == 2
  assert "no.png" in out.err and "no image was added" in out.err
  (tmp_path / "bad.png").write_text("no picture")
  said = f"/image {tmp_path / 'bad.png'}\n/image\n/image a\0b\n/imagery?\n"
  assert chat(monkeypatch, said, "--model", folder) == 0
  bad = capsys.readouterr()
  assert "bad.png is damaged" in bad.err or "bad.png" in bad.err
  assert bad.err.count("no image was added") == 3 and "/image FILE" in bad.err
  assert bad.out.count("\n") == 1  # /imagery? is a turn
  monkeypatch.setenv("HOME", str(tmp_path))
  assert chat(monkeypatch, "/image ~/a.png\nwhat is it?\n", "--model", folder) == 0
  assert capsys.readouterr().out == want + "\n"
  # The image of the first turn belongs to the conversation until it is reset.
  said = f"/image {picture}\n/reset\nwhat is it?\n"
  assert chat(monkeypatch, said, "--model", folder) == 0
  assert capsys.readouterr().out != out.out.split("\n")[0] + "\n"
  said = f"/image {picture}\nwhat is it?\n"
  assert chat(monkeypatch, said, "--model", folder, "--no-images") == 0
  assert "Give --images if" in capsys.readouterr().err


def test_a_server_gets_the_bytes_of_an_image(tmp_path, monkeypatch):
  picture, asked = toys_images.draw(tmp_path / "a.png", 1), []

  def stream(self, messages):
    asked.append(messages)
    yield chat_server.Part("a bird")

  monkeypatch.setattr(chat_server.ChatServer, "stream", stream)
  said = f"/image {picture}\nwhat is it?\nand now?\n"
  assert chat(monkeypatch, said, "--url", "http://127.0.0.1:1", "--model", "x") == 0
  data = base64.b64encode(picture.read_bytes()).decode()
  image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
  text = {"type": "text", "text": "what is it?"}
  assert asked[0] == [{"role": "user", "content": [image, text]}]
  assert asked[1][0] == asked[0][0] and asked[1][2]["content"] == "and now?"
