"""Training text in evaluation documents is found and dropped: slow word search, planted copies."""

import random
import re
import unicodedata
from types import SimpleNamespace

import numpy as np
import pytest

from data import ByteTokenizer
from evaluation.evaluation_settings import ContaminationSettings
from evaluation.scoring.contamination import BLOCK, _merged, find_overlap, screen, shared_text
from evaluation.scoring.targets import EvaluationText
from evaluation.stores import EvaluationStores

TOKENIZER = ByteTokenizer()
WORDS = [
    "time",
    "horse",
    "née",
    "Straße",
    "ﬁeld",
    "it",
    "42",
    "oak",
    "Ärger",
    "zebra",
    "quick",
    "x",
    "naïve",
]


class Corpus:
    """A store of texts, as bytes between BOS and EOS."""

    has_bos = has_eos = True

    def __init__(self, *texts):
        self.texts = [text.encode() if isinstance(text, str) else text for text in texts]
        self.n_documents = len(texts)
        self.lengths = np.array([len(text) + 2 for text in self.texts])
        self.names = [f"doc{i}" for i in range(len(texts))]
        self.clusters = [None] * len(texts)
        self.hash = repr(hash(tuple(self.texts)))

    def document(self, i):
        return np.array([256, *self.texts[i], 257], dtype=np.uint16)


