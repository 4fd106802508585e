"""Reader of `pytorch_model.bin` that needs no torch and executes nothing in the file.

The file is an uncompressed zip archive: `<name>/data.pkl` describes the tensors and
`<name>/data/<number>` are their bytes. A tensor is therefore a range of the file, as in
safetensors, and is read through a memory map. Files from before PyTorch 1.6 are bare
pickles, which are refused.
"""

from __future__ import annotations

import pathlib
import zipfile
from typing import BinaryIO

from tunix.models.files import torch_pickle
from tunix.models.files.stored_tensor import StoredTensor, brief, check_file

_LOCAL_HEADER = 30  # bytes of a member's header, before its name
_ENCRYPTED = 1  # bit of a member's flags
_REMEDY = (
  "save the model as safetensors (save_pretrained of transformers does), or download "
  "it in that format"
)


def read_file(file: pathlib.Path) -> dict[str, StoredTensor]:
  """Returns the tensors of a file that `torch.save` wrote from a state dict, by name.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: the file is damaged, is in the format from before PyTorch 1.6, or holds
      anything but tensors. Nothing in the file was executed.
  """
  check_file(file)
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
  """The members of a zip file and the ranges of their bytes."""

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
    (folder,) = folders
    order = f"{folder}/byteorder"
    if order in self.members and self._read(order, 16) != b"little":
      raise ValueError("its byte order is not little-endian")
    pickled = self._read(f"{folder}/data.pkl", torch_pickle.MAX_BYTES)

    def locate(key):
      return self._range(f"{folder}/data/{key}")

    return torch_pickle.read_tensors(pickled, self.file, locate)

  def _read(self, name: str, limit: int) -> bytes:
    start, size = self._range(name)
    if size > limit:
      raise ValueError(f"{brief(name)} has {size} bytes, at most {limit} are read")
    self.stream.seek(start)
    return self.stream.read(size)

  def _range(self, name: str) -> tuple[int, int]:
    """Returns a member's first byte in the file and its size in bytes."""
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
    """Returns the offset of a member's first byte, after its header.

    The index at the end of the archive has only the offset of the header. The lengths
    of the name and of the extra field are in the header, at bytes 26 and 28.
    """
    offset = member.header_offset
    if not 0 <= offset <= self.size - _LOCAL_HEADER:
      raise ValueError(f"{brief(member.filename)} is outside the file")
    self.stream.seek(offset)
    header = self.stream.read(_LOCAL_HEADER)
    name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    stored_name = self.stream.read(name)
    if header[:4] != b"PK\3\4" or stored_name != member.orig_filename.encode():
      raise ValueError(f"{brief(member.filename)} is not at the offset in the index")
    return offset + _LOCAL_HEADER + name + extra
