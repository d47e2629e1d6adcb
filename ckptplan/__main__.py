"""`python -m ckptplan planner=dp` is `python train.py planner=dp`."""

from ckptplan.cli import train_main

train_main()
