"""Pages of hand-written folders: their contents and their size. No run is trained."""

import json
import re

import pytest

from tests import toys_images
from tests.cli import runs as command
from tests.report import dom
from tunix.models.images import opening
from tunix.report import page
from tunix.report.page import Run


def write_run(folder, *, steps=3, metrics=None, sample=None, columns=None):
  """A folder as a run leaves it."""
  (folder / "logs").mkdir(parents=True)
  metrics = metrics or {"loss": lambda step: 2.0 / step}
  with (folder / "logs" / "metrics.jsonl").open("w") as file:
    for step in range(1, steps + 1):
      values = {name: value(step) for name, value in metrics.items()}
      file.write(json.dumps({"step": step, "mode": "train"} | values) + "\n")
  if sample is not None:
    completion = {"text": sample, "reward": 1.0, "rewards": {sample: 1.0}, "tokens": 3}
    group = {"step": 1, "prompt": sample, "columns": columns or {sample: sample}}
    group["completions"] = [completion, completion | {"reward": 0.0}]
    (folder / "samples").mkdir()
    (folder / "samples" / "000000.jsonl").write_text(json.dumps(group) + "\nbroken")
  return folder


def text_of(page):
  """All text that a page shows."""
  return dom.text(dom.draw(page))


def test_samples_are_drawn(tmp_path):
  folder = write_run(tmp_path / "run", sample="a completion")
  drawn = dom.draw(page.render([Run(name="run", folder=folder)]))
  (article,) = drawn.iter("article")
  assert [pre.text for pre in article.iter("pre")] == ["a completion"] * 3
  sides = [d.get("class") for d in article.iter("div") if "side" in d.get("class", "")]
  assert sides == ["side best", "side worst"]


def test_images_of_a_prompt_are_shown(tmp_path):
  (tmp_path / "broken.png").write_bytes(b"no image")
  toys_images.draw(tmp_path / "a.png", 1, (40, 400))
  files = [str(tmp_path / f"{name}.png") for name in ("a", "broken", "gone", "a")]
  columns = {"images": [*files, "data URI"]}
  folder = write_run(tmp_path / "run", sample="it is", columns=columns)
  (article,) = dom.draw(page.render([Run(name="run", folder=folder)])).iter("article")
  shown = [opening.open_image(image.get("src")) for image in article.iter("img")]
  assert [picture.shape for picture in shown] == [(16, 160, 3)] * 2


def test_what_a_model_wrote_is_text(tmp_path):
  hostile = "</script><img src=x onerror=alert(1)>\u2028<script>"
  folder = write_run(tmp_path / "run", sample=hostile)
  made = page.render([Run(name="run", folder=folder)])
  head, _, data = made.partition('type="application/json">')
  assert "default-src 'none'" in head and "connect-src" not in head
  assert "<" not in data.partition("</script>")[0]
  (article,) = dom.draw(made).iter("article")
  assert not [*article.iter("img")] and not [*article.iter("script")]
  assert [pre.text for pre in article.iter("pre")] == [hostile] * 3


def test_a_folder_named_like_a_file_of_samples_is_skipped(tmp_path):
  folder = write_run(tmp_path / "run", sample="a completion")
  (folder / "samples" / "000001.jsonl").mkdir()
  (folder / "samples" / "000002.jsonl").write_text("[" * 10**5)
  assert "a completion" in text_of(page.render([Run(name="run", folder=folder)]))


def test_keys_that_differ_from_their_defaults_come_first(tmp_path):
  settings = {"job": "sft", "seed": 3, "training.max_steps": 7}
  run = Run(
    name="run",
    folder=write_run(tmp_path / "run"),
    settings=settings,
    defaults={"job": "sft", "seed": 0, "training.max_steps": None},
    ended="finished after 7 steps",
  )
  text = text_of(page.render([run]))
  assert text.index("training.max_steps") < text.index("the other keys")
  assert "job, " not in text and "run, sft: finished after 7 steps" in text
  assert re.search("seed3 *0", text.replace("\n", ""))


def test_a_name_that_is_the_job_is_said_once_and_decoding_is_explained(tmp_path):
  metrics = {"rewards/score/mean": float}
  settings = {"job": "grpo", "rollout.temperature": 1.0, "rollout.eval_temperature": 0}
  folder = write_run(tmp_path / "grpo", metrics=metrics)
  text = text_of(page.render([Run(name="grpo", folder=folder, settings=settings)]))
  assert "grpo: not finished" in text and "grpo, grpo" not in text
  assert "temperature 1 to explore, and evaluations decode greedily" in text
  settings["rollout.eval_temperature"] = None
  text = text_of(page.render([Run(name="a", folder=folder, settings=settings)]))
  assert "a, grpo: not finished" in text and "to explore" not in text


