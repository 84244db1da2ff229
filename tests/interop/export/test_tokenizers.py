"""tokenizer.json of every tokenizer: the same ids and text as ours."""

import json
from collections.abc import Callable

import pytest
import tokenizers

from data.preparation.tokenizer_training import train_tokenizer
from data.tokenizers import ByteTokenizer, SentencePieceTokenizer, Tokenizer
from data.tokenizers.tokenizer_settings import HuggingFaceSettings, SentencePieceSettings
from errors import InteropError
from interop.export.tokenizer import PROBES, fast_tokenizer, write_tokenizer
from tests.files import ROOT
from tests.sentencepiece_models import LOSSLESS_BPE, sentencepiece_model

DOCS = ROOT / "docs"
TEXTS = [
    (DOCS / name).read_text(encoding="utf-8")[:20_000] for name in ("positions.md", "training.md")
]
UNSEEN = [*PROBES, "天下大势，分久必合 🙂🙃", "\t\tx\n\n\n y  ", "ﬁne ½ ²"]


def external(**options) -> SentencePieceTokenizer:
    lines = TEXTS[0].splitlines()
    return SentencePieceTokenizer(sentencepiece_model(lines, 600, **options))


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": ByteTokenizer,
    "bpe": lambda: train_tokenizer(SentencePieceSettings(vocab_size=600), TEXTS),
    "unigram": lambda: train_tokenizer(
        SentencePieceSettings(vocab_size=600, kind="unigram"), TEXTS
    ),
    "external BPE": lambda: external(**LOSSLESS_BPE),
    "external unigram": lambda: external(model_type="unigram"),  # NFKC, extra white space removed
    "byte-level BPE": lambda: train_tokenizer(HuggingFaceSettings(vocab_size=600), TEXTS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text(kind, tmp_path):
    ours = KINDS[kind]()
    write_tokenizer(ours, tmp_path, add_bos=True, max_length=99)
    exported = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert exported.get_vocab_size() == ours.vocab_size
    for text in (*TEXTS, *UNSEEN):
        ids = exported.encode(text, add_special_tokens=False).ids
        assert ids == ours.encode(text)
        assert exported.decode(ids) == ours.decode(ids)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 99
    if ours.bos_id is not None:
        assert exported.token_to_id(config["bos_token"]) == ours.bos_id
        assert exported.encode("a b").ids == [ours.bos_id, *ours.encode("a b")]
    assert exported.token_to_id(config["eos_token"]) == ours.eos_id


def test_a_tokenizer_that_differs_is_refused():
    class Upper(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return list(text.upper().encode())

    with pytest.raises(InteropError, match="differ on"):
        fast_tokenizer(Upper(), add_bos=False)
