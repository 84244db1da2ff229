"""Many trainings × many evaluations → one report. Stands above training and evaluation; runs both as commands."""
