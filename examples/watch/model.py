"""A 1-D CNN that halves the rate three times, and an LSTM over what is left."""

import torch
from torch import nn


def _conv(channels_in: int, channels_out: int, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(channels_in, channels_out, kernel, stride=2, padding=kernel // 2, bias=False),
        nn.BatchNorm1d(channels_out),
        nn.ReLU(),
    )


class WatchNet(nn.Module):
    """Signals [batch, 6, 128] of 2.56 s -> {"scores": [batch, 7]}."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(_conv(6, 32, 7), _conv(32, 48, 5), _conv(48, 64, 5))
        self.rnn = nn.LSTM(64, 64, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(64, 7)

    def forward(self, signal: torch.Tensor) -> dict[str, torch.Tensor]:
        steps, _ = self.rnn(self.features(signal).transpose(1, 2))
        return {"scores": self.head(self.dropout(steps.mean(1)))}


def build() -> nn.Module:
    return WatchNet()
