"""The processors of transformers, with their results in the layout of `Pixels`."""

import importlib
import types

import numpy as np


def _module(name):
  return importlib.import_module(f"transformers.models.{name}")


def image_processor(files, backend):
  """Their image processor; `backend` is "pil" or "torchvision"."""
  numbers = dict(files["preprocessor_config.json"])
  kind = numbers.pop("image_processor_type").removesuffix("ImageProcessor")
  name = {"Qwen2VL": "qwen2_vl"}.get(kind, kind.lower())
  middle, end = ("pil_", "Pil") if backend == "pil" else ("", "")
  module = _module(f"{name}.image_processing_{middle}{name}")
  return kind, getattr(module, f"{kind}ImageProcessor{end}")(**numbers)


def _square_values(found):
  values = np.asarray(found["pixel_values"])
  return values.reshape(-1, *values.shape[-3:]).transpose(0, 2, 3, 1)


def _patches(image, patch):
  """[3, H, W] row by row, written as loops on purpose."""
  _, height, width = image.shape
  return np.stack(
    [
      image[:, y : y + patch, x : x + patch].transpose(1, 2, 0).reshape(-1)
      for y in range(0, height, patch)
      for x in range(0, width, patch)
    ]
  )


def _gemma3(found, numbers, processor):
  values, crops = _square_values(found), int(found["num_crops"][0])
  soft = "<image_soft_token>" * processor["image_seq_length"]
  told = types.SimpleNamespace(
    full_image_sequence=f"\n\n<start_of_image>{soft}<end_of_image>\n\n"
  )
  cls = _module("gemma3.processing_gemma3").Gemma3Processor
  return values, [crops], cls.replace_image_token(told, found, 0), "<image_soft_token>"


def _smolvlm(found, numbers, processor):
  module = _module("smolvlm.processing_smolvlm")
  rows, columns = int(found["rows"][0][0]), int(found["cols"][0][0])
  text = module.get_image_prompt_string(
    rows,
    columns,
    processor["image_seq_len"],
    fake_token_around_image="<fake_token_around_image>",
    image_token="<image>",
    global_image_token="<global-img>",
  )
  return _square_values(found), [rows, columns], text, "<image>"


def _gemma4(found, numbers, processor):
  places = np.asarray(found["image_position_ids"][0])
  real = places[:, 0] >= 0
  grid = (places[real].max(axis=0) + 1)[::-1]  # theirs is (x, y)
  told = types.SimpleNamespace(
    boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>"
  )
  cls = _module("gemma4.processing_gemma4").Gemma4Processor
  text = cls.replace_image_token(told, found, 0)
  return np.asarray(found["pixel_values"][0])[real], grid.tolist(), text, "<|image|>"


def _qwen(found, numbers, processor):
  patch = numbers["patch_size"]
  frames = np.asarray(found["pixel_values"]).reshape(-1, 3, 2, patch, patch)
  np.testing.assert_array_equal(frames[:, :, 0], frames[:, :, 1])
  values = frames[:, :, 0].transpose(0, 2, 3, 1).reshape(len(frames), -1)
  told = types.SimpleNamespace(
    image_token="<|image_pad|>",
    image_processor=types.SimpleNamespace(merge_size=numbers["merge_size"]),
  )
  cls = _module("qwen3_vl.processing_qwen3_vl").Qwen3VLProcessor
  text = cls.replace_image_token(told, found, 0)
  grid = np.asarray(found["image_grid_thw"][0]).tolist()
  return values, grid, text, "<|image_pad|>"


def _pixtral(found, numbers, processor):
  patch = processor["patch_size"]
  told = types.SimpleNamespace(
    patch_size=patch,
    spatial_merge_size=processor["spatial_merge_size"],
    image_token="[IMG]",
    image_break_token="[IMG_BREAK]",
    image_end_token="[IMG_END]",
  )
  cls = _module("pixtral.processing_pixtral").PixtralProcessor
  text = cls.replace_image_token(told, found, 0)
  grid = [int(n) // patch for n in found["image_sizes"][0]]
  return _patches(np.asarray(found["pixel_values"][0]), patch), grid, text, "[IMG]"


def process(files, image, backend="pil"):
  """Returns (values, grid, soft tokens, text), or None if they refuse the image.

  The grid of Gemma 3 is its number of crops.
  """
  kind, processor = image_processor(files, backend)
  options = {"return_tensors": "np" if backend == "pil" else "pt"}
  if kind == "SmolVLM":
    options["return_row_col_info"] = True
  beside = files["processor_config.json"]
  if kind == "Pixtral":
    options["patch_size"] = beside["patch_size"] * beside["spatial_merge_size"]
  from PIL import Image

  try:
    found = processor([Image.fromarray(image)], **options)
  except ValueError:
    return None
  readers = {"Gemma3": _gemma3, "SmolVLM": _smolvlm, "Gemma4": _gemma4}
  read = {**readers, "Qwen2VL": _qwen, "Pixtral": _pixtral}[kind]
  values, grid, text, soft = read(found, files["preprocessor_config.json"], beside)
  return values, grid, text.count(soft), text
