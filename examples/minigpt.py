"""A custom miniGPT: pretraining, generation, LoRA and a profile, in one file.

    python examples/minigpt.py --output out          # some minutes on a laptop's CPU
    python examples/minigpt.py --output out --tiny   # seconds
    python examples/minigpt.py --output out --text stories.txt --style play.txt

The model is plain `flax.nnx` without code of tunix. PeftTrainer trains it with the loss
and the input function of this file. The model learns short stories; then adapters
(qwix) teach it the style of a play. `minigpt_text.py` generates both, or `--text` and
`--style` name files: texts separated by blank lines or by `<|endoftext|>`. On eight
devices (a TPU, or a CPU with XLA_FLAGS=--xla_force_host_platform_device_count=8)
batches are split four ways and matrices two ways.
"""

import argparse
import contextlib
import dataclasses
import pathlib

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import qwix
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P
from minigpt_text import Words, read_texts, share_of_new, speech, story, texts

from tunix.generate.sampler import CacheConfig, Sampler
from tunix.ops.reductions import weighted_sum
from tunix.sft.metrics_logger import MetricsLogger, Mode
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig
from tunix.sft.profiler import ProfilerOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """The sizes of the model, the data and the two trainings."""

  text_bytes: int = 600_000  # of the stories, and of the play
  num_transformer_blocks: int = 3
  maxlen: int = 96
  embed_dim: int = 128
  num_heads: int = 8
  feed_forward_dim: int = 256
  batch_size: int = 32
  num_epochs: int = 2
  learning_rate: float = 2e-3
  top_k: int = 10
  lora_rank: int = 16
  lora_alpha: float = 16.0
  lora_max_steps: int = 60
  lora_num_epochs: int = 10
  lora_batch_size: int = 32
  lora_learning_rate: float = 5e-3


TINY = Settings(
  text_bytes=60_000,
  num_transformer_blocks=1,
  maxlen=32,
  embed_dim=32,
  num_heads=2,
  feed_forward_dim=64,
  batch_size=16,
  num_epochs=2,
  learning_rate=1e-2,
  lora_max_steps=40,
  lora_batch_size=16,
)


def rows(tokenizer, lines, batch_size, maxlen, num_epochs):
  """Returns batches of one text a row: int32 tokens [B, maxlen] and a mask of the text.

  A text of more than `maxlen` tokens becomes several rows. The position of the Grain
  dataset is one number, which a checkpoint saves.
  """
  source = []
  for line in lines:
    tokens = [*tokenizer.encode(line), tokenizer.eos_id()]
    source += [tokens[i : i + maxlen] for i in range(0, len(tokens), maxlen)]

  def row(tokens):
    padding = [0] * (maxlen - len(tokens))
    return {
      "input_tokens": np.asarray(tokens + padding, np.int32),
      "input_mask": np.asarray([1] * len(tokens) + padding, np.int32),
    }

  data = grain.MapDataset.source(source).shuffle(seed=0).repeat(num_epochs).map(row)
  return data.batch(batch_size, drop_remainder=True).to_iter_dataset()


# The model. Each kernel declares its sharding: `split(None, "model")` splits the
# columns over the mesh axis "model". A following matrix is split in rows, so that the
# activations between the two stay on their device.


def split(*axes, init=None):
  return nnx.with_partitioning(init or nnx.initializers.xavier_uniform(), P(*axes))


class TransformerBlock(nnx.Module):
  def __init__(self, embed_dim, num_heads, ff_dim, *, rngs, rate=0.1):
    zeros = nnx.initializers.zeros_init()
    # These kernels have three dimensions, [D, N, H] and [N, H, D]. Their specs need
    # three entries, because qwix reads one entry for each dimension.
    self.mha = nnx.MultiHeadAttention(
      num_heads=num_heads,
      in_features=embed_dim,
      kernel_init=split(None, "model", None),
      bias_init=split("model", None, init=zeros),
      out_kernel_init=split("model", None, None),
      out_bias_init=split(None, init=zeros),
      decode=False,
      rngs=rngs,
    )
    self.linear1 = nnx.Linear(
      embed_dim, ff_dim, kernel_init=split(None, "model"), rngs=rngs
    )
    self.linear2 = nnx.Linear(
      ff_dim, embed_dim, kernel_init=split("model", None), rngs=rngs
    )
    self.layer_norm1 = nnx.LayerNorm(embed_dim, rngs=rngs)
    self.layer_norm2 = nnx.LayerNorm(embed_dim, rngs=rngs)
    self.dropout1 = nnx.Dropout(rate, rngs=rngs)
    self.dropout2 = nnx.Dropout(rate, rngs=rngs)

  def __call__(self, x):
    length = x.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))
    x = self.layer_norm1(x + self.dropout1(self.mha(x, mask=mask)))
    inner = self.linear2(nnx.relu(self.linear1(x)))
    return self.layer_norm2(x + self.dropout2(inner))


