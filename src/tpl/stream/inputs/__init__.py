"""Images from what a person names: class folders, zips, CSV lists and data sets to learn; anything to predict."""

from tpl.stream.inputs.batches import Batch, batches, batches_of
from tpl.stream.inputs.checked import readable
from tpl.stream.inputs.labelled import Labelled, labelled_images
from tpl.stream.inputs.walk import Found, find_images

__all__ = ["Batch", "Found", "Labelled", "batches", "batches_of", "find_images", "labelled_images", "readable"]
