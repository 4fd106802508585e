"""The page of the server, in a browser: conversations, faults, sizes."""

import importlib.resources
import re
import time

import pytest

from tests.browser import CHROMIUM
from tests.browser_tab import Tab
from tests.serve.fake_engine import Config, FakeEngine
from tests.serve.server_test import listening

TEXT = "<think>so</think>The sea is wide.\n<b onclick=alert(1)>deep</b>"
REPLIES = "[...document.querySelectorAll('.assistant > .text')].map(e => e.textContent)"
IS_IDLE = "!document.getElementById('send').hidden"

browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
  with Tab(tmp_path_factory.mktemp("chromium")) as made:
    yield made


@pytest.fixture
def engine():
  return FakeEngine(text=TEXT, rounds=2)


def open_page(tab, address, models=1):
  tab.open("about:blank")
  tab.resize(1000, 700)
  tab.open(f"{address}/")
  tab.wait(f"document.getElementById('model').options.length === {models}")


def say(tab, text):
  tab.type("text", text)
  tab.click("send")


def set_field(tab, name, text):
  tab.run("document.getElementById('settings').open = true")
  tab.type(name, text)


def problem(tab):
  return tab.run("document.getElementById('problem').textContent")


def until(condition):
  """Waits for what the server does; the page does not show it."""
  end = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < end, "the condition did not come true"
    time.sleep(0.01)


def prompt_of(engine, number):
  return engine.tokenizer.decode(engine.submitted[number].prompt)


def test_the_page_is_one_file():
  page = (importlib.resources.files("tunix.serve") / "status_page.html").read_text()
  assert not re.findall(r"https?:|//\w+\.\w|@import|\burl\(", page)
  assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]


def test_the_page_makes_no_markup_of_text():
  page = (importlib.resources.files("tunix.serve") / "status_page.html").read_text()
  readers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc"
  readers += r"|createContextualFragment|setHTML|\beval\(|new Function|javascript:"
  assert not re.findall(readers, page)
  # Elements, attributes and handlers have fixed names.
  assert set(re.findall(r"createElement\((.*?)\)", page)) == {"tag"}
  assert all(call.startswith('"') for call in re.findall(r"[^n] element\((.)", page))
  assert not re.findall(r"setAttribute\((?!\")|\bon\w+ ?=", page)


@pytest.mark.slow
@pytest.mark.ci
@browser
def test_a_conversation(tab, engine):
  engine.loaded["short"] = None
  with listening(engine, model_name="tiny") as (address, _, _):
    open_page(tab, address, models=2)
    set_field(tab, "system", "Be brief.")
    set_field(tab, "temperature", "0.25")
    set_field(tab, "tokens", "77")
    say(tab, "What is a sea?")
    tab.wait(f"{IS_IDLE} && {REPLIES}.length === 1")
    # Markup of the model stays text.
    assert tab.run(REPLIES) == [TEXT.partition("</think>")[2]]
    assert tab.run("document.querySelector('.thought .text').textContent") == "so"
    assert tab.run("document.querySelectorAll('main b').length") == 0
    first = engine.submitted[0]
    assert (first.temperature, first.max_tokens) == (0.25, 77)
    assert prompt_of(engine, 0).count("Be brief.") == 1

    set_field(tab, "tokens", "")
    tab.type("text", "line")
    tab.press("Enter", 13, "\r", shift=True)  # a line break in the message
    tab.command("Input.insertText", text="and line")
    tab.press("Enter", 13, "\r")  # sends it
    tab.wait(f"{IS_IDLE} && {REPLIES}.length === 2")
    second = prompt_of(engine, 1)
    assert "What is a sea?" in second and "The sea is wide." in second
    assert "line\nand line" in second
    assert engine.submitted[1].max_tokens > 77

    tab.run("document.getElementById('model').value = 'short'")
    tab.click("new")
    assert tab.run(REPLIES) == []
    say(tab, "Again")
    tab.wait(f"{IS_IDLE} && {REPLIES}.length === 1")
    assert "What is a sea?" not in prompt_of(engine, 2)
    assert engine.submitted[2].adapter == "short"
    assert tab.run("document.querySelector('.assistant .name').textContent") == "short"


@pytest.mark.slow
@pytest.mark.ci
@browser
def test_what_a_model_wrote_is_text(tab):
  wrote = "</textarea><script>document.title='x'</script>\x1b[31m\u2028&lt;&#60;b>"
  wrote += "<img src=x onerror=document.title='x'><a href=javascript:alert(1)>a</a>"
  engine = FakeEngine(text=f"<think>{wrote}</think>{wrote}", rounds=3)
  engine.config = Config(max_tokens=2048)
  engine.loaded[wrote] = None  # the name of an adapter
  with listening(engine) as (address, _, _):
    open_page(tab, address, models=2)
    title = tab.run("document.title")
    tab.run("document.getElementById('model').selectedIndex = 1")
    say(tab, "Hello")
    tab.wait(f"{IS_IDLE} && {REPLIES}.length === 1")
    assert tab.run(REPLIES) == [wrote]
    assert tab.run("document.querySelector('.thought .text').textContent") == wrote
    assert tab.run("document.querySelector('.assistant .name').textContent") == wrote
    engine.failing = wrote
    say(tab, "Again")
    tab.wait("!document.getElementById('problem').hidden")
    assert wrote in problem(tab)
    assert tab.run("document.querySelectorAll('main :is(script, img, a)').length") == 0
    assert tab.run("document.title") == title


