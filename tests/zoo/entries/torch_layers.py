"""The zoo's torch.nn: recurrent, attention, normalisation, convolution, pooling, embedding, activation, dropout, parametrised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

from entries.entry import VOCABULARY, WIDTH, Entry, Shaped, block, dense, square, stack, tokens
from pipetrain.verify.beside_loop import Verdict


class RunsOver(nn.Module):
    """Rows as sequences `[rows, 4, 4]` through a recurrent module, whose output is the first thing that it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x.reshape(-1, 4, 4))[0].flatten(1)


class Cells(nn.Module):
    """The three cells, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.gru, self.lstm = nn.RNNCell(4, 4), nn.GRUCell(4, 4), nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> Any:
        state = cell = hidden = x.new_zeros(x.shape[0], 4)
        outputs = []
        for part in x.reshape(-1, 4, 4).unbind(1):
            hidden = self.gru(self.rnn(part, hidden), hidden)
            state, cell = self.lstm(hidden, (state, cell))
            outputs.append(state)
        return torch.cat(outputs, 1)


class SelfAttention(nn.Module):
    """MultiheadAttention, with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        sequence = x.reshape(-1, 4, 4)
        output, weights = self.attention(sequence, sequence, sequence)
        return (output + weights).flatten(1)


class CausalAttention(nn.Module):
    """`scaled_dot_product_attention` with dropout."""

    def forward(self, x: Tensor) -> Any:
        heads = x.reshape(-1, 2, 4, 2)
        return (
            functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True, dropout_p=0.1).flatten(1) + x
        )


