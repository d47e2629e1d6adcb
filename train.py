"""Measure, plan, train and prove: `python train.py planner=dp budget_frac=0.5` (see ckptplan/cli.py)."""

import sys

if __name__ == "__main__":
    try:
        from ckptplan.cli import train_main

        train_main()
    except KeyboardInterrupt:  # while Python is still importing; from then on train_main takes care of it
        sys.exit(130)
