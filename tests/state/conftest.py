"""A bucket of an S3 server for tests of object stores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ckptplan.state import StorageConfig
from tests.state.s3_server import ACCESS_KEY, SECRET, S3Server

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Bucket:
    """An empty bucket; credentials and endpoint stand in the environment, as usual."""

    server: S3Server
    name: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}/run"

    def objects(self) -> list[str]:
        """All keys of the bucket, for a look past the code under test."""
        return sorted(self._client().find(self.name))

    def uploads(self) -> list[str]:
        """Keys of the multipart uploads that were begun and neither finished nor aborted."""
        found = self._client().call_s3("list_multipart_uploads", Bucket=self.name)
        return [upload["Key"] for upload in found.get("Uploads") or ()]

    def _client(self):  # type: ignore[no-untyped-def]
        import s3fs

        settings = {"key": ACCESS_KEY, "secret": SECRET, "endpoint_url": self.server.url}
        return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False, **settings)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    made = Bucket(s3_server, f"bucket-{next(_numbers)}")
    s3_server.reset()
    made._client().mkdir(made.name)
    s3_server.reset()
    return made


@pytest.fixture
def s3_storage(bucket: Bucket):  # type: ignore[no-untyped-def]
    return StorageConfig(bucket.url).open()
