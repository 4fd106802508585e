"""Custom data with Grain: transformations, a module by name, a shard per process.

    python examples/grain_data.py

A trainer takes any iterable of batches. A Grain dataset yields them in an order that a
seed determines, and its position is a number, so a resumed run continues after the last
batch it used.
"""

import dataclasses
import pathlib

import grain
import numpy as np
from rl_loop import Characters

from tunix.cli.utils.data import get_dataset_from_module

RECORDS = [{"text": f"{a}{b}=", "label": a < b} for a in range(10) for b in range(10)]


@dataclasses.dataclass(frozen=True)
class Tokenize(grain.transforms.Map):
  """{"text", "label"} -> {"input_tokens" int32 [T], "input_mask", "label"}."""

  tokenizer: Characters
  width: int = 4

  def map(self, element):
    tokens = self.tokenizer.encode(element["text"])[: self.width]
    # Rows of a batch need the same length for np.stack.
    padding = [self.tokenizer.pad_id()] * (self.width - len(tokens))
    return {
      "input_tokens": np.asarray(tokens + padding, np.int32),
      "input_mask": np.asarray([1] * len(tokens) + [0] * len(padding), np.int32),
      "label": np.int32(element["label"]),
    }


def pipeline(records, batch_size, num_epochs):
  """Returns batches by `MapDataset`, whose methods are the transformations."""
  data = grain.MapDataset.source(records).shuffle(seed=42).repeat(num_epochs)
  data = data.map(Tokenize(Characters()))
  return data.batch(batch_size, drop_remainder=True).to_iter_dataset()


def loader(records, batch_size, num_epochs, shard=None):
  """Returns batches by `DataLoader`, from index sampler and list of transforms.

  Args:
    records: all records.
    batch_size: rows of a batch of this process.
    num_epochs: number of passes; None: endless.
    shard: the records of this process; None: chosen by the index of the JAX process. A
      shard is a range (of 100 records, the second of 4 processes has 25 to 49) in a
      shuffled order.
  """
  return grain.DataLoader(
    data_source=records,
    sampler=grain.samplers.IndexSampler(
      num_records=len(records),
      num_epochs=num_epochs,
      shuffle=True,
      seed=42,
      shard_options=shard or grain.sharding.ShardByJaxProcess(drop_remainder=True),
    ),
    operations=[
      Tokenize(Characters()),
      grain.transforms.Batch(batch_size, drop_remainder=True),
    ],
  )


def create_dataset(count=3, add=2):
  """Returns prompts for RL; the command finds this function by its file's name."""
  records = [
    {
      "prompt": [{"role": "user", "content": f"What is {n} + {add}?"}],
      "answer": str(n + add),
    }
    for n in range(count)
  ]
  return grain.MapDataset.source(records)


class Chat(Characters):
  """A tokenizer with a chat template, as real tokenizers have."""

  def apply_chat_template(self, messages, **_):
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages)


def main():
  batches = iter(pipeline(RECORDS, 32, num_epochs=3))
  first = next(batches)
  print({name: value.shape for name, value in first.items()})
  place = batches.get_state()
  second = next(batches)
  batches.set_state(place)
  print(f"the same batch again: {(next(batches)['label'] == second['label']).all()}")

  for number in range(4):  # the batches of four processes, one after the other
    shard = grain.sharding.ShardOptions(number, 4, drop_remainder=True)
    rows = next(iter(loader(RECORDS, 5, 1, shard)))["input_tokens"]
    print(f"process {number} of 4:", [Characters().decode(row) for row in rows])

  here = pathlib.Path(__file__)
  prompts = get_dataset_from_module(f"{here}:create_dataset(count=2)", Chat())
  for n in range(len(prompts)):
    print(prompts[n])


if __name__ == "__main__":
  main()
