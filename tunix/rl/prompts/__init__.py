"""The choice of the prompts that a run samples next; the source of prompts and learners call it."""
