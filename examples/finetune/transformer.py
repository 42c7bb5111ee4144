"""The transformer of examples/gpt without its head, for the weights of which adapters are trained."""

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

LENGTH, ALPHABET, WIDTH, HEADS, LAYERS = 64, 128, 64, 4, 2


class Block(nn.Module):
    """[rows, length, WIDTH] to the same; a place sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.join = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.attention(self.norms[0](x)).chunk(3, -1))
        seen = scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).flatten(2))
        return x + self.outer(gelu(self.inner(self.norms[1](x))))


class Base(nn.Module):
    """The transformer of examples/gpt without its head: characters [rows, length] to [rows, length, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(ALPHABET, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks(self.characters(tokens) + self.places.weight[: tokens.shape[1]])
