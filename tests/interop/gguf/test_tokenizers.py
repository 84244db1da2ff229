"""Tokenizers embedded in GGUF files, in and out."""

import io
import json

import pytest
import sentencepiece
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.integrations.gguf import gguf_tokenizer_mapping as transformers_gguf

from data import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from errors import DataError, InteropError
from interop.gguf.pretokenizers import PRE_TOKENIZERS
from interop.gguf.reading.file import GGUFFile
from interop.gguf.reading.tokenizer import read_tokenizer
from interop.gguf.writing.vocabulary import tokenizer_metadata
from tests.interop.gguf.files import write

TEXTS = [
    "Once upon a time, in 1984,  there were 12,345.67 of them.\n\n   Don't! We'll see\tYOU'LL\r\n see.",
    "Ünïcödé naïve façade — „Zitat“, 日本語のテキスト, 한국어, Ελληνικά, русский, 🙂🙃 e\u0301.",
    "def f(x):\n    return x**2  # comment\n\n\n\tif not x: pass   \n",
    " leading and trailing  ",
    "HelloWorld camelCase ALLCAPS iPhone3G x1y2 ½ ² Ⅷ ١٢٣ / https://a.b/c?d=e&f#g",
]
CORPUS = [*TEXTS, *(" ".join(TEXTS).split(" "))] * 3


def trained_bpe(
    pre_tokenizer, size: int = 500, ignore_merges: bool = False
) -> tokenizers.Tokenizer:
    """A byte-level BPE with two control symbols."""
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|a|>", "<|b|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def split(pattern: str):
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def gpt2_keys(tokenizer: tokenizers.Tokenizer, pre: str, **more) -> dict:
    """The metadata of a byte-level BPE."""
    spec = json.loads(tokenizer.to_str())
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in ("<|a|>", "<|b|>") else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | more


def trained_sentencepiece(**options) -> SentencePieceTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        **(
            {
                "model_type": "bpe",
                "vocab_size": 450,
                "byte_fallback": True,
                "character_coverage": 0.98,
                "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False,
                "add_dummy_prefix": False,
                "minloglevel": 4,
            }
            | options
        ),
    )
    return SentencePieceTokenizer(model.getvalue())


def sentencepiece_keys(tokenizer: SentencePieceTokenizer, **more) -> dict:
    """The metadata of a sentencepiece model, through its own processor."""
    p = tokenizer.processor
    count = tokenizer.vocab_size
    kinds = ((p.is_unknown, 2), (p.is_control, 3), (p.is_unused, 5), (p.is_byte, 6))
    return {
        "model": "llama",
        "tokens": [p.id_to_piece(i) for i in range(count)],
        "scores": [p.get_score(i) for i in range(count)],
        "token_type": [next((kind for test, kind in kinds if test(i)), 1) for i in range(count)],
    } | more


def embedded(tmp_path, keys: dict, rows: int = 1000):
    path = write(tmp_path / "m.gguf", "llama", extra={"a": torch.zeros(1, 32)}, tokenizer=keys)
    return read_tokenizer(GGUFFile(path), rows)


DIGITS = pre_tokenizers.Digits(individual_digits=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
# The patterns of transformers, which it took from the models' own tokenizer.json.
STYLES = {
    "gpt-2": (BYTES, False, False),
    "smollm": (pre_tokenizers.Sequence([DIGITS, BYTES]), False, False),
    **{
        name: (split(transformers_gguf.GGUF_PRE_TOKENIZER_SPLITS[name]), ignore_merges, add_bos)
        for name, ignore_merges, add_bos in (
            ("llama-bpe", True, True),
            ("dbrx", False, False),
            ("qwen2", False, False),
            ("qwen35", False, False),
            ("tekken", True, True),
            ("gpt-4o", False, False),
        )
    },
}


@pytest.mark.parametrize("pre", STYLES)
def test_byte_level_bpe(pre, tmp_path):
    pre_tokenizer, ignore_merges, add_bos = STYLES[pre]
    expected = trained_bpe(pre_tokenizer, ignore_merges=ignore_merges)
    found = embedded(tmp_path, gpt2_keys(expected, pre))
    assert isinstance(found, HuggingFaceTokenizer)
    assert (found.bos_id, found.eos_id, found.eos_ids, found.add_bos) == (0, 1, (1,), add_bos)
    for text in TEXTS:
        ids = found.encode(text)
        assert ids == expected.encode(text).ids
        assert found.decode(ids) == text
    # control symbols are not read from text
    assert found.encode("x<|a|>") != [*found.encode("x"), 0]
    # Back: the same metadata.
    if not PRE_TOKENIZERS[pre].exact:
        with pytest.raises(InteropError, match="approximates"):
            tokenizer_metadata(found, found.vocab_size)
        return
    again = tokenizer_metadata(found, found.vocab_size)
    first = next(name for name, known in PRE_TOKENIZERS.items() if known == PRE_TOKENIZERS[pre])
    expected_keys = gpt2_keys(expected, first)
    assert {key: again[key] for key in expected_keys} == expected_keys


def test_user_defined_tokens(tmp_path):
    """They are whole tokens in any text, and have bytes."""
    keys = gpt2_keys(trained_bpe(BYTES), "gpt-2")
    keys["tokens"] = [*keys["tokens"], "<think>"]
    keys["token_type"] = [*keys["token_type"], 4]
    found = embedded(tmp_path, keys)
    new = len(keys["tokens"]) - 1
    assert found.encode("a<think>b") == [*found.encode("a"), new, *found.encode("b")]
    assert found.pieces[new] == b"<think>"
    assert tokenizer_metadata(found, new + 1)["token_type"][new] == 4


def test_bos_and_further_ends(tmp_path):
    keys = gpt2_keys(trained_bpe(BYTES), "gpt-2", add_bos_token=True, eot_token_id=0)
    found = embedded(tmp_path, keys)
    assert (found.add_bos, set(found.eos_ids)) == (True, {0, 1})
    keys = gpt2_keys(trained_bpe(BYTES), "llama-bpe", add_bos_token=False)
    assert not embedded(tmp_path, keys).add_bos


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix, tmp_path):
    expected = trained_sentencepiece(add_dummy_prefix=prefix)
    found = embedded(tmp_path, sentencepiece_keys(expected, add_space_prefix=prefix))
    assert isinstance(found, SentencePieceTokenizer)
    assert (found.bos_id, found.eos_id, found.add_bos, found.prefix) == (1, 2, True, b" " * prefix)
    for text in TEXTS:
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == text
    again = tokenizer_metadata(found, found.vocab_size)
    keys = sentencepiece_keys(expected, add_space_prefix=prefix)
    assert {key: again[key] for key in keys} == keys