def test_runs_are_compared(tmp_path):
  runs = [
    Run(
      name=name,
      folder=write_run(tmp_path / name, steps=3 + i),
      settings={"seed": i, "job": "sft"},
    )
    for i, name in enumerate("ab")
  ]
  drawn = dom.draw(page.render(runs))
  lines = [line.get("class") for line in drawn.iter("polyline")]
  assert lines == ["line c0", "line c1"]
  before, _, table = dom.text(drawn).partition("Keys that differ between the runs")
  assert table.startswith("keyabseed01") and "a, sft: not finished; step 3" in before


@pytest.mark.parametrize("count", [0, page.MOST_RUNS + 1])
def test_a_page_takes_some_runs(count, tmp_path):
  with pytest.raises(ValueError, match=f"runs are {count}"):
    page.render([Run(name="run", folder=tmp_path)] * count)


def test_a_long_run_has_a_small_page(tmp_path):
  metrics = {f"loss{i}": lambda step: (step * 7919 % 1000) / 7 for i in range(70)}
  run = write_run(tmp_path / "run", steps=1500, metrics=metrics)
  text = page.render([Run(name="run", folder=run)])
  assert len(text) < 1_000_000
  assert "10 further metrics are only in logs/metrics.jsonl" in text


def report(*argv):
  return command.tunix("report", *argv)


def test_the_command_writes_the_page_of_a_folder(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run, other = write_run(tmp_path / "one"), write_run(tmp_path / "two" / "one")
  (run / "config.yaml").write_text("job: sft\ntraining: {max_steps: 3}\nseed: 4\n")
  note = "nothing was learned: the gradient was 0"
  result = {"steps": 3, "train_loss": [2.0, 0.5], "notes": [note]}
  (run / "result.json").write_text(json.dumps(result))
  (run / "about.json").write_text(
    '{"devices": "1 cpu", "data": {"train": "9 records"}}'
  )
  (run / "scan.json").write_text('{"train": {"key": "x", "report": {"records": 9}}}')
  assert report(run) == 0 and "report.html" in capsys.readouterr().out
  text = text_of((run / "report.html").read_text())
  for phrase in (
    "finished after 3 steps; train loss 2 -> 0.5",
    "1 cpu",
    "9 records",
    note,
  ):
    assert phrase in text
  assert text.index("training.max_steps") < text.index("the other keys")
  assert report(run, other, "--output", "both.html") == 0
  assert "one (2)" not in (tmp_path / "both.html").read_text()
  assert str(other) in (tmp_path / "both.html").read_text()


def test_a_configuration_that_cannot_be_read_is_said_on_the_page(tmp_path):
  run = write_run(tmp_path / "run")
  (run / "config.yaml").write_text("job: nothing\n")
  (run / "about.json").write_text("[")
  assert report(run) == 0
  assert "config.yaml cannot be read" in (run / "report.html").read_text()


def test_the_command_refuses_what_is_no_run(tmp_path, capsys):
  run = write_run(tmp_path / "run")
  for argv, key in (
    ([tmp_path / "none"], "none is not a folder"),
    ([tmp_path], "holds no run"),
    ([run, "--output", tmp_path], "--output is"),
    ([run] * 9, "runs are 9"),
  ):
    assert report(*argv) == 2, argv
    error = capsys.readouterr().err
    assert key in error and error.count("\n") == 1


def test_curves_that_never_move_share_a_line(tmp_path):
  metrics = {
    "loss": lambda step: 2.0 / step,
    "entropy": lambda step: 1234.5,
    "vf_clipfrac": lambda step: 0.0,
  }
  drawn = dom.draw(page.render([run_of(tmp_path / "run", metrics)]))
  titles = [caption.itertext() for caption in drawn.iter("figcaption")]
  assert [next(texts) for texts in titles] == ["loss"]
  line = "The same in every step: entropy, nats: 1,234.5; clipped share of values: 0."
  assert line in dom.text(drawn)
  # One value cannot move: it is a point of a chart.
  drawn = dom.draw(page.render([run_of(tmp_path / "one", metrics, steps=1)]))
  assert len([*drawn.iter("figcaption")]) == 3


def test_charts_with_reward_in_their_names_are_explained(tmp_path):
  metrics = {"rewards/score/mean": float, "rewards/exact_match": float}
  text = text_of(page.render([run_of(tmp_path / "run", metrics)]))
  assert "rewards/exact_match is one of" in text
  del metrics["rewards/exact_match"]
  text = text_of(page.render([run_of(tmp_path / "alone", metrics)]))
  assert "reward functions" not in text


def run_of(folder, metrics, **options):
  return Run(name="run", folder=write_run(folder, metrics=metrics, **options))
