"""The race: our plans against every other way to train in less memory. ``python -m tests.benchmarks.race --help``."""
