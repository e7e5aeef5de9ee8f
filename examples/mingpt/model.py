"""A small decoder-only transformer over characters (after "Attention Is All You Need" and GPT-2: norms come first)."""

from __future__ import annotations

import torch
from config import Model
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention: (batch, time, width) → the same."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self._heads, self._dropout = shape.heads, shape.dropout
        self.into = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self._heads, -1).transpose(1, 2)
            for part in self.into(x).split(width, dim=2)
        )
        dropout = self._dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(shape.width), Attention(shape)
        self.second = nn.LayerNorm(shape.width)
        self.feed = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class GPT(nn.Module):
    """Characters → logits of the next ones.

    Args:
        shape: layers, heads, width.
        vocabulary: number of characters.
        block_size: the longest context.
    """

    def __init__(self, shape: Model, vocabulary: int, block_size: int) -> None:
        super().__init__()
        if shape.width % shape.heads:
            raise ValueError(
                f"model.width={shape.width} cannot be shared by model.heads={shape.heads} equally"
            )
        self.block_size = block_size
        self.tokens = nn.Embedding(vocabulary, shape.width)
        self.places = nn.Embedding(block_size, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm, self.head = (
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, vocabulary, bias=False),
        )
        for name, weight in self.named_parameters():
            if (
                weight.dim() > 1
            ):  # branches that are added begin small, the more the deeper the model is
                nn.init.normal_(
                    weight, std=0.02 / (2 * shape.layers) ** 0.5 if "out" in name else 0.02
                )

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) of int64 → (batch, time, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places(places))))

    @torch.no_grad()
    def continued(self, tokens: Tensor, more: int) -> Tensor:
        """(time,) → (time + more,): each next character drawn by its probability."""
        self.eval()
        for _ in range(more):
            logits = self(tokens[None, -self.block_size :])[0, -1]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(0), 1)])
        return tokens
