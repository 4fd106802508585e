"""Two processes of four devices train, save, stop and resume as one."""

import pathlib

import numpy as np
import pytest

from tests import processes, toys
from tests.sft import resume_test, trainers

PROGRAM = pathlib.Path(__file__).with_name("trainer_programs.py")


@pytest.mark.slow
def test_two_processes(tmp_path):
  processes.finish(*processes.together(PROGRAM, 2, 4, tmp_path))
  t = resume_test.make(tmp_path / "one", toys.model(), max_steps=4)
  t.train([toys.batch(i) for i in range(4)])
  want = trainers.leaves(t.model)
  got = np.load(tmp_path / "weights.npz")
  for name in got.files:
    np.testing.assert_allclose(got[name], want[name], atol=2e-3, err_msg=name)
