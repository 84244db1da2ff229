"""Models with a modeling file that is generated from our model code."""

from interop.export.generated.model import MODULE, WRAPPER, config, source, weights

__all__ = ["MODULE", "WRAPPER", "config", "source", "weights"]
