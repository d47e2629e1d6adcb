"""Seeded synthetic images whose class can be learnt."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ckptplan.data import Batch
from ckptplan.data.checks import require_int, require_number
from ckptplan.data.dataset import Dataset
from ckptplan.data.order import private_generator
from ckptplan.data.spec import DataSpec

_TEMPLATE_CELLS = 4  # each class is a pattern of 4 x 4 random cells, so that it survives down-sampling


def labelled_images(
    *,
    channels: int,
    image_size: int,
    classes: int,
    batch_size: int,
    num_samples: int = 1024,
    num_eval_samples: int = 64,
    noise_std: float = 2.0,
    seed: int = 0,
) -> Dataset:
    """Images of one coarse random pattern per class plus Gaussian noise; sample i has class i modulo ``classes``.

    Pixels have mean about 0; the pattern has standard deviation 1, the noise ``noise_std``. Images are made when they
    are read (a large ``image_size`` costs no memory beforehand) and depend on ``seed`` and their number alone.
    """
    for name, value in (("channels", channels), ("image_size", image_size), ("num_samples", num_samples)):
        require_int(name, value)
    require_int("classes", classes, minimum=2)
    require_number("noise_std", noise_std)
    cells = torch.randn(classes, channels, _TEMPLATE_CELLS, _TEMPLATE_CELLS, generator=private_generator(seed))
    patterns = F.interpolate(cells, size=(image_size, image_size), mode="nearest")

    def read(numbers: Tensor) -> Batch:
        labels = numbers % classes
        noise = [
            torch.randn(channels, image_size, image_size, generator=private_generator(seed, number))
            for number in numbers.tolist()
        ]
        return Batch(inputs=patterns[labels] + noise_std * torch.stack(noise), targets=labels)

    spec = DataSpec("images", channels=channels, image_size=image_size, classes=classes)
    return Dataset(spec, read, num_samples, num_eval_samples, batch_size, seed, one_shape=True)
