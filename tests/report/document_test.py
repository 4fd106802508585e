import re
from html.parser import HTMLParser

from tests.report import dom
from tunix.report import document

NASTY = '</script><script>alert(1)</script><img src=x onerror="alert(2)">\ud800'


class Tags(HTMLParser):
  """Names of the elements of a page as a browser's parser finds them."""

  def __init__(self, text):
    super().__init__()
    self.tags = []
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)


def test_texts_are_data_and_stay_texts():
  parts = [
    document.text(NASTY),
    document.table((NASTY, ""), [(NASTY, NASTY)], folded=NASTY),
  ]
  page = document.html(NASTY, [document.section(NASTY, *parts)])
  assert Tags(page).tags.count("script") == 2 and "img" not in Tags(page).tags
  drawn = dom.draw(page)
  assert not drawn.findall(".//script") and not drawn.findall(".//img")
  assert dom.text(drawn).count("alert(2)") == 6
  assert drawn.find(".//td").text == NASTY


def test_a_page_needs_no_network():
  page = document.html("page", [])
  assert not re.findall(r"\b(?:src|href)=|url\(|@import|fetch\(|innerHTML", page)
  assert re.findall(r"https?://[^\"']*", page) == ["http://www.w3.org/2000/svg"]


def test_sections_texts_and_tables():
  page = document.html(
    "page",
    [
      document.section("first", document.text("plain", colour=3)),
      document.section(
        "second",
        document.table(("key", "value"), [("a", "1")]),
        document.table(("", ""), [], folded="more"),
      ),
    ],
  )
  drawn = dom.draw(page)
  assert [h.text for h in drawn.iter() if h.tag in ("h1", "h2")] == ["first", "second"]
  assert drawn.find(".//p/span").get("class") == "key c3"
  assert [cell.text for cell in drawn.iter() if cell.tag in ("th", "td")] == [
    *("key", "value", "a", "1")
  ]
  assert dom.text(drawn.find(".//details")) == "morenothing"


def test_long_values_are_clipped():
  assert document.clipped({"a": 1}, 10) == {"a": 1}
  assert document.clipped("x" * 12, 10) == "x" * 10 + " ... (2 characters more)"
