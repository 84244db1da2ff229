"""Checkpoints of other codebases. No pickle is read and no code of a checkpoint is run."""
