"""A GGUF file as a checkpoint in transformers' terms."""
