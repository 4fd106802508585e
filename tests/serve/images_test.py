"""Chat completions with images: a real socket, a toy model, the openai client."""

import base64
import contextlib
import gc
import io
import struct
import threading
import time
import zlib

import httpx
import numpy as np
import pytest
from PIL import Image

from tests import toys_images
from tunix.data.images import ImageReader
from tunix.generate.engine.config import EngineConfig
from tunix.generate.engine.driver import Driver
from tunix.generate.engine.engine import Engine
from tunix.generate.sampler import Sampler
from tunix.serve import server as server_lib
from tunix.serve.app import make_app
from tunix.serve.settings import ServeSettings

SIZES = {"slots": 2, "max_tokens": 128, "page_tokens": 4, "prefill_tokens": 32}


def uri(data):
  return "data:image/png;base64," + base64.b64encode(data).decode()


def png(seed):
  levels = np.random.default_rng(seed).integers(0, 256, (20, 40, 3), np.uint8)
  file = io.BytesIO()
  Image.fromarray(levels).save(file, "PNG")
  return file.getvalue()


def bomb(width, height):
  """A PNG of few bytes whose header declares many pixels."""

  def chunk(kind, data):
    return (
      struct.pack(">I", len(data))
      + kind
      + data
      + struct.pack(">I", zlib.crc32(kind + data))
    )

  header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
  return (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", header)
    + chunk(b"IDAT", b"")
    + chunk(b"IEND", b"")
  )


def turn(*urls, text="what is it?"):
  parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
  return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
  folder = toys_images.folder("gemma3", tmp_path_factory.mktemp("x") / "gemma3")
  model = toys_images.load(folder)
  return model, toys_images.tokenizer("gemma3"), ImageReader(folder, model.config)


@contextlib.contextmanager
def listening(model, tokenizer, reader):
  """Yields the address of a server, and its engine."""
  engine = Engine(model, tokenizer, EngineConfig(**SIZES))
  driver, settings = Driver(engine), ServeSettings(port=0)
  addresses, started = [], threading.Event()

  def on_start(address):
    addresses.append(address)
    started.set()

  app = make_app(driver, settings, images=reader)
  server = server_lib.make_server(app, settings, on_start)
  driver.start()
  thread = threading.Thread(target=server.run, daemon=True)
  thread.start()
  assert started.wait(60)
  try:
    yield addresses[0], engine
  finally:
    server.should_exit = True
    thread.join(60)
    driver.stop(timeout=60)


@pytest.fixture(scope="module")
def served(toy):
  with listening(*toy) as made:
    yield made


def test_the_openai_client_sends_two_images_and_streams(toy, served):
  openai = pytest.importorskip("openai")
  (model, tokenizer, reader), (address, _) = toy, served
  body = {"model": "default", "messages": turn(uri(png(1)), uri(png(2)))}
  body |= {"max_tokens": 6, "temperature": 0, "extra_body": {"ignore_eos": True}}
  with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
    whole = client.chat.completions.create(**body)
    stream = client.chat.completions.create(
      **body, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    other = {**body, "messages": turn(uri(png(1)), uri(png(3)))}
    other = client.chat.completions.create(**other)
  text = whole.choices[0].message.content
  assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
  pictures = reader.open([png(1), png(2)], None, "a test")
  bare = [toys_images.message("what is it?", None, None)]
  rendered = tokenizer.apply_chat_template(
    [
      {
        **m,
        "content": [
          {k: v for k, v in part.items() if k != "image"} for part in m["content"]
        ],
      }
      for m in bare
    ]
  )
  ids = tokenizer.encode(reader.expand_text(pictures, rendered))
  expected = Sampler(model, tokenizer)(
    [np.asarray(ids)], 6, images=[reader.prompt(pictures)], eos_tokens=()
  )
  assert expected.text == [text]
  assert ids.count(toys_images.SOFT) == 8
  assert whole.usage.prompt_tokens == last.usage.prompt_tokens == len(ids)
  assert (
    last.usage.prompt_tokens_details.cached_tokens > ids.index(toys_images.SOFT) + 8
  )
  # The second image differs: the pages of the first one are shared.
  assert 8 <= other.usage.prompt_tokens_details.cached_tokens < 24


def test_disconnects_leak_nothing(served):
  address, engine = served
  body = {"messages": turn(uri(png(1))), "max_tokens": 60, "stream": True}
  body |= {"ignore_eos": True}
  for number in range(20):
    body["messages"] = turn(uri(png(number % 3)))
    with httpx.stream(
      "POST", f"{address}/v1/chat/completions", json=body, timeout=60
    ) as answer:
      assert answer.status_code == 200
      next(answer.iter_bytes())
  end = time.monotonic() + 60
  while engine.is_busy and time.monotonic() < end:
    time.sleep(0.01)
  assert not engine.is_busy
  engine.audit()
  gc.collect()
  assert engine.stats().running == 0 and not engine._device._vectors


def refusal(address, messages, **body):
  answer = httpx.post(
    f"{address}/v1/chat/completions", json={"messages": messages, **body}, timeout=60
  )
  assert answer.status_code == 400, answer.text
  return answer.json()["error"]["message"]


def test_what_is_refused(toy, served):
  address, _ = served
  for url in (
    "http://127.0.0.1:1/a.png",
    "https://example.org/a.png",
    "/etc/passwd",
    3,
  ):
    assert "this server opens no URLs and no files" in refusal(address, turn(url))
  found = refusal(address, turn(uri(bomb(60_000, 60_000))))
  assert "is too large" in found or "has 60000 x 60000 pixels" in found
  found = refusal(address, turn(uri(png(1)), uri(bomb(8192, 4096))))
  assert "messages[0].content[1]: " in found
  assert "have at most 33554432 pixels together (--max_image_pixels)" in found
  assert "is damaged" in refusal(address, turn(uri(png(1)[:60])))
  assert "is no base64" in refusal(address, turn("data:image/png;base64,?"))
  assert "the maximum context length" in refusal(address, turn(*[uri(png(1))] * 33))
  found = refusal(address, turn(uri(png(1)), text="a <start_of_image>"))
  assert "for 1 images" in found


def test_a_text_model_refuses_images_by_name():
  from tests.serve.serving import server

  with server() as made:
    answer = made.post("/v1/chat/completions", {"messages": turn(uri(png(1)))})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "messages[0].content[0]"
    assert "this model reads text only" in error["message"]
