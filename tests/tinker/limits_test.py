"""Limits of a tenant."""

import pytest

from tests.tinker.service_test import SPEC, row, service
from tunix.tinker.errors import BusyError, QuotaError, TinkerError
from tunix.tinker.learning.learner import AdapterSpec
from tunix.tinker.state.records import Records


def test_limits_are_told_before_they_are_passed():
  made = service(max_models=2, max_bytes=50_000, max_rank=8, max_pending=3)
  session = made.create_session("a", {})
  with pytest.raises(QuotaError, match="rank is 9; expected at most 8"):
    made.create_model("a", session, 0, AdapterSpec(rank=9))
  with pytest.raises(QuotaError, match=r"takes [\d,]+ bytes in training.*50,000"):
    made.create_model("a", session, 0, AdapterSpec(rank=8))
  small = AdapterSpec(rank=1)
  for number in range(2):
    _, model = made.create_model("a", session, number, small)
  with pytest.raises(QuotaError, match="has 2 loaded models"):
    made.create_model("a", session, 2, small)
  assert made.wait("a", f"{model}:0", 60)
  for number in (2, 3, 4):  # they wait for number 1
    made.training.optim_step("a", model, number, {})
  with pytest.raises(BusyError, match="the tenant has 3 waiting requests"):
    made.training.optim_step("a", model, 5, {})
  _, other = made.create_model("b", made.create_session("b", {}), 0, small)
  assert made.wait("b", made.training.unload_model("b", other), 60).error is None
  made.training.forward_backward("b", other, 2, row(), "cross_entropy")
  assert "was unloaded" in made.wait("b", f"{other}:2", 60).error
  with pytest.raises(TinkerError, match="expected 'base'"):
    made.create_model("a", session, 3, small, base_model="gpt")
  made.close()


def test_models_and_waiting_bytes_have_limits(tmp_path):
  made = service(max_runs=1, max_pending_bytes=100)
  session = made.create_session("a", {})
  _, model = made.create_model("a", session, 0, SPEC)
  with pytest.raises(QuotaError, match=r"has 1 models.*fewer than the limit of 1"):
    made.create_model("a", session, 1, SPEC)
  for number in (2, 3):  # they wait for number 1
    made.training.forward_backward("a", model, number, row(), "cross_entropy")
  with pytest.raises(BusyError, match=r"waiting requests have \d+ bytes"):
    made.training.forward_backward("a", model, 4, row(), "cross_entropy")
  made.close()


def test_a_new_session_replaces_the_oldest(tmp_path):
  made = Records(tmp_path, 2)
  other = made.create_session("b", {})
  sessions = [made.create_session("a", {}) for _ in range(3)]
  for number in (0, 1, 2, 1):
    made.create_sampler("a", sessions[2], number, None, "base")
  busy = {f"{sessions[2]}:sample:1"}
  made.in_use = lambda: busy  # it has an open request
  made.create_sampler("a", sessions[2], 3, None, "base")
  for found in (made, Records(tmp_path, 2)):
    assert (found.sessions("a"), found.sessions("b")) == (sessions[1:], [other])
    assert found.samplers_of(sessions[2]) == [
      f"{sessions[2]}:sample:{i}" for i in (1, 3)
    ]
    assert found.sampling_tenant(f"{sessions[2]}:sample:1:7") == "a"
    assert found.sampling_tenant(f"{sessions[2]}:sample:0:7") == ""
