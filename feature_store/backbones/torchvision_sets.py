"""torchvision's data sets as image sources, named like `torchvision:MNIST?root=DIR&split=train`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torchvision
from PIL import Image

from feature_store.decode import MAX_PIXELS, Skipped, to_rgb
from labeler.errors import BadData, InvalidSetting, UnreadableImage


class TorchvisionSource:
    """One torchvision classification data set.

    Args:
        address: `torchvision:NAME?root=DIR`, with `split=train` (default) or another split of that set, and
            `download=1` to fetch it; without that nothing is fetched.
    """

    def __init__(self, address: str) -> None:
        name, _, query = address.removeprefix("torchvision:").partition("?")
        options = dict(parse_qsl(query))
        unknown = options.keys() - {"root", "split", "download"}
        if unknown or "root" not in options:
            raise InvalidSetting(
                f"a torchvision source reads torchvision:NAME?root=DIR&split=train&download=1; "
                f"root is needed, and unknown here: {', '.join(sorted(unknown)) or 'nothing'}"
            )
        factory = getattr(torchvision.datasets, name, None)
        if not isinstance(factory, type) or not issubclass(factory, torchvision.datasets.VisionDataset):
            raise InvalidSetting(f"torchvision has no data set {name!r}; see torchvision.datasets for their names")
        self._address = address
        self._data = _open(factory, name, options)
        self._name, self._split = name, options.get("split", "train")
        # Some sets read from one open file, so only one thread may ask at a time.
        self._lock = threading.Lock()
        count = len(self._data)
        if not count:
            raise BadData(f"torchvision's {name} holds no image in split {self._split!r}")
        self.names = [f"{name}/{self._split}/{row}" for row in range(count)]
        self.label_names = tuple(str(label) for label in getattr(self._data, "classes", ()))
        self.names_are_declared = bool(self.label_names)
        self.labels = self._read_labels(count)
        self.left_out: tuple[Skipped, ...] = ()
        self.max_pixels = MAX_PIXELS

    def __reduce__(self) -> tuple[type[TorchvisionSource], tuple[str]]:
        """For another process, which opens the set itself."""
        return TorchvisionSource, (self._address,)

    def _read_labels(self, count: int) -> list[int | None]:
        for attribute in ("targets", "labels", "_labels", "y"):
            found = getattr(self._data, attribute, None)
            if found is not None and len(found) == count:
                labels = np.asarray(found).astype(np.int64)
                if not self.label_names:
                    self.label_names = tuple(str(label) for label in range(int(labels.max()) + 1))
                return [int(label) for label in labels]
        self.label_names = ()
        return [None] * count

    def read(self, index: int) -> Image.Image:
        with self._lock:
            image = self._data[index][0]
        if not isinstance(image, Image.Image):
            raise UnreadableImage(f"torchvision's {self._name} gave no image here")
        return to_rgb(image)

    def file(self, _: int) -> None:
        return None

    def blocks(self, index: int) -> Iterator[bytes]:
        image = self.read(index)
        yield f"{image.width} {image.height}\n".encode()
        yield image.tobytes()


def _open(factory: Any, name: str, options: dict[str, str]) -> Any:
    split = options.get("split", "train")
    settings: dict[str, Any] = {"root": options["root"]}
    if options.get("download") == "1":
        settings["download"] = True
    try:
        try:
            return factory(**settings, split=split)
        except TypeError:
            if split not in ("train", "test"):
                raise InvalidSetting(f"torchvision's {name} has the splits train and test, found {split!r}") from None
            return factory(**settings, train=split == "train")
    except (RuntimeError, FileNotFoundError):
        raise InvalidSetting(
            f"torchvision's {name} is not in the folder named; add download=1 to fetch it, or check root"
        ) from None
    except ValueError as error:
        raise InvalidSetting(f"torchvision's {name} refuses these options: {error}") from None
    except TypeError:
        raise InvalidSetting(f"torchvision's {name} cannot be opened by root and split; use a folder instead") from None
