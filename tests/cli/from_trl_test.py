"""`tunix init JOB --from-trl FILE`."""

import pytest
import yaml

from tests.cli import runs
from tunix.cli.commands import init
from tunix.cli.jobs.table import JOBS
from tunix.cli.settings import from_trl, keys

KEYS = {job: {k for k, _, _ in keys.walk(JOBS[job].settings)} for job in JOBS}


def translate(job, **options):
  return from_trl.translate(job, options, KEYS[job])


@pytest.mark.parametrize(
  ("job", "options", "want"),
  [
    ("grpo", {"scale_rewards": "none"}, {"advantage_estimator": "group_centered"}),
    ("grpo", {"scale_rewards": True}, {"advantage_estimator": "group_normalized"}),
    ("grpo", {"scale_rewards": "batch"}, {"advantage_estimator": "batch_scaled"}),
    (
      "grpo",
      {"loss_type": "sapo"},
      {"loss_algo": "sapo", "loss_agg_mode": "sequence-mean-token-mean"},
    ),
    (
      "grpo",
      {"loss_type": "cispo", "epsilon_high": 5.0},
      {"loss_algo": "cispo", "epsilon_low": 1.0, "epsilon_high": 4.0},
    ),
    (
      "grpo",
      {"loss_type": "luspo", "importance_sampling_level": "sequence"},
      {"loss_algo": "gspo", "loss_agg_mode": "sequence-mean-token-sum"},
    ),
    ("grpo", {"importance_sampling_level": "sequence"}, {"loss_algo": "gspo"}),
    ("grpo", {"epsilon_high": 0.28}, {"epsilon_high": 0.28}),
    ("grpo", {"loss_type": "grpo"}, {"loss_agg_mode": "sequence-mean-token-mean"}),
    ("grpo", {"mask_truncated_completions": True}, {"mask_truncated": True}),
    ("grpo", {"beta": 0.1}, {"beta": 0.1, "kl_corrected": True}),
    ("grpo", {}, {"beta": 0.0, "num_generations": 8}),
    # 8 completions on one device are the prompt of one group.
    ("grpo", {"gradient_accumulation_steps": 4}, {"global_batch_size": 4}),
    ("sft", {"save_total_limit": 2}, {"max_to_keep": 2, "num_epochs": 3}),
    ("sft", {"max_steps": 5}, {"max_steps": 5, "learning_rate": 2e-5}),
    ("sft", {"use_peft": True}, {"rank": 16, "alpha": 32}),
    ("sft", {"gradient_accumulation_steps": 4}, {"micro_batch_size": 8}),
    ("sft", {"load_in_4bit": True, "bf16": True}, {"dtype": "bfloat16"}),
    ("dpo", {"beta": 0.2, "loss_type": ["ipo"]}, {"beta": 0.2, "loss": "ipo"}),
    ("orpo", {"beta": 0.2}, {"lambda_orpo": 0.2}),
    ("sft", {"max_steps": None, "num_train_epochs": 2.0}, {"num_epochs": 2}),
    ("sft", {"per_device_train_batch_size": None}, {"global_batch_size": 8}),
    ("grpo", {"num_generations": 0, "loss_type": None}, {"num_generations": 8}),
    ("grpo", {"shuffle_dataset": False}, {"shuffle": False}),
  ],
)
def test_options_become_keys(job, options, want):
  values = translate(job, **options).values
  last = {key.rpartition(".")[2]: value for key, value in values.items()}
  assert last | want == last
  assert not set(values) - KEYS[job] - {"optimizer.args.weight_decay"}


def test_every_key_of_the_table_exists():
  known = set().union(*KEYS.values())
  others = {f"optimizer.args.{name}" for name in ("weight_decay", "b1", "b2", "eps")}
  assert set(from_trl._SAME.values()) - others <= known


@pytest.mark.parametrize(
  ("job", "option", "part"),
  [
    ("sft", {"report_to": ["wandb", "trackio"]}, "no counterpart of trackio"),
    ("sft", {"assistant_only_loss": False}, "TRL trains all turns"),
    ("sft", {"completion_only_loss": False}, "completions and never their prompts"),
    ("sft", {"max_steps": "many"}, "'many' is no whole number of at least -1"),
    ("sft", {"gradient_accumulation_steps": 0}, "0 is no whole number of at least 1"),
    ("grpo", {"scale_rewards": ["group"]}, "no counterpart of ['group']"),
    ("grpo", {"loss_type": ["dapo", "grpo"]}, "no counterpart of ['dapo', 'grpo']"),
    (
      "grpo",
      {"importance_sampling_level": "sequence", "loss_type": "cispo"},
      "no counterpart of 'sequence'",
    ),
    # Values that our keys do not take.
    ("sft", {"eval_steps": 0.1}, "training.eval_every_n_steps is the number 0.1"),
    ("sft", {"num_train_epochs": 0.5}, "data.num_epochs is the number 0.5"),
    ("grpo", {"top_k": -1}, "rollout.top_k is -1"),
    ("grpo", {"reward_weights": [1.0, 0.5]}, "reward.weights has 2 numbers"),
    ("grpo", {"temperature": "hot", "top_k": 5}, "rollout.temperature is the text"),
  ],
)
def test_values_without_a_counterpart_are_named(job, option, part, tmp_path):
  file = tmp_path / "trl.yaml"
  file.write_text(yaml.safe_dump(option))
  values, left = init._of_trl(job, str(file), {})
  assert part in left[next(iter(option))]
  init._values(job, values)


def test_texts_of_the_file_stay_texts_and_typed_keys_win(tmp_path):
  file = tmp_path / "trl.yaml"
  file.write_text(yaml.safe_dump(texts := {"output_dir": "out #1", "run_name": "a: b"}))
  values, _ = init._of_trl("sft", str(file), {})
  found = init._values("sft", values, {"data.train": "{x}.jsonl"})
  assert [found["output_dir"], found["logging.run_name"]] == list(texts.values())
  file.write_text("reward_weights: [1.0, 0.5]")
  typed = {"reward.functions": "[exact_match, exact_match]"}
  assert "reward_weights" not in init._of_trl("grpo", str(file), typed)[1]
  with pytest.raises(ValueError, match="top_k is 0"):
    init._of_trl("grpo", str(file), {"rollout.top_k": "0"})


def test_what_has_no_counterpart_is_named(tmp_path, capsys):
  options = {"neftune_noise_alpha": 5, "reward_funcs": ["f"], "loss_type": "bnpo"}
  options |= {"packing": True, "use_vllm": False, "lr_scheduler_type": "constant"}
  left = translate("grpo", **options).left
  assert left.pop("per_device_train_batch_size")
  assert left == {
    "neftune_noise_alpha": "no counterpart",
    "reward_funcs": "see reward.functions",
    "loss_type": "no counterpart of 'bnpo' in the job grpo",
    "packing": "no counterpart of True in the job grpo",
  }
  file, made = tmp_path / "trl.yaml", tmp_path / "mine.yaml"
  file.write_text(yaml.safe_dump({"max_length": 64, "neftune_noise_alpha": 5}))
  call = ("init", "sft", "--from-trl", file, "--output", made)
  assert runs.tunix(*call, "--data.train=a.jsonl") == 0
  assert f"{file}: neftune_noise_alpha: no counterpart" in capsys.readouterr().out
  written = yaml.safe_load(made.read_text())
  assert written["data"] == {"train": "a.jsonl", "num_epochs": 3, "max_length": 64}
  assert "lora" not in written
  file.write_text("- a list")
  assert runs.tunix(*call) == 2
