"""Text generation with a trained run: prompts, streamed text and output formats."""

from generation.prompts import read_prompts
from generation.samples import Sample, generate_samples, make_samples
from generation.text_stream import TextStream
from generation.writers import JsonLinesWriter, TextWriter

__all__ = [
    "JsonLinesWriter",
    "Sample",
    "TextStream",
    "TextWriter",
    "generate_samples",
    "make_samples",
    "read_prompts",
]