class Decodes(nn.Module):
    """A decoder layer that attends to its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        sequence = x.reshape(-1, 4, 4)
        return self.decoder(sequence, sequence * 0.5).flatten(1)


class UnpoolsAgain(nn.Module):
    """Max pooling that gives its indices, and unpooling by them."""

    def forward(self, x: Tensor) -> Any:
        pooled, indices = functional.max_pool2d(x.reshape(-1, 1, 4, 4), 2, return_indices=True)
        return functional.max_unpool2d(pooled, indices, (2, 2)).flatten(1) + x


class ChannelsLastNet(nn.Module):
    """A convolution whose input and output lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Any:
        image = x.reshape(-1, 4, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.convolution(image).flatten(1)


class Embeds(nn.Module):
    """Token ids through an embedding, to `[rows, WIDTH]`."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, ids: Tensor) -> Any:
        return self.embedding(ids).flatten(1)


def _embedded(name: str, make: Any, expected: Verdict = Verdict.EQUAL, says: str = "", **more: Any) -> Entry:
    def layers() -> list[nn.Module]:
        return [Embeds(make()), dense(), dense(), square()]

    return stack(name, layers, expected, says, batch=tokens, **more)


class Gumbel(nn.Module):
    """A hard choice with noise."""

    def forward(self, x: Tensor) -> Any:
        return functional.gumbel_softmax(x, hard=True) * 3 + x


class PairsUp(nn.Module):
    """Bilinear and distance of the two halves of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(8, 8, WIDTH)

    def forward(self, x: Tensor) -> Any:
        left, right = x.chunk(2, 1)
        return self.bilinear(left, right) + functional.pairwise_distance(left, right)[:, None]


def _eval_mode(module: nn.Module) -> nn.Module:
    return module.eval()


def _image_norm(norm: nn.Module) -> nn.Module:
    return Shaped(norm, 4, 2, 2)


ENTRIES: tuple[Entry, ...] = (
    block("RNN", lambda: RunsOver(nn.RNN(4, 4, nonlinearity="relu", batch_first=True))),
    block("LSTM of two layers with dropout", lambda: RunsOver(nn.LSTM(4, 4, 2, dropout=0.2, batch_first=True))),
    block("LSTM with a projection", lambda: RunsOver(nn.LSTM(4, 6, proj_size=4, batch_first=True))),
    block("GRU in both directions", lambda: RunsOver(nn.GRU(4, 2, bidirectional=True, batch_first=True))),
    block("RNN, GRU and LSTM cells", Cells),
    block("MultiheadAttention", SelfAttention),
    block("causal attention with dropout", CausalAttention),
    block("TransformerEncoderLayer", lambda: Shaped(nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True), 4, 4)),
    block("TransformerDecoderLayer", Decodes),
    block("BatchNorm1d", lambda: nn.BatchNorm1d(WIDTH)),
    block("BatchNorm2d with cumulative statistics", lambda: _image_norm(nn.BatchNorm2d(4, momentum=None))),
    block("BatchNorm1d without statistics", lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False, affine=False)),
    block("BatchNorm1d in eval mode", lambda: _eval_mode(nn.BatchNorm1d(WIDTH))),
    block("GroupNorm", lambda: _image_norm(nn.GroupNorm(2, 4))),
    block("LayerNorm", lambda: nn.LayerNorm(WIDTH)),
    block("RMSNorm", lambda: nn.RMSNorm(WIDTH)),
    block(
        "InstanceNorm2d with statistics",
        lambda: _image_norm(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    ),
    block("LocalResponseNorm", lambda: _image_norm(nn.LocalResponseNorm(2))),
    block("Conv1d", lambda: Shaped(nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), 4, 4)),
    block("Conv2d, depthwise and strided", lambda: Shaped(nn.Conv2d(2, 4, 3, 2, 1, groups=2), 2, 4, 2, features=8)),
    block("Conv3d", lambda: Shaped(nn.Conv3d(2, 2, 3, padding=1), 2, 2, 2, 2)),
    block("ConvTranspose2d", lambda: Shaped(nn.ConvTranspose2d(4, 2, 2, 2), 4, 2, 2, features=32)),
    block("Conv2d, channels last", ChannelsLastNet),
    block("max pooling with indices", UnpoolsAgain),
    block(
        "adaptive pooling",
        lambda: Shaped(nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.AdaptiveAvgPool2d(1)), 4, 2, 2, features=4),
    ),
    block("fractional max pooling", lambda: Shaped(nn.FractionalMaxPool2d(2, output_size=3), 1, 4, 4, features=9)),
    block(
        "LPPool and Upsample", lambda: Shaped(nn.Sequential(nn.LPPool2d(2, 2), nn.Upsample(scale_factor=2)), 1, 4, 4)
    ),
    block("PixelShuffle", lambda: Shaped(nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2)), 1, 4, 4)),
    block("Bilinear and distances", PairsUp),
    _embedded("Embedding with padding", lambda: nn.Embedding(VOCABULARY, 4, padding_idx=0)),
    _embedded("EmbeddingBag", lambda: nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean")),
    _embedded(
        "Embedding with max_norm, which changes its weight in F",
        lambda: nn.Embedding(VOCABULARY, 4, max_norm=0.5),
        Verdict.REFUSED,
        "layer 0 (Embeds)",
        on_ranks=False,
    ),
    _embedded("Embedding with sparse gradients", lambda: nn.Embedding(VOCABULARY, 4, sparse=True), max_norm=None),
    block("RReLU", nn.RReLU),
    block("activations in place", lambda: nn.Sequential(square(), nn.ReLU(True), square(), nn.ELU(inplace=True))),
    stack(
        "activations in place on what they get",
        lambda: [square(), nn.LeakyReLU(0.1, inplace=True), square(), nn.Hardtanh(inplace=True), square()],
    ),
    block("smooth activations", lambda: nn.Sequential(nn.GELU(), nn.SiLU(), nn.Mish(), nn.Softplus(), nn.CELU())),
    block("softmax and its like", lambda: nn.Sequential(nn.Softmax(1), nn.LogSoftmax(1), nn.Softmin(1), nn.Softsign())),
    block("GLU", lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GLU())),
    block("PReLU", nn.PReLU),
    block("a hard choice by Gumbel noise", Gumbel),
    block("Dropout", lambda: nn.Dropout(0.3)),
    block(
        "Dropout1d to 3d",
        lambda: nn.Sequential(
            Shaped(nn.Dropout1d(0.2), 4, 4), Shaped(nn.Dropout2d(0.2), 4, 2, 2), Shaped(nn.Dropout3d(0.2), 4, 1, 2, 2)
        ),
    ),
    block(
        "AlphaDropout",
        lambda: nn.Sequential(nn.SELU(), nn.AlphaDropout(0.2), Shaped(nn.FeatureAlphaDropout(0.2), 4, 4)),
    ),
    block("weight_norm", lambda: parametrizations.weight_norm(square())),
    block("spectral_norm", lambda: parametrizations.spectral_norm(square())),
    block("orthogonal", lambda: parametrizations.orthogonal(square())),
    block("pruned", lambda: prune.random_unstructured(square(), "weight", 0.3), Verdict.KEPT),  # type: ignore[no-untyped-call]
)
