"""Measure, plan, train and prove: `python train.py planner=dp budget_frac=0.5` (see ckptplan/cli.py)."""

from ckptplan.cli import train_main

if __name__ == "__main__":
    train_main()
