"""OLMo 3."""
