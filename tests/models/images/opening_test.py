"""Reading of image files as people have them, and refusal of broken ones."""

import base64
import io
import pathlib
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.models.images import toys
from tunix.models.gemma3 import images as gemma3_images
from tunix.models.images import opening, pillow
from tunix.utils import optional

GRAY = (np.arange(24).reshape(4, 6) * 10).astype(np.uint8)
RGB = toys.picture(4, 6)


def saved(image, kind="PNG", **options):
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


def png(width, height, *, kind=2, depth=8, data=b"\0" * 40):
  """A PNG file with this header, whatever its pixels are."""
  parts = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
  chunks = ((b"IHDR", parts), (b"IDAT", zlib.compress(data)), (b"IEND", b""))
  out = b"\x89PNG\r\n\x1a\n"
  for name, body in chunks:
    check = struct.pack(">I", zlib.crc32(name + body))
    out += struct.pack(">I", len(body)) + name + body + check
  return out


def turned(orientation):
  exif = Image.Exif()
  exif[0x0112] = orientation
  return saved(Image.fromarray(RGB), "PNG", exif=exif)


def frames():
  later = [Image.new("RGB", (6, 4), "red")]
  first = Image.fromarray(RGB)
  return saved(first, "WEBP", lossless=True, save_all=True, append_images=later)


def palette():
  image = Image.new("P", (6, 4))
  image.putpalette([0, 0, 0, 10, 20, 30])
  image.putdata([1] * 24)
  return image


def transparent():
  """A level of 100 with alpha 51, so 100 / 5 + 255 * 4 / 5 = 224 on white."""
  image = Image.new("RGBA", (6, 4), (100, 100, 100, 51))
  return image


GRAY3 = np.repeat(GRAY[..., None], 3, -1)
flat = lambda *color: np.full((4, 6, 3), color, np.uint8)
deep = (GRAY.astype(np.uint16) << 8) + 77

