"""A server of trained models: an HTTP API as OpenAI's clients call it."""
