"""The S3 server of the tests of states, for whole runs too."""

from tests.state.conftest import bucket, s3_server

__all__ = ["bucket", "s3_server"]
