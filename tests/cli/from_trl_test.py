"""`tunix init JOB --from-trl FILE`."""

import pytest
import yaml

from tests.cli import runs
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
