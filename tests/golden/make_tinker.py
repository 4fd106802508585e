"""Makes resume_before/tinker.tar.xz: a Tinker folder of an earlier version.

Run it with the last version whose journals had no checksums of heads:

  git worktree add ../before 2d24565a
  PYTHONPATH=../before python tests/golden/make_tinker.py

The model has a state (generation 1), a checkpoint `one`, results after the state, and
request 9, which waits for number 8. A sampling request waits for an engine.
"""

import pathlib
import tempfile

import make_resume  # beside this file; it takes the settings of the tests
import numpy as np

from tests.tinker.serving import base, engine, rows
from tunix.generate.engine.driver import Driver
from tunix.tinker.learning import data
from tunix.tinker.learning.learner import AdapterSpec
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings


def write(root: pathlib.Path) -> None:
  model = base()
  idle = engine(model)
  settings = TinkerSettings(root=root, snapshot_steps=2, keep_results=2)
  made = Service(model, settings, driver=Driver(idle))
  session = made.create_session("a", {})
  spec = AdapterSpec(rank=1, train_mlp=False)
  _, id = made.create_model("a", session, 0, spec, seed=5)
  ((x, y),) = rows(0, 6)
  row = lambda: [data.Row(tokens=x, inputs={"target_tokens": y})]
  for number in (1, 3, 6):
    made.training.forward_backward("a", id, number, row, "cross_entropy")
    if number < 6:
      made.training.optim_step("a", id, number + 1, {"learning_rate": 1e-2})
      assert made.wait("a", f"{id}:{number + 1}", 60).error is None
  made.training.save_weights("a", id, 5, "one")
  made.training.optim_step("a", id, 7, {"learning_rate": 1e-2})
  assert made.wait("a", f"{id}:7", 60).error is None
  made.training.optim_step("a", id, 9, {"learning_rate": 1e-2})
  sampler = made.sampling.create("a", session, 0, None)
  args = {"num_samples": 2, "sampling_params": {"max_tokens": 4}}
  made.sampling.sample("a", sampler, 0, np.array([3, 4, 5]), args)
  idle.close()  # else the request waits for it
  made.close()


if __name__ == "__main__":
  with tempfile.TemporaryDirectory() as folder:
    write(pathlib.Path(folder))
    make_resume.pack("tinker", pathlib.Path(folder))
