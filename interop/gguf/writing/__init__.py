"""A model and its tokenizer as a GGUF file."""
