"""An OpenAI-compatible completion server for a trained run, and its page."""
