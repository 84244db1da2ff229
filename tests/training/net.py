"""A small model."""

from torch import nn


class Net(nn.Module):
    """Embedding, matrix, bias, norm, a learned position table, and a head that may be tied."""

    def __init__(self, vocabulary: int = 11, dim: int = 6, tie_embeddings: bool = True):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.position = nn.Embedding(9, dim)
        self.mix = nn.Linear(dim, dim)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        if tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.norm(x + self.mix(x)))
