"""PPO with tunix.rl: the task of examples/grpo.py, with a critic.

    python examples/ppo.py --output out

GRPO compares the answers to one prompt with each other. In PPO a critic predicts the
expected reward before every token, and the policy learns from the difference to the
real reward. The critic is trained together with the policy. One completion of each
prompt is enough.
"""

from grpo import arguments, cluster, places, run
from rl_loop import new_model

from tunix.rl.ppo.ppo_learner import PPOConfig, PPOLearner
from tunix.rl.utils import create_critic_model


def main():
  args = arguments()
  actor = new_model(seed=0)
  models = cluster(
    args.steps, args.output, actor=actor, critic=create_critic_model(actor)
  )
  algorithm = PPOConfig(
    num_generations=8, num_iterations=2, beta=0.0, gae_lambda=1.0, pass_threshold=1.0
  )
  learner = PPOLearner(models, algorithm, places)
  run(learner, args.steps, args.output)


if __name__ == "__main__":
  main()
