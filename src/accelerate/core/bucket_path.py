# SPDX-License-Identifier: Apache-2.0
"""The path of an object, or of a folder of objects, in a bucket: with the methods of `Path` that checkpoints use."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from .buckets import Bucket

if TYPE_CHECKING:
    # Code for local paths serves both. It reaches files through `core/files.py`, which tells them apart: `os.fspath`
    # of this class raises TypeError, and a method that it does not have AttributeError.
    _Path = Path
else:
    _Path = object


class HasSize(Protocol):
    """What is known of an object."""

    @property
    def size(self) -> int:
        """Its bytes."""


class BucketPath(_Path):
    """A path in a bucket.

    Args:
        bucket: that has the objects.
        key: of the object or folder, without slashes at its ends.
        objects: by key, the objects that are known to be in a folder above. Then none is looked up.
        cache: what has been read of these objects, by whoever reads them. Objects of a checkpoint never change.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        objects: Mapping[str, HasSize] | None = None,
        cache: dict[Any, Any] | None = None,
    ) -> None:
        self.bucket = bucket
        self.key = key
        self.objects = objects
        self.cache: dict[Any, Any] = {} if cache is None else cache

    @classmethod
    def of(cls, location: str | os.PathLike[str]) -> BucketPath:
        """The path at a location such as "s3://bucket/folder"."""
        return cls(*Bucket.of(location))

    def with_objects(self, objects: Mapping[str, HasSize]) -> BucketPath:
        """The same folder with these objects, whose names count from the folder."""
        keys = {(self / name).key: known for name, known in objects.items()}
        return BucketPath(self.bucket, self.key, keys)

    def listed(self) -> BucketPath:
        """The same folder with the objects that the store lists now."""
        keys = {entry.key: entry for entry in self.bucket.objects(self.key)}
        return BucketPath(self.bucket, self.key, keys)

    # -- names

    def __truediv__(self, other: object) -> BucketPath:
        key = f"{self.key}/{other}".strip("/")
        return BucketPath(self.bucket, key, self.objects, self.cache)

    def __str__(self) -> str:
        return f"{self.bucket.url}/{self.key}".rstrip("/")

    def __repr__(self) -> str:
        return f"BucketPath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BucketPath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: object) -> bool:
        return str(self) < str(other)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The ending of the name, such as ".json"."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> BucketPath:
        """The folder above."""
        return BucketPath(self.bucket, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> BucketPath:
        """A neighbor."""
        return self.parent / name

    def relative_to(self, other: object) -> PurePosixPath:  # type: ignore[override]
        """The part of the path below a folder."""
        assert isinstance(other, BucketPath)
        return PurePosixPath(self.key).relative_to(other.key)

    def absolute(self) -> BucketPath:
        """The path itself."""
        return self

    def is_absolute(self) -> bool:
        """True: nothing counts from the current folder."""
        return True

    # -- what is there

    def size(self) -> int:
        """The bytes of an object. Raises FileNotFoundError."""
        if self.objects is not None and self.key in self.objects:
            return self.objects[self.key].size
        return self.bucket.stat(self.key).size

    def is_file(self) -> bool:
        """Whether there is an object of this key."""
        if self.objects is not None:
            return self.key in self.objects
        return self.bucket.version(self.key) is not None

    def is_dir(self) -> bool:
        """Whether there are objects below."""
        return next(self._keys_below(), None) is not None

    def exists(self) -> bool:
        """Whether there is an object of this key, or below it."""
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        """False: a bucket has no links."""
        return False

    def iterdir(self) -> Iterator[BucketPath]:  # type: ignore[override]
        """What is directly below, by name."""
        if self.objects is None:
            folders, entries = self.bucket.children(self.key)
            names = {*folders, *(entry.key.rpartition("/")[2] for entry in entries)}
        else:
            start = len(self.key) + 1
            names = {key[start:].partition("/")[0] for key in self._keys_below()}
        for name in sorted(names):
            yield self / name

    def glob(self, pattern: str) -> Iterator[BucketPath]:  # type: ignore[override]
        """What is directly below and has a name of this pattern."""
        for path in self.iterdir():
            if fnmatch.fnmatchcase(path.name, pattern):
                yield path

    def rglob(self, pattern: str) -> Iterator[BucketPath]:  # type: ignore[override]
        """All objects below, at any depth, with a name of this pattern."""
        folder = self
        if self.objects is None:
            # The caller asks for nothing that the list has.
            folder = self.listed()
        for key in folder._keys_below():
            path = BucketPath(self.bucket, key, folder.objects, folder.cache)
            if fnmatch.fnmatchcase(path.name, pattern):
                yield path

    def _keys_below(self) -> Iterator[str]:
        if self.objects is None:
            for entry in self.bucket.objects(self.key):
                yield entry.key
            return
        for key in self.objects:
            if key.startswith(f"{self.key}/"):
                yield key

    # -- content

    def read_at(self, offset: int, target: memoryview) -> None:
        """Fill memory with the bytes of the object from an offset on."""
        self.bucket.read(self.key, offset, [target])

    def read_bytes(self) -> bytes:
        """The content of the object."""
        return self.bucket.get(self.key, 1 << 62)

    def write_text(self, text: str) -> int:  # type: ignore[override]
        """Write the object."""
        self.bucket.write(self.key, [text.encode()])
        return len(text)

    def mkdir(self, **options: bool) -> None:  # type: ignore[override]
        """Nothing: the folders of a bucket are parts of its keys."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        self.bucket.delete([self.key])
