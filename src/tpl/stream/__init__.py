"""Images, tasks and data sets: everything a learner sees arrives through here."""

from tpl.errors import DataError, TaskClosed, UnreadableImage
from tpl.stream.decoding import FORMATS, MAX_PIXELS, decode, to_rgb
from tpl.stream.folders import FileImages, MixedImages, Source, image_folder, is_image_name
from tpl.stream.images import ArrayImages, ImageSet, concatenate, fingerprint, relabelled
from tpl.stream.labelled import Labelled, labelled_images, readable
from tpl.stream.preprocess import Preprocess
from tpl.stream.sources import download_root, load_source
from tpl.stream.task import ENOUGH_TO_HOLD_OUT, Stream, Task, check_order, class_counts, class_order, hold_out, split
from tpl.stream.unlabelled import Batch, Found, batches, batches_of, find_images

__all__ = [
    "ENOUGH_TO_HOLD_OUT",
    "FORMATS",
    "MAX_PIXELS",
    "ArrayImages",
    "Batch",
    "DataError",
    "FileImages",
    "Found",
    "ImageSet",
    "Labelled",
    "MixedImages",
    "Preprocess",
    "Source",
    "Stream",
    "Task",
    "TaskClosed",
    "UnreadableImage",
    "batches",
    "batches_of",
    "check_order",
    "class_counts",
    "class_order",
    "concatenate",
    "decode",
    "download_root",
    "find_images",
    "fingerprint",
    "hold_out",
    "image_folder",
    "is_image_name",
    "labelled_images",
    "load_source",
    "readable",
    "relabelled",
    "split",
    "to_rgb",
]
