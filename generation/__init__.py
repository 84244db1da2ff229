"""Text generation: sampling of tokens, decoding of batches, prompts, streamed text and output
formats."""
