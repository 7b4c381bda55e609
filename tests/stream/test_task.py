"""Tasks, streams, the guard on past training data, validation splits and class-incremental splitting."""

from collections.abc import Callable

import numpy as np
import pytest

from tpl.stream import ArrayImages, DataError, ImageSet, Stream, Task, TaskClosed, concatenate, split


def images(labels: list[int], origin: str = "train") -> ArrayImages:
    """Images whose every pixel is ten times their label plus their position among those of the label."""
    seen: dict[int, int] = {}
    values = []
    for label in labels:
        values.append(10 * label + seen.get(label, 0))
        seen[label] = seen.get(label, 0) + 1
    return ArrayImages(np.array(values, np.uint8)[:, None, None] * np.ones((1, 2, 2), np.uint8), labels, origin)


def values(part: ImageSet | None) -> list[int]:
    assert part is not None
    return [int(np.asarray(part.load(i))[0, 0, 0]) for i in range(len(part))]


def names(part: ImageSet | None) -> list[str]:
    assert part is not None
    return [part.name(i) for i in range(len(part))]


NAMES = ["ant", "bee", "cat", "dog", "eel"]


@pytest.fixture
def stream() -> Stream:
    labels = [0, 1, 2, 3, 4] * 3
    return split(images(labels), images([4, 3, 2, 1, 0], "test"), NAMES, 2, [3, 0, 4, 1, 2])


class TestTask:
    def test_it_refuses_what_cannot_be_learned(self) -> None:
        with pytest.raises(DataError, match="at least one class"):
            Task("t", (), images([]))
        with pytest.raises(DataError, match="unique.*ant"):
            Task("t", ("ant", "bee", "ant"), images([0, 1, 2]))
        with pytest.raises(DataError, match="train labels run from 0 to 2"):
            Task("t", ("ant", "bee"), images([0, 2]))
        with pytest.raises(DataError, match="test labels run from -1"):
            Task("t", ("ant", "bee"), images([0, 1]), ArrayImages(np.zeros((1, 2, 2), np.uint8), [-1]))

    def test_a_stream_refuses_a_class_that_comes_twice(self) -> None:
        with pytest.raises(DataError, match="stream.*ant"):
            Stream([Task("a", ("ant",), images([0])), Task("b", ("bee", "ant"), images([0, 1]))])


class TestSplit:
    def test_classes_arrive_in_order_under_new_labels(self, stream: Stream) -> None:
        assert [task.classes for task in stream] == [("dog", "ant"), ("eel", "bee"), ("cat",)]
        assert stream.classes == ("dog", "ant", "eel", "bee", "cat")
        assert values(stream[0].train) == [0, 30, 1, 31, 2, 32]
        assert stream[0].train.labels.tolist() == [1, 0, 1, 0, 1, 0]
        assert values(stream[0].test) == [30, 0]
        assert values(stream[2].train) == [20, 21, 22]

    def test_unequal_tasks_and_unused_classes(self) -> None:
        unequal = split(images([0, 1, 2, 3, 4]), None, NAMES, [1, 3], None)
        assert [task.classes for task in unequal] == [("ant",), ("bee", "cat", "dog")]
        assert unequal[0].test is None

    @pytest.mark.parametrize("per_task", [0, -1, [], [2, 0], [3, 3]])
    def test_impossible_sizes(self, per_task: int | list[int]) -> None:
        with pytest.raises(DataError, match="classes per task"):
            split(images([0, 1, 2, 3, 4]), None, NAMES, per_task, None)

    @pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 2, 3, 3], [1, 2, 3, 4, 5]])
    def test_order_must_be_a_permutation(self, order: list[int]) -> None:
        with pytest.raises(DataError, match="class order"):
            split(images([0, 1, 2, 3, 4]), None, NAMES, 2, order)

    def test_a_class_without_training_images_is_named(self) -> None:
        with pytest.raises(DataError, match="no training images for: cat"):
            split(images([0, 1, 3, 4]), None, NAMES, 2, None)

    def test_slices_are_streams(self, stream: Stream) -> None:
        tail = stream[1:]
        assert isinstance(tail, Stream) and len(tail) == 2
        assert tail.classes == ("eel", "bee", "cat")
        assert stream[-1].classes == ("cat",)


