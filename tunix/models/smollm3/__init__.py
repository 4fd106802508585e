"""SmolLM3."""