class MiniGPT(nnx.Module):
  """A decoder from tokens, int32 [B, T], to logits [B, T, V].

  The trainer calls `model.train()` and `model.eval()`, which switch dropout on and off,
  so `__call__` needs no `training` argument.
  """

  def __init__(self, settings, vocab_size, *, rngs):
    s = settings
    self.token_emb = nnx.Embed(vocab_size, s.embed_dim, rngs=rngs)
    self.pos_emb = nnx.Embed(s.maxlen, s.embed_dim, rngs=rngs)
    self.transformer_blocks = nnx.List(  # nnx refuses a plain list
      TransformerBlock(s.embed_dim, s.num_heads, s.feed_forward_dim, rngs=rngs)
      for _ in range(s.num_transformer_blocks)
    )
    self.output_layer = nnx.Linear(
      s.embed_dim, vocab_size, kernel_init=split(None, "model"), rngs=rngs
    )

  def __call__(self, inputs):
    x = self.token_emb(inputs) + self.pos_emb(jnp.arange(inputs.shape[1]))
    for block in self.transformer_blocks:
      x = block(x)
    return self.output_layer(x)

  def get_model_input(self):
    """Returns the input with which qwix traces the model to find its matrices."""
    return {"inputs": jnp.zeros((1, 4), jnp.int32)}


# The training: two functions for the trainer.


def gen_model_input_fn(batch):
  """Returns the loss's arguments from a batch."""
  return {"inputs": batch["input_tokens"], "mask": batch["input_mask"]}


def loss_fn(model, inputs, mask):
  """Returns the next-token cross-entropy.

  It is a weighted sum and not a mean, because a mean over all positions would count the
  padding of rows of different lengths.
  """
  logits = model(inputs[:, :-1])
  nll = optax.softmax_cross_entropy_with_integer_labels(logits, inputs[:, 1:])
  return weighted_sum(nll, mask[:, 1:])


def train(model, optimizer, data, label=None, **options):
  """Trains the model; returns losses and seconds of the steps."""
  logger = MetricsLogger()
  config = TrainingConfig(
    data_sharding_axis=("batch",), pbar_description=label, **options
  )
  # The trainer compiles its step, so there is neither `nnx.jit` nor `jax.jit` here. A
  # `jax.jit` around a step that changes a module would discard the changes.
  trainer = PeftTrainer(model, optimizer, config, logger)
  trainer.with_gen_model_input_fn(gen_model_input_fn).with_loss_fn(loss_fn)
  trainer.train(data)
  trainer.close()
  history = lambda name: logger.get_metric_history("", name, Mode.TRAIN)
  return history("loss"), history("step_time_sec")


def add_lora(model, settings):
  """Returns the model with adapters; it shares the weights of the base.

  The adapters are in attention, MLP and the output layer. Without the last, words that
  no story has would remain unlikely.
  """
  # qwix matches whole paths, such as transformer_blocks/0/mha/query. ".*mha" matches no
  # matrix of the attention, ".*mha.*" matches all four.
  provider = qwix.LoraProvider(
    module_path=".*mha.*|.*linear1|.*linear2|output_layer",
    rank=settings.lora_rank,
    alpha=settings.lora_alpha,
  )
  adapted = qwix.apply_lora_to_model(
    model, provider, rngs=nnx.Rngs(1), **model.get_model_input()
  )
  count = len(jax.tree.leaves(nnx.state(adapted, nnx.LoRAParam)))
  print(f"{count} adapter matrices")
  return adapted


