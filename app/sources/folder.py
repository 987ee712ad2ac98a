"""One folder per class, of JPEG and PNG files, which stay encoded: train/<class>/ and test/<class>/, or <class>/ alone."""

import dataclasses
import itertools
import pathlib

from app.sources import Raw, Source, SourceError, files

_ENDINGS = (".jpg", ".jpeg", ".png")
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")


@dataclasses.dataclass(frozen=True, eq=False)
class Files:
    """A Split of files, opened one by one as they are asked for.

    Attributes:
      root: the data folder.
      paths: relative to root.
      labels: of each.
      ignored: files and folders in the class folders that are not examples, by their ending.
    """

    root: pathlib.Path
    paths: tuple[str, ...]
    labels: tuple[int, ...]
    ignored: int

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Raw:
        """Raises SourceError if the file cannot be read, or is neither JPEG nor PNG, whatever its name says."""
        path = self.root / self.paths[index]
        content = files.read(path)
        if not content.startswith(_SIGNATURES):
            raise SourceError(f"{path}: {'begins like neither JPEG nor PNG' if content else 'is empty'}; replace or remove it")
        return Raw(content, self.labels[index], self.paths[index])


def folder(name: str, data_dir: str) -> Source:
    """The pictures below data_dir.

    With data_dir/train there, each folder in it is a class; the first of data_dir/test, val and validation, if one is there,
    is what is held out. Otherwise each folder in data_dir is a class, and of each every tenth file, beginning with the first,
    is held out.

    Labels follow the folders' names sorted by their UTF-8 bytes ('B' before 'a'), and the examples of a class theirs. Names
    end in .jpg, .jpeg or .png, in any case; hidden files are passed over, other endings counted. Links are followed.

    Raises:
      SourceError: if there are no classes, or one has no pictures, or one is held out that is not in train.
    """
    root = pathlib.Path(data_dir)
    if not data_dir or not root.is_dir():
        raise SourceError(f"{name}: {f'{root} is no folder' if data_dir else 'where is it'}; give --data_dir")
    if (root / "train").is_dir():
        train = _classes(root, "train")
        held_out = next((part for part in ("test", "val", "validation") if (root / part).is_dir()), None)
        test = _classes(root, held_out) if held_out else None
        if unknown := sorted(set(test or ()) - set(train)):
            raise SourceError(f"{root / held_out}: {unknown[0]!r} is not among the classes in {root / 'train'}")
    else:
        whole = _classes(root, "")
        train = {c: ([p for i, p in enumerate(paths) if i % 10], ignored) for c, (paths, ignored) in whole.items()}
        test = {c: (paths[::10], ignored) for c, (paths, ignored) in whole.items()}
        if single := [c for c, (paths, _) in train.items() if not paths]:
            raise SourceError(f"{root / single[0]}: a single picture, which is held out, leaves none to learn from; add more")
    names = tuple(train)
    return Source(name, names, _split(root, train, names), test and _split(root, test, names), None, "imagenet")


def _classes(root, part):
    """By class, in order, the paths of its pictures relative to `root`, and how many other things are there."""
    classes = [entry.name for entry in files.entries(root / part) if entry.is_dir()]
    if not classes:
        raise SourceError(f"{root / part}: has no folders; expected one for each class")
    found = {}
    for name in classes:
        entries = files.entries(root / part / name)
        # A link that leads nowhere is not a folder, so it is kept, and fails by its name when it is read.
        pictures = [e.name for e in entries if e.name.lower().endswith(_ENDINGS) and not e.is_dir()]
        if not pictures:
            raise SourceError(f"{root / part / name}: has no {', '.join(_ENDINGS)} among its {len(entries)} files and folders")
        found[name] = [str(pathlib.Path(part, name, picture)) for picture in pictures], len(entries) - len(pictures)
    return found


def _split(root, classes, names):
    paths, ignored = zip(*classes.values(), strict=True)
    labels = itertools.chain.from_iterable([names.index(c)] * len(pictures) for c, (pictures, _) in classes.items())
    return Files(root, tuple(itertools.chain.from_iterable(paths)), tuple(labels), sum(ignored))
