"""Makes trl_self.npz beside this file: TRL's losses of self-distillation.

Run where TRL is installed (an environment of its own: `pip install torch trl`):
`python tests/golden/make_trl_self.py`. The functions of TRL that SDFT and SDPO call run
on logits of student and teacher; the losses are means over all tokens. TRL compares the
student's top k tokens, we the teacher's: here both have the same ones.
"""

import pathlib

import numpy as np
import torch
import trl
from trl.experimental.sdft import loss_utils as sdft
from trl.experimental.sdpo import loss_utils as sdpo

HERE = pathlib.Path(__file__).parent
TOP = 4
# alpha: 0 is the forward KL, 1 the reverse KL, between them the Jensen-Shannon one.
CASES = [
  *(("whole", alpha) for alpha in (0.0, 0.3, 0.5, 1.0)),
  *(("top", alpha) for alpha in (0.0, 0.5, 1.0)),
  ("sampled", 1.0),
]


def inputs(seed: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)
  first = np.argsort(rng.random((3, 5, 11)), -1) < TOP  # in front for both
  draw = lambda: (rng.uniform(-1, 1, (3, 5, 11)) + 2.5 * first).astype(np.float32)
  return {"student": draw(), "teacher": draw(), "tokens": rng.integers(0, 11, (3, 5))}


def loss(form: str, alpha: float, given: dict[str, np.ndarray]):
  """(mean loss, gradient in the student's logits)."""
  student = torch.tensor(given["student"], requires_grad=True)
  teacher, alone = torch.tensor(given["teacher"]), {"distillation_alpha": alpha}
  if form == "whole":
    values = sdft.compute_full_logit_self_distillation_loss(student, teacher, **alone)
  elif form == "top":
    values = sdft.compute_topk_self_distillation_loss(
      student, teacher, distillation_topk=TOP, distillation_add_tail=True, **alone
    )
  else:
    values = sdpo.compute_sampled_token_self_distillation_loss(
      student, teacher, torch.tensor(given["tokens"]), **alone
    )
  values.mean().backward()
  return values.mean().detach().numpy(), student.grad.numpy()


def main() -> None:
  given = inputs(0)
  out = {**given, "version": np.asarray(trl.__version__)}
  for form, alpha in CASES:
    name = f"{form}/{alpha}"
    out[f"loss/{name}"], out[f"gradient/{name}"] = loss(form, alpha, given)
  np.savez(HERE / "trl_self.npz", **out)


if __name__ == "__main__":
  main()
