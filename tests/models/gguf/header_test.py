"""Damaged and malicious GGUF files: one line each, and no memory on their word."""

import re
import struct
import tracemalloc

import pytest

from tunix.models.gguf import header, tensors

U32, TEXT, LIST = 4, 8, 9
BIG = 2**60
DIM, VOCAB = 64, 4096  # the file has 1 MB, so that its double can be measured


def text(value):
  raw = value if isinstance(value, bytes) else value.encode()
  return struct.pack("<Q", len(raw)) + raw


def pair(key, value):
  """A key with a whole number, a text, or raw bytes that begin with their type."""
  if isinstance(value, int):
    value = struct.pack("<II", U32, value)
  elif isinstance(value, str):
    value = struct.pack("<I", TEXT) + text(value)
  return text(key) + value


def listed(item, count, raw=b""):
  return struct.pack("<IIQ", LIST, item, count) + raw


PAIRS = {
  "general.architecture": "llama",
  "llama.block_count": 1,
  "llama.context_length": 8,
  "llama.embedding_length": DIM,
  "llama.feed_forward_length": DIM,
  "llama.attention.head_count": 4,
  "llama.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5),
}
TABLE, NORM = "token_embd.weight", "output_norm.weight"
INFOS = {
  TABLE: {"shape": (DIM, VOCAB), "kind": 0, "offset": 0},
  NORM: {"shape": (DIM,), "kind": 0, "offset": 4 * DIM * VOCAB},
}


def build(
  pairs=None, infos=None, magic=b"GGUF", version=3, counts=(None, None), order="<"
):
  """The bytes of a file. `pairs` and `infos` are (name, contents), later ones added."""
  pairs = [*(PAIRS | dict(pairs or {})).items()]
  infos = [*INFOS.items(), *(infos or [])]
  announced = [len(x) if n is None else n for n, x in zip(counts, (infos, pairs))]
  out = magic + struct.pack(f"{order}IQQ", version, *announced)
  out += b"".join(pair(key, value) for key, value in pairs)
  for name, info in infos:
    axes = info.get("axes", len(info["shape"]))
    out += text(name) + struct.pack("<I", axes)
    out += struct.pack(f"<{len(info['shape'])}Q", *info["shape"])
    out += struct.pack("<IQ", info["kind"], info["offset"])
  return out + bytes(-len(out) % 32) + bytes(4 * DIM * (VOCAB + 1))


def another(**changes):
  """One more tensor, in the place of the norm unless `changes` say otherwise."""
  return [("another", INFOS[NORM] | changes)]


END = 4 * DIM * (VOCAB + 1)
DAMAGED = {
  "empty": (b"", "0 bytes"),
  "three bytes": (b"GGU", "3 bytes"),
  "foreign": (build(magic=b"ggjt"), "begins with b'ggjt'"),
  "version 1": (build(version=1), "version is 1"),
  "version 99": (build(version=99), "version is 99"),
  "big-endian": (build(order=">"), "big-endian"),
  "cut in the header": (build()[:200], "more"),
  "cut in the tensors": (build()[:-100], "ends at byte"),
  "many pairs": (build(counts=(None, BIG)), "at most|announces|unknown type"),
  "many tensors": (build(counts=(BIG, None)), "announces|axes|text"),
  "long key": (
    build().replace(text("llama.block_count"), struct.pack("<Q", BIG)),
    "text",
  ),
  "long text": (build({"x": struct.pack("<IQ", TEXT, 2**40)}), "at most"),
  "text beyond the end": (
    build({"x": struct.pack("<IQ", TEXT, 2**20)}).replace(bytes(DIM), b""),
    "announces",
  ),
  "many numbers": (build({"x": listed(U32, BIG)}), "announces"),
  "many texts": (build({"x": listed(TEXT, BIG)}), "announces"),
  "many empty texts": (build({"x": listed(TEXT, 2**50)}), "announces|beyond"),
  "unknown type of value": (build({"x": struct.pack("<I", 99)}), "unknown type 99"),
  "list of lists": (build({"x": listed(LIST, 1)}), "unknown type 9"),
  "no UTF-8": (build({b"\xff\xfe": 1}), "no UTF-8"),
  "key twice": (
    build({"general.architecture_": "x"}).replace(
      text("general.architecture_"), text("general.architecture")
    ),
    "twice",
  ),
  "tensor twice": (build(infos=[(NORM, INFOS[NORM])]), "twice"),
  "no axis": (build(infos=another(shape=(), axes=0)), "0 axes"),
  "nine axes": (build(infos=another(shape=(1,) * 9)), "9 axes"),
  "large axis": (build(infos=another(shape=(BIG, BIG))), "larger than any file"),
  "unknown type of tensor": (build(infos=another(kind=999)), "unknown type 999"),
  "beyond the end": (build(infos=another(offset=END)), "ends at byte"),
  "far beyond": (build(infos=another(offset=2**63)), "ends at byte"),
  "between two multiples": (build(infos=another(offset=END - 7)), "multiple of"),
  "overlap": (build(infos=another()), "begins at byte"),
  "no whole block": (build(infos=another(kind=8, shape=(33,))), "multiple of 32"),
  "alignment 0": (build({"general.alignment": 0}), "alignment is 0"),
  "alignment 48": (build({"general.alignment": 48}), "alignment is 48"),
  "alignment text": (build({"general.alignment": "x"}), "alignment is 'x'"),
  "split": (build({"split.count": 3}), "split.count is 3"),
}
# Readable files of models that cannot be.
FOREIGN = {
  "architecture": ({"general.architecture": "falcon"}, "architecture is 'falcon'"),
  "no text": ({"general.architecture": 7}, "architecture is 7"),
  "adapter": ({"general.type": "adapter"}, "type is 'adapter'"),
  "many layers": ({"llama.block_count": 2**31 - 1}, "block_count is"),
  "no layers": ({"llama.block_count": 0}, "block_count is 0"),
  "layers as text": ({"llama.block_count": "many"}, "block_count is 'many'"),
  "no heads": ({"llama.attention.head_count": 0}, "head_count is 0"),
  "list of heads": ({"llama.attention.head_count": listed(U32, 0)}, "head_count is"),
  "experts": ({"llama.expert_count": 10**9}, "expert_count is"),
  "rope": ({"llama.rope.scaling.type": "strange"}, "scaling.type is 'strange'"),
}


def refused(raw, file):
  """The message, and the most memory in bytes that reading took."""
  file.write_bytes(raw)
  header.library()
  tracemalloc.start()
  try:
    with pytest.raises(ValueError) as error:
      tensors.config_json(header.read(file))
    return str(error.value), tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()


@pytest.mark.parametrize("name", [*DAMAGED, *FOREIGN])
def test_a_damaged_file_is_refused_in_one_line(name, tmp_path):
  raw, message = DAMAGED.get(name) or (build(FOREIGN[name][0]), FOREIGN[name][1])
  said, memory = refused(raw, tmp_path / "model.gguf")
  assert "\n" not in said and len(said) < 700
  assert memory < 2 * max(len(raw), 100_000)
  assert re.search(message, said), said


def test_the_undamaged_file_is_read(tmp_path):
  file = tmp_path / "model.gguf"
  file.write_bytes(build({"x": listed(TEXT, 2, text("a") + text("é"))}))
  read = header.read(file)
  assert [*read.metadata["x"]] == ["a", "é"] and [*read.metadata["x"][1:]] == ["é"]
  assert read.tensors[NORM].shape == (DIM,)
  assert tensors.config_json(read)["rms_norm_eps"] == 1e-5
