"""KTO with tunix: learning from single answers with a label, good or bad.

    python examples/kto.py --output out

The task of examples/dpo.py with one labeled answer to each question. `tunix train
--job=kto` trains on a file.
"""

import optax
from dpo import Text, arguments, log, options, questions, run
from rl_loop import new_model

from tunix.sft.dpo.kto_trainer import KTOConfig, KTODataInput, KTOTrainer


def batches(count, seed):
  """Yields batches of answers; every second answer is right."""
  for shown, ordered in questions(count, seed):
    labels = [row % 2 == 0 for row in range(len(shown))]
    answers = [b if good else a for a, b, good in zip(shown, ordered, labels)]
    yield KTODataInput(
      prompts=[f"{digits}=" for digits in shown], completions=answers, labels=labels
    )


def main():
  args = arguments()
  logger = log(args.output)
  trainer = KTOTrainer(
    new_model(seed=0),
    new_model(seed=0),
    optax.adam(1e-3),
    KTOConfig(beta=0.1, **options(args.output, args.steps)),
    Text(),
    metrics_logger=logger,
  )
  held_out = list(batches(1, seed=1))
  run(trainer, batches(args.steps, seed=0), held_out, logger, "rewards/margin")


if __name__ == "__main__":
  main()
