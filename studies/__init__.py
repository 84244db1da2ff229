"""Many trainings × many evaluations → one report. Above training and evaluation; runs both as
commands."""
