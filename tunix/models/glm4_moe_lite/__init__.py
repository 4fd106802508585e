"""GLM-4.7 Flash, a mixture of experts with latent attention."""
