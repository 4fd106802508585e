"""The parts of `tunix.sft.checkpoint_manager`."""
