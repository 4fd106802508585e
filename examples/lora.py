"""LoRA with tunix: a model gets a new habit, and its own weights stay as they are.

    python examples/lora.py --output out

The model of examples/sft.py puts digits in order. Adapters of rank 8 then teach it to
repeat them as they stand. They are saved as a folder of PEFT, loaded again onto the
untouched base, and merged into it. `tunix train --job=sft --lora.rank=8` does it from a
file.
"""

import jax
import optax
from dpo import arguments, log
from flax import nnx
from rl_loop import new_model
from sft import accuracy, as_they_stand, train

from tunix.models import lora, safetensors_saver


def base_model(output, steps):
  """A model that puts digits in order."""
  model = new_model(seed=0)
  train(model, optax.adam(2e-3), output / "base", 4 * steps, log(output / "base"))
  return model


def learn(adapted, output, steps):
  """Trains the adapters alone: a trainer that finds some leaves all else as it is."""
  return train(
    adapted,
    optax.adam(1e-2),  # adapters take, and need, larger steps than whole models
    output / "checkpoints",  # of the adapters: small
    4 * steps,
    log(output),
    as_they_stand,
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
  merged = lora.merge(again)  # full weights: no adapter is computed any more
  safetensors_saver.save_pretrained(merged, args.output / "merged")
  models = {"base": base, "adapted": adapted, "loaded": again, "merged": merged}
  for name, model in models.items():
    print(
      f"{name:8} in order {accuracy(model):4.0%}   "
      f"as they stand {accuracy(model, as_they_stand):4.0%}"
    )
  frozen = jax.tree.leaves(nnx.state(adapted, nnx.Not(nnx.LoRAParam)))
  own = {id(x) for x in jax.tree.leaves(nnx.state(base))}
  print(
    f"{sum(id(x) in own for x in frozen)} of the base's {len(own)} arrays are shared"
  )


if __name__ == "__main__":
  main()
