"""Choice of the prompts that a run samples next, for learners and their source."""
