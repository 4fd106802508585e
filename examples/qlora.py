"""QLoRA with tunix: adapters on a model with 4-bit matrices.

    python examples/qlora.py --output out

The training of examples/lora.py on a base in NF4 (arXiv:2305.14314).
AutoModel.from_pretrained(folder, quantize="nf4") quantizes a folder while it reads, one
matrix at a time, so the full-precision model need not fit into memory. `tunix train
--job=sft --model.quantize=nf4 --lora.rank=8` trains on a file.
"""

from dpo import arguments
from flax import nnx
from lora import base_model, learn
from sft import accuracy, unchanged

from tunix.models import lora, quantization, safetensors_saver
from tunix.utils.tree import size_bytes


def main():
  args = arguments()
  base = base_model(args.output, args.steps)
  small = quantization.quantize(base, "nf4")
  for name, model in (("base", base), ("nf4", small)):
    size = size_bytes(nnx.state(model.layers))
    print(f"{name:5} layers {size:8,} bytes   sorted {accuracy(model):4.0%}")
  # Only adapters can be trained, because 4-bit weights have no gradient.
  adapted = lora.apply(small, lora.LoraConfig(rank=8, alpha=16.0))
  first, last = learn(adapted, args.output, args.steps)
  print(f"held-out loss {first:.2f} -> {last:.2f}")
  print(f"unchanged {accuracy(adapted, unchanged):.0%}")
  # Full-precision weights with merged adapters, a standard Hugging Face folder.
  safetensors_saver.save_pretrained(adapted, args.output / "merged")


if __name__ == "__main__":
  main()
