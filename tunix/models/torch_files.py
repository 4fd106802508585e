"""`pytorch_model.bin` without torch: mapped where it lies, nothing in it executed.

Such a file is a zip archive that is not compressed: `<name>/data.pkl` describes the
tensors and `<name>/data/<number>` are their bytes, so a tensor is a place in the file
as in safetensors. Files from before PyTorch 1.6 are bare pickles and are refused.
"""

from __future__ import annotations

import pathlib
import zipfile
from typing import BinaryIO

from tunix.models import torch_pickle
from tunix.models.stored_tensor import StoredTensor, brief
from tunix.models.torch_pickle import Storage

_LOCAL_HEADER = 30  # bytes, before the member's name
_ENCRYPTED = 1
_REMEDY = (
  "save the model as safetensors (save_pretrained of transformers does), or download "
  "it in that format"
)


def read_file(file: pathlib.Path) -> dict[str, StoredTensor]:
  """The tensors of one file that `torch.save` wrote from a state dict.

  Raises:
    FileNotFoundError: no such file.
    ValueError: it is damaged, of the old format, or holds anything but tensors;
      nothing was executed.
  """
  with file.open("rb") as stream:
    if stream.read(4) != b"PK\3\4":
      raise ValueError(
        f"{file} is damaged, or in the format from before PyTorch 1.6, which only "
        f"torch reads: {_REMEDY}"
      )
    try:
      return _Archive(file, stream).tensors()
    except (
      zipfile.BadZipFile,
      NotImplementedError,  # a zip version or a method that zipfile does not know
      ValueError,
    ) as error:
      raise ValueError(
        f"{file} is damaged or no plain file of tensors ({brief(error)}); nothing in "
        f"it was executed: {_REMEDY}"
      ) from error


class _Archive:
  """The members of a zip file and where their bytes lie."""

  def __init__(self, file: pathlib.Path, stream: BinaryIO):
    self.file = file
    self.stream = stream
    self.size = file.stat().st_size
    with zipfile.ZipFile(stream) as archive:
      members = archive.infolist()
    self.members = {member.filename: member for member in members}
    if len(self.members) < len(members):
      raise ValueError("two members have one name")

  def tensors(self) -> dict[str, StoredTensor]:
    folders = [
      folder
      for folder, _, rest in (name.partition("/") for name in self.members)
      if rest == "data.pkl"
    ]
    if len(folders) != 1:
      raise ValueError(f"{len(folders)} members are named */data.pkl, expected one")
    order = f"{folders[0]}/byteorder"
    if order in self.members and self._read(order, 16) != b"little":
      raise ValueError("its byte order is not little-endian")
    raw = self._read(f"{folders[0]}/data.pkl", torch_pickle.MAX_BYTES)
    views = torch_pickle.read_tensors(raw)
    starts = {
      storage: self._storage(folders[0], storage)
      for storage in {view.storage for view in views.values()}
    }
    return {
      name: StoredTensor(
        name,
        self.file,
        view.dtype,
        view.shape,
        starts[view.storage] + view.start * view.dtype.itemsize,
        None if _is_plain(view) else view.strides,
      )
      for name, view in views.items()
    }

  def _storage(self, folder: str, storage: Storage) -> int:
    start, size = self._place(f"{folder}/data/{storage.key}")
    if size != storage.nbytes:
      raise ValueError(
        f"storage {storage.key} has {size} bytes, {storage.nbytes} expected"
      )
    return start

  def _read(self, name: str, limit: int) -> bytes:
    start, size = self._place(name)
    if size > limit:
      raise ValueError(f"{brief(name)} has {size} bytes, at most {limit} are read")
    self.stream.seek(start)
    return self.stream.read(size)

  def _place(self, name: str) -> tuple[int, int]:
    """(first byte in the file, size) of a member."""
    member = self.members.get(name)
    if member is None:
      raise ValueError(f"{brief(name)} is not in it")
    stored = member.compress_type == zipfile.ZIP_STORED
    if not stored or member.compress_size != member.file_size:
      raise ValueError(f"{brief(name)} is compressed, torch stores plain bytes")
    if member.flag_bits & _ENCRYPTED:
      raise ValueError(f"{brief(name)} is encrypted")
    start = self._after_header(member)
    if start + member.file_size > self.size:
      raise ValueError(f"{brief(name)} goes beyond the end of the file")
    return start, member.file_size

  def _after_header(self, member: zipfile.ZipInfo) -> int:
    """Where the bytes begin: only the header before them knows its own length."""
    at = member.header_offset
    if not 0 <= at <= self.size - _LOCAL_HEADER:
      raise ValueError(f"{brief(member.filename)} lies outside the file")
    self.stream.seek(at)
    header = self.stream.read(_LOCAL_HEADER)
    name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    stored = self.stream.read(name)
    if header[:4] != b"PK\3\4" or stored != member.orig_filename.encode():
      raise ValueError(f"{brief(member.filename)} does not lie where the index says")
    return at + _LOCAL_HEADER + name + extra


def _is_plain(view: torch_pickle.View) -> bool:
  """Whether the elements lie row by row; the stride of an axis of 1 does not count."""
  step = 1
  for size, stride in zip(reversed(view.shape), reversed(view.strides)):
    if size != 1 and stride != step:
      return False
    step *= size
  return True
