"""Token mixers other than softmax attention over keys."""
