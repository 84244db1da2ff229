"""One file per positional scheme; `model.position.registry` lists them."""
