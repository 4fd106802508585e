"""Pages from hand-written folders: what stands on them, that texts stay texts, and that
they stay small. No run is trained here."""

import html.parser
import json
import re

import pytest

from tests.cli import runs as command
from tunix.report import page
from tunix.report.page import Run

NASTY = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\ud800'


def write_run(folder, *, steps=3, metrics=None, sample=None):
  """A folder as a run leaves it."""
  (folder / "logs").mkdir(parents=True)
  metrics = metrics or {"loss": lambda step: 2.0 / step}
  with (folder / "logs" / "metrics.jsonl").open("w") as file:
    for step in range(1, steps + 1):
      values = {name: value(step) for name, value in metrics.items()}
      file.write(json.dumps({"step": step, "mode": "train"} | values) + "\n")
  if sample is not None:
    completion = {"text": sample, "reward": 1.0, "rewards": {sample: 1.0}, "tokens": 3}
    group = {"step": 1, "prompt": sample, "columns": {sample: sample}}
    group["completions"] = [completion, completion | {"reward": 0.0}]
    (folder / "samples").mkdir()
    (folder / "samples" / "000000.jsonl").write_text(json.dumps(group) + "\nbroken")
  return folder


class Tags(html.parser.HTMLParser):
  """Names of the elements of a page, and its text."""

  def __init__(self, text):
    super().__init__()
    self.tags, self.attributes, self.text = [], set(), ""
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes |= {name for name, _ in attrs}

  def handle_data(self, data):
    self.text += data


def test_texts_of_models_and_users_stay_texts(tmp_path):
  folder = write_run(tmp_path / "run", metrics={NASTY: float}, sample=NASTY)
  run = Run(
    name=NASTY,
    folder=folder,
    settings={NASTY: NASTY, "job": NASTY},
    about={"data": {NASTY: NASTY}, NASTY: NASTY},
    scans={NASTY: {"report": {NASTY: NASTY}}},
    ended=NASTY,
    notes=[NASTY],
  )
  found = Tags(page.render([run]))
  assert found.tags.count("script") == 1 and "img" not in found.tags
  assert "onerror" not in found.attributes
  assert found.text.count("alert(2)") > 10


def test_a_page_needs_no_network(tmp_path):
  text = page.render([Run(name="run", folder=write_run(tmp_path / "run"))])
  assert not re.findall(r"\b(?:src|href)=|url\(|@import|fetch\(", text)
  assert re.findall(r"https?://[^\"']*", text) == ["http://www.w3.org/2000/svg"]


def test_configuration_tells_first_what_differs(tmp_path):
  settings = {"job": "sft", "seed": 3, "training.max_steps": 7}
  run = Run(
    name="run",
    folder=write_run(tmp_path / "run"),
    settings=settings,
    defaults={"job": "sft", "seed": 0, "training.max_steps": None},
    ended="finished after 7 steps",
  )
  text = Tags(page.render([run])).text
  assert text.index("training.max_steps") < text.index("the other keys")
  assert "job, " not in text and "run, sft: finished after 7 steps" in text
  assert re.search("seed3 *0", text.replace("\n", ""))


def test_runs_are_compared(tmp_path):
  runs = [
    Run(
      name=name,
      folder=write_run(tmp_path / name, steps=3 + i),
      settings={"seed": i, "job": "sft"},
    )
    for i, name in enumerate("ab")
  ]
  text = page.render(runs)
  assert text.count("<polyline") == 2 and 'class="line c1"' in text
  before, _, table = Tags(text).text.partition("What differs between the runs")
  assert table.startswith("keyabseed01") and "a, sft: not finished; step 3" in before


@pytest.mark.parametrize("count", [0, page.MOST_RUNS + 1])
def test_a_page_takes_some_runs(count, tmp_path):
  with pytest.raises(ValueError, match="a page takes 1 to 8"):
    page.render([Run(name="run", folder=tmp_path)] * count)


def test_a_long_run_has_a_small_page(tmp_path):
  metrics = {f"loss{i}": lambda step: (step * 7919 % 1000) / 7 for i in range(70)}
  run = write_run(tmp_path / "run", steps=1500, metrics=metrics)
  text = page.render([Run(name="run", folder=run)])
  assert len(text) < 1_000_000
  assert "10 further metrics are in logs/metrics.jsonl alone" in text


def report(*argv):
  return command.tunix("report", *argv)


def test_the_command_writes_the_page_of_a_folder(tmp_path, capsys, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run, other = write_run(tmp_path / "one"), write_run(tmp_path / "two" / "one")
  (run / "config.yaml").write_text("job: sft\ntraining: {max_steps: 3}\nseed: 4\n")
  (run / "result.json").write_text('{"steps": 3, "train_loss": [2.0, 0.5]}')
  (run / "about.json").write_text(
    '{"devices": "1 cpu", "data": {"train": "9 records"}}'
  )
  (run / "scan.json").write_text('{"train": {"key": "x", "report": {"records": 9}}}')
  assert report(run) == 0 and "report.html" in capsys.readouterr().out
  text = Tags((run / "report.html").read_text()).text
  for said in ("finished after 3 steps; train loss 2 -> 0.5", "1 cpu", "9 records"):
    assert said in text
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
  for argv, said in (
    ([tmp_path / "none"], "none is no folder: give the output_dir of a `tunix train`"),
    ([tmp_path], "holds no run"),
    ([run, "--output", tmp_path], "a folder: name a file in it"),
    ([run] * 9, "9 runs were named"),
  ):
    assert report(*argv) == 2, argv
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
