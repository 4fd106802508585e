"""Token ids by llama.cpp; runs in an environment that has llama-cpp-python.

Usage: python llama_cpp_ids.py FILE.gguf < TEXTS.json > IDS.json
"""

import json
import sys

import llama_cpp

if __name__ == "__main__":
  model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
  ids = [
    model.tokenize(text.encode(), add_bos=False, special=True)
    for text in json.load(sys.stdin)
  ]
  json.dump(ids, sys.stdout)
