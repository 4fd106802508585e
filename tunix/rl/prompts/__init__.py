"""Which prompts a run samples next; the source of prompts and learners call it."""
