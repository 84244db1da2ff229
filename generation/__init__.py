"""Text generation: sampling of tokens, decoding of batches, prompts, streamed text and output
formats."""

from generation.decoding import Generation
from generation.prompts import read_prompts
from generation.samples import Sample, generate_samples, make_samples
from generation.sampling import SamplingParams
from generation.text_stream import TextStream
from generation.writers import JsonLinesWriter, TextWriter

__all__ = [
    "Generation",
    "JsonLinesWriter",
    "Sample",
    "SamplingParams",
    "TextStream",
    "TextWriter",
    "generate_samples",
    "make_samples",
    "read_prompts",
]
