"""DeepSeek-V3, a mixture of experts with latent attention."""
