"""Many runs and one table: `python sweep.py` is four planners at five budgets (see ckptplan/cli.py)."""

from ckptplan.cli import sweep_main

if __name__ == "__main__":
    sweep_main()
