"""What conf/model names: five small models, each a chain of blocks that it declares itself."""

from ckptplan.models.chain import ChainModel
from ckptplan.models.gpt import GPT
from ckptplan.models.mlp import MLP
from ckptplan.models.resnet import ResNet
from ckptplan.models.unet import UNet
from ckptplan.models.vit import ViT

__all__ = ["GPT", "MLP", "ChainModel", "ResNet", "UNet", "ViT"]
