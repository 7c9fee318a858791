"""Trains the float weights that are committed as weights.pt: `python examples/watch/train.py`."""

from pathlib import Path

import data
import model
import torch


def main(epochs: int = 15) -> None:
    torch.manual_seed(0)
    net = model.build()
    batches = [(torch.from_numpy(x["signal"]), torch.from_numpy(y)) for x, y in data.train()]
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * len(batches))
    for epoch in range(epochs):
        net.train()
        for i in torch.randperm(len(batches)).tolist():
            signal, label = batches[i]
            gain = 1 + 0.1 * torch.randn(len(signal), 6, 1)
            value = data.loss(net(signal * gain), label)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
        net.eval()
        with torch.no_grad():
            figures = data.evaluate(lambda x: {"scores": net(torch.from_numpy(x["signal"]))["scores"].numpy()})
        print(f"epoch {epoch + 1}: {figures['accuracy']:.2f} %")
    torch.save(net.state_dict(), Path(__file__).with_name("weights.pt"))


if __name__ == "__main__":
    main()
