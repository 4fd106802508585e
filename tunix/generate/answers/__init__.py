"""The text of an answer into content, reasoning and tool calls."""
