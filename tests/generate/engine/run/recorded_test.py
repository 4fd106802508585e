"""A plan of an engine lowers the programs that a run of it calls."""

import jax
import numpy as np
import pytest

from tests import toys, toys_text
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.engine import Engine
from tunix.generate.engine.request import EngineRequest
from tunix.models import automodel
from tunix.models.automodel import AutoModel
from tunix.perf import programs
from tunix.utils import mesh as mesh_lib

VOCAB = 600
TOKENIZER = toys_text.chat_tokenizer()


def requests(prompts=(), tokens=90):
  rules = {"temperature": 1.0, "seed": 0, "logprobs": True, "stop_ids": ()}
  return [
    EngineRequest(prompt=np.ones(n, np.int32), max_tokens=tokens, **rules)
    for n in prompts
  ]


def planned(model, config, **options):
  with programs.recording(**options) as records:
    Engine(model, TOKENIZER, config).run(requests([1]))
  return records


@pytest.mark.parametrize(
  ("axes", "attention"),
  [({"tp": 1}, "auto"), ({"tp": 2}, "gather")],
  ids=["rows", "pages"],
)
def test_a_run_calls_no_other_program(axes, attention):
  count = next(iter(axes.values()))
  mesh = mesh_lib.create_mesh(axes, jax.devices()[:count])
  sizes = toys.config(vocab_size=VOCAB, num_layers=1)
  config = EngineConfig(
    slots=3, max_tokens=150, prefill_tokens=128, rounds=4, attention=attention
  )
  ran = set()

  def note(name, jitted, args):
    ran.add((name, jitted.lower(*args).as_text()))
    return jitted(*args)

  with mesh_lib.use_mesh(mesh):
    before = len(jax.live_arrays())
    shapes = automodel.of_shapes(sizes, mesh)
    records = planned(shapes, config, all_sizes=True)
    assert len(jax.live_arrays()) - before < 9  # no cache is made
    real = Engine(AutoModel.from_config(sizes, mesh=mesh), TOKENIZER, config)
    with programs.intercepted(note):
      # Prompts of one block and of many, shared pages, and rows that become wider.
      real.run(requests([3, 60, 40]))
      real.run([*requests([33], 2), *requests([120, 121, 1], 20)])
  known = {
    (name, one.lowered.as_text())
    for name, first in records.items()
    for one in (first, *first.others)
  }
  assert {"engine mixed", "engine decode"} <= {name for name, _ in ran}
  assert not {name for name, _ in ran - known}
