"""Makes images.json: what the processors of transformers make of tests' pictures.

Run where torch, torchvision, transformers and Pillow 13 are installed:
`python tests/golden/make_images.py`. Each entry belongs to a processor and a picture of
tests/models/images/toys.py and holds, or is null if transformers refuses the picture,

  grid     as in `Pixels`; the number of crops for Gemma 3
  tokens   number of soft tokens
  text     CRC-32 of the text that replaces the placeholder
  shape    of the values
  levels   CRC-32 of all values as levels from 0 to 255
  values   16 of the values, at equal distances
"""

import json
import pathlib
import sys
import zlib

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from tests.models.images import theirs, toys  # noqa: E402


def levels(values, numbers):
  """The values as bytes from 0 to 255."""
  mean, std = np.array(numbers["image_mean"]), np.array(numbers["image_std"])
  exact = (values.reshape(-1, 3) * std + mean) * 255
  found = np.round(exact).astype(np.uint8)
  assert np.abs(exact - found).max() < 0.01
  return found.tobytes()


def summary(values, grid, tokens, text, numbers):
  places = np.linspace(0, values.size - 1, 16).astype(int)
  return {
    "grid": [int(n) for n in grid],
    "tokens": int(tokens),
    "text": zlib.crc32(text.encode()),
    "shape": list(values.shape),
    "levels": zlib.crc32(levels(values, numbers)),
    "values": [round(float(x), 7) for x in values.reshape(-1)[places]],
  }


def main():
  found = {}
  for config in (*toys.CONFIGS, *toys.PUBLISHED):
    for name, files, image in toys.cases(config):
      result = theirs.process(files, image)
      found[name] = result and summary(*result, files["preprocessor_config.json"])
  lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in found.items())
  (HERE / "images.json").write_text("{\n" + lines + "\n}\n")


if __name__ == "__main__":
  main()
