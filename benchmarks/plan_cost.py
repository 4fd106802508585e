"""Measures the CPU seconds and the memory of plans, by depth and by number of chips.

    python benchmarks/plan_cost.py

plans a step of Llama 3.1 8B (and one of Llama 3.3 70B), each in a fresh process, with
the package libtpu and without a TPU (several minutes). Prints a line of JSON each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

# (preset, layers, topology, chips); None: all layers of the preset.
_PLANS = (
  ("llama3p1_8b", 8, "v5e:4x4", 16),
  ("llama3p1_8b", 16, "v5e:4x4", 16),
  ("llama3p1_8b", None, "v5e:4x4", 16),
  ("llama3p1_8b", None, "v5e:8x8", 64),
  ("llama3p1_8b", None, "v5e:16x16", 256),
  ("llama3p3_70b", None, "v5p:8x8x4", 256),
)


def main() -> None:
  """Runs the plans one after the other."""
  for preset, layers, topology, chips in _PLANS:
    words = [f"--model.name={preset}", "--model.dtype=bfloat16", "--model.remat=block"]
    if layers is not None:
      words.append(f"--model.args={{num_layers: {layers}}}")
    words += ["--data.max_length=4096", f"--training.global_batch_size={chips}"]
    print(
      json.dumps(
        {
          "preset": preset,
          "layers": layers,
          "topology": topology,
          **measure([*words, "--topology", topology]),
        }
      ),
      flush=True,
    )


def measure(words: list[str]) -> dict[str, float]:
  """Returns CPU seconds and peak memory of `tunix plan` with these arguments."""
  command = [sys.executable, "-m", "tunix.cli.main", "plan", *words]
  start = time.perf_counter()
  process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
  _, status, used = os.wait4(process.pid, 0)
  if status:
    raise RuntimeError(f"{' '.join(command)} ended with {status}")
  return {
    "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
    "seconds": round(time.perf_counter() - start, 1),
    "peak_gib": round(used.ru_maxrss / 2**20, 2),  # Linux gives KiB
  }


if __name__ == "__main__":
  main()
