"""The parts of the tokenizer adapter: files, back ends, templates."""
