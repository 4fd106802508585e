"""The parts of the padded sampler, `tunix.generate.sampler`."""
