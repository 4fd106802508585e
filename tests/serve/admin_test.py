import asyncio

import pytest

from tests.serve.serving import error_of, server

BODY = {"prompt": [60, 61], "max_tokens": 4}


@pytest.fixture
def root(tmp_path):
  folder = tmp_path / "root"
  (folder / "lora").mkdir(parents=True)
  (folder / "lora" / "adapter_config.json").write_text("{}")
  (folder / "empty").mkdir()
  (tmp_path / "secret").mkdir()
  (folder / "link").symlink_to(tmp_path / "secret")
  return folder


def test_adapters_are_loaded_named_and_unloaded(root):
  with server(checkpoint_root=root) as made:
    body = {"lora_name": "tuned", "lora_path": "lora"}
    assert made.post("/v1/load_lora_adapter", body).status_code == 200
    assert made.engine.loaded == {"tuned": root / "lora"}
    error_of(made.post("/v1/load_lora_adapter", body), 400)  # the name is taken
    cards = made.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
      ("default", None),
      ("tuned", "default"),
    ]
    assert made.get("/v1/models/tuned").json()["max_model_len"] == 256
    error_of(made.get("/v1/models/other"), 404)
    answer = made.post("/v1/completions", {**BODY, "model": "tuned"}).json()
    assert answer["model"] == "tuned" and made.engine.submitted[-1].adapter == "tuned"
    name = {"lora_name": "tuned"}
    assert made.post("/v1/unload_lora_adapter", name).status_code == 200
    error_of(made.post("/v1/unload_lora_adapter", name), 404)
    error_of(made.post("/v1/completions", {**BODY, "model": "tuned"}), 404)
    absolute = {"lora_name": "b", "lora_path": str(root / "lora")}
    assert made.post("/v1/load_lora_adapter", absolute).status_code == 200


@pytest.mark.parametrize(
  ("path", "status"),
  [
    ("..", 403),
    ("../secret", 403),
    ("lora/../../secret", 403),
    ("link", 403),
    ("/etc", 403),
    ("../missing", 403),
    ("a\0b", 403),
    ("x" * 5000, 403),
    ("missing", 404),
    ("lora/adapter_config.json", 404),
    ("empty", 400),
  ],
)
def test_no_path_leads_out_of_the_root(root, path, status):
  with server(checkpoint_root=root, parts={"load_model": open}) as made:
    body = {"lora_name": "a", "lora_path": path}
    error = error_of(made.post("/v1/load_lora_adapter", body), status)
    assert str(root.parent) not in error["message"]
    if status != 400:
      error_of(made.post("/update_weights", {"path": path}), status)
    assert not made.engine.loaded and not made.engine.models


def test_without_a_root_nothing_is_read(root):
  with server() as made:
    body = {"lora_name": "a", "lora_path": str(root / "lora")}
    error_of(made.post("/v1/load_lora_adapter", body), 403)
    error_of(made.post("/update_weights", {"path": str(root / "lora")}), 403)


def test_weights_are_updated(root):
  load = lambda folder: f"model of {folder.name}"
  with server(checkpoint_root=root, parts={"load_model": load}) as made:
    body = {"path": "lora", "version": 12, "mode": "keep"}
    answer = made.post("/update_weights", body)
    assert answer.json() == {"status": "updated", "version": 12}
    assert made.engine.models == [("model of lora", "keep")]
    choice = made.post(
      "/inference/v1/generate",
      {"token_ids": [60], "sampling_params": {"max_tokens": 1}},
    ).json()["choices"][0]
    assert choice["weight_versions"][0]["version"] == "12"
    error_of(made.post("/update_weights", {"path": "lora", "mode": "x"}), 400)


def test_pause_keeps_waits_or_aborts():
  with server() as made:

    async def run(mode):
      async with made.client() as client:
        await client.post("/pause?mode=keep")
        one = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not made.engine.rows:
          await asyncio.sleep(0)
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        if mode == "abort":
          await client.post("/pause", json={"mode": "abort"})
        await client.post("/resume")
        assert (await client.get("/is_paused")).json() == {"is_paused": False}
        if mode == "wait":
          answer = await client.post("/pause?mode=wait")
          assert answer.json()["status"] == "paused" and not made.engine.rows
          await client.post("/resume")
        return (await one).json()["choices"][0]

    assert asyncio.run(run("keep"))["finish_reason"] == "length"
    assert asyncio.run(run("wait"))["finish_reason"] == "length"
    assert asyncio.run(run("abort"))["finish_reason"] == "abort"
    error_of(made.post("/pause?mode=x"), 400)


def test_administration_is_bounded_and_alone():
  with server(admin_timeout=0.2) as made:

    async def run():
      async with made.client() as client:
        await client.post("/pause?mode=keep")
        waiting = asyncio.create_task(client.post("/v1/completions", json=BODY))
        while not made.engine.rows:
          await asyncio.sleep(0)
        first = asyncio.create_task(client.post("/pause?mode=wait"))
        while not made.context.admin.locked():
          await asyncio.sleep(0)
        second = await client.post("/pause?mode=abort")
        error_of(second, 409)
        assert error_of(await first, 504)["code"] == "timeout"
        await client.post("/resume")
        return await waiting

    assert asyncio.run(run()).status_code == 200
