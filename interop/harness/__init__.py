"""Sextant runs in EleutherAI's lm-evaluation-harness. Requires the extra `harness`, imported by `lm` only."""
