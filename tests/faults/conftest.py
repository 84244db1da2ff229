from tests.training.conftest import corpus, overrides, prepared_root, settings_of_runs  # noqa: F401  (fixtures)
