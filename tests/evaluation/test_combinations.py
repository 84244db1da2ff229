"""Every pair of options: each stored loss against its definition, one window at a time."""

import random
from itertools import combinations, product

import numpy as np
import pytest
import torch

from evaluation.evaluation_settings import EvaluationSettings
from evaluation.scoring.contamination import Overlap
from evaluation.scoring.evaluation_plan import truncation_step
from model import TokenPositions
from tests.evaluation.conftest import BOS, MemoryStore, MemoryTokenizer, loss_session

L0 = 16
LENGTHS = [16, 24, 48]
EXCLUDED = np.array([[0, 50, 57], [2, 20, 23], [2, 60, 62]])  # document, first, last as stored
OPTIONS = {
    "protocol": ["fixed-targets", "sliding", "non-overlapping", "by-position"],
    "bos": ["as-trained", "none", "every-window"],
    "stored_bos": [True, False],
    "stored_eos": [True, False],
    "dtype": ["float64", "float32", "bfloat16"],
    "chunk": [4096, 7],
    "batch": [None, 3],
    "stride": [None, 5],
    "methods": [["trained"], ["trained", "truncate", "yarn", "window"]],
    "excluded": [False, True],
    "interrupted": [False, True],
    "clusters": [None, ["a", "b", "a", None]],
}


def pairwise(options, seed=0):
    """Rows that contain every pair of values, chosen greedily."""
    choices = {key: [(key, i) for i in range(len(values))] for key, values in options.items()}
    left = set()
    for a, b in combinations(choices.values(), 2):
        left |= set(product(a, b))
    rng = random.Random(seed)
    rows = []
    while left:
        draws = [[rng.choice(own) for own in choices.values()] for _ in range(200)]
        covered = [left & set(combinations(draw, 2)) for draw in draws]
        best = max(range(200), key=lambda n: len(covered[n]))
        if covered[best]:
            left -= covered[best]
            rows.append({key: options[key][i] for key, i in draws[best]})
    return rows


