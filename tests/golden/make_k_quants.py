"""Makes gguf/*.gguf: a tiny Llama in types that only llama.cpp's quantizer writes.

Needs llama-cpp-python, version 0.3.36 made the committed files.

  python -m tests.golden.make_k_quants
"""

import pathlib
import tempfile

import llama_cpp

from tests.models.gguf import ggufs

KINDS = {
  "q2_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q2_K,
  "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
  "q5_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
}


def main():
  folder = pathlib.Path(__file__).parent / "gguf"
  llama_cpp.llama_backend_init()
  with tempfile.TemporaryDirectory() as temporary:
    plain = pathlib.Path(temporary) / "f32.gguf"
    metadata = {"llama.vocab_size": 48, "tokenizer.ggml.model": "none"}
    ggufs.write(plain, *ggufs.llama(**ggufs.K_SIZES), **metadata)
    for name, kind in KINDS.items():
      params = llama_cpp.llama_model_quantize_default_params()
      params.ftype = kind
      target = folder / f"{name}.gguf"
      paths = str(plain).encode(), str(target).encode()
      assert llama_cpp.llama_model_quantize(*paths, params) == 0, name


if __name__ == "__main__":
  main()
