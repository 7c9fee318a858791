"""Pictures for two ImageNet models: 100 from Debian's packages to calibrate, foolbox's 20 labelled ones to evaluate.

The two sets have no picture in common. `scripts/fetch-zoo` fetches both.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

ZOO = Path(__file__).parents[2] / ".zoo"
MEAN, DEVIATION = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
CALIBRATION_PICTURES = 100


def _image():
    """Pillow's module, which lies in the zoo."""
    if str(ZOO / "site") not in sys.path:
        sys.path.append(str(ZOO / "site"))
    from PIL import Image

    return Image


def _opened(path: Path):
    """The picture in RGB; object pictures, which stand on a transparent ground, on white."""
    pillow = _image()
    image = pillow.open(path)
    if image.mode in ("RGBA", "LA", "P"):
        image = image.convert("RGBA")
        ground = pillow.new("RGBA", image.size, (255, 255, 255, 255))
        image = pillow.alpha_composite(ground, image)
    return image.convert("RGB")


def picture(path: Path) -> np.ndarray:
    """The centre 224 x 224 of the picture, its shorter side at 224: float32 [224, 224, 3] from 0 to 255."""
    image = _opened(path)
    scale = 224 / min(image.size)
    size = [max(224, round(side * scale)) for side in image.size]
    left, top = (size[0] - 224) // 2, (size[1] - 224) // 2
    return np.asarray(image.resize(size).crop((left, top, left + 224, top + 224)), dtype=np.float32)


def _object_pictures() -> list[Path]:
    objects = sorted(p for p in (ZOO / "pictures" / "tuxpaint-stamps-default").rglob("*.png") if "_" not in p.stem)
    return [p for p in objects if p.stat().st_size > 20_000]


def _calibration_paths() -> list[Path]:
    """The photographs first, then every so many-th object picture."""
    photos = sorted((ZOO / "pictures" / "opencv-doc").rglob("*.jpg"))
    photos = [p for p in photos if p.parent.name == "data" and p.stat().st_size > 20_000]
    objects = _object_pictures()
    missing = CALIBRATION_PICTURES - len(photos)
    chosen = photos + objects[:: max(1, len(objects) // missing)][:missing]
    if len(chosen) < CALIBRATION_PICTURES:
        raise RuntimeError(f"only {len(chosen)} pictures are there: run scripts/fetch-zoo")
    return chosen[:CALIBRATION_PICTURES]


@functools.cache
def calibration_pictures() -> np.ndarray:
    """float32 [100, 224, 224, 3]: photographs and object pictures."""
    return np.stack([picture(path) for path in _calibration_paths()])


@functools.cache
def other_pictures(count: int = 100) -> np.ndarray:
    """float32 [count, 224, 224, 3]: object pictures that are not among the calibration pictures, evenly chosen."""
    used = set(_calibration_paths())
    rest = [path for path in _object_pictures() if path not in used]
    chosen = [rest[round(i)] for i in np.linspace(0, len(rest) - 1, count)]
    return np.stack([picture(path) for path in chosen])


def _labelled_paths() -> tuple[list[Path], np.ndarray]:
    """foolbox's pictures and their ImageNet classes int64 [20]."""
    paths = sorted((ZOO / "site" / "foolbox" / "data").glob("imagenet_*.jpg"))
    if not paths:
        raise RuntimeError("foolbox's pictures are not there: run scripts/fetch-zoo")
    return paths, np.array([int(p.stem.split("_")[2]) for p in paths])


@functools.cache
def labelled() -> tuple[np.ndarray, np.ndarray]:
    """foolbox's pictures float32 [20, 224, 224, 3] and their ImageNet classes int64 [20]."""
    paths, labels = _labelled_paths()
    return np.stack([picture(path) for path in paths]), labels


def for_mobilenet(pictures: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(((pictures / np.float32(255) - MEAN) / DEVIATION).transpose(0, 3, 1, 2))


def for_efficientnet(pictures: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(((pictures - np.float32(127)) / np.float32(128)).transpose(0, 3, 1, 2))


def _calibration(prepare: Callable, name: str) -> Iterator[dict[str, np.ndarray]]:
    pictures = calibration_pictures()
    for start in range(0, len(pictures), 10):
        yield {name: prepare(pictures[start : start + 10])}


def _top1(predict: Callable, prepare: Callable, name: str) -> dict[str, float]:
    pictures, labels = labelled()
    found = [predict({name: prepare(pictures[i : i + 5])})["output"].argmax(1) for i in range(0, len(pictures), 5)]
    return {"top1": 100 * float((np.concatenate(found) == labels).mean())}


def frame(path: Path) -> np.ndarray:
    """The picture as a camera of 480 x 640 would give it, in BGR: uint8 [480, 640, 3], its shorter side at 480."""
    image = _opened(path)
    scale = 480 / min(image.size)
    image = image.resize([max(480, round(side * scale)) for side in image.size])
    seen = _image().new("RGB", (640, 480))
    seen.paste(image, ((640 - image.width) // 2, (480 - image.height) // 2))
    return np.ascontiguousarray(np.asarray(seen)[:, :, ::-1])


def frames_calibration():
    paths = _calibration_paths()
    for start in range(0, len(paths), 5):
        yield {"image": np.stack([frame(path) for path in paths[start : start + 5]])}


def frames_evaluate(predict):
    """Top-1 and top-5 accuracy in percent over the 20 labelled pictures, by the classes that the artifact gives."""
    paths, labels = _labelled_paths()
    found = [predict({"image": frame(path)[None]})["output.indices"][0] for path in paths]
    first = np.float64([top[0] == label for top, label in zip(found, labels, strict=True)])
    among = np.float64([label in top for top, label in zip(found, labels, strict=True)])
    return {"top1": 100 * float(first.mean()), "top5": 100 * float(among.mean())}


def mobilenet_calibration():
    return _calibration(for_mobilenet, "image")


def mobilenet_evaluate(predict):
    """Top-1 accuracy in percent over the 20 labelled pictures."""
    return _top1(predict, for_mobilenet, "image")


def efficientnet_calibration():
    return _calibration(for_efficientnet, "inputs")


def efficientnet_evaluate(predict):
    """Top-1 accuracy in percent over the 20 labelled pictures."""
    return _top1(predict, for_efficientnet, "inputs")
