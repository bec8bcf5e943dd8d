"""Folders of images, one folder for each class."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rung.launcher.storage import Store
from rung.launcher.storage_files import list_files
from rung.strategies.errors import DataError, DependencyError

if TYPE_CHECKING:
    import torch

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


class ImageFolder:
    """Images below `folder/CLASS/`, sorted by path: (float32 tensor of shape (channels, height, width) in 0..1, class).

    `classes` are the names of the folders in order, or as given. `size` = (height, width) resizes; `mode` is Pillow's,
    such as "RGB" or "L". `transform` gets the Pillow image instead and returns what the first part of a sample is.
    """

    def __init__(
        self,
        folder: str,
        *,
        size: tuple[int, int] | None = None,
        mode: str = "RGB",
        classes: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            raise DependencyError(f"reading images needs Pillow ({error})", hint='pip install "rung[data]"') from None
        self._folder, self._options = str(folder).rstrip("/"), dict(options or {})
        self.size, self.mode, self.transform = size, mode, transform
        names = [n for n in list_files(self._folder, options) if n.lower().endswith(ENDINGS) and "/" in n]
        found = sorted({name.partition("/")[0] for name in names})
        self.classes = list(classes) if classes is not None else found
        known = {name: number for number, name in enumerate(self.classes)}
        self.paths = [name for name in names if name.partition("/")[0] in known]
        if not self.paths:
            raise DataError(
                f"{Store.open(self._folder, options).url} holds no images in folders"
                + (f" named {', '.join(self.classes[:5])}" if classes is not None else ""),
                hint=f"images lie in folder/CLASS/ and end in {', '.join(ENDINGS)}",
            )
        self.labels = np.array([known[name.partition("/")[0]] for name in self.paths], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> "tuple[torch.Tensor | Any, int]":
        if not -len(self.paths) <= index < len(self.paths):
            raise IndexError(f"sample {index} of {len(self.paths)}")
        path = self.paths[index]
        store = Store.open(self._folder, self._options)
        image = _decoded(store.read(path, limit_bytes=store.size(path)), store.url_of(path), index % len(self.paths))
        label = int(self.labels[index])
        image = image.convert(self.mode)
        if self.size is not None:
            image = image.resize((self.size[1], self.size[0]))
        if self.transform is not None:
            return self.transform(image), label
        import torch

        pixels = torch.from_numpy(np.array(image)).float() / 255
        return (pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()), label


def _decoded(data: bytes, url: str, index: int) -> Any:
    import io

    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        image.load()
    except Exception as error:  # Pillow's plug-ins raise whatever they like for damaged files
        if not data:
            what = "is empty"
        elif "cannot identify" in str(error):
            what = f"is no image that Pillow knows; it begins with {data[:8]!r}"
        else:
            what = f"cannot be read as an image: {error}"
        raise DataError(
            f"{url} {what}", samples=(index,), hint="fetch it again, or set data.clean: [drop_unreadable]"
        ) from None
    return image
