"""What turns prompts into completions while a policy is trained."""
