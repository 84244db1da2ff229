"""Real text and checkpoints outside the repository, at ../shared/corpora or SEXTANT_CORPORA."""

import os
from pathlib import Path

import pytest

CORPORA = Path(
    os.environ.get("SEXTANT_CORPORA", Path(__file__).resolve().parents[2] / "shared" / "corpora")
)
STORIES = CORPORA / "checkpoints" / "stories260K"

needs_stories = pytest.mark.skipif(
    not STORIES.is_dir(),
    reason=f"no checkpoint at {STORIES}; SEXTANT_CORPORA names the folder above",
)