class TestUnion:
    def test_it_joins_tasks_with_offset_labels(self, stream: Stream) -> None:
        joint = stream.union(1)
        assert joint.classes == ("dog", "ant", "eel", "bee")
        assert values(joint.train) == [0, 30, 1, 31, 2, 32, 10, 40, 11, 41, 12, 42]
        assert joint.train.labels.tolist() == [1, 0, 1, 0, 1, 0, 3, 2, 3, 2, 3, 2]
        assert joint.test is not None
        for part in (joint.train, joint.test):
            pixels = [NAMES[value // 10] for value in values(part)]
            assert pixels == [joint.classes[label] for label in part.labels]
        assert len(stream.union(0).train) == 6 and len(stream.union(2).train) == 15
        with pytest.raises(IndexError):
            stream.union(3)


class TestOnce:
    def test_past_training_sets_are_closed(self, stream: Stream) -> None:
        tasks = stream.once()
        first = next(tasks)
        part, whole = first.train.select([0, 1]), concatenate([first.train], [0])
        later = part.select([1])
        opened = later.block(np.arange(1))
        assert opened is not None and opened[0, 0, 0].tolist() == [30, 30, 30]
        assert values(later) == [30] and first.train.labels.tolist() == [1, 0, 1, 0, 1, 0]
        second = next(tasks)
        for closed in (first.train, part, later, whole):
            refused: list[Callable[[], object]] = [
                lambda s=closed: s.load(0),  # type: ignore[misc]
                lambda s=closed: s.labels,  # type: ignore[misc]
                lambda s=closed: s.block(np.arange(1)),  # type: ignore[misc]
                lambda s=closed: s.select([0]),  # type: ignore[misc]
                lambda s=closed: concatenate([s], [0]),  # type: ignore[misc]
            ]
            for access in refused:
                with pytest.raises(TaskClosed, match="task 1"):
                    access()
        assert len(first.train) == 6
        assert values(first.test) == [30, 0]
        assert len(values(second.train)) == 6

    def test_the_last_task_closes_at_the_end(self, stream: Stream) -> None:
        handed = list(stream.once())
        assert [task.classes for task in handed] == [task.classes for task in stream]
        for task in handed:
            with pytest.raises(TaskClosed):
                task.train.load(0)

    def test_the_stream_itself_stays_open(self, stream: Stream) -> None:
        list(stream.once())
        assert values(stream[0].train) == [0, 30, 1, 31, 2, 32]
        assert values(next(stream.once()).train) == [0, 30, 1, 31, 2, 32]

    def test_dropping_the_iterator_leaves_the_task_in_hand_open(self, stream: Stream) -> None:
        task = next(stream.once())
        assert values(task.train)[0] == 0

    def test_a_guarded_task_guarded_again_obeys_both(self, stream: Stream) -> None:
        outer = stream.once()
        inner = next(Stream([next(outer)]).once())
        joined = concatenate([inner.train], [0])
        assert len(joined.labels) == 6
        next(outer)
        for closed in (inner.train, joined):
            with pytest.raises(TaskClosed):
                _ = closed.labels


class TestValidation:
    def test_train_is_cut_per_class_and_test_is_not_used(self) -> None:
        labels = [0] * 10 + [1] * 4 + [2]
        whole = Stream([Task("t", ("ant", "bee", "cat"), images(labels), images([0, 1, 2], "test"))])
        task = whole.with_validation(0.3, seed=1)[0]
        assert task.test is not None
        # 0.3 * 10 = 3; 0.3 * 4 rounds to 1; the only image of a class stays
        assert np.bincount(task.test.labels, minlength=3).tolist() == [3, 1, 0]
        assert sorted(names(task.train) + names(task.test)) == sorted(names(whole[0].train))

    def test_at_least_one_and_at_most_all_but_one(self) -> None:
        whole = Stream([Task("t", ("ant", "bee"), images([0] * 10 + [1] * 2))])
        few, most = whole.with_validation(0.01, 0)[0].test, whole.with_validation(0.99, 0)[0].test
        assert few is not None and few.labels.tolist() == [0, 1]
        assert most is not None and most.labels.tolist() == [0] * 9 + [1]

    def test_no_class_has_two_images(self) -> None:
        task = Stream([Task("t", ("ant",), images([0]))]).with_validation(0.5, 0)[0]
        assert task.test is None and len(task.train) == 1

    def test_it_depends_on_the_seed_alone(self) -> None:
        train = images([0, 1, 2] * 9)
        one = split(train, None, ["ant", "bee", "cat"], 3, None)
        other = split(train, None, ["ant", "bee", "cat"], 1, [2, 0, 1])
        held = set(names(one.with_validation(0.3, 5)[0].test))
        assert held == set(names(one.with_validation(0.3, 5)[0].test))
        assert held == {n for task in other.with_validation(0.3, 5) for n in names(task.test)}
        assert held != set(names(one.with_validation(0.3, 6)[0].test))
        positions = [{int(n[6:-1]) // 3 for n in held if int(n[6:-1]) % 3 == label} for label in range(3)]
        assert positions[0] != positions[1] or positions[1] != positions[2]  # not one draw for all classes

    @pytest.mark.parametrize(("fraction", "seed"), [(0.0, 0), (1.0, 0), (-0.1, 0), (0.5, -1)])
    def test_bad_arguments(self, stream: Stream, fraction: float, seed: int) -> None:
        with pytest.raises(DataError, match="validation"):
            stream.with_validation(fraction, seed)


class TestBlurred:
    def test_a_share_of_every_class_arrives_elsewhere_and_nothing_is_lost(self) -> None:
        sharp = split(images([0, 1, 2, 3] * 20), None, NAMES[:4], 1)
        blurry = sharp.blurred(0.2, seed=0)
        late = dict.fromkeys(NAMES[:4], 0)
        for number, task in enumerate(blurry):
            earlier = {name for before in blurry[:number] for name in before.classes}
            if task.more is not None:
                assert set(task.more.classes) <= earlier
                for label in task.more.train.labels:
                    late[task.more.classes[label]] += 1
        kept = [len(task.train) for task in blurry]
        assert [20 - count for count in late.values()] == kept
        assert late["dog"] == 0 and late["ant"] == 4  # the last class has no later task, the first no earlier one
        everything = sorted(values(blurry.union(3).train))
        assert everything == sorted(values(sharp.union(3).train))

    def test_late_images_keep_their_class_and_are_closed_with_their_task(self) -> None:
        blurry = split(images([0] * 9 + [1] * 9 + [2] * 9), None, NAMES[:3], 1).blurred(0.4, seed=1)
        union = blurry.union(2)
        assert [value // 10 for value in values(union.train)] == union.train.labels.tolist()
        tasks = list(blurry.once())
        more = next(task.more for task in tasks if task.more is not None)
        with pytest.raises(TaskClosed):
            more.train.load(0)

    def test_the_same_seed_gives_the_same_stream(self) -> None:
        sharp = split(images([0, 1, 2] * 10), None, NAMES[:3], 1)
        a, b, c = (sharp.blurred(0.3, seed).union(2) for seed in (0, 0, 1))
        assert values(a.train) == values(b.train) != values(c.train)