def test_sentencepiece_defaults(tmp_path):
    """llama.cpp adds a space and BOS unless the file says otherwise."""
    found = embedded(tmp_path, sentencepiece_keys(trained_sentencepiece(add_dummy_prefix=True)))
    assert (found.prefix, found.add_bos) == (b" ", True)


def test_byte_tokenizer(tmp_path):
    ours = ByteTokenizer()
    found = embedded(tmp_path, tokenizer_metadata(ours, 260))
    for text in TEXTS:
        assert found.encode(text) == ours.encode(text)
    assert (found.bos_id, found.eos_id, found.vocab_size) == (256, 257, 258)


def test_padding_of_the_vocabulary():
    found = tokenizer_metadata(trained_sentencepiece(), 460)
    assert len(found["tokens"]) == len(set(found["tokens"])) == len(found["scores"]) == 460
    assert found["token_type"][450:] == [5] * 10


def test_tokenizer_absent(tmp_path):
    assert embedded(tmp_path, {}) is None
    assert embedded(tmp_path, {"model": "no_vocab"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model"),
        ({"pre": "jina-v2-xyz"}, "tokenizer.ggml.pre = 'jina-v2-xyz'"),
        ({"pre": None}, "tokenizer.ggml.pre = None"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.tokens"),
        ({"bos_token_id": 5000}, "tokenizer.ggml.bos_token_id"),
        ({"merges": ["Ġ qqqq"]}, "tokenizer.ggml.merges"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokenizer.ggml.tokens"),
        ({"tokens": [1, 2], "token_type": [1, 1]}, "tokenizer.ggml.tokens"),
        ({"add_space_prefix": True}, "tokenizer.ggml.add_space_prefix"),
    ],
)
def test_invalid_tokenizers(change, message, tmp_path):
    keys = gpt2_keys(trained_bpe(BYTES, 300), "gpt-2") | change
    with pytest.raises(InteropError, match=message):
        embedded(tmp_path, {key: value for key, value in keys.items() if value is not None})


def test_vocabulary_larger_than_the_embedding(tmp_path):
    with pytest.raises(InteropError, match="embedding has 299 rows"):
        embedded(tmp_path, gpt2_keys(trained_bpe(BYTES, 300), "gpt-2"), rows=299)


def test_lossy_vocabulary(tmp_path):
    keys = gpt2_keys(trained_bpe(BYTES, 300), "gpt-2", merges=["t h"])
    keys["tokens"] = [token.replace("Ġ", "ĠĠĠĠ") for token in keys["tokens"]]
    del keys["merges"]
    with pytest.raises(DataError):
        embedded(tmp_path, keys)


def test_tokenizers_that_cannot_be_exported():
    unigram = trained_sentencepiece(model_type="unigram", vocab_size=380)
    normalizing = trained_sentencepiece(normalization_rule_name="nmt_nfkc")
    no_bytes = trained_sentencepiece(byte_fallback=False, character_coverage=1.0, vocab_size=220)
    other = trained_bpe(split(r"\S+|\s+"))
    nfc = trained_bpe(BYTES)
    nfc.normalizer = tokenizers.normalizers.NFC()
    for tokenizer in (
        unigram,
        normalizing,
        no_bytes,
        HuggingFaceTokenizer(other.to_str().encode()),
        HuggingFaceTokenizer(nfc.to_str().encode()),
    ):
        with pytest.raises(InteropError, match="export to the Hugging Face format"):
            tokenizer_metadata(tokenizer, tokenizer.vocab_size)
