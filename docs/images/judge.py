"""Makes judge_learning.png: python docs/images/judge.py METRICS.jsonl ...

Each file is that of a run of examples/judge.py.
"""

import json
import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main() -> None:
  """Plots the mean reward of each run over its steps."""
  figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
  for file in sys.argv[1:]:
    lines = map(json.loads, pathlib.Path(file).read_text().splitlines())
    steps = [x for x in lines if x["mode"] == "train" and "rewards/score/mean" in x]
    numbers = [x["step"] for x in steps]
    axes.plot(numbers, [x["rewards/score/mean"] for x in steps])
  axes.set(xlabel="step", ylabel="mean reward of the judge", ylim=(0, 1))
  figure.savefig(pathlib.Path(__file__).with_name("judge_learning.png"), dpi=110)


if __name__ == "__main__":
  main()
