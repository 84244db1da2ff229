"""Many training runs × many evaluations → one report. Runs train.py and evaluate.py as commands."""
