"""Models of the harness tests."""

import pytest

pytest.importorskip("lm_eval")
