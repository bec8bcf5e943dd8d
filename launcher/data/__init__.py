"""Data: the order of samples, loading, checks; and readers for those who have files and no Dataset.

    from rung.launcher.data import Csv, ImageFolder, Jsonl, Parquet, SavedDataset, Text

Each is a map-style data set over files on a path or any fsspec URL, larger than memory, safe to pickle and to fork,
with errors that name file, line, column and value.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rung.launcher.data.readers_arrow import Parquet, SavedDataset
    from rung.launcher.data.readers_csv import Csv
    from rung.launcher.data.readers_images import ImageFolder
    from rung.launcher.data.readers_json import Jsonl
    from rung.launcher.data.readers_text import Text

__all__ = ["Csv", "ImageFolder", "Jsonl", "Parquet", "SavedDataset", "Text"]

_HOMES = {"Parquet": "arrow", "SavedDataset": "arrow", "Csv": "csv", "ImageFolder": "images", "Jsonl": "json",
          "Text": "text"}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Loaded on first use: the data order, which every worker needs, lives in this package too.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.readers_{_HOMES[name]}"), name)
