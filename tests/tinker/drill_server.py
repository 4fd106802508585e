"""A server of the training API in a process of its own, which tests kill.

python -m tests.tinker.drill_server ROOT PORT
"""

import pathlib
import sys

from tests.tinker import serving
from tunix.generate.engine.driver import Driver
from tunix.serve import server
from tunix.serve.settings import ServeSettings
from tunix.tinker import app as tinker_app
from tunix.tinker.service import Service
from tunix.tinker.settings import TinkerSettings


def main(root: str, port: str) -> None:
  model = serving.base()
  driver = Driver(serving.engine(model, ranks=32))
  driver.start()
  keys = {f"tenant{i}": f"tml-{i}" for i in range(8)}
  settings = TinkerSettings(
    max_models=10_000,  # a client that is killed leaves its model loaded
    max_starts=100,  # kills are frequent here, and no fault of a request
    root=pathlib.Path(root),
    lora_alpha=8.0,
    snapshot_steps=3,
    keys=keys,
    wait_seconds=2,
  )
  service = Service(model, settings, name="toy", driver=driver)
  server.serve(
    driver,
    ServeSettings(port=int(port)),
    more=tinker_app.routes(service),
    on_start=lambda address: print("serving", address, flush=True),
    on_stop=service.close,
    ends_process=True,
  )


if __name__ == "__main__":
  main(*sys.argv[1:])