@pytest.mark.slow
@pytest.mark.ci
@browser
def test_stop_ends_the_request_and_keeps_the_text(tab):
  engine = FakeEngine(text="The sea is wide and deep.", rounds=1)
  engine.hold_at = 3
  with listening(engine) as (address, _, _):
    open_page(tab, address)
    say(tab, "Hello")
    tab.wait(f"{REPLIES}.join('').length > 0")
    part = tab.run(REPLIES)
    tab.click("stop")
    tab.wait(IS_IDLE)
    assert tab.run(REPLIES) == part and problem(tab) == ""
    assert "Stopped." in tab.run("document.querySelector('.note').textContent")
    until(lambda: len(engine.cancelled) == 1)
    engine.hold_at = None
    say(tab, "Go on")
    tab.wait(f"{IS_IDLE} && {REPLIES}.length === 2")
    assert part[0] in prompt_of(engine, 1)

    engine.hold_at = 0  # a new chat in the middle of a reply ends that reply
    say(tab, "And")
    until(lambda: len(engine.submitted) == 3)
    tab.click("new")
    assert tab.run(REPLIES) == [] and tab.run(IS_IDLE)
    until(lambda: len(engine.cancelled) == 2)
    engine.hold_at = None
    say(tab, "Hello")
    tab.wait(f"{IS_IDLE} && {REPLIES}.length === 1")


@pytest.mark.slow
@pytest.mark.ci
@browser
def test_a_key_is_asked_for_and_stays_in_memory(tab, engine):
  with listening(engine, api_key="secret") as (address, _, _):
    open_page(tab, address, models=0)
    tab.wait("!document.getElementById('problem').hidden")
    assert "needs an API key" in problem(tab)
    assert tab.run("document.activeElement.id") == "key"
    tab.type("key", "secret")
    tab.press("Tab", 9)
    tab.wait("document.getElementById('model').options.length === 1")
    assert problem(tab) == ""
    say(tab, "Hello")
    tab.wait(f"{IS_IDLE} && {REPLIES}.length === 1")
    assert tab.run("localStorage.length + sessionStorage.length") == 0
    assert tab.run("document.cookie") == ""
    tab.open("about:blank")
    open_page(tab, address, models=0)
    assert tab.run("document.getElementById('key').value") == ""


@pytest.mark.slow
@pytest.mark.ci
@browser
def test_faults_are_shown_and_the_message_is_kept(tab, engine):
  with listening(engine) as (address, _, _):
    open_page(tab, address)
    engine.failing = "the logits are not finite"
    say(tab, "Hello")
    tab.wait("!document.getElementById('problem').hidden")
    assert problem(tab) == "the logits are not finite"
    assert tab.run("document.getElementById('text').value") == "Hello"
    assert tab.run(REPLIES) == [] and tab.run(IS_IDLE)
    engine.failing = None
    engine.hold_at = 12
    tab.click("send")
    tab.wait(f"{REPLIES}.join('').length > 0")
    engine.broken = RuntimeError("the chip is gone")
    tab.wait(IS_IDLE)
    assert "the chip is gone" in problem(tab)
    assert "Not complete." in tab.run("document.querySelector('main').textContent")
  say(tab, "Hello")
  tab.wait(IS_IDLE)
  assert "Is it running?" in problem(tab)


@pytest.mark.slow
@pytest.mark.ci
@browser
def test_the_page_fits_phones_and_windows(tab):
  engine = FakeEngine(text="wide" * 200 + "\n" + "a line of text " * 80, rounds=50)
  engine.config = Config(max_tokens=8192)
  with listening(engine, model_name="a-long-name-" * 20) as (address, _, _):
    open_page(tab, address)
    say(tab, "word" * 200)
    tab.wait(f"{IS_IDLE} && {REPLIES}.length === 1")
    pictures = set()
    for width, height in ((360, 640), (640, 360), (1200, 800)):
      for settings in ("true", "false"):
        tab.run(f"document.getElementById('settings').open = {settings}")
        for dark in (False, True):
          tab.resize(width, height, dark)
          assert tab.run("document.documentElement.scrollWidth") == width
          assert tab.run("document.documentElement.scrollHeight") == height
          assert tab.run(
            "document.getElementById('send').getBoundingClientRect().bottom"
            " <= innerHeight"
          )
          pictures.add(tab.picture())
    assert len(pictures) == 12
    tab.run("document.getElementById('settings').open = true")
    controls = tab.controls()
    assert {role for role, _ in controls} >= {"textbox", "button", "combobox"}
    assert [role for role, name in controls if not name] == []
