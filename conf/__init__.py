"""Hydra looks for config files in packages only; in the wheel this folder is ckptplan/conf."""
