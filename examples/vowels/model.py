"""A GRU over frames of any number, between two linear layers."""

import torch
from torch import nn


class SpeakerNet(nn.Module):
    """Frames [batch, time, 12] -> {"scores": [batch, 9]}."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 64)
        self.rnn = nn.GRU(64, 64, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(64, 9)

    def forward(self, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        steps, _ = self.rnn(torch.relu(self.embed(frames)))
        return {"scores": self.head(self.dropout(steps.mean(1)))}


def build() -> nn.Module:
    return SpeakerNet()
