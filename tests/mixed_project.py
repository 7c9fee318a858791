"""A small project with a layer that int8 cannot compute, known by construction, and everything else easy.

`bad` reads a channel that is always 0 by weights of 300: each row's scale is theirs, its other weights round to 0, in
float nothing changes. Per-channel scales do not help, which are one a row; a float layer does.
"""

from __future__ import annotations

from pathlib import Path

from tests.small_project import write_project

MODEL = '''

class Hidden(nn.Module):
    """[n, 1, 12, 12] -> {"scores": [n, 6]}"""
    def __init__(self, bad=True):
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.bad = nn.Conv2d(8, 8, 3, padding=1)
        self.good = nn.Conv2d(8, 16, 3, padding=1)
        self.tail = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 6)
        with torch.no_grad():
            if bad:
                self.stem.weight[0] = 0
                self.stem.bias[0] = 0
                self.bad.weight[:, 0] = 300
            self.tail.weight.mul_(3)
            self.head.weight.mul_(4)

    def forward(self, image):
        x = nn.functional.relu6(self.stem(image))
        x = nn.functional.relu6(self.bad(x))
        x = nn.functional.relu6(self.good(x))
        x = nn.functional.relu6(self.tail(x))
        return {"scores": self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))}

def hidden():
    torch.manual_seed(5)
    return Hidden()

def spread():
    """`bad` has one output channel of huge weights, which relu6 bounds: per channel it is as easy as the others."""
    torch.manual_seed(5)
    net = Hidden(bad=False)
    with torch.no_grad():
        net.bad.weight[0].mul_(300)
    return net

def easy():
    torch.manual_seed(5)
    return Hidden(bad=False)
'''

DATA = '''

def evaluate(predict):
    """How close the scores are to the model's own, 1 for equal."""
    import model
    import torch
    images, _ = bars(32, 3)
    with torch.no_grad():
        wanted = model.NAME().eval()(torch.from_numpy(images))["scores"].numpy()
    given = np.concatenate([predict({"image": images[i : i + 16]})["scores"] for i in range(0, 32, 16)])
    return {"closeness": 1 - float(np.abs(given - wanted).mean() / np.abs(wanted - wanted.mean(0)).mean())}
'''


def mixed_project(folder: Path, model: str = "hidden", *, least: float = 0.8, **changes) -> Path:
    """The project in `folder`; `closeness` may not fall below `least`."""
    without = changes.pop("without", ("train", "loss", "qat"))
    return write_project(
        folder, without=without, model_code=MODEL, data_code=DATA.replace("NAME", model),
        **{"model": f"model.py:{model}", "limits": {"metric_min": {"closeness": least}}, **changes},
    )  # fmt: skip
