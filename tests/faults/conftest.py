from tests.training.conftest import corpus, prepared_root, words  # noqa: F401  (fixtures)
