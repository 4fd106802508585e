"""GGUF files, the format of llama.cpp; `automodel` reads them, `export` writes them."""
