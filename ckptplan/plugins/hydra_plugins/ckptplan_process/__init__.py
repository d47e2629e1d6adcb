"""Hydra finds launchers only below a package called hydra_plugins; the work is done in ckptplan/sweeps.py."""
