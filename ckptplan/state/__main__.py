"""`python -m ckptplan.state`: see `cli`."""

from ckptplan.state.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
