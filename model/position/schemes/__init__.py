"""One file per positional scheme; `model.position` lists them."""
