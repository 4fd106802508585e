"""Model families over one decoder; loading, saving, LoRA."""
