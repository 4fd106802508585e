"""ORPO with tunix: one training for the answers and for the preference between them.

    python examples/orpo.py --output out

The task of examples/dpo.py without a reference: training raises the likelihood of the
chosen answer and its odds against the rejected one. `tunix train --job=orpo` trains on
a file of pairs.
"""

import optax
from dpo import Text, arguments, batches, log, options, run
from rl_loop import new_model

from tunix.sft.dpo.dpo_trainer import ORPOTrainer, ORPOTrainingConfig


def main():
  args = arguments()
  logger = log(args.output)
  trainer = ORPOTrainer(
    new_model(seed=0),
    optimizer=optax.adam(1e-3),
    training_config=ORPOTrainingConfig(
      lambda_orpo=0.5, **options(args.output, args.steps)
    ),
    tokenizer=Text(),
    metrics_logger=logger,
  )
  run(trainer, batches(args.steps, seed=0), list(batches(1, seed=1)), logger)


if __name__ == "__main__":
  main()
