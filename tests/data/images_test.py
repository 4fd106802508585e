"""Records with images: forms, tokens, masks, pixels, and what is refused."""

import base64
import json
import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import toys_images as toys
from tunix.data import chat, show
from tunix.data.fields import check_messages
from tunix.data.images import ImageReader
from tunix.data.pipeline import build_dataset
from tunix.data.reading.files import open_file
from tunix.data.reading.mixture import Mixture
from tunix.data.reading.stored import HeldRecords, Renamed
from tunix.data.reading.stream import Streamed, of_file
from tunix.data.records import LABELLED, PAIRS, SFT
from tunix.data.render import render_record
from tunix.data.rows import OneRow, SideBySide
from tunix.data.scan import scan
from tunix.data.source import Source
from tunix.models import automodel

ANSWER = {"role": "assistant", "content": "a cat."}
APART = SideBySide(max_prompt_length=24, max_completion_length=8)


@pytest.fixture(scope="module", params=toys.NAMES)
def family(request, tmp_path_factory):
  """(name, model folder, tokenizer, reader) of a family."""
  name = request.param
  folder = toys.folder(name, tmp_path_factory.mktemp("models") / name)
  config = automodel.config_of_folder(folder, images=True)
  return name, folder, toys.tokenizer(name), ImageReader(folder, config)


@pytest.fixture
def smol(tmp_path):
  folder = toys.folder("smolvlm", tmp_path / "model")
  config = automodel.config_of_folder(folder)
  return toys.tokenizer("smolvlm"), ImageReader(folder, config)


def source_of(records, tokenizer, reader, **options):
  layout = OneRow(max_length=options.pop("max_length", 96))
  options = {"images": reader, "kind": SFT, "layout": layout, **options}
  return Source(records=records, tokenizer=tokenizer, **options)


def element(source) -> Any:
  return source.element(0)


