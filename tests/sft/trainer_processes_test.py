"""Two processes of four devices train, save and resume as one."""

import socket

import numpy as np
import pytest

from tests import toys
from tests.sft import resume_test, sharding_utils_test, trainers


@pytest.mark.slow
def test_two_processes(tmp_path, monkeypatch):
  program = sharding_utils_test.PROGRAMS.with_name("trainer_programs.py")
  monkeypatch.setattr(sharding_utils_test, "PROGRAMS", program)
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    port = probe.getsockname()[1]
  starts = (sharding_utils_test.start(4, rank, port, tmp_path) for rank in range(2))
  sharding_utils_test.finish(*starts)
  t = resume_test.make(tmp_path / "one", toys.model(), max_steps=4)
  t.train([toys.batch(i) for i in range(4)])
  want = trainers.leaves(t.model)
  got = np.load(tmp_path / "weights.npz")
  for name in got.files:
    np.testing.assert_allclose(got[name], want[name], atol=2e-3, err_msg=name)