def prose(n, seed):
    """`n` words that no other seed has in the same order."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 7))) for _ in range(n)]
    return " ".join(word + rng.choice(["", "", ",", ".", "\n", " —"]) for word in words)


def check(store, *trained, wanted=True, cache=None, unknown="", console=None):
    """Every token of `store` but the first of each document as a target, screened."""
    text = EvaluationText(store)
    document = np.arange(store.n_documents)
    columns = (document, text.lengths, text.lengths - 1, text.lengths - 1)
    windows = np.stack(columns, axis=1)
    stores = EvaluationStores(store, earlier=trained, overlaps=cache, unknown=unknown)
    shared = shared_text(ContaminationSettings(check=wanted), stores, TOKENIZER, console)
    return screen(shared, text, windows)


def lost_share(store, screening):
    """(documents,) the share of the targets of `check` that are dropped."""
    document = np.repeat(np.arange(store.n_documents), store.lengths - 2)
    return np.bincount(document, weights=~screening.kept) / np.bincount(document)


def slow_overlap(text: str, other: str) -> np.ndarray:
    """(characters,) inside 13 words that stand in `other`: by unicodedata, re and tuples."""

    def words(of):
        found = []
        for match in re.finditer(r"[^\W_]+", of):
            folded = unicodedata.normalize(
                "NFKC", unicodedata.normalize("NFKC", match.group()).casefold()
            )
            found.append((folded, match.start(), match.end()))
        return found

    def passages(found):
        text = [word for word, _, _ in found]
        return [tuple(text[i : i + 13]) for i in range(len(text) - 12)]

    known = set(passages(words(other)))
    own = words(text)
    inside = np.zeros(len(text), dtype=bool)
    for i, passage in enumerate(passages(own)):
        if passage in known:
            inside[own[i][1] : own[i + 12][2]] = True
    return inside


@pytest.mark.parametrize("seed", range(6))
def test_excluded_spans_match_naive_search(seed):
    # Few words, so that many runs of 13 almost match, and long stretches that do.
    rng = random.Random(seed)
    joints = [" ", ", ", "\n", " — ", "! ", " _"]

    def text(n):
        return "".join(word + rng.choice(joints) for word in rng.choices(WORDS, k=n))

    shared = [text(n) for n in (5, 12, 13, 14, 40)]
    one, other = [
        "".join(part for piece in rng.sample(shared, 5) for part in (text(9), piece))
        for _ in range(2)
    ]
    if seed % 2:
        other = unicodedata.normalize("NFD", other).upper()  # other bytes, the same words
    want = slow_overlap(one, unicodedata.normalize("NFC", other))
    got = check(Corpus(one), Corpus(other))
    sizes = [len(character.encode()) for character in one]
    # Targets: every byte but the first token of the text, which is BOS.
    assert (~got.kept == np.repeat(want, sizes)).all()
    assert 0 < want.mean() < 1
    assert got.record["in_training"] == (~got.kept).sum()


def test_chinese_is_split_into_characters():
    rng = random.Random(1)
    text = "".join(chr(rng.randrange(0x4E00, 0x9000)) for _ in range(200))
    for n, hit in (
        (29, 0),
        (30, 90),
        (60, 180),
    ):
        found = check(Corpus(text[50 : 50 + n] + prose(40, 2)), Corpus("一" + text, prose(80, 3)))
        # three bytes a character, the last one's included
        assert found.record["in_training"] == hit
    # Beside words each counts by its share: 15 characters and 7 words are one passage, 6 words are
    # none.
    mixed = text[:15] + " one two three four five six seven"
    assert check(Corpus(f"{mixed} x"), Corpus(mixed)).record["in_training"] == len(mixed.encode())
    assert check(Corpus(f"{mixed[:-6]} x"), Corpus(mixed[:-6])).kept.all()


def test_matches_do_not_cross_documents():
    a = prose(40, 1).rstrip()
    b = prose(40, 2)
    tail = " ".join(a.split()[-8:])
    head = " ".join(b.split()[:8])
    assert check(Corpus(f"{tail} {head} x"), Corpus(a, b)).record["in_training"] == 0
    assert check(Corpus(f"{tail} {head} x"), Corpus(f"{a} {b}")).record["in_training"] > 0
    assert check(Corpus(tail, head), Corpus(f"{a} {b}")).record["in_training"] == 0


def test_passages_at_the_edges_of_blocks_are_found():
    long = prose(60_000, 4)
    raw = long.encode()
    assert len(raw) > 2.5 * BLOCK
    for at in (0, BLOCK - 1100, BLOCK - 1000, BLOCK - 100, 2 * BLOCK - 1050, len(raw) - 300):
        copy = raw[at : at + 300].decode(errors="ignore")
        assert check(Corpus(f"{prose(20, 7)} {copy}"), Corpus(long)).record["in_training"] > 250
        back = np.flatnonzero(~check(Corpus(long), Corpus(copy)).kept)
        assert at <= back.min() <= back.max() < at + 300
        assert len(back) > 250, at


def test_shared_passage_is_counted_once():
    shared = prose(60, 9)
    store = Corpus(prose(80, 1) + " " + shared, prose(90, 2), shared + " " + prose(70, 3), shared)
    found = check(store, Corpus(prose(100, 4)))
    assert found.record["in_training"] == 0
    assert found.kept[: len(store.texts[0])].all()
    lost = lost_share(store, found)
    assert (lost[:2] == 0).all()
    assert lost[3] > 0.98
    assert 0.4 < lost[2] < 0.5


def test_passages_that_overlap_or_touch_are_one():
    rows = [[0, 5, 9], [1, 2, 8], [0, 0, 4], [0, 11, 12], [1, 0, 3], [1, 1, 2]]
    assert _merged(np.array(rows)).tolist() == [[0, 0, 9], [0, 11, 12], [1, 0, 8]]


def test_lineage_training_data_is_screened():
    mothers = prose(120, 1)
    own = prose(120, 2)
    fresh = prose(120, 3)
    store = Corpus(fresh, mothers, own)
    train = Corpus(prose(50, 4), own)
    earlier = Corpus(prose(50, 5), mothers)

    def lost(found):
        return np.flatnonzero(lost_share(store, found)).tolist()

    assert lost(check(store, train)) == [2]
    assert lost(check(store, earlier)) == [1]
    both = check(store, train, earlier)
    assert lost(both) == [1, 2]
    assert both.record["checked"]
    gone = check(store, train, unknown="a parent's text is missing")
    assert lost(gone) == [2]
    assert gone.unchecked == "a parent's text is missing"
    parents = check(store, train, Corpus(fresh, mothers, own))
    assert parents.kept.all()
    assert not parents.record["checked"]
    assert parents.unchecked


def test_results_are_cached_and_corrupted_cache_is_ignored(tmp_path):
    shared = prose(80, 1)
    store = Corpus(prose(90, 2) + shared, shared, prose(50, 3))
    train = Corpus(prose(70, 4) + " " + shared)
    first = check(store, train, cache=tmp_path / "overlaps")
    (path,) = (tmp_path / "overlaps").iterdir()
    unread = SimpleNamespace(hash=train.hash)  # nothing but its hash is looked at
    assert check(store, unread, cache=tmp_path / "overlaps").record == first.record
    path.write_bytes(path.read_bytes()[:-40])
    assert check(store, train, cache=tmp_path / "overlaps").record == first.record
    assert check(store, Corpus("other"), cache=tmp_path / "overlaps").record != first.record
    # A folder that cannot be written to costs time alone.
    (tmp_path / "file").write_text("")
    assert check(store, train, cache=tmp_path / "file" / "overlaps").record == first.record


def test_first_word_without_bos_is_included():
    class Bare(Corpus):
        has_bos = has_eos = False

        def __init__(self, *texts):
            super().__init__(*texts)
            self.lengths = self.lengths - 2

        def document(self, i):
            return super().document(i)[1:-1]

    passage = " ".join(re.findall("[a-z]+", prose(13, 1)))
    found = find_overlap(Bare(passage), Corpus(f"before {passage} behind"), TOKENIZER)
    assert found.trained.tolist() == [[0, 0, len(passage) - 1]]