def generate(model, tokenizer, settings, start):
  """Samples a text that begins with `start`. Any causal model can be sampled."""
  model.eval()
  prompt = tokenizer.encode(start)
  # The sampler pads rows to a few fixed lengths, so that it compiles few programs. This
  # model has no positions beyond maxlen.
  limit = CacheConfig(cache_size=settings.maxlen)
  out = Sampler(model, tokenizer, limit)(
    [start],
    settings.maxlen - len(prompt),
    len(prompt),
    temperature=1.0,
    top_k=settings.top_k,
    seed=0,
  )
  return start + out.text[0]


# The devices.


def new_mesh(model_axis=2):
  """Returns a mesh of all devices, `model_axis` of them along "model"."""
  count = jax.device_count()
  width = model_axis if count % model_axis == 0 else 1
  # By default `jax.make_mesh` makes Explicit axes, on which lookups in split tables and
  # concatenations need explicit shardings. With Auto axes XLA chooses them.
  kinds = (AxisType.Auto,) * 2
  return jax.make_mesh((count // width, width), ("batch", "model"), axis_types=kinds)


def inside(mesh, form):
  """Returns the mesh as a context: `jax.set_mesh(mesh)`, or the older `with mesh:`."""
  stack = contextlib.ExitStack()
  stack.enter_context(jax.set_mesh(mesh) if form == "set_mesh" else mesh)
  # A new nnx variable is sharded only under `jax.set_mesh`. The trainer shards
  # variables that are created under `with mesh:` or without a mesh.
  stack.enter_context(nnx.use_eager_sharding(False))
  return stack


def run(settings, output, mesh, form="set_mesh", text=None, style=None):
  """Runs the whole tutorial; returns losses, texts and models.

  Args:
    settings: sizes.
    output: folder of the profile.
    mesh: the devices.
    form: how the mesh becomes the context; see `inside`.
    text, style: files to learn in place of the generated stories and scenes.
  """
  s = settings
  stories = read_texts(text) if text else texts(story, s.text_bytes, seed=1)
  play = read_texts(style) if style else texts(speech, s.text_bytes, seed=1)
  tokenizer = Words(stories + play)  # adapters do not change the vocabulary
  start = stories[0].partition(" ")[0] if text else "Once upon a time"
  with inside(mesh, form):
    model = MiniGPT(s, tokenizer.vocab_size, rngs=nnx.Rngs(0))
    before = generate(model, tokenizer, s, start)
    pretrained, _ = train(
      model,
      optax.adam(s.learning_rate),
      rows(tokenizer, stories, s.batch_size, s.maxlen, s.num_epochs),
      # Steps 5 to 7, after compilation; XProf and TensorBoard read the profile.
      profiler_options=ProfilerOptions(
        output / "profile", skip_first_n_steps=5, profiler_steps=3
      ),
    )
    story_text = generate(model, tokenizer, s, start)
    adapted = add_lora(model, s)
    lora, _ = train(
      adapted,
      optax.adamw(s.lora_learning_rate),
      rows(tokenizer, play, s.lora_batch_size, s.maxlen, s.lora_num_epochs),
      max_steps=s.lora_max_steps,
    )
    play_text = generate(adapted, tokenizer, s, start)
  written = {"before": before, "pretrained": story_text, "lora": play_text}
  return {
    "pretrained": pretrained,
    "lora": lora,
    "texts": written,
    "new": {name: share_of_new(each, stories) for name, each in written.items()},
    "model": model,
    "adapted": adapted,
  }


def main():
  parser = argparse.ArgumentParser(description="see the top of the file")
  parser.add_argument("--output", type=pathlib.Path, required=True)
  parser.add_argument("--tiny", action="store_true")
  parser.add_argument("--mesh", choices=("set_mesh", "with"), default="set_mesh")
  parser.add_argument("--text", type=pathlib.Path, help="file for the pretraining")
  parser.add_argument("--style", type=pathlib.Path, help="file for the adapters")
  args = parser.parse_args()
  mesh = new_mesh()
  print(f"mesh {dict(mesh.shape)}")
  settings = TINY if args.tiny else Settings()
  out = run(settings, args.output, mesh, args.mesh, args.text, args.style)
  for name in ("pretrained", "lora"):
    print(f"{name}: loss {out[name][0]:.2f} -> {out[name][-1]:.2f}")
  for name, text in out["texts"].items():
    print(f"\n{name} ({out['new'][name]:.0%} of its words are in no story)\n{text}")
  print(f"\nthe profile is in {args.output / 'profile'}")


if __name__ == "__main__":
  main()
