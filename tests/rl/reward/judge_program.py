"""Asks a judge about 12 batches: python -m tests.rl.reward.judge_program FOLDER.

The judge is behind TUNIX_JUDGE_URL, and FOLDER keeps its answers. The rewards of all
batches are written to FOLDER/rewards when the last one is known.
"""

import json
import pathlib
import sys

from tunix.rl.reward.judge import Judge
from tunix.rl.reward.rewards import RewardManager


def main() -> None:
  folder = pathlib.Path(sys.argv[1])
  folder.mkdir(parents=True, exist_ok=True)
  prompt = folder / "judge.txt"
  prompt.write_text("{completion}")
  judge = Judge(str(prompt), model="m", cache=str(folder / "kept"), concurrency=2)
  manager, rewards = RewardManager(judge), []
  for batch in range(12):
    texts = [f"batch {batch}, row {row}" for row in range(8)]
    rewards.append(manager.compute(["?"] * 8, texts).total.tolist())
  (folder / "rewards").write_text(json.dumps(rewards))


if __name__ == "__main__":
  main()
