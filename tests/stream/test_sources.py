"""Data sets by name, from every layout they may lie in, and what is said when they do not."""

import hashlib
import io
import os
import pickle
import urllib.error
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tpl.bench.benchmarks import BENCHMARKS, find_benchmark
from tpl.stream import ArrayImages, DataError, ImageSet, Source, class_order, image_folder, load_source, split
from tpl.stream.sources import MAX_SOURCES, reused, signature

# The content of a small data set by path; the pixel value of each image tells them apart.
Files = dict[str, bytes]


def picture(value: int, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    Image.new("L", (4, 4), value).save(stream, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return stream.getvalue()


def as_folder(root: Path, files: Files) -> Path:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def as_zip(path: Path, files: Files) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def content(images: ImageSet | None, names: tuple[str, ...]) -> list[tuple[str, int]]:
    assert images is not None
    return [(names[label], int(np.asarray(images.load(i))[0, 0, 0])) for i, label in enumerate(images.labels)]


TOY: Files = {
    "train/dog/b.png": picture(3),
    "train/dog/a.PNG": picture(2),
    "train/cat/a.jpeg": picture(1, "JPEG"),
    "test/cat/a.png": picture(11),
    "test/dog/a.webp": picture(12, "WEBP"),
}
NOISE: Files = {
    "__MACOSX/train/cat/._a.jpeg": b"x",
    "train/.DS_Store": b"x",
    "train/cat/.hidden.png": b"x",
    "train/.cache/a.png": picture(9),
    "train/cat/readme.txt": b"x",
    "train/dog/Thumbs.db": b"x",
}


def check_toy(source: Any) -> None:
    assert source.class_names == ("cat", "dog")
    assert content(source.train, source.class_names) == [("cat", 1), ("dog", 2), ("dog", 3)]
    assert content(source.test, source.class_names) == [("cat", 11), ("dog", 12)]
    assert source.skipped == ()


class TestFolder:
    def test_train_and_test_folders(self, tmp_path: Path) -> None:
        check_toy(load_source("folder", as_folder(tmp_path, TOY | NOISE), False))

    def test_val_in_the_place_of_test(self, tmp_path: Path) -> None:
        files = {path.replace("test/", "val/"): data for path, data in TOY.items()}
        check_toy(image_folder(as_folder(tmp_path, files)))

    def test_an_unlabelled_test_folder_gives_way_to_val(self, tmp_path: Path) -> None:
        files = {path.replace("test/", "val/"): data for path, data in TOY.items()}
        check_toy(image_folder(as_folder(tmp_path, files | {"test/images/1.png": picture(99)})))

    @pytest.mark.parametrize("wrapper", ["", "toy/", "outer/toy/"])
    def test_zip_with_and_without_wrapping_folders(self, tmp_path: Path, wrapper: str) -> None:
        files = {wrapper + path: data for path, data in (TOY | NOISE).items()}
        check_toy(image_folder(as_zip(tmp_path / "toy.zip", files)))

    def test_zip_made_on_windows(self, tmp_path: Path) -> None:
        check_toy(image_folder(as_zip(tmp_path / "t.zip", {p.replace("/", "\\"): d for p, d in TOY.items()})))

    def test_plain_class_folders_have_no_test(self, tmp_path: Path) -> None:
        source = image_folder(as_folder(tmp_path, {"cat/a.png": picture(1), "train/b.png": picture(2)}))
        assert source.test is None
        assert content(source.train, source.class_names) == [("cat", 1), ("train", 2)]  # the vehicle

    def test_a_list_of_parts_is_merged(self, tmp_path: Path) -> None:
        paths = list(TOY)
        first = as_zip(tmp_path / "a.zip", {path: TOY[path] for path in paths[:2]})
        second = as_folder(tmp_path / "b", {path: TOY[path] for path in paths[2:]})
        check_toy(image_folder([first, str(second)]))
        with pytest.raises(DataError, match=r"train/dog/.* another part"):
            image_folder([first, first])

    def test_a_folder_of_zips_with_or_without_the_part_in_their_paths(self, tmp_path: Path) -> None:
        train = {path: data for path, data in TOY.items() if path.startswith("train")}
        test = {path.removeprefix("test/"): data for path, data in TOY.items() if path.startswith("test")}
        as_zip(tmp_path / "train.zip", train)
        as_zip(tmp_path / "test.zip", test)
        check_toy(image_folder(tmp_path))

    def test_an_old_zip_beside_class_folders_is_not_mixed_in(self, tmp_path: Path) -> None:
        as_zip(tmp_path / "train-old.zip", {"train/cow/a.png": picture(1)})
        check_toy(image_folder(as_folder(tmp_path, TOY)))

    def test_what_is_left_out_is_listed(self, tmp_path: Path) -> None:
        extra = {"train/loose.png": picture(1), "test/cow/a.png": picture(1), "train/ape/notes.txt": b"x"}
        root = as_folder(tmp_path, TOY | extra)
        (root / "train" / "emu").mkdir()
        source = image_folder(root)
        assert source.class_names == ("cat", "dog")
        assert source.skipped == (
            "train/ape: no images",
            "train/emu: no images",
            "train: 1 image outside class folders",
            "test/cow: no training images",
        )

    def test_nothing_usable_says_what_is(self, tmp_path: Path) -> None:
        (tmp_path / "cat").mkdir()
        with pytest.raises(DataError, match="empty class folders: cat.*Accepted: train/CLASS"):
            image_folder(tmp_path)
        with pytest.raises(DataError, match="check the path"):
            image_folder(tmp_path / "absent")
        (tmp_path / "no.zip").write_bytes(b"no zip")
        with pytest.raises(DataError, match="no.zip cannot be opened as a zip"):
            image_folder(tmp_path / "no.zip")
        with pytest.raises(DataError, match="--data FOLDER"):
            load_source("folder", None, False)

    def test_test_classes_that_are_all_unknown(self, tmp_path: Path) -> None:
        files = {"train/cat/a.png": picture(1), "test/cow/a.png": picture(1)}
        with pytest.raises(DataError, match="test share no class folder with train"):
            image_folder(as_folder(tmp_path, files))

    def test_links_are_followed_but_not_in_circles(self, tmp_path: Path) -> None:
        as_folder(tmp_path / "store", {"a.png": picture(5)})
        as_folder(tmp_path / "set", {"dog/a.png": picture(6)})
        os.symlink(tmp_path / "store", tmp_path / "set" / "cat")
        os.symlink(tmp_path / "set", tmp_path / "set" / "dog" / "loop")
        source = image_folder(tmp_path / "set")
        assert content(source.train, source.class_names) == [("cat", 5), ("dog", 6)]


def test_digits() -> None:
    source = load_source("digits", None, False)
    assert source.class_names == tuple("0123456789") and source.test is not None
    assert len(source.train) == 1437 and len(source.test) == 360
    names = {source.train.name(i) for i in range(1437)} | {source.test.name(i) for i in range(360)}
    assert len(names) == 1797 and "digits[17]" in names
    counts = np.bincount(source.test.labels)
    assert counts.min() >= 34 and counts.max() <= 37  # stratified
    pixels = np.stack([np.asarray(source.train.load(i)) for i in range(50)])
    assert pixels.shape == (50, 8, 8, 3) and pixels.min() == 0 and pixels.max() == 255
    again = load_source("digits", None, False)
    assert again.test is not None and again.test.name(5) == source.test.name(5)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match="mnist.*digits, cifar10, cifar100, tiny-imagenet, imagenet380, folder"):
        load_source("mnist", None, False)


def cifar_like(classes: int, split_name: str, seed: int = 0) -> Files:
    """One image for each class, whose value is the class's number in alphabetical order."""
    return {f"{split_name}/c{k:03d}/{seed}.webp": picture(k, "WEBP") for k in range(classes)}


class TestCifar:
    def test_folder_of_zips(self, tmp_path: Path) -> None:
        as_zip(tmp_path / "train-0.zip", cifar_like(100, "train", 0))
        as_zip(tmp_path / "train-1.zip", cifar_like(100, "train", 1))
        as_zip(tmp_path / "test.zip", cifar_like(100, "test"))
        source = load_source("cifar100", tmp_path, False)
        assert len(source.train) == 200 and source.test is not None and len(source.test) == 100
        assert source.train.labels.tolist() == [value for _, value in content(source.train, source.class_names)]
        stream = split(source.train, source.test, source.class_names, 10, class_order("random:1", source.name, 100))
        assert len(stream) == 10 and len(stream[3].train) == 20

    def test_zips_are_read_and_decoded_once_while_they_stay_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        as_zip(tmp_path / "train.zip", cifar_like(10, "train"))
        as_zip(tmp_path / "test.zip", cifar_like(10, "test"))
        source = load_source("cifar10", tmp_path, False)
        block = source.train.select([4, 2]).block(np.arange(2))
        assert block is not None and block[:, 0, 0, 0].tolist() == [4, 2]
        again = load_source("cifar10", tmp_path, False)
        assert again is source
        with monkeypatch.context() as patch:
            patch.setattr("tpl.stream.folders.decode", None)  # decoding once more would fail
            assert content(again.train.select([4, 2]), again.class_names) == [("c004", 4), ("c002", 2)]
        as_zip(tmp_path / "train.zip", cifar_like(10, "train") | {"train/c003/more.webp": picture(99, "WEBP")})
        changed = load_source("cifar10", tmp_path, False)
        assert changed is not source and len(changed.train) == 11
        (tmp_path / "test.zip").unlink()
        with pytest.raises(DataError, match="no test images"):
            load_source("cifar10", tmp_path, False)

    def test_class_folders(self, tmp_path: Path) -> None:
        source = load_source("cifar10", as_folder(tmp_path, cifar_like(10, "train") | cifar_like(10, "val")), False)
        assert len(source.class_names) == 10 and source.test is not None

    def test_part_of_the_classes_is_refused(self, tmp_path: Path) -> None:
        root = as_folder(tmp_path, cifar_like(9, "train") | cifar_like(9, "test"))
        (root / "train" / "c009").mkdir()
        with pytest.raises(DataError, match="9 classes .*c009.*cifar10 has 10.*'folder'"):
            load_source("cifar10", root, False)

    @pytest.mark.parametrize("made", [True, False])
    def test_missing_data_names_both_ways_out(self, tmp_path: Path, made: bool) -> None:
        root = tmp_path / "data"
        if made:
            root.mkdir()
        with pytest.raises(DataError, match=r"cifar100 was not found in .*data.*--download.*--data FOLDER.*train\*"):
            load_source("cifar100", root, False)

    def test_cifar10_in_parts(self, tmp_path: Path) -> None:
        names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
        for part in ("train-0", "train-1", "test"):
            as_zip(tmp_path / f"{part}.zip", {f"{n}/{part}.webp": picture(k, "WEBP") for k, n in enumerate(names)})
        source = load_source("cifar10", tmp_path, False)
        assert list(source.class_names) == names
        assert content(source.train, source.class_names) == [(n, k) for k, n in enumerate(names) for _ in range(2)]
        assert content(source.test, source.class_names) == [(n, k) for k, n in enumerate(names)]

    def test_without_a_root_the_download_folder_is_searched(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(DataError, match=f"in {tmp_path}/tpl/data .where downloads go"):
            load_source("cifar10", None, False)

    @pytest.mark.parametrize(("name", "count"), [("cifar10", 10), ("cifar100", 100)])
    def test_torchvision_root(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
        as_torchvision_cifar(tmp_path, monkeypatch, name, count)
        source = load_source(name, tmp_path, False)
        assert source.class_names[:2] == ("class 0", "class 1") and len(source.class_names) == count
        train = content(source.train, source.class_names)
        assert train[:2] == [("class 1", 1), ("class 2", 2)]
        assert source.train.name(1) == f"{name} train[1]"
        assert source.test is not None and len(source.test) == 2

    def test_a_damaged_torchvision_root_is_not_a_traceback(self, tmp_path: Path) -> None:
        (tmp_path / "cifar-100-python").mkdir()
        with pytest.raises(DataError, match="damaged.*--download.*--data"):
            load_source("cifar100", tmp_path, False)

    def test_a_failed_download_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from torchvision.datasets import cifar

        def offline(*_: Any, **__: Any) -> None:
            raise urllib.error.URLError("no network")

        monkeypatch.setattr(cifar, "download_and_extract_archive", offline)
        as_folder(tmp_path, {"tiny-imagenet-200/train/n1/images/a.JPEG": picture(1)})  # not to be mistaken for it
        with pytest.raises(DataError, match="no network.*--data FOLDER"):
            load_source("cifar100", tmp_path, True)


def as_torchvision_cifar(root: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    """Two images for each batch in torchvision's own format; its checksums are replaced by those of these files."""
    from torchvision import datasets

    kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
    folder = root / kind.base_folder
    folder.mkdir()
    key = "labels" if name == "cifar10" else "fine_labels"
    pixels = np.repeat(np.array([[1], [2]], np.uint8), 3072, axis=1)
    names = [f"class {k}" for k in range(count)]

    def written(file: str, value: object) -> list[str]:
        data = pickle.dumps(value)
        (folder / file).write_bytes(data)
        return [file, hashlib.md5(data, usedforsecurity=False).hexdigest()]

    batch = {"data": pixels, key: [1, 2]}
    monkeypatch.setattr(kind, "train_list", [written(file, batch) for file, _ in kind.train_list])
    monkeypatch.setattr(kind, "test_list", [written(file, batch) for file, _ in kind.test_list])
    file, checksum = written(kind.meta["filename"], {kind.meta["key"]: names})
    monkeypatch.setattr(kind, "meta", {"filename": file, "key": kind.meta["key"], "md5": checksum})


class TestReuse:
    def source(self, value: int) -> Source:
        return Source(str(value), ArrayImages(np.zeros((1, 2, 2), np.uint8), [0]), None, ("a",))

    def test_deep_and_large_folders_are_read_again(self, tmp_path: Path) -> None:
        as_folder(tmp_path / "deep", {"train/cat/a.png": b"x"})
        as_folder(tmp_path / "many", {f"{i}.png": b"x" for i in range(120)})
        for place in ("deep", "many", "absent"):
            assert signature(tmp_path / place) is None
            first = reused(place, tmp_path / place, lambda: self.source(1))
            assert reused(place, tmp_path / place, lambda: self.source(2)) is not first

    @pytest.mark.parametrize("change", ["content", "new file", "new folder", "removed"])
    def test_any_change_is_seen(self, tmp_path: Path, change: str) -> None:
        as_folder(tmp_path, {"one.zip": b"abc", "batches/data": b"x"})
        first = reused(change, tmp_path, lambda: self.source(1))
        assert reused(change, tmp_path, lambda: self.source(2)) is first
        changes: dict[str, Callable[[], object]] = {
            "content": lambda: (tmp_path / "batches" / "data").write_bytes(b"longer"),
            "new file": lambda: (tmp_path / "two.zip").touch(),
            "new folder": lambda: (tmp_path / "batches 2").mkdir(),
            "removed": lambda: (tmp_path / "one.zip").unlink(),
        }
        changes[change]()
        assert reused(change, tmp_path, lambda: self.source(3)) is not first

    def test_only_a_few_are_held(self, tmp_path: Path) -> None:
        path = as_zip(tmp_path / "a.zip", {})
        first = reused("set 0", path, lambda: self.source(0))
        for i in range(1, MAX_SOURCES + 1):
            reused(f"set {i}", path, lambda: self.source(0))
        assert reused("set 0", path, lambda: self.source(0)) is not first


class TestImageNet380:
    def test_380_classes_with_val_or_test(self, tmp_path: Path) -> None:
        files = {f"{part}/n{k:08d}/a.JPEG": b"x" for part in ("train", "val") for k in range(380)}
        source = load_source("imagenet380", as_zip(tmp_path / "set.zip", files))
        assert len(source.class_names) == 380 and source.test is not None and len(source.test) == 380
        stream = find_benchmark("imagenet380-10t").stream(tmp_path / "set.zip")
        assert [len(task.classes) for task in stream] == [38] * 10

    def test_other_counts_say_what_to_do(self, tmp_path: Path) -> None:
        files = {f"{part}/n{k}/a.JPEG": b"x" for part in ("train", "val") for k in range(3)}
        with pytest.raises(DataError, match="3 classes, but imagenet380 has 380 .*'folder'; or add or remove"):
            load_source("imagenet380", as_folder(tmp_path, files))
        with pytest.raises(DataError, match="cannot be downloaded.*--data FOLDER"):
            load_source("imagenet380", None, True)


def test_the_papers_memories() -> None:
    small = {name: (b.options["memory"], b.small_memory) for name, b in BENCHMARKS.items() if b.small_memory}
    assert small == {
        "c10-5t": (200, 100),
        "c100-10t": (2000, 1000),
        "c100-20t": (2000, 1000),
        "t-5t": (2000, 1000),
        "t-10t": (2000, 1000),
    }
    options = find_benchmark("imagenet380-10t").options
    assert options == find_benchmark("t-10t").options | {"memory": 7600}


WNIDS = [f"n{k:08d}" for k in range(200)]


def tiny_train(prefix: str = "") -> Files:
    files = {f"{prefix}train/{w}/images/{w}_0.JPEG": picture(k, "JPEG") for k, w in enumerate(WNIDS)}
    return files | {f"{prefix}train/{WNIDS[0]}/{WNIDS[0]}_boxes.txt": b"x"}


def tiny_stock(prefix: str = "") -> Files:
    # listed backwards, so that neither the file's number nor its place tells the class
    lines = [f"val_{i}.JPEG\t{w}\t0\t32\t44\t62\n" for i, w in enumerate(reversed(WNIDS))]
    files = {f"{prefix}val/images/val_{i}.JPEG": picture(199 - i, "JPEG") for i in range(200)}
    files[f"{prefix}val/val_annotations.txt"] = "".join(lines).encode()
    return tiny_train(prefix) | files | {f"{prefix}test/images/test_0.JPEG": picture(0, "JPEG")}


def tiny_sorted() -> Files:
    return tiny_train() | {f"val/{w}/val_{k}.JPEG": picture(k, "JPEG") for k, w in enumerate(WNIDS)}


def tiny_parts(root: Path) -> Path:
    """Class folders in two archives of training images, and one of test images."""
    for part in range(2):
        as_zip(root / f"train-{part}.zip", {f"{w}/{w}_0.JPEG": picture(k, "JPEG")
               for k, w in list(enumerate(WNIDS))[part::2]})  # fmt: skip
    as_zip(root / "test.zip", {f"{w}/val_{k}.JPEG": picture(k, "JPEG") for k, w in enumerate(WNIDS)})
    return root


class TestTinyImageNet:
    @pytest.mark.parametrize("layout", ["stock", "sorted", "zip", "zip inside", "wrapped", "parts"])
    def test_layouts(self, tmp_path: Path, layout: str) -> None:
        wrapped = tiny_stock("tiny-imagenet-200/")
        root = {
            "stock": lambda: as_folder(tmp_path, tiny_stock()),
            "sorted": lambda: as_folder(tmp_path, tiny_sorted()),
            "zip": lambda: as_zip(tmp_path / "tiny.zip", wrapped),
            "zip inside": lambda: as_zip(tmp_path / "tiny-imagenet-200.zip", wrapped).parent,
            "parts": lambda: tiny_parts(tmp_path),
            "wrapped": lambda: as_folder(tmp_path, wrapped | {"cifar-10-batches-py/x": b"x"}),
        }[layout]()
        source = load_source("tiny-imagenet", root, False)
        assert list(source.class_names) == WNIDS and source.test is not None
        for part in (source.train, source.test):
            assert len(part) == 200
            for label, value in [(int(part.labels[i]), np.asarray(part.load(i))[0, 0, 0]) for i in (0, 50, 199)]:
                assert abs(label - int(value)) <= 1  # JPEG

    def test_annotations_must_fit(self, tmp_path: Path) -> None:
        files = tiny_stock() | {"val/val_annotations.txt": b"val_0.JPEG\tn99999999\t0\t0\t1\t1\n"}
        with pytest.raises(DataError, match="val_annotations.txt.*n99999999"):
            load_source("tiny-imagenet", as_folder(tmp_path, files), False)

    def test_missing_and_download(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from torchvision.datasets import utils

        with pytest.raises(DataError, match="--download.*--data FOLDER.*val_annotations.txt"):
            load_source("tiny-imagenet", tmp_path, False)
        asked: list[str] = []

        def fetch(url: str, place: str) -> None:
            asked.append(url)
            as_folder(Path(place), tiny_stock("tiny-imagenet-200/"))

        monkeypatch.setattr(utils, "download_and_extract_archive", fetch)
        for _ in range(2):
            assert len(load_source("tiny-imagenet", tmp_path, True).train) == 200
        assert asked == ["http://cs231n.stanford.edu/tiny-imagenet-200.zip"]  # and not a second time
