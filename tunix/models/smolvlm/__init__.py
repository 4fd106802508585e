"""SmolVLM, SmolVLM2 and Idefics3: images and text."""
