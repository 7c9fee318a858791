"""Trains the float weights that are committed as weights.pt: `python examples/vowels/train.py`."""

from pathlib import Path

import data
import model
import torch


def main(epochs: int = 40) -> None:
    torch.manual_seed(0)
    net = model.build()
    steps = len(list(data.train()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * steps)
    for _ in range(epochs):
        net.train()
        for inputs, speakers in data.batches("TRAIN", seed=1):
            frames = torch.from_numpy(inputs["frames"])
            value = data.loss(net(frames + 0.05 * torch.randn_like(frames)), torch.from_numpy(speakers))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        figures = data.evaluate(lambda x: {"scores": net(torch.from_numpy(x["frames"]))["scores"].numpy()})
    print(f"after {epochs} epochs: {figures['accuracy']:.2f} %")
    torch.save(net.state_dict(), Path(__file__).with_name("weights.pt"))


if __name__ == "__main__":
    main()
