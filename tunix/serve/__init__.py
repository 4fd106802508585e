"""The HTTP server over the engine: OpenAI's routes, token routes and administration."""
