"""Answers for any number of images: in this process, or on a cluster. They come in the order of the images."""

from tpl.bulk.answered import Answered, answer_here
from tpl.bulk.readers import Readers

__all__ = ["Answered", "Readers", "answer_here"]