class Definition:
    """The losses of an evaluation from its definition, with the model in float64."""

    def __init__(self, row, store, subject, plan):
        self.row = row
        self.plan = plan
        self.subject = subject
        self.documents = [ids[: len(ids) - row["stored_eos"]].tolist() for ids in store.documents]
        if row["bos"] == "none" and row["stored_bos"]:
            self.documents = [ids[1:] for ids in self.documents]
        if row["bos"] == "every-window" and not row["stored_bos"]:
            self.documents = [[BOS, *ids] for ids in self.documents]

    def contexts(self, length):
        """(document, index, start): each target, and the first token that it may see."""
        protocol = self.row["protocol"]
        spans = self.plan.record.get("spans", [])
        if protocol == "fixed-targets":
            return [(d, i, end - 1 - length) for d, end in spans for i in range(end - 5, end)]
        if protocol == "by-position":
            windows = self.plan.windows[LENGTHS[-1]]
            ends = windows[:, :2].tolist()
            return [(d, i, e - 1 - length) for d, e in ends for i in range(e - length, e)]
        out = []
        for d, ids in enumerate(self.documents):
            if len(ids) <= LENGTHS[-1]:
                continue
            if protocol == "non-overlapping":
                last = (len(ids) - 1) // LENGTHS[-1] * LENGTHS[-1]
                out += [(d, i, (i - 1) // length * length) for i in range(1, last + 1)]
            else:
                stride = self.row["stride"] or length // 8
                for i in range(1, len(ids)):
                    out.append((d, i, self.slid(i, length, stride, len(ids))))
        return out

    @staticmethod
    def slid(i, length, stride, size):
        """Windows begin at 0 and advance by `stride`; the last one ends with the document."""
        steps = max(0, -(-(i - length) // stride))
        return min(steps * stride, max(0, size - 1 - length)) if steps else 0

    def cut(self):
        """by-position, with the context truncated to L0."""
        span = truncation_step(EvaluationSettings(targets=5), L0)
        out = []
        for d, i, start in self.contexts(LENGTHS[-1]):
            steps = max(0, -(-(i - start - L0) // span))
            end = min(start + L0 + steps * span, start + LENGTHS[-1])
            out.append((d, i, max(start, end - L0)))
        return out

    def losses(self, contexts, overrides, length):
        model = self.subject.under(overrides, "float64")
        known = {}
        out = []
        for d, i, start in contexts:
            if (d, start) not in known:
                ids = list(self.documents[d])
                ids = ids[start : start + length + 1]
                if self.row["bos"] == "every-window":
                    ids[0] = BOS
                tokens = torch.tensor(ids)
                places = TokenPositions.plain(len(ids) - 1, length=length)
                with torch.no_grad():
                    logits = model(tokens[None, :-1], places)[0].log_softmax(-1)
                known[d, start] = -logits[torch.arange(len(ids) - 1), tokens[1:]]
            out.append(float(known[d, start][i - 1 - start]))
        return np.array(out)

    def kept(self, contexts):
        """Whether each target is outside excluded text."""
        shift = {"none": self.row["stored_bos"], "every-window": self.row["stored_bos"] - 1}
        shift = int(shift.get(self.row["bos"], 0))
        document, index, _ = np.transpose(contexts)
        kept = np.ones(len(contexts), dtype=bool)
        for excluded, first, last in EXCLUDED if self.row["excluded"] else ():
            is_inside = (first <= index + shift) & (index + shift <= last)
            kept &= ~(is_inside & (document == excluded))
        return kept


@pytest.mark.parametrize("row", pairwise(OPTIONS), ids=str)
def test_losses_are_those_of_the_definition(row, subject, tmp_path, monkeypatch):
    store = MemoryStore(
        [59, 30, 70, 66], bos=row["stored_bos"], eos=row["stored_eos"], clusters=row["clusters"]
    )
    rows = EXCLUDED if row["excluded"] else EXCLUDED[:0]
    overlap = Overlap(rows, EXCLUDED[:0])
    monkeypatch.setattr("evaluation.scoring.evaluation_plan.shared_text", lambda *_: overlap)
    settings = EvaluationSettings(
        lengths=LENGTHS,
        targets=5,
        spans_per_document=2,
        device="cpu",
        **{
            key: row[key]
            for key in ("protocol", "bos", "dtype", "chunk", "batch", "stride", "methods")
        },
    )

    def measured():
        return loss_session(settings, subject, store, tmp_path, tokenizer=MemoryTokenizer())

    session = measured()
    result = session.run()
    if row["interrupted"]:  # some cells are missing, others are half finished
        paths = sorted(tmp_path.glob("*.npz"))
        for path in paths[::3]:
            path.unlink()
        for path in paths[1::3]:
            with np.load(path) as held:
                nll = held["nll"].copy()
                nll[len(nll) // 2 :] = np.nan
                np.savez(tmp_path / f"partial-0-{path.name}", nll=nll, key=held["key"])
            path.unlink()
        session = measured()
        result = session.run()
        assert sorted(tmp_path.iterdir()) == paths
    plan = session.plan
    definition = Definition(row, store, subject, plan)
    tolerance = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 1.0}[row["dtype"]]
    baseline = None
    for method in result.methods:
        for length in plan.lengths:
            contexts = definition.contexts(length)
            kept = definition.kept(contexts)
            if method.truncates:
                if row["protocol"] != "by-position":
                    assert result.nll["truncate", length] is result.nll["trained", L0]
                continue
            want = definition.losses(contexts, method.overrides, length)
            nll = result.nll[method.label, length]
            assert want[kept].std() > 0.5
            assert np.abs(nll - want[kept]).max() < tolerance
            assert result.document.tolist() == [d for d, _, _ in np.array(contexts)[kept]]
            if row["dtype"] == "bfloat16":
                last = len(plan.windows[length]) - 1
                few = sorted({round(i) for i in np.linspace(0, last, 32)})
                of_window = np.repeat(
                    np.arange(len(plan.windows[length])), plan.windows[length][:, 3]
                )
                here = np.isin(of_window[kept], few)
                if kept.all():
                    error = (nll - want[kept])[here].mean()
                    assert result.rounding_error[method.label, length] == pytest.approx(
                        error, abs=1e-4
                    )
            if row["protocol"] == "by-position" and baseline is None:
                baseline = definition.losses(definition.cut(), (), L0)[kept]
                assert np.abs(result.truncated_nll - baseline).max() < tolerance
    units = [0, 1, 0, 2] if row["clusters"] else range(4)
    assert result.unit.tolist() == [units[d] for d in result.document]
