"""A reward model with tunix: it learns to score answers from pairs of them.

    python examples/reward.py --output out

A model with a head of one score trains on the pairs of examples/dpo.py. The result fits
`RLCluster(reward=model)`, and `tunix eval --pairs` evaluates it. `tunix train
--job=reward` trains on a file of pairs.
"""

import optax
from dpo import Text, arguments, batches, log, options, run
from rl_loop import new_model

from tunix.models.heads import with_scores
from tunix.sft.dpo.reward_trainer import RewardConfig, RewardTrainer


def main():
  args = arguments()
  logger = log(args.output)
  trainer = RewardTrainer(
    with_scores(new_model(seed=0)),
    optax.adam(1e-3),
    RewardConfig(centering=0.01, **options(args.output, args.steps)),
    Text(),
    metrics_logger=logger,
  )
  run(trainer, batches(args.steps, seed=0), list(batches(1, seed=1)), logger)


if __name__ == "__main__":
  main()
