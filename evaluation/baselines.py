"""What a model must beat to have learned anything: the unigram model on the very same targets."""

import numpy as np

TOKENS_AT_MOST = 50_000_000  # enough to know every frequent token's share to four digits


def unigram_nll(train, targets: np.ndarray, vocab_size: int, *, at_most: int = TOKENS_AT_MOST) -> np.ndarray:
    """NLL in nats of every target id (n,) under add-one smoothed token counts of the store `train`, (n,)
    float64.

    A document's own BOS and EOS are not counted: they are never targets, so that leaving them in would only
    handicap the baseline. Counting stops after `at_most` tokens (whole documents, in stored order).
    """
    counts = np.ones(vocab_size, dtype=np.float64)
    seen = 0
    first, last = int(bool(train.has_bos)), int(bool(train.has_eos))
    for document in range(train.n_documents):
        tokens = train.document(document)
        tokens = tokens[first : len(tokens) - last]
        counts += np.bincount(tokens, minlength=vocab_size)
        seen += len(tokens)
        if seen >= at_most:
            break
    return -np.log(counts / counts.sum())[targets]
