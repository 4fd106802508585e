"""QLoRA with tunix: adapters on a model whose matrices take four bits.

    python examples/qlora.py --output out

The training of examples/lora.py, on a base in NF4 (arXiv:2305.14314). A folder is read
straight into four bits by AutoModel.from_pretrained(folder, quantise="nf4"), one matrix
at a time: a model that would not fit is trained. `tunix train --job=sft
--model.quantise=nf4 --lora.rank=8` does it from a file.
"""

from dpo import arguments
from flax import nnx
from lora import base_model, learn
from sft import accuracy, as_they_stand

from tunix.models import lora, quantisation, safetensors_saver
from tunix.utils.tree import size_bytes


def main():
  args = arguments()
  base = base_model(args.output, args.steps)
  small = quantisation.quantise(base, "nf4")
  for name, model in (("base", base), ("nf4", small)):
    size = size_bytes(nnx.state(model.layers))
    print(f"{name:5} layers {size:8,} bytes   in order {accuracy(model):4.0%}")
  # Only adapters can be trained on it: four bits have no gradient.
  adapted = lora.apply(small, lora.LoraConfig(rank=8, alpha=16.0))
  first, last = learn(adapted, args.output, args.steps)
  print(f"held-out loss {first:.2f} -> {last:.2f}")
  print(f"as they stand {accuracy(adapted, as_they_stand):.0%}")
  # Full weights again, adapters merged: what any other program reads.
  safetensors_saver.save_pretrained(adapted, args.output / "merged")


if __name__ == "__main__":
  main()
