"""Torch files made without torch, instruction by instruction, to be bent at will."""

import zipfile

import numpy as np

KINDS = {
  np.dtype(np.float32): "FloatStorage",
  np.dtype(np.float16): "HalfStorage",
  np.dtype(np.int64): "LongStorage",
}


def text(value):
  raw = value.encode()
  return b"X" + len(raw).to_bytes(4, "little") + raw


def number(value):
  return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def numbers(values):
  return b"(" + b"".join(number(value) for value in values) + b"t"


def name(full):
  module, _, word = full.rpartition(".")
  return f"c{module}\n{word}\n".encode()


def call(function, *arguments):
  return name(function) + b"(" + b"".join(arguments) + b"tR"


def storage(key, kind, count):
  return (
    b"("
    + text("storage")
    + name(f"torch.{kind}")
    + text(key)
    + text("cpu")
    + number(count)
    + b"tQ"
  )


def tensor(key, kind, count, start, shape, strides):
  return call(
    "torch._utils._rebuild_tensor_v2",
    storage(key, kind, count),
    number(start),
    numbers(shape),
    numbers(strides),
    b"\x89",
    call("collections.OrderedDict"),
  )


def state(entries):
  """A pickled dict; the values are pickled already."""
  return (
    b"\x80\x02}("
    + b"".join(text(key) + value for key, value in entries.items())
    + b"u."
  )


def archive(path, pickled, storages, *, folder="model", compression=0, order="little"):
  with zipfile.ZipFile(path, "w", compression) as file:
    file.writestr(f"{folder}/data.pkl", pickled)
    file.writestr(f"{folder}/byteorder", order)
    for key, raw in storages.items():
      file.writestr(f"{folder}/data/{key}", raw)
    file.writestr(f"{folder}/version", "3\n")
  return path


def write(path, values):
  """A torch file of NumPy arrays."""
  entries, storages = {}, {}
  for i, (key, value) in enumerate(values.items()):
    steps = [step // value.itemsize for step in value.strides]
    entries[key] = tensor(str(i), KINDS[value.dtype], value.size, 0, value.shape, steps)
    storages[str(i)] = value.tobytes()
  return archive(path, state(entries), storages)