def test_tokens_masks_and_pixels(family, tmp_path):
  _, _, tokenizer, reader = family
  records = open_file(toys.write_records(tmp_path))
  source = source_of(records, tokenizer, reader)
  rendered = source.render(0)  # two images
  text = tokenizer.decode(rendered.prompt, skip_special_tokens=False)
  images = [reader.processor.text(x.grid) for x in rendered.pictures]
  assert all(image in text for image in images) and text.count("what is 0?") == 1
  assert [str(x) for x in rendered.pictures] == [
    f"pictures/{i}.png, 40 x 20 pixels, {x.num_tokens} tokens"
    for i, x in enumerate(rendered.pictures)
  ]
  soft = int(np.sum(rendered.tokens == toys.SOFT))
  assert soft == sum(x.num_tokens for x in rendered.pictures)
  trained = rendered.tokens[rendered.mask == 1]
  assert tokenizer.decode(trained, skip_special_tokens=True).strip() == "it is 0."
  assert toys.SOFT not in trained
  report = scan(source)
  assert report.image_tokens == soft and f"the most images have {soft}" in str(report)
  batch = next(iter(batches(records, tokenizer, reader, image_tokens=soft)))
  pixels = [reader.processor(x.image) for x in rendered.pictures]
  given = batch["images"]
  if isinstance(given, tuple):
    values, grid = given
    expected = np.concatenate([x.values for x in pixels])
    patches = soft * reader.processor.merge_size**2
    assert values.shape == (4, patches, 48) and grid.shape[:2] == (4, soft)
    assert grid[0, :2].tolist() == [x.grid[0].tolist() for x in pixels]
    assert not grid[0, 2:].any() and not grid[2].any()
    given = values
  else:
    expected = np.concatenate([x.values for x in pixels])
    edge = expected.shape[1]
    assert given.shape == (4, soft // 4, edge, edge, 3)
  np.testing.assert_array_equal(given[0, : len(expected)], expected)
  assert given[1].any() and not given[2].any()  # the rows with one and no image


def batches(records, tokenizer, reader, **options):
  options = {"batch_size": 4, "max_length": 96, "shuffle": False, **options}
  return build_dataset(records, tokenizer, images=reader, **options)


def forms(path):
  """One image in every form: the record, and the folder of its file."""
  content = path.read_bytes()
  uri = "data:image/png;base64," + base64.b64encode(content).decode()
  text = {"type": "text", "text": "\nwhat?"}

  def parts(part):
    return {"messages": [{"role": "user", "content": [part, text]}, ANSWER]}

  marked = [{"role": "user", "content": "<image>\nwhat?"}, ANSWER]
  conversation = [
    {"from": "human", "value": "<image>\nwhat?"},
    {"from": "gpt", "value": "a cat."},
  ]
  empty = {"type": "image"}
  return {
    "relative path": parts({"type": "image", "image": path.name}),
    "absolute path": parts({"type": "image", "path": str(path)}),
    "data URI": parts({"type": "image", "image": uri}),
    "bytes": parts({"type": "image", "image": content}),
    "cell": parts({"type": "image", "image": {"bytes": content, "path": None}}),
    "Pillow": parts({"type": "image", "image": Image.open(path)}),
    "OpenAI": parts({"type": "image_url", "image_url": {"url": uri}}),
    "TRL": {**parts(empty), "images": [content]},
    "TRL, prompt and completion": {
      "prompt": parts(empty)["messages"][:1],
      "completion": [ANSWER],
      "images": [content],
    },
    "marks": {"messages": marked, "images": [path.name]},
    "prompt": {"prompt": "<image>\nwhat?", "response": "a cat.", "image": path.name},
    "LLaVA": {"conversations": conversation, "image": path.name},
  }


def test_every_form_gives_one_row(smol, tmp_path):
  path = toys.draw(tmp_path / "cat.png", 0)
  rows = {
    form: chat.render(record, smol[0], images=smol[1], folder=tmp_path)
    for form, record in forms(path).items()
  }
  first = rows["bytes"]
  for form, row in rows.items():
    np.testing.assert_array_equal(row.tokens, first.tokens, form)
    np.testing.assert_array_equal(row.mask, first.mask, form)
    np.testing.assert_array_equal(row.pictures[0].image, first.pictures[0].image, form)


def pair_forms(path):
  """One pair in every form."""
  text = {"type": "text", "text": "\nwhat?"}
  answers = {"chosen": ANSWER, "rejected": {**ANSWER, "content": "a dog."}}
  texts = {name: turn["content"] for name, turn in answers.items()}
  turns = {name: [turn] for name, turn in answers.items()}
  shown = user({"type": "image", "image": path.name}, text)
  empty = user({"type": "image"}, text)
  whole = lambda prompt: {name: [prompt, turn] for name, turn in answers.items()}
  said = {name: {"from": "gpt", "value": text} for name, text in texts.items()}
  human = {"from": "human", "value": "<image>\nwhat?"}
  cell = [{"bytes": path.read_bytes(), "path": None}]
  return {
    "parts": {"prompt": [shown], **texts},
    "parts, whole": whole(shown),
    "parts, whole with prompt": {"prompt": [shown], **whole(shown)},
    "TRL": {"images": cell, "prompt": [empty], **turns},
    "TRL, whole": {"images": cell, **whole(empty)},
    "marks": {"image": path.name, "prompt": "<image>\nwhat?", **texts},
    "LLaVA": {"image": path.name, "conversations": [human], **said},
  }


def test_every_form_of_a_pair_gives_one_row(smol, tmp_path):
  path = toys.draw(tmp_path / "cat.png", 0)
  tokenizer, reader = smol
  options: Any = {"images": reader, "folder": tmp_path}
  forms = pair_forms(path)
  single = {"prompt": forms["parts"]["prompt"], "completion": "a cat.", "label": True}
  alone = chat.render({"messages": [*single["prompt"], ANSWER]}, tokenizer, **options)
  rows = [render_record(single, LABELLED, tokenizer, **options)]
  rows += [render_record(x, PAIRS, tokenizer, **options) for x in forms.values()]
  for form, row in zip(("labelled", *forms), rows):
    np.testing.assert_array_equal(row.prompt, alone.prompt, form)
    trained = alone.completions[0][alone.masks[0] == 1]
    np.testing.assert_array_equal(row.completions[0], trained, form)
    assert [x.image.shape for x in row.pictures] == [(20, 40, 3)], form
    dog = [tokenizer.decode(x).strip() for x in row.completions[1:]]
    assert dog == ["a dog."] * (form != "labelled"), form


def test_refused_pairs(smol, tmp_path):
  toys.draw(tmp_path / "cat.png", 0)
  asked = user(HERE)
  later = [asked, ANSWER, asked, ANSWER]
  for record, message in (
    ({"rejected": later[1:]}, '"rejected" holds an image after the prompt; expected'),
    (
      {"rejected": "b", "image": "cat.png"},
      "0 placeholders .* and 1 images in 'image'",
    ),
    ({"rejected": [{**ANSWER, "content": [HERE]}]}, "of the assistant holds an image"),
  ):
    with pytest.raises(ValueError, match=message):
      PAIRS.read({"prompt": [asked], "chosen": [ANSWER], **record}, "x")
  file = tmp_path / "data.jsonl"
  file.write_text(
    json.dumps({"prompt": [asked], "chosen": "a", "rejected": "b"}) + "\n"
  )
  records = open_file(file, PAIRS)
  options: Any = {"kind": PAIRS, "layout": APART, "overlong": "truncate"}
  with pytest.raises(ValueError, match=r"data.jsonl:1: .* images need 12; .*within"):
    source_of(records, *smol, **options).element(0)


def test_paths_begin_in_the_folder_of_their_file(smol, tmp_path):
  files = [toys.write_records(tmp_path / part) for part in ("a", "b")]
  toys.draw(tmp_path / "b" / "pictures" / "0.png", 9)
  expected = [np.asarray(Image.open(f.parent / "pictures" / "0.png")) for f in files]

  def first(records, index: Any = 0):
    return source_of(records, *smol).render(index).pictures[0].image

  a, b = map(open_file, files)
  stream = Streamed([of_file(files[1])])
  [item] = (item for item, _ in list(stream.items((0, 0, None), 1))[:1])
  opened = [first(Renamed(a, {})), first(Mixture([a, b]), 8), first(stream, item)]
  for image, number in zip([*opened, first(stream.head(1))], (0, 1, 1, 1)):
    np.testing.assert_array_equal(image, expected[number])


def test_bytes_of_columns_stay_bytes_and_have_a_digest(tmp_path):
  path = toys.draw(tmp_path / "cat.png", 0)
  rows = [{"images": [{"bytes": path.read_bytes(), "path": None}], "label": b"text"}]
  held = HeldRecords(rows, name="x")
  assert held.raw(0)["images"][0]["bytes"] == path.read_bytes()
  assert held.raw(0)["label"] == "text"
  opened = [HeldRecords([{"image": Image.open(path)}], name="x") for _ in range(2)]
  assert opened[0].fingerprint == opened[1].fingerprint


def test_real_parquet(smol, tmp_path):
  """A column of the type Image in pairs as TRL has them, and one of bytes."""
  datasets = pytest.importorskip("datasets")
  path = toys.draw(tmp_path / "cat.png", 0)
  text = {"type": "text", "text": "what?"}
  answers = {
    n: [{**ANSWER, "content": [{**text, "text": n}]}] for n in PAIRS.completions
  }
  cell = {"bytes": path.read_bytes(), "path": None}
  pair = {"images": [cell], "prompt": [user(EMPTY, text)], **answers}
  image = datasets.List(datasets.Image())
  table = datasets.Dataset.from_list([pair]).cast_column("images", image)
  table.to_parquet(str(tmp_path / "pairs.parquet"))
  texts = {"image": path.read_bytes(), "prompt": "<image>what?", "response": "chosen"}
  datasets.Dataset.from_list([texts]).to_parquet(str(tmp_path / "texts.parquet"))
  path.unlink()  # the tables hold its bytes
  read = open_file(tmp_path / "pairs.parquet", PAIRS)
  layout = SideBySide(max_prompt_length=88, max_completion_length=24)
  pairs = source_of(read, *smol, kind=PAIRS, layout=layout)
  rows = source_of(open_file(tmp_path / "texts.parquet"), *smol)
  one, two = pairs.render(0), rows.render(0)
  np.testing.assert_array_equal(one.prompt, two.prompt)
  trained = two.completions[0][two.masks[0] == 1]
  np.testing.assert_array_equal(one.completions[0], trained)
  np.testing.assert_array_equal(one.pictures[0].image, two.pictures[0].image)
  assert one.pictures[0].image.shape == (20, 40, 3)


def of(*turns, **columns):
  return {"messages": [*turns, ANSWER], **columns}


def user(*parts):
  return {"role": "user", "content": list(parts)}


HERE = {"type": "image", "image": "cat.png"}
EMPTY = {"type": "image"}


@pytest.mark.parametrize(
  "record, message",
  [
    (of(user({**HERE, "image": "no.png"})), "there is no file .*no.png'; correct"),
    (of(user({**HERE, "image": "bad.png"})), "image 1: image .*bad.png' is damaged"),
    (of(user(HERE, {**HERE, "image": "bad.png"})), "image 2: image .*bad.png"),
    (of(user({**HERE, "image": "http://x/y.png"})), "is no path; .*Download"),
    (of(user({**HERE, "image": 5})), "image is of type int"),
    (of(user(EMPTY)), "1 placeholders of images and 0 images in the columns"),
    (
      of(user(EMPTY), images=["cat.png"] * 2),
      "1 placeholders .* and 2 images in 'imag",
    ),
    (
      of(user(), image="cat.png"),
      r"0 placeholders .* 1 images in 'image'; .*\"image\"",
    ),
    (of(user({"type": "video"})), r"\[0\] is a part of the type 'video'"),
    (of(user("text")), r"a part of the type 'str'; expected text or image"),
    (of(user({"type": "text"}, HERE)), '"text" missing'),
    (
      {"messages": [user(HERE), {**ANSWER, "content": [HERE]}]},
      "of the assistant holds an image; expected text",
    ),
    (
      of(user(HERE, {"type": "text", "text": "<image>"})),
      "the chat has 2 times '<image>' for 1 images",
    ),
    (
      {"messages": [user(HERE), {**ANSWER, "content": "<image>"}]},
      "a trained answer has 2 times",
    ),
    (of(user(*[HERE] * 4)), r"the maximum is 96, .*\(48 of the tokens are of"),
  ],
)
def test_refused_records(record, message, smol, tmp_path):
  path = toys.draw(tmp_path / "cat.png", 0)
  (tmp_path / "bad.png").write_bytes(path.read_bytes()[:100])
  file = tmp_path / "data.jsonl"
  file.write_text("\n" + json.dumps(record) + "\n")
  with pytest.raises(ValueError, match=rf"data.jsonl:2: .*{message}"):
    scan(source_of(open_file(file), *smol))


def test_records_with_images_elsewhere(smol, tmp_path):
  toys.draw(tmp_path / "cat.png", 0)
  file = tmp_path / "data.jsonl"
  file.write_text(json.dumps(of(user(HERE))) + "\n")
  records = open_file(file)
  with pytest.raises(ValueError, match=r"data.jsonl:1: .*only text is read here"):
    source_of(records, smol[0], None).render(0)
  with pytest.raises(ValueError, match=r"records that were scanned .* have none"):
    source_of(records, *smol, image_tokens=0).element(0)
  with pytest.raises(ValueError, match=r"image_tokens is 4; .*Raise"):
    source_of(records, *smol, image_tokens=4).element(0)
  with pytest.raises(ValueError, match="packing is True and the records have images"):
    batches(records, *smol, packing=True)
  with pytest.raises(ValueError, match="Batches of text have no images"):
    check_messages([user(HERE)], "x", images=False)


def test_rows_are_never_cut_within_images(smol, tmp_path):
  toys.draw(tmp_path / "cat.png", 0)
  file = tmp_path / "data.jsonl"
  long = {**ANSWER, "content": "a" * 90}
  file.write_text(json.dumps({"messages": [user(HERE), long]}) + "\n")
  cut = source_of(open_file(file), *smol, overlong="truncate", max_length=64)
  assert len(element(cut)["input_tokens"]) == 64
  assert len(element(cut)["images"]) == 64 // 4
  short = source_of(open_file(file), *smol, overlong="truncate", max_length=20)
  with pytest.raises(
    ValueError, match=r"has \d+ image tokens .* 1 images need 12; .*cut"
  ):
    short.element(0)


def test_texts_among_images(smol):
  """Rows without images are those of a text model; soft tokens need an image."""
  records = [of({"role": "user", "content": "what?"})]
  plain = next(iter(batches(records, smol[0], None)))
  batch = next(iter(batches(records, *smol)))
  assert not batch.pop("images").any()
  assert batch.keys() == plain.keys()
  for name, values in plain.items():
    np.testing.assert_array_equal(batch[name], values)
  records = [of({"role": "user", "content": "<image>"})]
  texts = source_of(records, *smol, image_tokens=0)  # as a text model reads it
  assert toys.SOFT in element(texts)["input_tokens"]
  with pytest.raises(ValueError, match=r"1 image tokens \(id 79\), and its 0 images"):
    next(iter(batches(records, *smol)))


def test_a_processor_of_another_model(tmp_path):
  folder = toys.folder("smolvlm", tmp_path / "model")
  config = automodel.config_of_folder(folder)
  files = folder / "preprocessor_config.json"
  numbers = json.loads(files.read_text()) | {"max_image_size": {"longest_edge": 28}}
  files.write_text(json.dumps(numbers))
  reader = ImageReader(folder, config)
  text = automodel.config_of_folder(folder, images=False)
  with pytest.raises(TypeError, match=r"llama3.model.ModelConfig; expected that of a"):
    ImageReader(folder, text)
  with pytest.raises(ValueError, match=r"sizes \(28, 4\) and the .* tower \(24, 4\)"):
    reader.open([toys.draw(tmp_path / "cat.png", 0)], None, "x")


def test_shown_records(smol, tmp_path):
  path = toys.draw(tmp_path / "cat.png", 0)
  record = SFT.read(of(user({**HERE, "image": str(path)})), "x")
  assert f"[user] [image {path}]" in show.describe_record(record)
  rendered = chat.render(of(user(HERE)), smol[0], images=smol[1], folder=tmp_path)
  text = show.describe_rendered(rendered, ("completion",), smol[0])
  assert text.startswith("image 1: cat.png, 40 x 20 pixels, 12 tokens\nprompt, ")
  tokens = np.asarray([5, *[toys.SOFT] * 16, 6])
  assert "<image> [16 times]" in show._decoded(tokens, smol[0])
  assert isinstance(path, pathlib.Path)
