"""Files into records; the command and `tunix.data.questions` call it."""
