"""Runs with different tokenizers: spans of bytes, tiled by the tokens of each."""

import numpy as np
import pytest

from errors import EvaluationError
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.methods import resolve_methods
from evaluation.scoring.byte_spans import choose_byte_spans
from evaluation.scoring.evaluation_plan import choose_targets
from evaluation.scoring.text_loss import LossMeasurement
from evaluation.stores import EvaluationStores
from tests.evaluation.conftest import MemoryStore

SCORER = "evaluation.scoring.text_loss.ModelScorer"
LENGTHS = [16, 32]


class PieceTokenizer:
    """Text in pieces of up to `size` characters of a word, with the white space before it."""

    bos_id = 0
    prefix = b""
    vocab_size = 10_000

    def __init__(self, size):
        self.size = size
        self.hash = f"pieces of {size}"
        self.pieces = [b""]
        self.ids = {}

    @property
    def token_bytes(self):
        return np.array([len(piece) for piece in self.pieces])

    def encode(self, text):
        pieces = []
        for character in text:
            is_new = character == " " or ord(character) > 0x7F or not pieces
            if is_new or len(pieces[-1]) >= self.size + pieces[-1].startswith(" "):
                pieces.append("")
            pieces[-1] += character
        for piece in pieces:
            if piece not in self.ids:
                self.ids[piece] = len(self.pieces)
                self.pieces.append(piece.encode())
        return [0, *(self.ids[piece] for piece in pieces)]


def stored(tokenizer, texts):
    store = MemoryStore([1] * len(texts), eos=False)
    store.documents = [np.array(tokenizer.encode(text)) for text in texts]
    store.lengths = np.array([len(ids) for ids in store.documents])
    store.bytes = np.array([len(text.encode()) for text in texts])
    store.hash = tokenizer.hash
    return store


def texts_of(alphabet, count=7):
    rng = np.random.default_rng(0)
    word = lambda: "".join(rng.choice(list(alphabet), rng.integers(1, 9)))  # noqa: E731
    return [" ".join(word() for _ in range(120 + 5 * i)) for i in range(count)]


def chosen(texts, sizes=(3, 5), others=None, trained=(16, 16, 16), **settings):
    asked = {"lengths": LENGTHS, "targets": 9, "spans_per_document": 2, "device": "cpu"}
    settings = EvaluationSettings(**asked | {"contamination": {"check": False}} | settings)
    tokenizers = [PieceTokenizer(size) for size in sizes]
    stores = [
        EvaluationStores(stored(tokenizer, texts if i == 0 else others or texts))
        for i, tokenizer in enumerate(tokenizers)
    ]
    targets = [
        choose_targets(settings, read, tokenizer, length)
        for read, tokenizer, length in zip(stores, tokenizers, trained, strict=False)
    ]
    return settings, choose_byte_spans(targets)


@pytest.mark.parametrize("alphabet", ["abcdefgh", "abc水浒传西"])
@pytest.mark.parametrize("bos", ["as-trained", "none", "every-window"])
def test_tokens_tile_one_byte_range_at_word_boundaries(alphabet, bos):
    texts = texts_of(alphabet)
    _, runs = chosen(texts, sizes=(3, 5, 2), bos=bos)
    for length in LENGTHS:
        spans = []
        for run in runs:
            windows = run.plan.windows[length]
            assert (windows[:, 1] > LENGTHS[-1]).all() and (windows[:, 2] == length).all()
            pieces = run.tokenizer.pieces
            of_run = []
            for document, end, _, keep in windows.tolist():
                before, tokens = (
                    b"".join(pieces[i] for i in run.text.slice(document, a, b) if i)
                    for a, b in ((0, end - keep), (end - keep, end))
                )
                of_run.append((document, before, tokens))
            spans.append(of_run)
            assert run.plan.span_bytes.tolist() == [len(tokens) for *_, tokens in of_run]
        assert spans[0] == spans[1] == spans[2] and len(spans[0]) > 7
        for document, before, tokens in spans[0]:
            after = texts[document].encode()[len(before) + len(tokens) :]
            assert after[:1] in (b" ", b"") or after[0] >= 0xC0
            assert tokens[:1] == b" " or tokens[0] >= 0xC0
    assert len({run.plan.hash for run in runs}) == 1
    assert chosen(texts_of("xyz")[:7])[1][0].plan.hash != runs[0].plan.hash


def test_losses_per_byte_do_not_depend_on_the_tokenizer(subject, monkeypatch, tmp_path):
    """A model that charges 0.3 nats for each byte; and one that charges by word."""
    texts = texts_of("abcdefgh")
    settings, runs = chosen(texts, methods=["trained", "truncate"])
    for run in runs:
        cost = 0.3 * run.tokenizer.token_bytes
        scorer = lambda windows, keep, cost=cost: cost[windows[:, -keep:]]  # noqa: E731
        monkeypatch.setattr(SCORER, lambda *_, scorer=scorer, **__: scorer)
        methods = resolve_methods(["trained", "truncate"], 16)
        result = LossMeasurement(
            settings, subject, run, methods, tmp_path / run.tokenizer.hash
        ).run()
        assert set(result.nll) == {(m, n) for m in ("trained", "truncate") for n in LENGTHS}
        for nll in result.nll.values():
            assert len(nll) == result.n_bytes == run.plan.span_bytes.sum()
            assert np.abs(nll - 0.3).max() < 1e-12
        assert (
            result.unit.tolist()
            == np.repeat(run.plan.truncated_windows[:, 0], run.plan.span_bytes).tolist()
        )


def test_what_cannot_be_compared_is_refused():
    texts = texts_of("abcdefgh")
    with pytest.raises(EvaluationError, match="doc2"):
        chosen(texts, others=[*texts[:2], texts[2].replace("a", "b"), *texts[3:]])
    with pytest.raises(EvaluationError, match="numbers of documents"):
        chosen(texts, others=texts[:5])
    with pytest.raises(EvaluationError, match="lower targets"):  # 14 tokens are 20 of the other
        chosen(texts, sizes=(9, 1), targets=14)
    asked = {"lengths": [16, 32, 300], "targets": 4, "shorten": True}  # 300 tokens for the second
    with pytest.raises(EvaluationError, match="300"):
        chosen(texts, sizes=(9, 1), trained=(16, 300), **asked)
