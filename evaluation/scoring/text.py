"""Documents of an evaluation: tokens of a store under a BOS rule, cut into windows.

Coordinates. Every index below is an index into the *text* of a document: the stored tokens without
EOS and

- `as-trained`: exactly as stored, a leading BOS included where the store wrote one;
- `none`: without any BOS;
- `every-window`: with a leading BOS, and the first token of every window overwritten by BOS, so
  that BOS is one of the L inputs and displaces the oldest token, at every L alike.

Index 0 is never a target, as nothing precedes it, so BOS is not a target. EOS is removed and is not
a target either.
"""

import numpy as np

from errors import EvaluationError


class EvaluationText:
    """The documents of `store` (`.n_documents .lengths .has_bos .has_eos .document(i)`) under
    `bos_rule`.

    `excluded`: ranges in which no token is a target, rows (document, first token, last token) as
    stored, ascending and not overlapping. Raises EvaluationError for `every-window` without a BOS
    id.
    """

    def __init__(
        self,
        store,
        bos_rule: str = "as-trained",
        bos_id: int | None = None,
        excluded: np.ndarray | None = None,
    ):
        self.store = store
        self.bos_rule = bos_rule
        if bos_rule == "every-window" and (bos_id is None or bos_id < 0):
            raise EvaluationError(
                "bos=every-window needs a tokenizer with a BOS token; use bos=as-trained or none"
            )
        self.bos_id = -1 if bos_id is None else bos_id  # read under every-window only
        # Text index = stored index - shift.
        self.shift = 0
        if bos_rule == "none" and store.has_bos:
            self.shift = 1
        elif bos_rule == "every-window" and not store.has_bos:
            self.shift = -1
        lengths = np.asarray(store.lengths, dtype=np.int64)
        self.lengths = np.maximum(lengths - self.shift - int(store.has_eos), 0)
        # (n, 3) document, start, end (exclusive), in text coordinates.
        stored = np.zeros((0, 3), dtype=np.int64) if excluded is None else excluded
        self.excluded = stored + np.array([0, -self.shift, 1 - self.shift])

    def clean(self, document: int, first: int = 0) -> list[tuple[int, int]]:
        """The stretches (start, end) of one document's text from `first` on that are not
        excluded."""
        length = int(self.lengths[document])
        low, high = np.searchsorted(self.excluded[:, 0], [document, document + 1])
        excluded = np.clip(self.excluded[low:high, 1:], first, length)
        edges = [first, *excluded.ravel().tolist(), length]
        pieces = zip(edges[::2], edges[1::2], strict=True)
        return [(start, end) for start, end in pieces if start < end]

    def is_clean(self, document: int, start: int, end: int) -> bool:
        """Whether no token of text [start, end) is excluded."""
        return any(first <= start and end <= last for first, last in self.clean(document))

    def excluded_in(self, documents: np.ndarray | list[int]) -> list[list[int]]:
        """The excluded stretches of these documents: [document, start, end]."""
        return self.excluded[np.isin(self.excluded[:, 0], documents)].tolist()

    def slice(self, document: int, start: int, end: int) -> np.ndarray:
        """Tokens [start, end) of one document's text, (end - start,) int64, without the overwritten
        BOS."""
        low = start + self.shift
        stored = self.store.document(document)[max(0, low) : end + self.shift].astype(np.int64)
        return stored if low >= 0 else np.append(self.bos_id, stored)

    def windows(self, documents: np.ndarray, ends: np.ndarray, inputs: int) -> np.ndarray:
        """Windows of `inputs` + 1 tokens that end (exclusively) at `ends`: (n, inputs + 1)
        int64."""
        rows = zip(documents.tolist(), ends.tolist(), strict=True)
        windows = np.stack([self.slice(document, end - inputs - 1, end) for document, end in rows])
        if self.bos_rule == "every-window":
            windows[:, 0] = self.bos_id
        return windows

    def units(self) -> tuple[np.ndarray, list[str], str]:
        """The independent unit of every document: ids (n_documents,), their names, and 'document'
        or 'cluster'.

        A corpus with clusters (an author, a series) declares that its documents are not
        independent. A document without a cluster is its own unit.
        """
        names = [str(name) for name in self.store.names]
        clusters = self.store.clusters
        if not any(clusters):
            return np.arange(len(names)), names, "document"
        keys = []  # clusters sort before documents without one
        for i, cluster in enumerate(clusters):
            keys.append((0, str(cluster), str(cluster)) if cluster else (1, str(i), names[i]))
        ids = {key: n for n, key in enumerate(sorted(set(keys)))}
        unit_names = [name for *_, name in ids]
        return np.array([ids[key] for key in keys]), unit_names, "cluster"