FILES = {
  "png": (saved(Image.fromarray(RGB)), RGB),
  "webp": (saved(Image.fromarray(RGB), "WEBP", lossless=True), RGB),
  "bmp": (saved(Image.fromarray(RGB), "BMP"), RGB),
  "ppm": (saved(Image.fromarray(RGB), "PPM"), RGB),
  "tiff": (saved(Image.fromarray(RGB), "TIFF"), RGB),
  "jpeg": (saved(Image.new("RGB", (6, 4), (9, 9, 9)), "JPEG"), flat(9)),
  "mirrored": (turned(2), RGB[:, ::-1]),
  "upside down": (turned(3), RGB[::-1, ::-1]),
  "on its side": (turned(6), RGB.transpose(1, 0, 2)[:, ::-1]),
  "other side": (turned(8), RGB.transpose(1, 0, 2)[::-1]),
  "gray": (saved(Image.fromarray(GRAY)), GRAY3),
  "one bit": (saved(Image.new("1", (6, 4), 1)), flat(255)),
  "16 bit": (saved(Image.fromarray(deep)), GRAY3),
  "16 bit tiff": (saved(Image.fromarray(deep), "TIFF"), GRAY3),
  "16 bit pgm": (b"P5 6 4 65535 " + deep.astype(">u2").tobytes(), GRAY3),
  "16 bit rgb": (png(1, 1, depth=16, data=b"\0\x11\x22\x33\x44\x55\x66"), None),
  "palette": (saved(palette()), flat(10, 20, 30)),
  "clear palette": (saved(palette(), transparency=1), flat(255)),
  "gif": (saved(palette(), "GIF"), flat(10, 20, 30)),
  "rgba": (saved(transparent()), flat(224)),
  "gray with alpha": (saved(Image.new("LA", (6, 4), (100, 51))), flat(224)),
  "cmyk": (saved(Image.new("CMYK", (6, 4), (0, 255, 255, 0)), "TIFF"), flat(255, 0, 0)),
  "animated": (frames(), RGB),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_become_rgb(kind):
  data, want = FILES[kind]
  found = opening.open_image(data)
  want = np.array([[[0x11, 0x33, 0x55]]]) if want is None else want
  assert found.dtype == np.uint8
  np.testing.assert_array_equal(found, want)


def test_all_sources_give_the_same(tmp_path):
  data = FILES["png"][0]
  file = tmp_path / "a.png"
  file.write_bytes(data)
  text = base64.b64encode(data).decode()
  uri = f"data:image/png;base64,{text[:30]}\n{text[30:]}"
  for source in (data, file, str(file), uri, RGB, Image.fromarray(RGB)):
    np.testing.assert_array_equal(opening.open_image(source), RGB)
  want = gemma3_images.preprocess([RGB], 8)
  np.testing.assert_array_equal(gemma3_images.preprocess([data], 8), want)
  assert gemma3_images.preprocess([]).shape == (0, 896, 896, 3)


def bad_checksum():
  data = bytearray(FILES["png"][0])
  data[data.index(b"IDAT") + 8] ^= 255
  return bytes(data)


BAD = {
  "bomb": (png(60_000, 60_000), "too large|60000 x 60000 pixels"),
  "large": (png(9000, 9000), "9000 x 9000 pixels; expected 1 to 67108864"),
  "gif bomb": (b"GIF89a" + struct.pack("<HHBBB", 60_000, 60_000, 0, 0, 0), "large|is"),
  "no width": (png(0, 5), "image of"),
  "empty": (b"", "is no image that can be read"),
  "text": (b"hello, world", "expected PNG, JPEG"),
  "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "Convert it"),
  "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n", "is no image"),
  "cut header": (FILES["png"][0][:20], "damaged|is no image"),
  "cut png": (saved(Image.fromarray(toys.picture(60, 60)))[:-200], "damaged"),
  "cut jpeg": (saved(Image.fromarray(toys.picture(60, 60)), "JPEG")[:900], "truncated"),
  "cut webp": (
    saved(Image.fromarray(toys.picture(60, 60)), "WEBP")[:400],
    "damaged|is",
  ),
  "cut tiff": (FILES["tiff"][0][:60], "damaged|is no image"),
  "changed png": (bad_checksum(), "damaged"),
  "floats": (saved(Image.new("F", (6, 4)), "TIFF"), "32 bits"),
  "url": ("https://example.com/a.png", "Download"),
  "percent uri": ("data:image/svg+xml,%3Csvg", "data URI of"),
  "bad base64": ("data:image/png;base64,@@@", "no base64"),
  "bare base64": ("iVBO" * 2000, "is no path"),
}


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_in_one_line_without_memory(kind):
  source, message = BAD[kind]
  opening.open_image(FILES["png"][0])  # Loads Pillow's formats.
  tracemalloc.start()
  try:
    with pytest.raises(ValueError, match=message) as caught:
      opening.open_image(source)
    assert tracemalloc.get_traced_memory()[1] < 2**20
  finally:
    tracemalloc.stop()
  assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_every_cut_and_changed_file_is_read_or_refused(kind):
  whole = saved(Image.fromarray(toys.picture(9, 7)), kind)
  rng = np.random.default_rng(0)
  refused = 0
  for place in rng.integers(0, len(whole), 40):
    changed = bytearray(whole)
    changed[place] ^= int(rng.integers(1, 256))
    for data in (whole[:place], bytes(changed)):
      try:
        opening.open_image(data, max_pixels=10_000)
      except ValueError:
        refused += 1
  assert refused > 20


@pytest.mark.parametrize(
  "source, kind, message",
  [
    (np.zeros((4, 4), np.uint8), ValueError, r"image has shape \(4, 4\)"),
    (np.zeros((3, 4, 4), np.uint8), ValueError, "channels last"),
    (np.zeros((0, 4, 3), np.uint8), ValueError, r"\(0, 4, 3\)"),
    (np.zeros((4, 4, 3)), TypeError, "float64, expected an array of uint8"),
    (3.5, TypeError, "type float; expected a path"),
    (pathlib.Path("/nowhere/a.png"), FileNotFoundError, "/nowhere/a.png"),
  ],
)
def test_refused_sources(source, kind, message):
  with pytest.raises(kind, match=message):
    opening.open_image(source)


def test_max_pixels_bounds_every_source():
  for source in (RGB, FILES["png"][0], Image.fromarray(RGB)):
    assert opening.open_image(source, max_pixels=24).shape == (4, 6, 3)
    with pytest.raises(ValueError, match="6 x 4 pixels; expected 1 to 23"):
      opening.open_image(source, max_pixels=23)


def test_missing_pillow_names_the_extra(monkeypatch):
  missing = lambda name: (_ for _ in ()).throw(ImportError(name))
  monkeypatch.setattr(optional.importlib, "import_module", missing)
  with pytest.raises(ImportError, match=r"pip install 'tunix\[images\]'"):
    pillow.module("Image")
