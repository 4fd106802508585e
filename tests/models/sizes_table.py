"""The table of docs/guides/sizes.md; `python -m tests.models.sizes_table` writes it."""

import pathlib

from tests.models.published import ALIASES, COUNTS
from tunix.models import families

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "sizes.md"
BEGIN, END = "<!-- sizes -->\n", "<!-- end of sizes -->\n"
HEAD = (
  "| preset | also | checkpoint | parameters | L | D | F | N / K | H | V | notes |\n"
  "|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def row(preset: str) -> str:
  config = families.preset(preset)[1]()
  repository, count = COUNTS[preset]
  also = ", ".join(f"`{alias}`" for alias, name in ALIASES.items() if name == preset)
  hidden = config.hidden_dim if config.moe is None else config.moe.hidden_dim
  cells = (
    f"`{preset}`",
    also,
    repository,
    f"{count:,}",
    config.num_layers,
    config.embed_dim,
    hidden,
    f"{config.num_heads} / {config.num_kv_heads}",
    config.head_dim,
    config.vocab_size,
    ", ".join(notes(config)),
  )
  return "| " + " | ".join(map(str, cells)) + " |\n"


def notes(config) -> list[str]:
  out = ["tied"] if config.tie_embeddings else []
  if config.moe is not None:
    out.append(f"{config.moe.num_experts} experts, {config.moe.experts_per_token} used")
  if config.sliding_window is not None:
    out.append(f"window {config.sliding_window}")
  if config.rope.scaling is not None:
    out.append(f"rope {config.rope.scaling} {config.rope.factor:g}")
  if config.mla is not None:
    out.append("latent attention")
  if config.attention_sinks:
    out.append("attention sinks")
  if hasattr(config, "vision"):
    out.append("images")
  return out


def table() -> str:
  return HEAD + "".join(row(preset) for preset in COUNTS)


def page() -> str:
  """The page with the table as it should be."""
  text = PAGE.read_text()
  before, after = text.split(BEGIN)[0], text.split(END)[1]
  return before + BEGIN + table() + END + after


if __name__ == "__main__":
  PAGE.write_text(page())
