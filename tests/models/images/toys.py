"""Pictures and processors' files that the golden, the live test and the others share.

Nothing here imports tunix or transformers.
"""

import json

import numpy as np

# (height, width) of 20 odd pictures.
SIZES = (
  *((1, 1), (1, 2), (2, 1), (7, 9), (9, 7), (16, 16), (28, 28), (33, 31), (48, 48)),
  *((64, 48), (100, 37), (37, 100), (97, 101), (120, 120), (1, 150), (150, 1)),
  *((3, 255), (199, 200), (20, 3000), (3000, 20)),
)
PUBLISHED_SIZES = ((37, 53), (20, 300), (700, 1100))


def picture(height, width):
  """Noise over stripes of black and white, where filters overshoot and are clipped."""
  rng = np.random.default_rng(height * 10_007 + width)
  noise = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
  stripes = np.arange(height)[:, None] // 3 + np.arange(width)[None] // 2
  sharp = np.uint8(255) * (stripes[..., None] % 2).astype(np.uint8)
  return np.where((stripes % 3 == 0)[..., None], sharp, noise)


_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_ODD = {"image_mean": [0.48, 0.45, 0.40], "image_std": [0.26, 0.27, 0.28]}


def _files(kind, numbers, **processor):
  """The contents of the two files of a model folder."""
  numbers = {"image_processor_type": kind + "ImageProcessor", **numbers}
  return {"preprocessor_config.json": numbers, "processor_config.json": processor}


def _gemma3(size, pan=None, tokens=256, **other):
  names = "min_crop_size", "max_num_crops", "min_ratio_to_activate"
  pan_and_scan = dict(zip(names, pan or (None,) * 3, strict=True))
  numbers = {f"pan_and_scan_{name}": value for name, value in pan_and_scan.items()}
  numbers |= {"size": {"height": size, "width": size}, "resample": 2, **_HALF, **other}
  numbers["do_pan_and_scan"] = pan is not None
  return _files("Gemma3", numbers, image_seq_length=tokens)


def _gemma4(patch, pool, tokens):
  numbers = {"patch_size": patch, "pooling_kernel_size": pool, "do_normalize": False}
  numbers |= {
    "max_soft_tokens": tokens,
    "image_mean": [0.0] * 3,
    "image_std": [1.0] * 3,
  }
  return _files("Gemma4", numbers)


def _smolvlm(longest, tile, split, tokens, **other):
  numbers = {"size": {"longest_edge": longest}, "resample": 1, **_HALF, **other}
  numbers |= {"max_image_size": {"longest_edge": tile}, "do_image_splitting": split}
  return _files("SmolVLM", numbers, image_seq_len=tokens)


def _qwen(patch, merge, least, most, **other):
  numbers = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 2}
  numbers |= {"size": {"shortest_edge": least, "longest_edge": most}, **_HALF, **other}
  return _files("Qwen2VL", numbers)


def _pixtral(patch, merge, longest):
  numbers = {"size": {"longest_edge": longest}, "patch_size": patch, **_ODD}
  return _files("Pixtral", numbers, patch_size=patch, spatial_merge_size=merge)


CONFIGS = {
  "gemma3": _gemma3(28, tokens=4),
  "gemma3 crops": _gemma3(24, (6, 5, 1.25), 3, **_ODD),
  "gemma3 few crops": _gemma3(20, (30, 3, 1.0), 2, resample=3),
  "gemma4": _gemma4(4, 3, 70),
  "gemma4 small": _gemma4(6, 1, 140),
  "gemma4 pairs": _gemma4(2, 2, 280),
  "smolvlm": _smolvlm(64, 24, True, 2),
  "smolvlm whole": _smolvlm(50, 20, False, 3, **_ODD),
  "smolvlm one tile": _smolvlm(40, 48, True, 1, resample=3),
  "qwen": _qwen(6, 2, 600, 6000),
  "qwen wide": _qwen(4, 3, 1000, 1100, **_ODD),
  "qwen free": _qwen(8, 1, 1, 100_000, resample=2),
  "pixtral": _pixtral(5, 2, 90),
  "pixtral single": _pixtral(6, 1, 300),
  "pixtral triple": _pixtral(3, 3, 3100),
}
PUBLISHED = {
  "gemma3 published": _gemma3(896),
  "gemma3 published crops": _gemma3(896, (256, 4, 1.2)),
  "gemma4 published": _gemma4(16, 3, 280),
  "smolvlm published": _smolvlm(2048, 512, True, 64),
  "qwen published": _qwen(16, 2, 65_536, 16_777_216),
  "pixtral published": _pixtral(14, 2, 1540),
}


def cases(config):
  """Yields (name, files, picture) of all pictures of a processor."""
  published = config in PUBLISHED
  files = (PUBLISHED if published else CONFIGS)[config]
  for h, w in PUBLISHED_SIZES if published else SIZES:
    yield f"{config}: {h}x{w}", files, picture(h, w)


def write(folder, files):
  for name, content in files.items():
    (folder / name).write_text(json.dumps(content))
  return folder
