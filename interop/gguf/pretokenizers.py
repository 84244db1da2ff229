"""The pre-tokenizers of byte-level BPE vocabularies in GGUF files, by `tokenizer.ggml.pre`.

A GGUF file names its pre-tokenizer instead of containing it. Patterns are those of llama.cpp
(src/llama-vocab.cpp), in the form of the original tokenizer.json where llama.cpp quotes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data.tokenizers.huggingface import LLAMA3, LLAMA3_SINGLE_DIGITS

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = LLAMA3_SINGLE_DIGITS.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?{words}" for words in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_REST}"
_GPT4O = rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before the merges.

    Attributes:
        pattern: the regular expression of the pieces; None: GPT-2's.
        digits: whether every digit is a piece of its own, before the pattern is applied.
        ignore_merges: whether a piece that is in the vocabulary is one token whatever the merges.
        add_bos: whether models begin documents with BOS unless the file says otherwise.
        exact: whether llama.cpp splits all text in this way. It knows no letter cases and splits Chinese,
            for instance, otherwise than patterns that distinguish them.
    """

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False
    exact: bool = True

    def as_json(self) -> dict[str, Any]:
        """The `pre_tokenizer` of a tokenizer.json."""
        steps: list[dict[str, Any]] = []
        if self.digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if self.pattern is not None:
            regex = {"Regex": self.pattern}
            steps.append(
                {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
            )
        steps.append(
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": self.pattern is None,
            }
        )
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


_GPT2_STYLE = PreTokenizer()
_SMOLLM_STYLE = PreTokenizer(digits=True)
_LLAMA3_STYLE = PreTokenizer(LLAMA3, ignore_merges=True, add_bos=True)
_QWEN2_STYLE = PreTokenizer(LLAMA3_SINGLE_DIGITS)
_GPT4O_STYLE = PreTokenizer(_GPT4O, exact=False)

# The first name of each style is the one written by an export.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling"), _GPT2_STYLE
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SMOLLM_STYLE
    ),
    "minerva-7b": _SMOLLM_STYLE,
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3_STYLE
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer(LLAMA3)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "solar-open"), _QWEN2_STYLE
    ),
    "qwen35": PreTokenizer(_QWEN35),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True, exact=False),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O_STYLE),
}
