"""The same training on several meshes with tunix, and moving a model between meshes.

    python examples/sharding.py --output out

The training of examples/sft.py runs on one device, and on eight devices (simulated on a
CPU) with FSDP, with FSDP and tensor parallelism, and with data parallelism. The losses
are the same. Then the model moves from eight devices to four and back, bit for bit.
examples/tensor_parallel.py shows how a custom model declares its sharding.
"""

import jax
import numpy as np
import optax
from dpo import arguments, log
from flax import nnx
from rl_loop import new_model
from sft import batches

from tunix.rl.weights.reshard import reshard_model_to_mesh
from tunix.sft.metrics_logger import Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.utils.mesh import create_mesh

MESHES = {"fsdp": {"fsdp": 8}, "fsdp x tp": {"fsdp": 4, "tp": 2}, "dp": {"dp": 8}}


def train(mesh, output, steps):
  """Trains on a mesh, or on one device if it is None; returns model and losses.

  The model's ShardingRules split matrices along `fsdp` and `tp` if the mesh has these
  axes. Rows of a batch are split over all axes but `tp`.
  """
  if mesh is None:
    return fit(new_model(seed=0), (), output, steps)
  rows = tuple(axis for axis in mesh.shape if axis != "tp")
  with jax.set_mesh(mesh):  # `with mesh:` and Explicit axes work too
    return fit(new_model(seed=0), rows, output, steps)


def fit(model, rows, output, steps):
  logger = log(output)
  config = TrainingConfig(
    max_steps=steps, data_sharding_axis=rows, pbar_description=None
  )
  trainer = PeftTrainer(model, optax.adam(2e-3), config, logger)
  trainer.train(batches(steps, seed=0))
  trainer.close()
  return model, logger.get_metric_history("", "loss", Mode.TRAIN)


def describe(model):
  """Returns the sharding of a matrix and the bytes of the model on one device."""
  kernel = model.layers.mlp.up_proj.kernel[...]
  leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
  held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
  spec = getattr(kernel.sharding, "spec", "one device")
  return f"up_proj {spec}, {held:,} of {sum(x.nbytes for x in leaves):,} bytes a device"


def main():
  args = arguments()
  model, expected = train(None, args.output / "one", args.steps)
  print(
    f"{'one device':10} loss {expected[0]:.4f} -> {expected[-1]:.4f}  {describe(model)}"
  )
  for name, axes in MESHES.items():
    model, losses = train(create_mesh(axes), args.output / name, args.steps)
    off = np.max(np.abs(losses - expected) / expected)
    print(
      f"{name:10} loss {losses[0]:.4f} -> {losses[-1]:.4f}, largest difference "
      f"{off:.0e}  {describe(model)}"
    )

  before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]
  for count in (4, 8):
    mesh = create_mesh({"fsdp": count}, jax.devices()[:count])
    reshard_model_to_mesh(model, mesh)
    print(f"moved to {count} devices: {describe(model)}")
  after = jax.tree.leaves(nnx.state(model))
  same = all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
  print("the weights are bit-identical" if same else "the weights have changed!")


if __name__ == "__main__":
  # Before the first array. A machine with only a CPU simulates eight devices.
  jax.config.update("jax_num_cpu_devices", 8)
  main()
