"""Images from what a person names: what is found, what is left out and why, and that nothing piles up."""

from __future__ import annotations

import io
import os
import threading
import time
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tpl.stream import DataError, Found, Preprocess, batches, find_images, labelled_images, readable
from tpl.stream.unlabelled import paths_from

PREPROCESS = {"input_size": (3, 32, 32), "crop_pct": 1.0}


def picture(value: int, size: int = 8) -> bytes:
    stream = io.BytesIO()
    Image.new("L", (size, size), value).save(stream, "PNG")
    return stream.getvalue()


def write(root: Path, *names: str, value: int = 7) -> Path:
    """A picture under each of the names."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(picture(value + number))
    return root


def names(found: Iterator[Found], root: Path) -> list[str]:
    return [os.path.relpath(item.name, root) for item in found]


# To predict: finding


def test_folders_are_searched_in_order_and_hidden_files_left_out(tmp_path: Path) -> None:
    write(tmp_path, "b.png", "a/2.jpg", "a/1.JPEG", "a/deep/er/x.webp", ".hidden/x.png", ".x.png", "__MACOSX/x.png")
    (tmp_path / "notes.txt").write_text("no image")
    expected = ["a/1.JPEG", "a/2.jpg", "a/deep/er/x.webp", "b.png"]
    assert names(find_images([str(tmp_path)]), tmp_path) == expected


def test_a_named_file_counts_whatever_its_suffix(tmp_path: Path) -> None:
    write(tmp_path, "upload.tmp")
    (found,) = find_images([str(tmp_path / "upload.tmp")])
    assert found.entry == tmp_path / "upload.tmp"


def test_what_is_not_there_is_found_with_its_reason(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    (tmp_path / "broken.zip").write_bytes(b"PK no archive")
    found = list(find_images([str(tmp_path / n) for n in ("absent.png", "broken.zip", "a.png", "x" * 300)]))
    assert [item.entry is None for item in found] == [True, True, False, True]
    assert "does not exist" in found[0].error and "absent.png" in found[0].error
    assert "zip archive" in found[1].error


def test_members_of_a_zip_are_found_and_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for name in ("in/a.png", "b.png", ".DS_Store", "__MACOSX/b.png", "notes.txt"):
            archive.writestr(name, picture(200))
    found = list(find_images([str(tmp_path / "photos.zip")]))
    assert [item.name for item in found] == [f"{tmp_path}/photos.zip/in/a.png", f"{tmp_path}/photos.zip/b.png"]
    (batch,) = batches(found, Preprocess(PREPROCESS))
    assert batch.errors == (None, None) and bool((batch.pixels == 200).all())


def test_a_link_back_into_its_own_folder_is_followed_once(tmp_path: Path) -> None:
    write(tmp_path, "in/a.png", "other/b.png")
    (tmp_path / "in" / "back").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "in" / "aside").symlink_to(tmp_path / "other", target_is_directory=True)
    assert names(find_images([str(tmp_path / "in")]), tmp_path) == ["in/a.png", "in/aside/b.png", "in/back/other/b.png"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_closed_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path, "closed/a.png", "open/b.png")
    (tmp_path / "closed").chmod(0)
    try:
        found = list(find_images([str(tmp_path)]))
    finally:
        (tmp_path / "closed").chmod(0o700)
    assert [bool(item.error) for item in found] == [True, False] and "closed" in found[0].error


@pytest.mark.parametrize(
    ("raw", "paths"),
    [
        (b"a.png\nb c.png\n", ["a.png", "b c.png"]),
        (b"a.png\r\n\r\nlast.png", ["a.png", "last.png"]),
        (b"new\nline.png\0b.png\0", ["new\nline.png", "b.png"]),
        (b"", []),
        ("grün.png\n".encode(), ["grün.png"]),
    ],
)
def test_paths_come_by_line_or_by_nul(raw: bytes, paths: list[str]) -> None:
    assert list(paths_from(io.BytesIO(raw))) == paths


def test_paths_in_pieces_are_put_together() -> None:
    raw = "".join(f"folder/{i:05d}.png\n" for i in range(20_000)).encode()
    found = list(paths_from(io.BytesIO(raw)))
    assert len(found) == 20_000 and found[12_345] == "folder/12345.png"


def test_stdin_may_name_folders_and_a_dash_is_a_file_there(tmp_path: Path) -> None:
    write(tmp_path, "in/a.png")
    found = list(find_images(["-"], io.BytesIO(f"{tmp_path}/in\n-\n".encode())))
    assert [item.entry is not None for item in found] == [True, False]


# To predict: decoding


def test_the_unreadable_are_noted_and_the_others_keep_their_order(tmp_path: Path) -> None:
    write(tmp_path, "1.png", "3.png", value=100)
    (tmp_path / "2.png").write_bytes(b"no picture")
    found = find_images([str(tmp_path), str(tmp_path / "absent.png")])
    (batch,) = batches(found, Preprocess(PREPROCESS))
    assert [error is None for error in batch.errors] == [True, False, True, False]
    assert "2.png is not an image" in str(batch.errors[1])
    assert batch.pixels.float().mean(dim=(1, 2, 3)).tolist() == [100, 101]


def test_pixels_are_those_that_learning_sees(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")
    preprocess = Preprocess(PREPROCESS)
    (batch,) = batches(find_images([str(tmp_path)]), preprocess)
    assert bool((batch.pixels[0] == preprocess(Image.fromarray(noise))).all())


def test_only_a_few_batches_are_ahead(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    asked = 0

    def endless() -> Iterator[Found]:
        nonlocal asked
        while True:
            asked += 1
            yield Found("a.png", tmp_path / "a.png")

    stream = batches(endless(), Preprocess(PREPROCESS), size=4)
    taken = list(islice(stream, 3))
    time.sleep(0.5)
    assert [len(batch.names) for batch in taken] == [4, 4, 4]
    assert asked <= 4 * 6
    stream.close()


def test_a_ready_batch_does_not_wait_for_the_next_path(tmp_path: Path) -> None:
    write(tmp_path, "a.png")
    more = threading.Event()

    def slow() -> Iterator[Found]:
        yield Found("a.png", tmp_path / "a.png")
        assert more.wait(60)
        yield Found("b.png", None, "late")

    stream = batches(slow(), Preprocess(PREPROCESS), size=1)
    assert next(stream).errors == (None,)  # would wait for ever if the second path were asked for first
    more.set()
    assert next(stream).errors == ("late",)


def test_an_error_while_finding_is_raised_where_batches_are_taken() -> None:
    def broken() -> Iterator[Found]:
        raise RuntimeError("no more")
        yield

    with pytest.raises(RuntimeError, match="no more"):
        next(batches(broken(), Preprocess(PREPROCESS)))


def test_finding_holds_no_list_of_a_large_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpl.stream.unlabelled.SORTED_ENTRIES", 10)
    for i in range(100):
        (tmp_path / f"{i:03d}.png").touch()
    found = find_images([str(tmp_path)])
    first = list(islice(found, 10))
    assert first == sorted(first, key=lambda item: item.name)
    assert len({item.name for item in [*first, *found]}) == 100


# To learn


def test_class_folders_a_zip_and_a_csv_give_the_same(tmp_path: Path) -> None:
    photos = write(tmp_path / "photos", "cat/1.png", "cat/2.png", "dog/1.png")
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for file in sorted(photos.rglob("*.png")):
            archive.write(file, file.relative_to(tmp_path))
    lines = ["path,label", "photos/dog/1.png,dog", "photos/cat/1.png,cat", "photos/cat/2.png,cat"]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    for place in (photos, tmp_path / "photos.zip", tmp_path / "list.csv"):
        found = labelled_images(place)
        assert found.counts == {"cat": 2, "dog": 1} and found.skipped == ()
        labels = [found.class_names[label] for label in found.images.labels]
        content = {(name, int(np.asarray(found.images.load(i)).max())) for i, name in enumerate(labels)}
        assert content == {("cat", 7), ("cat", 8), ("dog", 9)}


@pytest.mark.parametrize(
    "text",
    [
        "a.png,cat\nb.png,dog\n",
        "label,id,file\ncat,1,a.png\ndog,2,b.png\n",
        "\ufeffa.png;cat\r\n\r\nb.png;dog\r\n",
        "Image\tClass\na.png\tcat\nb.png\tdog\n",
        '"a.png","cat"\n"b.png" , dog\n',
    ],
)
def test_csv_in_all_its_forms(text: str, tmp_path: Path) -> None:
    write(tmp_path, "a.png", "b.png")
    (tmp_path / "list.csv").write_text(text, encoding="utf-8")
    found = labelled_images(tmp_path / "list.csv")
    assert found.counts == {"cat": 1, "dog": 1} and found.skipped == ()


def test_bad_lines_of_a_csv_are_named(tmp_path: Path) -> None:
    write(tmp_path, "a.png", "b.png")
    lines = ["a.png,cat", "absent.png,cat", "b.png", ",cat", "b.png, ", "b.png,dog", "a.png,dog"]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    found = labelled_images(tmp_path / "list.csv")
    assert found.counts == {"cat": 1, "dog": 1}
    said = [note.partition(", line ")[2] for note in found.skipped]
    assert [note[0] for note in said] == list("23457")
    for note, text in zip(said, ("no file", "1 field,", "no path", "no label", "before, in line 1"), strict=True):
        assert text in note


def test_a_csv_without_a_single_good_line_says_how_one_looks(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("absent.png,cat\n")
    with pytest.raises(DataError, match="line 1: there is no file .*A line is path,label"):
        labelled_images(tmp_path / "list.csv")
    (tmp_path / "list.csv").write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(DataError, match="UTF-8"):
        labelled_images(tmp_path / "list.csv")


def test_a_known_data_set_has_a_training_and_a_test_part() -> None:
    train, test = (labelled_images(None, "digits", testing=testing) for testing in (False, True))
    assert train.class_names == test.class_names == tuple("0123456789")
    assert (len(train.images), len(test.images)) == (1437, 360)


def test_a_folder_with_a_test_part_gives_it_for_testing(tmp_path: Path) -> None:
    write(tmp_path, "train/cat/1.png", "train/dog/1.png", "train/dog/2.png", "test/dog/1.png")
    assert labelled_images(tmp_path).counts == {"cat": 1, "dog": 2}
    assert labelled_images(tmp_path, testing=True).counts == {"dog": 1}


def test_classes_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, "ant/1.png", "bee/1.png", "cow/1.png", "cow/2.png")
    whole = labelled_images(tmp_path)
    chosen = whole.only(["cow", "ant"])
    assert chosen.counts == {"ant": 1, "cow": 2}
    assert [chosen.images.name(i).split("/")[-2] for i in range(3)] == ["ant", "cow", "cow"]
    with pytest.raises(DataError, match="no class owl; it has ant, bee, cow"):
        whole.only(["owl"])


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["1.png", "2.png"], "holds 2 images, but not in class folders"),
        (["cat/", "dog/"], "class folders without any image (cat, dog)"),
        (["cat/1.heic", "cat/2.heic", "notes.txt"], "only 2 .heic, 1 .txt"),
        ([], "is empty"),
    ],
)
def test_a_folder_without_a_usable_class_says_why(files: list[str], reason: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).mkdir(parents=True) if name.endswith("/") else write(tmp_path, name)
    with pytest.raises(DataError) as error:
        labelled_images(tmp_path)
    assert reason in str(error.value)


@pytest.mark.parametrize(("name", "reason"), [("absent", "no folder or zip"), ("1.png", "single image")])
def test_what_is_no_data_set_says_why(name: str, reason: str, tmp_path: Path) -> None:
    write(tmp_path, "1.png")
    with pytest.raises(DataError, match=reason):
        labelled_images(tmp_path / name)


def test_empty_classes_and_stray_images_are_noted(tmp_path: Path) -> None:
    write(tmp_path, "cat/1.png", "stray.png")
    (tmp_path / "dog").mkdir()
    found = labelled_images(tmp_path)
    assert found.class_names == ("cat",)
    assert any("dog: no images" in note for note in found.skipped)
    assert any("1 image outside" in note for note in found.skipped)


def test_unreadable_images_are_named_and_the_rest_kept_shrunk(tmp_path: Path) -> None:
    write(tmp_path, "cat/1.png", "cat/3.png", "dog/1.png")
    (tmp_path / "cat" / "2.png").write_bytes(b"no picture")
    (tmp_path / "cow").mkdir()
    (tmp_path / "cow" / "1.png").write_bytes(b"")
    Image.new("RGB", (400, 200), (9, 9, 9)).save(tmp_path / "dog" / "2.png")
    found, seen = labelled_images(tmp_path), 0

    def count(number: int) -> None:
        nonlocal seen
        seen += number

    images, problems = readable(found.images, Preprocess(PREPROCESS).shrink, count)
    assert seen == 6 and len(problems) == 2
    assert "2.png is not an image" in problems[0] and "1.png is empty" in problems[1]
    rest = found.with_images(images)
    assert rest.counts == {"cat": 2, "dog": 2}
    assert rest.images.load(3).size == (64, 32)  # as small as the encoder's own resize makes it


def test_images_beyond_the_limit_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "cat/1.png", "cat/2.png")
    monkeypatch.setattr("tpl.stream.labelled.MAX_SHRUNK_BYTES", 200)
    images, _ = readable(labelled_images(tmp_path).images, Preprocess(PREPROCESS).shrink)
    for file in (tmp_path / "cat").iterdir():
        file.write_bytes(picture(250))
    assert [np.asarray(images.load(i)).max() for i in range(2)] == [7, 250]
