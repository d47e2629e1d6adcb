"""Many runs and one table: `python sweep.py` is four planners at five budgets (see ckptplan/cli.py)."""

import sys

if __name__ == "__main__":
    try:
        from ckptplan.cli import sweep_main

        sweep_main()
    except KeyboardInterrupt:  # while Python is still importing; from then on sweep_main takes care of it
        sys.exit(130)
