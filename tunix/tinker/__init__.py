"""The Tinker training API: many LoRA adapters trained over one frozen base model."""
