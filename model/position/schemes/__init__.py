"""The positional schemes; `model.position` lists them."""
