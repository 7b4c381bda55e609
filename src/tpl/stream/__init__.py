"""Images, tasks and data sets: everything a learner sees arrives through here."""

from tpl.stream.decoding import MAX_PIXELS, decode, to_rgb
from tpl.stream.errors import DataError, TaskClosed, UnreadableImage
from tpl.stream.files import FileImages, is_image_name
from tpl.stream.fingerprint import fingerprint
from tpl.stream.images import ArrayImages, ImageSet, concatenate
from tpl.stream.inputs import Batch, Found, Labelled, batches, batches_of, find_images, labelled_images, readable
from tpl.stream.layouts import Source, image_folder
from tpl.stream.orders import check_order, class_order
from tpl.stream.preprocess import Preprocess
from tpl.stream.sources import download_root, load_source
from tpl.stream.task import Stream, Task, split

__all__ = [
    "MAX_PIXELS",
    "ArrayImages",
    "Batch",
    "DataError",
    "FileImages",
    "Found",
    "ImageSet",
    "Labelled",
    "Preprocess",
    "Source",
    "Stream",
    "Task",
    "TaskClosed",
    "UnreadableImage",
    "batches",
    "batches_of",
    "check_order",
    "class_order",
    "concatenate",
    "decode",
    "download_root",
    "find_images",
    "fingerprint",
    "image_folder",
    "is_image_name",
    "labelled_images",
    "load_source",
    "readable",
    "split",
    "to_rgb",
]
