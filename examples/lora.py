"""LoRA with tunix: adapters change the behavior of a model, its weights stay the same.

    python examples/lora.py --output out

The model of examples/sft.py sorts digits. Adapters of rank 8 then teach it to repeat
the digits unchanged. The adapters are saved as a PEFT folder, loaded onto the unchanged
base, and merged into it. `tunix train --job=sft --lora.rank=8` trains on a file.
"""

import jax
import optax
from dpo import arguments, log
from flax import nnx
from rl_loop import new_model
from sft import accuracy, train, unchanged

from tunix.models import lora, safetensors_saver


def base_model(output, steps):
  """Returns a model that sorts digits."""
  model = new_model(seed=0)
  train(model, optax.adam(2e-3), output / "base", 4 * steps, log(output / "base"))
  return model


def learn(adapted, output, steps):
  """Trains the adapters; the trainer freezes the other weights by itself."""
  return train(
    adapted,
    optax.adam(1e-2),  # adapters need a higher learning rate than full training
    output / "checkpoints",  # they hold only the adapters
    4 * steps,
    log(output),
    unchanged,
  )


def main():
  args = arguments()
  base = base_model(args.output, args.steps)
  adapted = lora.apply(base, lora.LoraConfig(rank=8, alpha=16.0))
  print(lora.describe(adapted))
  first, last = learn(adapted, args.output, args.steps)
  print(f"held-out loss {first:.2f} -> {last:.2f}")

  lora.save_adapter(adapted, args.output / "adapter")
  again = lora.load_adapter(base, args.output / "adapter")
  merged = lora.merge(again)  # full weights without adapters
  safetensors_saver.save_pretrained(merged, args.output / "merged")
  models = {"base": base, "adapted": adapted, "loaded": again, "merged": merged}
  for name, model in models.items():
    print(
      f"{name:8} sorted {accuracy(model):4.0%}   "
      f"unchanged {accuracy(model, unchanged):4.0%}"
    )
  frozen = jax.tree.leaves(nnx.state(adapted, nnx.Not(nnx.LoRAParam)))
  arrays = {id(x) for x in jax.tree.leaves(nnx.state(base))}
  shared = sum(id(x) in arrays for x in frozen)
  print(f"{shared} of the base's {len(arrays)} arrays are shared")


if __name__ == "__main__":
  main()
