"""scikit-learn's handwritten digits: 1,797 real images that come with the package, nothing to download."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptplan.data import Batch
from ckptplan.data.checks import require_int, require_number
from ckptplan.data.dataset import Dataset
from ckptplan.data.spec import DataSpec


def handwritten_digits(
    *,
    image_size: int,
    batch_size: int,
    channels: int = 1,
    classes: int = 10,
    eval_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Digits 0 .. classes - 1, 8 x 8 pixels scaled to ``image_size``, grey values 0 .. 1 repeated in every channel.

    The last ``eval_fraction`` of the collection is for evaluation; it is sorted by writer, so evaluation is on hands
    never seen in training. Raises ``ModuleNotFoundError`` with the command to type where scikit-learn is missing.
    """
    require_int("image_size", image_size)
    require_int("channels", channels)
    if not 2 <= require_int("classes", classes) <= 10:
        raise ValueError(f"classes={classes}; expected 2 to 10, the digits to use")
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "data=digits needs scikit-learn, which is not installed; type pip install -e '.[digits]', "
            "or data=labelled_images"
        ) from error
    collection = load_digits()
    labels = torch.from_numpy(collection.target).long()
    pixels = torch.from_numpy(collection.images).float().unsqueeze(1) / 8 - 1  # (N, 1, 8, 8); grey values are 0 .. 16
    images = F.interpolate(
        pixels[labels < classes], size=(image_size, image_size), mode="bilinear", align_corners=False
    )
    labels = labels[labels < classes]
    num_eval = int(len(labels) * require_number("eval_fraction", eval_fraction, below=1))

    def read(numbers: Tensor) -> Batch:
        return Batch(inputs=images[numbers].expand(-1, channels, -1, -1).contiguous(), targets=labels[numbers])

    spec = DataSpec("images", channels=channels, image_size=image_size, classes=classes)
    return Dataset(spec, read, len(labels) - num_eval, num_eval, batch_size, seed, one_shape=True)
