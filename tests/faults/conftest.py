from tests.training.conftest import corpus, overrides, prepared_root  # noqa: F401  (fixtures)
