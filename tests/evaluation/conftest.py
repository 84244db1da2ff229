"""Stores and models in memory."""

import numpy as np
import pytest
import torch

from evaluation.evaluated_model import EvaluatedModel
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.methods import resolve_methods
from evaluation.scoring.evaluation_plan import choose_targets
from evaluation.scoring.text_loss import LossMeasurement
from evaluation.stores import EvaluationStores
from model import ModelSettings, Transformer
from run_directory.run_settings import RunSettings

VOCAB = 23
BOS = 1
EOS = 2


class MemoryTokenizer:
    vocab_size = VOCAB
    bos_id = BOS
    eos_id = EOS
    eos_ids = (EOS,)
    hash = "tokenizer"
    prefix = b""
    pieces = [b"", b"", b""] + [b"word"[: 1 + i % 3] for i in range(VOCAB - 3)]
    token_bytes = np.array([len(piece) for piece in pieces])


class MemoryStore:
    """A store with the reader's interface: documents of random ids from 3 on, BOS and EOS where
    asked for."""

    def __init__(self, lengths, *, bos=True, eos=True, seed=0, clusters=None):
        rng = np.random.default_rng(seed)
        self.documents = [
            np.array(
                [BOS] * bos + rng.integers(3, VOCAB, size=n).tolist() + [EOS] * eos, dtype=np.uint16
            )
            for n in lengths
        ]
        self.has_bos = bos
        self.has_eos = eos
        self.clusters = clusters or [None] * len(lengths)
        self.lengths = np.array([len(d) for d in self.documents], dtype=np.int64)
        self.names = [f"doc{i}" for i in range(len(lengths))]
        self.n_documents = len(lengths)
        self.hash = f"store-{seed}"
        sizes = MemoryTokenizer.token_bytes
        self.bytes = np.array([sizes[ids].sum() for ids in self.documents])

    def document(self, i):
        return self.documents[i]


@pytest.fixture
def make_store():
    return MemoryStore


@pytest.fixture
def tokenizer():
    return MemoryTokenizer()


@pytest.fixture
def tiny():
    """Factory of tiny Transformers; every size differs so that swapped axes fail."""

    def make(position=None, *, train_length=16, dtype=torch.float32, seed=0, layers=3):
        extra = {} if position is None else {"position": position}
        settings = ModelSettings(
            dim=24,
            layers=layers,
            heads=6,
            kv_heads=2,
            ffn_dim=40,
            **extra,
        )
        return Transformer(settings, VOCAB, train_length).initialize(seed).to(dtype).eval()

    return make


@pytest.fixture
def sharp(tiny):
    """A tiny Transformer whose attention and head are far from uniform, so that context matters."""

    def make(position=None, **kwargs):
        model = tiny(position, **kwargs)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.ndim == 2:
                    weight.mul_(8 if name in ("head.weight", "embed.weight") else 2)
        return model

    return make


class MemoryModel(EvaluatedModel):
    """A model that is not on disk; `used`: the (overrides, dtype) it was asked for."""

    def __init__(self, model, bos_first=""):
        settings = RunSettings(
            model=model.settings,
            train_length=model.train_length,
            training={"validation": {"targets": 8}},
        )
        super().__init__("runs/tiny", model, settings, "abc", 7, bos_first)
        self.used = set()

    def under(self, overrides, dtype="float32"):
        self.used.add((tuple(overrides), dtype))
        return super().under(overrides, dtype)


@pytest.fixture
def subject(sharp):
    return MemoryModel(sharp({"name": "rope"}))


def loss_session(settings, subject, store, cells, *, train=None, tokenizer=None, **more):
    """A session on stores in memory."""
    tokenizer = tokenizer or MemoryTokenizer()
    stores = EvaluationStores(store, train=train)
    targets = choose_targets(settings, stores, tokenizer, subject.trained_length)
    methods = resolve_methods(settings.methods, subject.trained_length)
    return LossMeasurement(settings, subject, targets, methods, cells, **more)


@pytest.fixture
def do(make_store, tokenizer, subject, tmp_path):
    store = make_store([90, 120, 75, 99, 130, 81, 77], seed=1)
    train = make_store([300, 40], seed=2)

    def run(
        console=None,
        methods=("trained", "truncate", "yarn", "window"),
        store=store,
        train=train,
        **kw,
    ):
        asked = {
            "lengths": [16, 32, 64],
            "targets": 5,
            "spans_per_document": 2,
            "device": "cpu",
        }
        settings = EvaluationSettings(methods=list(methods), **asked | kw)
        cells = tmp_path / "cells"
        return loss_session(settings, subject, store, cells, train=train, console=console).run()

    return run
