"""Trains the float weights that are committed as weights.pt: `python examples/digits/train.py`."""

from pathlib import Path

import data
import model
import torch


def main(epochs: int = 12) -> None:
    torch.manual_seed(0)
    net = model.build()
    batches = [(torch.from_numpy(x["image"]), torch.from_numpy(y)) for x, y in data.train()]
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * len(batches))
    for epoch in range(epochs):
        net.train()
        for i in torch.randperm(len(batches)).tolist():
            image, label = batches[i]
            shift = torch.randint(-2, 3, (2,)).tolist()
            value = data.loss(net(torch.roll(image, shift, (2, 3))), label)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
        net.eval()
        with torch.no_grad():
            figures = data.evaluate(lambda x: {"logits": net(torch.from_numpy(x["image"]))["logits"].numpy()})
        print(f"epoch {epoch + 1}: {figures['accuracy']:.2f} %")
    torch.save(net.state_dict(), Path(__file__).with_name("weights.pt"))


if __name__ == "__main__":
    main()
