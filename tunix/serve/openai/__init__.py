"""The routes of OpenAI's protocol, and what a request passes on the way."""
