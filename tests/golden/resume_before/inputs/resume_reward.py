def short(prompts, completions, **columns):
  return [1.0 / (1 + len(text)) for text in completions]
