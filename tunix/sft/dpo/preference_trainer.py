"""PreferenceTrainer: another name of DPOTrainer, whose loss is a setting."""

from tunix.sft.dpo.dpo_trainer import PreferenceTrainer

__all__ = ["PreferenceTrainer"]
