"""Makes trl_gkd.npz beside this file: TRL's generalized JSD and its gradient.

Run where TRL is installed (an environment of its own: `pip install torch trl`):
`python tests/golden/make_trl_gkd.py`. `GKDTrainer.generalized_jsd_loss` itself runs, on
logits of two models with padding; the mean is over the tokens that are not padding.
"""

import pathlib

import numpy as np
import torch
import trl
from trl.experimental.gkd import GKDTrainer

HERE = pathlib.Path(__file__).parent
CASES = [(0.0, 1.0), (0.1, 1.0), (0.5, 1.0), (0.5, 2.0), (0.9, 0.7), (1.0, 1.5)]


def inputs(seed: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  draw = lambda: (3 * rng.standard_normal((3, 5, 11))).astype(np.float32)
  lengths = np.asarray([[5], [2], [4]])
  return {"student": draw(), "teacher": draw(), "mask": np.arange(5) < lengths}


def loss(beta: float, temperature: float, given: dict[str, np.ndarray]):
  """(loss, gradient in the student's logits)."""
  student = torch.tensor(given["student"], requires_grad=True)
  value = GKDTrainer.generalized_jsd_loss(
    student,
    torch.tensor(given["teacher"]),
    labels=torch.where(torch.tensor(given["mask"]), 0, -100),
    beta=beta,
    temperature=temperature,
    num_items_in_batch=int(given["mask"].sum()),
  )
  value.backward()
  return value.detach().numpy(), student.grad.numpy()


def main() -> None:
  given = inputs(0)
  out = {**given, "version": np.asarray(trl.__version__), "cases": np.asarray(CASES)}
  for i, case in enumerate(CASES):
    out[f"loss/{i}"], out[f"gradient/{i}"] = loss(*case, given)
  np.savez(HERE / "trl_gkd.npz", **out)


if __name__ == "__main__":
  main()
