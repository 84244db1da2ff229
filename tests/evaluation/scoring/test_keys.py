"""Keys of stored cells: a setting that changes a number changes the key."""

from itertools import combinations

import numpy as np
import pytest

from evaluation.evaluation_settings import EvaluationSettings
from evaluation.scoring.cells import KEY_FORMAT, cell_file, position_key
from model import ModelSettings
from tests.evaluation.conftest import MemoryStore, loss_session

# Settings that change a number, another value of each, and the protocol it belongs to (None: all).
NUMBERS = {
    "seed": (1, None),
    "dtype": ("float64", None),
    "chunk": (9, None),
    "bos": ("every-window", None),
    "lengths": ([16, 32, 40], None),
    "documents": (3, None),
    "targets": (4, "fixed-targets"),
    "spans_per_document": (3, "fixed-targets"),
    "stride": (7, "sliding"),
    "windows_per_document": (5, "by-position"),
    "ngram": (3, "fixed-targets"),
}
BY_HASH = [
    "targets_by",
    "store",
    "split",
    "weights",
    "device",
    "methods",
    "protocol",
    "contamination",
]
# What is derived from the numbers, which cells there are, and limits of the machine.
OTHERS = [
    "folder",
    "confidence",
    "memory",
    "least_documents",
    "shorten",
    "unreachable",
    "matrix",
    "tolerance",
    "batch",
    "context",
]
PROTOCOLS = ("fixed-targets", "sliding", "non-overlapping", "by-position")
REPEATED = {"targets_by": "repetition", "ngram": 4}


@pytest.fixture
def session(subject, tmp_path):
    store = MemoryStore([57, 61, 75, 59, 53, 65], seed=1)
    for ids in store.documents:
        ids[40:48] = ids[28:36]

    def make(methods=("trained",), **settings):
        asked = {"lengths": [16, 32], "targets": 5, "spans_per_document": 2, "device": "cpu"}
        settings = EvaluationSettings(methods=list(methods), **asked | settings)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return loss_session(settings, subject, store, folder)

    return make


def test_every_setting_is_classified():
    assert {*NUMBERS, *BY_HASH, *OTHERS} == EvaluationSettings.model_fields.keys()


def options_of(protocol):
    """Another value of each setting that changes a number under a protocol, and the settings of all
    its sessions."""
    options = {
        key: value
        for key, (value, only) in NUMBERS.items()
        if only in (None, protocol) and (protocol, key) != ("non-overlapping", "lengths")
    }
    return options, {"protocol": protocol} | (REPEATED if protocol == "fixed-targets" else {})


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_settings_that_change_numbers_change_the_key(session, protocol):
    """Each setting, and each pair: some cells have names that neither has alone."""
    options, common = options_of(protocol)

    def names(*keys, **settings):
        made = session(**common | {key: options[key] for key in keys} | settings)
        return {cell_file(cell.key) for cell in made.cells()}

    before = names()
    alone = {key: names(key) for key in options}
    for key, found in alone.items():
        assert found - before, key
    for a, b in combinations(options, 2):
        assert names(a, b) - before - alone[a] - alone[b], (a, b)
    for key, value in {
        "batch": 2,
        "confidence": 0.9,
        "tolerance": 1.0,
        "memory": 1.0,
    }.items():
        assert names(**{key: value}) == before, key


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_equal_keys_have_equal_numbers(session, protocol):
    """Two cells of one name hold the same losses, up to rounding, whichever setting differs."""
    options, common = options_of(protocol)
    known = {}
    for changed in [{}, {"batch": 2}, *({key: value} for key, value in options.items())]:
        made = session(**common | changed)
        made.run()
        for cell in made.cells():
            stored = made.store.load(cell.key)
            known.setdefault(cell.file, stored)
            assert np.abs(known[cell.file] - stored).max() < 1e-4, changed


@pytest.mark.parametrize("name", ["rope", "alibi", "learned", "t5", "fox"])
def test_settings_added_to_a_scheme_keep_the_keys_of_stored_cells(name):
    """A setting that is missing here was added later: see `cells.LATER`."""
    common = {"name", "window", "sinks", "sink_logit", "temperature"}
    own = {
        "rope": "fraction layout remap resonance scaling theta",
        "alibi": "learned shared slopes stretch",
        "learned": "extend max_length",
        "t5": "buckets max_distance shared unscaled",
        "fox": "gate rotary theta",
    }
    record = ModelSettings(position={"name": name}).positions_record()
    assert position_key(record).keys() == common | set(own[name].split())
    assert position_key(record | {"shifted_keys": 0.5})["shifted_keys"] == 0.5
    kinds = {"kinds": {"a": record, "b": record | {"weights": "entmax"}}}
    assert position_key(kinds)["kinds"]["b"]["weights"] == "entmax"


def test_cells_of_an_earlier_format_are_measured_again(session):
    made = session(methods=("trained", "yarn"))
    wrong = np.zeros(made.plan.truncated_windows[:, 3].sum())
    for cell in made.cells():
        made.store.save(cell.key | {"format": KEY_FORMAT - 1}, wrong)
    result = made.run()
    assert all(nll.min() > 0 for nll in result.nll.values())
